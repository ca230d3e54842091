"""Data that would teach something else than it seems to: each limit from both sides, and what is logged."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from train.config import DataLimits, LanguageModelConfig, TrainConfig
from train.data import Row, encode
from train.data_check import RULES, check_data
from train.language_model import train_language_model

STOP = 2
# the first byte of é, which is no character by itself
HALF = 130

Rows = Callable[..., list[Row]]
Check = Callable[..., None]


@pytest.fixture
def good(byte_tokenizer: PreTrainedTokenizerFast) -> Rows:
    """Builds chats that nothing is wrong with."""
    assert byte_tokenizer("é").input_ids[0] == HALF

    def build(num_rows: int) -> list[Row]:
        records = [{"prompt": f"Say {number}", "response": str(number)} for number in range(num_rows)]
        return [encode(record, byte_tokenizer, 100) for record in records]

    return build


@pytest.fixture
def check(byte_tokenizer: PreTrainedTokenizerFast) -> Check:
    """`check_data` with the byte tokenizer and the limits given, the others their defaults."""

    def call(rows: Any, stop_ids: Any = (STOP,), token_ids: Any = None, name: str = "data", **limits: float) -> None:
        options = dict(stop_ids=stop_ids, token_ids=token_ids, limits=DataLimits(**limits), name=name)
        check_data(rows, byte_tokenizer, **options)

    return call


def without_stop(row: Row) -> Row:
    """A response that just ends: without the stop token and the line break after it."""
    return row | {key: row[key][:-2] for key in ("input_ids", "response_mask")}


def with_ids(row: Row, place: int, token: int) -> Row:
    ids = row["input_ids"].copy()
    ids[place] = token
    return row | {"input_ids": ids}


# How to break each rule, and no other.
SPOIL: dict[str, Callable[[Row], Row]] = {
    "max_truncated_share": lambda row: row | {"truncated": True},
    "max_unlearnable_share": lambda row: row | {"response_mask": np.zeros_like(row["response_mask"])},
    "max_unmasked_share": lambda row: row | {"response_mask": np.ones_like(row["response_mask"])},
    "max_unended_share": without_stop,
    "max_reencoded_share": lambda row: with_ids(row, 7, HALF),
}


# --- limits -----------------------------------------------------------------------------------------------


def test_good_rows_pass_the_strictest_limits(good: Rows, check: Check) -> None:
    check(good(10), token_ids=range(259), **dict.fromkeys(RULES, 0.0), min_coverage=1.0)


@pytest.mark.parametrize("limit", RULES)
def test_up_to_the_limit_passes_and_beyond_it_is_refused(limit: str, good: Rows, check: Check) -> None:
    assert set(SPOIL) == set(RULES)

    def spoilt(number: int) -> list[Row]:
        rows = good(10)
        return rows[: 10 - number] + [SPOIL[limit](row) for row in rows[10 - number :]]

    check(spoilt(2), **{limit: 0.2})
    fault, remedy = RULES[limit]
    expected = f"^data: 3 of 10 rows {fault}, the first is row 8; {remedy}, or raise data_limits.{limit} above 0.2$"
    with pytest.raises(ValueError, match=expected):
        check(spoilt(3), **{limit: 0.2})
    with pytest.raises(ValueError, match=f"data_limits.{limit} above 0.1"):
        check(spoilt(2))


def test_a_reduced_vocabulary_must_hold_enough_of_the_responses(check: Check) -> None:
    row = {"input_ids": [30, *range(40, 50)], "response_mask": [False] + [True] * 10}
    # the prompt does not count, nor does an id beyond all of the vocabulary
    check([row], stop_ids=(), token_ids=torch.arange(40, 49), min_coverage=0.9)
    check([row], stop_ids=(), token_ids=[*range(40, 48), 200, 30], min_coverage=0.8)
    with pytest.raises(ValueError, match=r"^data: the reduced vocabulary holds 80.0% .*min_coverage below 0.9$"):
        check([row], stop_ids=(), token_ids=torch.arange(40, 48), min_coverage=0.9)
    with pytest.raises(ValueError, match=r"holds 80.0% of the response tokens"):
        check([row], stop_ids=(), token_ids=[*range(40, 48), 200, 30], min_coverage=0.9)


def test_no_rows_and_nothing_to_learn_are_refused_whatever_the_limits(good: Rows, check: Check) -> None:
    nothing = [SPOIL["max_unlearnable_share"](row) for row in good(3)]
    with pytest.raises(ValueError, match=r"^data: none of 3 rows has a response token to learn"):
        check(nothing, max_unlearnable_share=1.0)
    with pytest.raises(ValueError, match=r"^heldout: there are no rows, so nothing to learn from; "):
        check([], name="heldout", max_unlearnable_share=1.0)


def test_a_first_token_that_is_learnt_teaches_nothing(check: Check) -> None:
    with pytest.raises(ValueError, match="1 of 1 rows have no response token"):
        check([{"input_ids": [STOP, 30], "response_mask": [True, False]}])


def test_a_text_has_no_prompt_to_be_masked(check: Check, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    row = encode({"text": "learnt whole"}, byte_tokenizer, 100)
    assert row["response_mask"].all()
    check([row], max_unmasked_share=0.0)
    del row["has_prompt"]  # as in rows that were tokenised elsewhere
    with pytest.raises(ValueError, match="1 of 1 rows have a response_mask that is true throughout"):
        check([row], max_unmasked_share=0.0)


# --- ends -------------------------------------------------------------------------------------------------


def test_a_response_cut_on_purpose_needs_no_stop_token_and_is_not_truncated(good: Rows, check: Check) -> None:
    rows = [without_stop(row) for row in good(3)]
    strict = {"max_unended_share": 0.0, "max_truncated_share": 0.0}
    check([row | {"finish_reason": "length"} for row in rows], **strict)
    with pytest.raises(ValueError, match="3 of 3 rows have a whole response without a stop token"):
        check([row | {"finish_reason": "stop"} for row in rows], **strict)


def test_a_row_cut_at_max_length_needs_no_stop_token(good: Rows, check: Check) -> None:
    rows = [without_stop(row) | {"truncated": True} for row in good(3)]
    check(rows, max_unended_share=0.0, max_truncated_share=1.0)


def test_any_stop_token_will_do_and_without_any_none_is_needed(good: Rows, check: Check) -> None:
    check(good(3), stop_ids=[77, STOP], max_unended_share=0.0)
    check(good(3), stop_ids=(), max_unended_share=0.0)
    with pytest.raises(ValueError, match="3 of 3 rows have a whole response without a stop token"):
        check(good(3), stop_ids=[77], max_unended_share=0.0)


def test_it_is_the_last_response_that_must_end(check: Check, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": role, "content": content} for role, content in [("user", "a"), ("assistant", "b")] * 2]
    row = encode({"messages": turns}, byte_tokenizer, 1000)
    check([row], max_unended_share=0.0)
    assert STOP in without_stop(row)["input_ids"][without_stop(row)["response_mask"]]  # of the first response
    with pytest.raises(ValueError, match="without a stop token"):
        check([without_stop(row)], max_unended_share=0.0)


# --- encoding again ---------------------------------------------------------------------------------------


def test_what_a_model_sampled_may_be_in_tokens_of_its_own(good: Rows, check: Check) -> None:
    strict = {"max_reencoded_share": 0.0}
    (row,) = good(1)
    response = int(row["response_mask"].argmax())
    sampled = with_ids(row, response, HALF)
    check([sampled | {"finish_reason": "stop"}], **strict)
    for other in (sampled, with_ids(row, 7, HALF) | {"finish_reason": "stop"}):  # not sampled; in the prompt
        with pytest.raises(ValueError, match="1 of 1 rows have a text that is encoded to other tokens"):
            check([other], **strict)


def test_a_cut_may_go_through_a_character(check: Check, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    strict = {"max_reencoded_share": 0.0, "max_truncated_share": 1.0, "max_unended_share": 1.0}
    row = encode({"text": "naïvetés"}, byte_tokenizer, 8)
    assert row["truncated"]
    assert row["input_ids"][-1] == HALF
    check([row], **strict)
    for other in (row | {"truncated": False}, with_ids(row, 1, HALF)):
        with pytest.raises(ValueError, match="encoded to other tokens"):
            check([other], **strict)


def test_a_first_token_that_the_tokenizer_adds_is_not_added_twice(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    first = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = first
    row = encode({"text": "a"}, tokenizer, 100)
    assert row["input_ids"][0] == 1
    check_data([row], tokenizer, stop_ids=[STOP], limits=DataLimits(max_reencoded_share=0.0))


def test_of_many_rows_a_sample_is_encoded_again(good: Rows, check: Check) -> None:
    rows = [SPOIL["max_reencoded_share"](row) for row in good(200)]
    with pytest.raises(ValueError, match="64 of 64 rows have a text that is encoded"):
        check(rows)
    for number in (0, 199):  # the first and the last are in it
        with pytest.raises(ValueError, match=f"1 of 64 rows .*, the first is row {number + 1};"):
            check([*good(200)[:number], rows[number], *good(200)[number + 1 :]], max_reencoded_share=0.0)


# --- what is logged ---------------------------------------------------------------------------------------


def test_the_summary_says_what_is_there(good: Rows, check: Check, caplog: pytest.LogCaptureFixture) -> None:
    rows = good(4)
    rows[1] |= {"truncated": True}
    rows[2] = without_stop(rows[2])
    with caplog.at_level("INFO"):
        check(rows, name="heldout", token_ids=range(259), max_truncated_share=0.5, max_unended_share=0.5)
    num_tokens = sum(len(row["input_ids"]) for row in rows)
    share = sum(row["response_mask"].sum() for row in rows) / num_tokens
    assert caplog.messages[0] == (
        f"heldout: 4 rows; {num_tokens} tokens, {share:.1%} of them learnt; 1 of 4 rows cut at max_length; "
        "1 of 3 whole responses without a stop token; 100.0% of what is learnt in the reduced vocabulary"
    )
    assert len(caplog.messages) == 2


def test_a_row_is_shown_with_what_is_learnt(good: Rows, check: Check, caplog: pytest.LogCaptureFixture) -> None:
    rows = good(3)
    rows[0] = SPOIL["max_unlearnable_share"](rows[0])
    with caplog.at_level("INFO"):
        check(rows, max_unlearnable_share=0.5)
    assert caplog.messages[1] == (
        r"data: such as <|im_start|>user\nSay 1<|im_end|>\n<|im_start|>assistant\n⟦1<|im_end|>⟧\n"
    )


def test_it_is_shown_even_if_it_is_refused(good: Rows, check: Check, caplog: pytest.LogCaptureFixture) -> None:
    rows = [SPOIL["max_unlearnable_share"](row) for row in good(3)]
    with caplog.at_level("INFO"), pytest.raises(ValueError, match="3 of 3 rows"):
        check(rows)
    assert (
        caplog.messages[1] == r"data: such as <|im_start|>user\nSay 0<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"
    )


def test_a_long_row_is_shown_in_part(
    check: Check, byte_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"role": role, "content": role[0] * 500} for role in ("user", "assistant") * 10]
    with caplog.at_level("INFO"):
        check([encode({"messages": turns}, byte_tokenizer, 100_000)])
    shown = caplog.messages[1]
    assert len(shown) < 2000
    assert shown.startswith("data: such as <|im_start|>user\\nuuu")
    assert shown.endswith("aaaa<|im_end|>⟧…")
    assert (shown.count("⟦"), shown.count("⟧"), shown.count("…")) == (4, 4, 9)


def test_rows_of_a_dataset_do_too(good: Rows, check: Check) -> None:
    keys = ("input_ids", "response_mask")
    rows = datasets.Dataset.from_list([{key: row[key].tolist() for key in keys} for row in good(5)])
    check(rows, **dict.fromkeys(RULES, 0.0))
    with pytest.raises(ValueError, match="5 of 5 rows have a whole response without"):
        check(rows, stop_ids=[77])


# --- the configuration, and spec-train --------------------------------------------------------------------


@pytest.mark.parametrize("limit", [*RULES, "min_coverage"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_limit_is_a_share(limit: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{limit}: {value} is not possible; give a share from 0 to 1"):
        DataLimits(**{limit: value})


@pytest.mark.parametrize("name", ["data", "eval_data"])
def test_spec_train_asks_before_the_first_step(
    name: str, tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    def config(**options: Any) -> LanguageModelConfig:
        train = TrainConfig(output=str(tmp_path / "run"), max_steps=1)
        model = str(tiny_model_folder(hidden_size=16))
        given = {"data": "short", "eval_data": "short", name: "long"}
        paths = {key: str(tmp_path / f"{value}.jsonl") for key, value in given.items()}
        return LanguageModelConfig(model=model, max_length=20, train=train, **paths, **options)

    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "abc"}) + "\n")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "a" * 30}) + "\n" + json.dumps({"text": "a"}) + "\n")
    with pytest.raises(ValueError, match=f"^{name}: 1 of 2 rows are cut at max_length, the first is row 1; "):
        train_language_model(config())
    assert not (tmp_path / "run").exists()
    train_language_model(config(data_limits=DataLimits(max_truncated_share=0.5)))
    assert (tmp_path / "run" / "model").is_dir()
