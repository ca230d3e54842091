"""Which texts are learnt from, and which are held out."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from distill.config import RunConfig
from distill.responses import load_responses
from distill.texts import column, load_texts, without_signal

Configure = Callable[..., RunConfig]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    """Rows whose second token is their number."""
    return [{"input_ids": [1, 3 + number, 2], "response_mask": [False, True, True]} for number in range(count)]


def numbers(rows: Any) -> list[int]:
    return [int(ids[1]) - 3 for ids in column(rows, "input_ids")]


def test_responses_have_their_own_splits(
    distill_folders: dict[str, Path], configure_run: Configure, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    for name in ("responses", "hidden_states", "top_k"):
        folder = distill_folders[name]
        texts = load_texts(configure_run(responses=folder), byte_tokenizer)
        assert texts.by_target
        assert texts.heldout_greedy is not None
        for rows, split in (
            (texts.train, "train"),
            (texts.heldout, "heldout"),
            (texts.heldout_greedy, "heldout_greedy"),
        ):
            assert column(rows, "input_ids") == load_responses(str(folder), split)["input_ids"]
        assert texts.learnable() is texts
    older = load_texts(configure_run(responses=without_greedy(distill_folders, configure_run)), byte_tokenizer)
    assert older.heldout_greedy is None


def without_greedy(folders: dict[str, Path], configure: Configure) -> Path:
    """As an older release wrote them."""
    older = Path(configure().train.output).parent / "older"
    older.mkdir()
    for path in folders["responses"].iterdir():
        if path.name != "heldout_greedy":
            (older / path.name).symlink_to(path)
    return older


@pytest.mark.parametrize(
    ("count", "share", "heldout"),
    [(40, 0.05, 2), (40, 0.4, 16), (40, 0.3, 12), (40, 0.5, 20), (2, 0.05, 1), (3, 0.5, 2), (7, 0.01, 1)],
)
def test_of_other_data_the_stated_share_is_held_out_evenly(
    count: int,
    share: float,
    heldout: int,
    configure_run: Configure,
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    responses = write(tmp_path / "rows.jsonl", numbered(count))
    texts = load_texts(configure_run(responses=responses, heldout_fraction=share), byte_tokenizer)
    assert not texts.by_target
    assert texts.heldout_greedy is None
    found = numbers(texts.heldout)
    assert len(found) == heldout
    assert sorted(found + numbers(texts.train)) == list(range(count))
    assert numbers(texts.train) == sorted(numbers(texts.train))
    gaps = [after - before for before, after in zip([-1, *found[:-1]], found, strict=True)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("suffix", [".txt", ".parquet", "", ":train"])
def test_data_may_have_any_form(
    suffix: str, configure_run: Configure, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = [{"text": f"Line {number}."} for number in range(10)]
    path = tmp_path / f"data{suffix}"
    if suffix == ".txt":
        path.write_text("".join(row["text"] + "\n" for row in rows))
    elif suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif suffix == "":
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "data"))
    texts = load_texts(configure_run(responses=path, heldout_fraction=0.2), byte_tokenizer)
    assert (len(texts.train), len(texts.heldout)) == (8, 2)
    assert byte_tokenizer.decode(texts.train[0]["input_ids"]) == "Line 0.<|im_end|>"


def test_rows_are_cut_at_max_length(
    configure_run: Configure, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    responses = write(tmp_path / "rows.jsonl", [{"text": "x" * 50}, {"text": "y"}, {"text": "z" * 9}])
    texts = load_texts(configure_run(responses=responses, max_length=10), byte_tokenizer)
    assert [len(ids) for ids in column(texts.train, "input_ids")] == [10, 2]
    assert [row["truncated"] for row in texts.train] == [True, False]


def test_one_row_is_too_few(configure_run: Configure, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    responses = write(tmp_path / "rows.jsonl", numbered(1))
    with pytest.raises(ValueError, match=r"^responses .*: one row cannot be learnt from and held out; give more$"):
        load_texts(configure_run(responses=responses), byte_tokenizer)


def test_rows_without_a_response_token_are_left_out(
    configure_run: Configure, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rows = numbered(10)
    for number in (0, 3, 4):
        rows[number]["response_mask"] = [True, False, False]  # nothing predicts a first token
    responses = write(tmp_path / "rows.jsonl", rows)
    texts = load_texts(configure_run(responses=responses, heldout_fraction=0.2), byte_tokenizer)
    assert numbers(texts.heldout) == [4, 9]
    assert numbers(texts.learnable().heldout) == [9]
    assert numbers(texts.learnable().train) == [1, 2, 5, 6, 7, 8]
    with pytest.raises(ValueError, match=r"^responses: no row that was held out has a response token; "):
        replace(texts, heldout=texts.heldout[:1]).learnable()


def test_columns_and_rows_without_a_signal(
    distill_folders: dict[str, Path], configure_run: Configure, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    config = configure_run(responses=distill_folders["hidden_states"], teacher="cached")
    online = load_texts(configure_run(responses=distill_folders["hidden_states"]), byte_tokenizer)
    assert "teacher_hidden" not in online.train[0]  # which nobody would read
    texts = load_texts(config, byte_tokenizer)
    assert "teacher_hidden" in texts.train[0]
    without = without_signal(texts.train)
    assert set(without[0]) == {"input_ids", "response_mask", "finish_reason"}
    assert column(without, "input_ids") == column(texts.train, "input_ids")
    rows = numbered(3)
    assert without_signal(rows) is rows
    assert column(rows, "input_ids") == [row["input_ids"] for row in rows]
