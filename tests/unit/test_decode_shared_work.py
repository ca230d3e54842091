"""Work in batches: done once, in order, and not again after an interruption."""

import json
import logging
from pathlib import Path

import pytest

from decode.progress import ProgressBar
from decode.shared_work import SharedWork

BATCHES = [[1, 2], [3, 4], [5]]


class Doubling:
    """Remembers what it was given; stops before one item."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.seen: list[int] = []

    def __call__(self, batch: list[int], bar: ProgressBar) -> list[int]:
        if self.stop_at in batch:
            raise KeyboardInterrupt
        self.seen += batch
        return [2 * item for item in batch]


def test_all_is_found_in_order_and_nothing_left_behind(tmp_path: Path) -> None:
    for path in (None, tmp_path / "kept.jsonl"):
        work = SharedWork(path, "a")
        assert work.results("stage", "doubling", BATCHES, Doubling()) == [2, 4, 6, 8, 10]
        assert work.on_main(lambda: "found") == "found"
        work.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("torn", ["", "{", '{"stage": "stage", "batch": 1, "found": [6, 8]}', "null", "\xff"])
def test_finished_batches_are_not_done_again(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    with pytest.raises(KeyboardInterrupt):
        SharedWork(path, "a").results("stage", "doubling", BATCHES, Doubling(stop_at=3))
    with path.open("a", encoding="latin-1") as file:
        file.write(torn)
    again = Doubling()
    assert SharedWork(path, "a").results("stage", "doubling", BATCHES, again) == [2, 4, 6, 8, 10]
    assert again.seen == [3, 4, 5]
    assert [json.loads(line).get("batch") for line in path.read_text().splitlines()] == [None, 0, 1, 2]
    # and other work has nothing of it
    other = Doubling()
    SharedWork(path, "a").results("other", "doubling", BATCHES, other)
    assert other.seen == [1, 2, 3, 4, 5]


def test_what_was_kept_for_other_work_is_dropped_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kept.jsonl"
    SharedWork(path, "a").results("stage", "doubling", BATCHES, Doubling())
    again = Doubling()
    with caplog.at_level(logging.INFO):
        SharedWork(path, "b").results("stage", "doubling", BATCHES, again)
    assert again.seen == [1, 2, 3, 4, 5]
    assert "is of other settings, models or texts: all is done anew" in caplog.text
