"""The target's responses: what is kept of them, where, and that nothing of it is lost or made twice."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from decode.params import SamplingParams
from decode.plain import PlainDecoder
from decode.prompts import as_messages, encode
from distill import parts, responses
from distill.cache import cache
from distill.config import CacheConfig, RespondConfig
from distill.responses import SPLITS, load_responses, respond
from distill.signal import load_record, load_signal
from train.checkpoint import publish
from train.data import read_rows

STOP_IDS = [2, *range(20, 30)]
COLUMNS = ["id", "category", "input_ids", "response_mask", "finish_reason"]
MAX_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def target(
    tiny_llama: Callable[..., LlamaForCausalLM],
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Ends its texts with many tokens, so that some are over before max_new_tokens."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_llama(hidden_size=16)
    model.generation_config.eos_token_id = STOP_IDS
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven of different lengths: two held out, two with a category."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"Say {'very ' * number}slowly.", "id": f"p{number}"} for number in range(7)
    ]
    rows[2]["split"] = rows[5]["split"] = "heldout"
    rows[0]["split"] = "train"  # those that say nothing are for training too
    rows[0]["category"] = rows[5]["category"] = "adverbs"
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def configure(target: Path, prompts: Path, tmp_path: Path) -> Callable[..., RespondConfig]:
    def configure(**changes: Any) -> RespondConfig:
        values = {
            "target": str(target),
            "prompts": str(prompts),
            "output": str(tmp_path / "responses"),
            "sampling": SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, seed=0),
            "batch_size": 3,
        }
        return RespondConfig(**(values | changes))

    return configure


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each call of the decoder was given."""
    calls: list[int] = []
    generate = PlainDecoder.generate_ids

    def count(self: PlainDecoder, prompts: list[list[int]], *arguments: Any, **keywords: Any) -> Any:
        calls.append(len(prompts))
        return generate(self, prompts, *arguments, **keywords)

    monkeypatch.setattr(PlainDecoder, "generate_ids", count)
    return calls


def rows_of(output: Path) -> dict[str, list[dict[str, Any]]]:
    return {split: list(load_responses(str(output), split)) for split in SPLITS}


def prompt_ids(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    return encode(tokenizer, as_messages(f"Say {'very ' * int(row['id'][1:])}slowly."))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is kept -----------------------------------------------------------------------------------------


def test_rows_hold_prompt_and_response_and_why_it_ended(configure: Callable[..., RespondConfig], target: Path) -> None:
    output = respond(configure())
    assert names(output.parent) == ["responses"]
    assert set(datasets.load_from_disk(str(output))) == set(SPLITS)
    rows = rows_of(output)
    assert [row["id"] for row in rows["train"]] == ["p0", "p1", "p3", "p4", "p6"]
    assert [row["id"] for row in rows["heldout"]] == ["p2", "p5"]
    tokenizer = AutoTokenizer.from_pretrained(target)
    reasons = set()
    for row in rows["train"] + rows["heldout"]:
        assert list(row) == COLUMNS
        assert row["category"] == ("adverbs" if row["id"] in ("p0", "p5") else None)
        prompt = prompt_ids(tokenizer, row)
        response = row["input_ids"][len(prompt) :]
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["response_mask"] == [False] * len(prompt) + [True] * len(response)
        assert 1 <= len(response) <= MAX_NEW_TOKENS
        stopped = response[-1] in STOP_IDS
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(response) == MAX_NEW_TOKENS
        assert not set(response[:-1]) & set(STOP_IDS)
        reasons.add(row["finish_reason"])
    assert reasons == {"stop", "length"}


def test_the_record_says_how_it_was_made(configure: Callable[..., RespondConfig]) -> None:
    output = respond(configure())
    record = json.loads((output / "respond.json").read_text())
    assert record["settings"]["sampling"]["max_new_tokens"] == MAX_NEW_TOKENS
    assert "output" not in record["settings"]
    assert record["provenance"]["resolved_config"]["output"] == str(output)


def test_training_prompts_are_answered_as_often_as_asked_and_differently(
    configure: Callable[..., RespondConfig],
) -> None:
    rows = rows_of(respond(configure(samples_per_prompt=3)))
    assert [row["id"] for row in rows["train"]] == [f"p{number}" for number in (0, 1, 3, 4, 6) for _ in range(3)]
    assert [row["id"] for row in rows["heldout"]] == ["p2", "p5"]
    for first in range(0, 15, 3):
        texts = {tuple(row["input_ids"]) for row in rows["train"][first : first + 3]}
        assert len(texts) == 3


def test_the_batch_size_does_not_change_the_text(configure: Callable[..., RespondConfig], tmp_path: Path) -> None:
    """In fp32 and for a few tokens: each response has its own stream of noise."""
    one, all_at_once = (rows_of(respond(configure(batch_size=n, output=str(tmp_path / f"{n}")))) for n in (1, 64))
    assert one == all_at_once
    other = rows_of(
        respond(
            configure(
                sampling=SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, seed=1),
                output=str(tmp_path / "other"),
            )
        )
    )
    assert other != one


def test_spec_train_reads_them(configure: Callable[..., RespondConfig]) -> None:
    output = respond(configure())
    rows = read_rows(output / "train", tokenizer=None, max_length=1000)
    expected = rows_of(output)["train"]
    assert [row["input_ids"].tolist() for row in rows] == [row["input_ids"] for row in expected]
    assert [row["response_mask"].tolist() for row in rows] == [row["response_mask"] for row in expected]


def test_states_are_those_that_a_second_reading_finds(
    configure: Callable[..., RespondConfig], target: Path, tmp_path: Path
) -> None:
    plain = rows_of(respond(configure(output=str(tmp_path / "plain"))))
    output = respond(configure(keep_states=True))
    kept = load_record(str(output))
    again = cache(CacheConfig(responses=str(output), output=str(tmp_path / "again"), kind="hidden_states"))
    assert kept is not None and kept == load_record(str(again))
    for split, rows in rows_of(output).items():
        read_again = load_responses(str(again), split).to_list()
        ours, theirs = load_signal(rows, kept), load_signal(read_again, kept)
        assert ours.keys() == theirs.keys() == kept.columns().keys()
        assert len(ours["log_normalizers"]) == sum(sum(row["response_mask"]) for row in rows)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], atol=2e-5, rtol=1e-4)
        for row, without in zip(rows, plain[split], strict=True):  # what is kept beside them changes no response
            assert {name: row[name] for name in COLUMNS} == without
    assert "cache.json" not in names(tmp_path / "plain")


def test_a_disk_that_may_not_hold_the_states_is_refused(
    configure: Callable[..., RespondConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 9 * MAX_NEW_TOKENS * (16 * 4 + 4)  # seven answers and two greedy ones; fp32, and a normaliser
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=most - 1))
    with pytest.raises(ValueError, match="free some, name a folder on another disk, or leave keep_states false"):
        respond(configure(keep_states=True))
    assert names(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=most))
    respond(configure(keep_states=True))


# --- answered greedily ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_held_out_prompts_are_also_answered_greedily(
    temperature: float, configure: Callable[..., RespondConfig], target: Path
) -> None:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, seed=0, stop_token_ids=(40, 41))
    rows = rows_of(respond(configure(sampling=sampling)))
    assert [row["id"] for row in rows["heldout_greedy"]] == [row["id"] for row in rows["heldout"]] == ["p2", "p5"]
    assert (rows["heldout_greedy"] == rows["heldout"]) == (temperature == 0)
    model = AutoModelForCausalLM.from_pretrained(target)
    for row, sampled in zip(rows["heldout_greedy"], rows["heldout"], strict=True):
        assert row["category"] == sampled["category"]
        start = row["response_mask"].index(True)
        prompt, response = row["input_ids"][:start], row["input_ids"][start:]
        assert prompt == sampled["input_ids"][:start]
        with torch.no_grad():
            likeliest = model(torch.tensor([row["input_ids"][:-1]])).logits[0, start - 1 :].argmax(-1)
        assert response == likeliest.tolist()
        stopped = response[-1] in (*STOP_IDS, 40, 41)
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(response) == MAX_NEW_TOKENS
        assert not set(response[:-1]) & {*STOP_IDS, 40, 41}


def test_responses_of_an_older_release_lack_them_and_serve_otherwise(
    configure: Callable[..., RespondConfig], generated: list[int]
) -> None:
    output = respond(configure())
    shutil.rmtree(output / "heldout_greedy")
    generated.clear()
    assert respond(configure()) == output
    assert generated == []
    assert len(load_responses(str(output), "heldout")) == 2
    with pytest.raises(ValueError, match=r"^responses .*: holds no heldout_greedy/; an older release wrote it"):
        load_responses(str(output), "heldout_greedy")


# --- the split --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompts", "fraction", "heldout"),
    [(20, 0.1, [9, 19]), (5, 0.1, [4]), (2, 0.5, [1]), (10, 0.4, [1, 4, 6, 9]), (3, 0.9, [0, 2])],
)
def test_a_split_is_made_where_the_prompts_have_none(
    num_prompts: int, fraction: float, heldout: list[int], configure: Callable[..., RespondConfig], tmp_path: Path
) -> None:
    (tmp_path / "plain.txt").write_text("".join(f"Say {number}.\n" for number in range(num_prompts)))
    config = configure(
        prompts=str(tmp_path / "plain.txt"),
        heldout_fraction=fraction,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=1, seed=0),
    )
    rows = rows_of(respond(config))
    numbers = {split: [int(row["id"].rpartition(":")[2]) - 1 for row in rows[split]] for split in rows}
    assert numbers["heldout"] == heldout
    assert numbers["train"] == [number for number in range(num_prompts) if number not in heldout]


@pytest.mark.parametrize(
    ("splits", "lacking"), [([None], "heldout"), (["train", "train"], "heldout"), (["heldout", "heldout"], "train")]
)
def test_nothing_to_train_on_or_to_judge_by_is_refused_before_anything_is_generated(
    splits: list[str | None],
    lacking: str,
    configure: Callable[..., RespondConfig],
    tmp_path: Path,
    generated: list[int],
) -> None:
    rows = [{"prompt": "Hi."} | ({"split": split} if split else {}) for split in splits]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = rf"^prompts .*p\.jsonl: none of {len(splits)} is in the split '{lacking}'; add or mark some$"
    with pytest.raises(ValueError, match=message):
        respond(configure(prompts=str(tmp_path / "p.jsonl")))
    assert generated == []
    assert names(tmp_path) == ["p.jsonl"]


# --- begun again ------------------------------------------------------------------------------------------


class StopRunError(Exception):
    """Raised in place of a kill, where the process must live on."""


def interrupt_at_batch(number: int, config: RespondConfig) -> None:
    calls = []
    generate = PlainDecoder.generate_ids

    def stop(self: PlainDecoder, *arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        if len(calls) == number:
            raise StopRunError
        return generate(self, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainDecoder, "generate_ids", stop)
        with pytest.raises(StopRunError):
            respond(config)


@pytest.mark.parametrize("number", [1, 2, 4])  # the fourth is the first of the greedy ones
def test_interrupted_it_goes_on_and_ends_as_if_never_interrupted(
    number: int, configure: Callable[..., RespondConfig], tmp_path: Path, generated: list[int]
) -> None:
    whole = respond(configure(output=str(tmp_path / "whole")))
    sizes = [3, 2, 2, 2]  # five prompts to learn from, two held out, and those again
    assert generated == sizes
    generated.clear()
    interrupt_at_batch(number, configure())
    assert generated == sizes[: number - 1]
    assert names(tmp_path) == [".responses.partial", "whole"]
    output = respond(configure())
    assert generated == sizes  # each once
    assert names(tmp_path) == ["responses", "whole"]
    assert rows_of(whole) == rows_of(output)


def test_a_half_written_batch_is_made_again(
    configure: Callable[..., RespondConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generated: list[int]
) -> None:
    whole = respond(configure(output=str(tmp_path / "whole")))
    published = []

    def stop(temporary: Path, final: Path) -> None:
        published.append(final)
        if len(published) == 2:
            temporary.write_bytes(temporary.read_bytes()[:100])
            raise StopRunError
        publish(temporary, final)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "publish", stop)
        with pytest.raises(StopRunError):
            respond(configure())
    generated.clear()
    respond(configure())
    assert generated == [2, 2, 2]
    assert rows_of(whole) == rows_of(tmp_path / "responses")
    assert not [path for path in (tmp_path / "responses").rglob("*") if "tmp" in path.name]


@pytest.mark.parametrize("step", ["write_text", "finish", "publish"])
def test_interrupted_elsewhere_it_goes_on(
    step: str,
    configure: Callable[..., RespondConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    generated: list[int],
) -> None:
    """Before the record of the settings is there; when all is made but not yet in its place."""
    output = tmp_path / "responses"
    module = responses if step == "finish" else parts
    original = getattr(module, step)

    def stop(*arguments: Any) -> None:
        if step != "publish" or arguments[1] == output:
            raise StopRunError
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, step, stop)
        with pytest.raises(StopRunError):
            respond(configure())
    assert names(tmp_path) == [".responses.partial"]
    before = len(generated)
    respond(configure())
    assert (before, len(generated)) == ((0, 4) if step == "write_text" else (4, 4))
    assert names(tmp_path) == ["responses"]


def test_interrupted_with_states_it_ends_with_the_same(
    configure: Callable[..., RespondConfig], tmp_path: Path, generated: list[int]
) -> None:
    whole = respond(configure(keep_states=True, output=str(tmp_path / "whole")))
    interrupt_at_batch(3, configure(keep_states=True))
    generated.clear()
    assert rows_of(respond(configure(keep_states=True))) == rows_of(whole)
    assert generated == [2, 2]
    with pytest.raises(ValueError, match="keep_states: False differs from True"):
        respond(configure())


@pytest.mark.parametrize("keep_states", [False, True])
def test_a_target_replaced_meanwhile_is_noticed(
    keep_states: bool, configure: Callable[..., RespondConfig], target: Path, tmp_path: Path
) -> None:
    shutil.copytree(target, tmp_path / "target")
    config = configure(target=str(tmp_path / "target"), keep_states=keep_states)
    interrupt_at_batch(2, config)
    described = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(described | {"rms_norm_eps": 1e-4}))
    with pytest.raises(
        ValueError, match=r"^output .*responses: was begun with another target of the same name; delete"
    ):
        respond(config)


def test_what_an_older_release_began_is_begun_anew(configure: Callable[..., RespondConfig], tmp_path: Path) -> None:
    interrupt_at_batch(1, configure())
    for stale in ("00000000", "heldout_greedy/00000000"):
        (tmp_path / ".responses.partial" / stale).mkdir(parents=True)
    output = respond(configure())
    assert names(output) == sorted([*SPLITS, "dataset_dict.json", "respond.json"])
    assert not list(output.rglob("0*"))


def test_finished_responses_are_left_alone(
    configure: Callable[..., RespondConfig],
    target: Path,
    generated: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = respond(configure())
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    generated.clear()
    monkeypatch.setattr(responses, "load_model", None)  # not even loaded
    with caplog.at_level(logging.INFO):
        assert respond(configure()) == output
    assert "complete already" in caplog.text
    assert generated == []
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


OTHER_SETTINGS = {
    "samples_per_prompt": 2,
    "batch_size": 4,
    "heldout_fraction": 0.2,
    "keep_states": True,
    "dtype": "bfloat16",
    "sampling": SamplingParams(temperature=0.9, max_new_tokens=MAX_NEW_TOKENS, seed=0),
}


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_other_settings_in_the_same_folder_are_refused(
    state: str, configure: Callable[..., RespondConfig], tmp_path: Path
) -> None:
    if state == "finished":
        respond(configure())
    else:
        interrupt_at_batch(2, configure())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name, value in OTHER_SETTINGS.items():
        with pytest.raises(ValueError, match=rf"^{name}: .* differs from .*, with which .*responses.* was begun; "):
            respond(configure(**{name: value}))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    respond(configure())  # the control


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_sampling_fields_that_were_not_recorded_had_their_defaults(
    state: str, configure: Callable[..., RespondConfig], tmp_path: Path
) -> None:
    """Responses outlive the release that wrote them, which knew fewer fields."""
    if state == "finished":
        folder = respond(configure())
    else:
        interrupt_at_batch(2, configure())
        folder = tmp_path / ".responses.partial"
    record = json.loads((folder / "respond.json").read_text())
    known = ("temperature", "top_k", "top_p", "max_new_tokens", "seed")
    record["settings"]["sampling"] = {name: record["settings"]["sampling"][name] for name in known}
    (folder / "respond.json").write_text(json.dumps(record))
    same = configure().sampling
    for changes in ({"min_p": 0.1}, {"stop": ("x",)}, {"logit_bias": {5: 1.0}}, {"min_new_tokens": 2}, {"seed": 1}):
        with pytest.raises(ValueError, match=r"^sampling: .* differs from .*, with which .*responses.* was begun; "):
            respond(configure(sampling=replace(same, **changes)))
    assert respond(configure()) == tmp_path / "responses"


def test_stop_strings_end_responses(configure: Callable[..., RespondConfig]) -> None:
    config = configure(sampling=replace(configure().sampling, stop=("a", "e", "i", "o", "u", " "), bad_words=("x",)))
    rows = [row for split in rows_of(respond(config)).values() for row in split]
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    ended = {row["finish_reason"] for row in rows}
    assert ended == {"stop", "length"}
    for row in rows:
        answer = [token for token, mask in zip(row["input_ids"], row["response_mask"], strict=True) if mask]
        assert not set(tokenizer.decode(answer[:-1], skip_special_tokens=True)) & set("aeiou x")


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_other_prompts_under_the_same_name_are_refused(
    state: str, configure: Callable[..., RespondConfig], prompts: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "copied.jsonl"
    shutil.copy(prompts, copied)
    config = configure(prompts=str(copied))
    if state == "finished":
        respond(config)
    else:
        interrupt_at_batch(2, config)
    copied.write_text(copied.read_text().replace("Say very slowly.", "Say it quickly."))
    with pytest.raises(ValueError, match=r"^prompts_sha256: .* differs from .*, with which .*responses.* was begun; "):
        respond(config)


def test_a_folder_of_something_else_is_left_alone(
    configure: Callable[..., RespondConfig], tmp_path: Path, generated: list[int]
) -> None:
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"^output .*responses: exists and holds no respond\.json; give another"):
        respond(configure())
    assert generated == []
    assert names(tmp_path) == ["responses"]
    assert names(tmp_path / "responses") == ["thesis.tex"]


# --- refusals ---------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_named_before_anything_is_generated(
    configure: Callable[..., RespondConfig], prompts: Path, tmp_path: Path, generated: list[int]
) -> None:
    rows = [*prompts.read_text().splitlines(), json.dumps({"prompt": "long " * 120, "id": "the-long-one"})]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    message = r"^prompt the-long-one: 6\d\d tokens and 12 new ones are more than the target's context of 512; "
    with pytest.raises(ValueError, match=message):
        respond(configure(prompts=str(tmp_path / "p.jsonl")))
    assert generated == []
    assert names(tmp_path) == ["p.jsonl"]


def test_a_prompt_that_just_fits_is_answered(configure: Callable[..., RespondConfig], tmp_path: Path) -> None:
    room = 512 - MAX_NEW_TOKENS
    tokenizer = AutoTokenizer.from_pretrained(configure().target)
    overhead = len(encode(tokenizer, as_messages("x"))) - 1
    for length, fits in ((room - overhead, True), (room - overhead + 1, False)):
        (tmp_path / "p.txt").write_text(f"{'x' * length}\nHi.\n")
        config = configure(prompts=str(tmp_path / "p.txt"), output=str(tmp_path / f"{length}"))
        if fits:
            assert max(len(row["input_ids"]) for row in rows_of(respond(config))["train"]) > room
        else:
            with pytest.raises(ValueError, match=r"^prompt .*p\.txt:1: 501 tokens and 12 new ones"):
                respond(config)


@pytest.mark.parametrize("split", SPLITS)
def test_unfinished_responses_are_not_loaded(
    split: str, configure: Callable[..., RespondConfig], tmp_path: Path
) -> None:
    interrupt_at_batch(2, configure())
    for folder in (tmp_path / "responses", tmp_path / ".responses.partial"):
        with pytest.raises(ValueError, match=rf"^responses .*: holds no {split}/; give a folder that"):
            load_responses(str(folder), split)


def test_a_folder_without_response_masks_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(str(tmp_path / "train"))
    with pytest.raises(ValueError, match="lacks the column response_mask"):
        load_responses(str(tmp_path), "train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 0}, "^samples_per_prompt: 0 is not possible"),
        ({"batch_size": 0}, "^batch_size: 0 is not possible"),
        ({"heldout_fraction": 0.0}, "^heldout_fraction: 0.0 is not possible"),
        ({"heldout_fraction": math.nan}, "^heldout_fraction: nan is not possible"),
        ({"sampling": SamplingParams(temperature=1.0)}, "^sampling.seed: null cannot be resumed; give a number$"),
    ],
)
def test_values_that_cannot_be_meant(
    changes: dict[str, Any], message: str, configure: Callable[..., RespondConfig]
) -> None:
    with pytest.raises(ValueError, match=message):
        configure(**changes)
