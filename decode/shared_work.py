"""Work that processes share in batches, and that goes on where it was interrupted."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState

from .progress import ProgressBar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Found = TypeVar("Found")


def processes() -> PartialState:
    """Those of this launch; from the first call on, each has an accelerator of its own, where there are some."""
    return PartialState(cpu=not torch.accelerator.is_available())


class SharedWork:
    """Deals batches to the processes of a launch, and keeps what was found in a file until all is done.

    Every batch is worked on as a whole by one process, so what is found does not depend on how many there are. They
    take turns of a batch each, after which all know what was found; the main process alone writes.

    Args:
        path: a JSON object a line: what the work is, then what was found for each batch; None keeps nothing.
        fingerprint: of all that the work depends on; what was kept under another is dropped.
    """

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self.state = processes()
        self.path = path
        self.kept: dict[str, dict[int, list[Any]]] = self.on_main(lambda: self._take_up(fingerprint))

    def results(
        self,
        stage: str,
        description: str,
        batches: Sequence[list[Item]],
        work: Callable[[list[Item], ProgressBar], list[Any]],
    ) -> list[Any]:
        """What `work` finds for each item, in order.

        Args:
            stage: tells it apart from other work in the file.
            description: for the progress bar, which counts items.
            batches: of items.
            work: gives a JSON value for each item of a batch; may advance the bar while at it.
        """
        kept = self.kept.setdefault(stage, {})
        waiting = [number for number in range(len(batches)) if number not in kept]
        with ProgressBar(description, sum(map(len, batches))) as bar:
            bar.skip(sum(len(batches[number]) for number in kept))
            for start in range(0, len(waiting), self.state.num_processes):
                turn = waiting[start : start + self.state.num_processes]
                place = self.state.process_index
                found = work(batches[turn[place]], bar) if place < len(turn) else []
                for number, each in zip(turn, self._gathered(found), strict=False):
                    kept[number] = each
                    self._append({"stage": stage, "batch": number, "found": each})
                bar.set(sum(len(batches[number]) for number in kept))
        return [each for number in range(len(batches)) for each in kept[number]]

    def on_main(self, work: Callable[[], Found]) -> Found:
        """What the main process finds, known to all; the others wait."""
        found = work() if self.state.is_main_process else None
        return self._gathered(found)[0]  # type: ignore[return-value]

    def finish(self) -> None:
        """All is done: nothing needs to be kept."""
        if self.path and self.state.is_main_process:
            self.path.unlink(missing_ok=True)

    def _gathered(self, found: Found) -> list[Found]:
        """By process."""
        if self.state.num_processes == 1:
            return [found]
        everything: list[Any] = [None] * self.state.num_processes
        torch.distributed.all_gather_object(everything, found)
        return everything

    def _take_up(self, fingerprint: str) -> dict[str, dict[int, list[Any]]]:
        """What an interrupted process left, whose last line may be torn; begins the file anew with it."""
        if self.path is None:
            return {}
        entries = _whole_lines(self.path) if self.path.is_file() else []
        if entries and entries[0] != {"fingerprint": fingerprint}:
            logger.info("%s is of other settings, models or texts: all is done anew", self.path)
            entries = []
        kept: dict[str, dict[int, list[Any]]] = {}
        for entry in entries[1:]:
            kept.setdefault(entry["stage"], {})[entry["batch"]] = entry["found"]
        if kept:
            logger.info("going on from %s", self.path)
        temporary = self.path.with_name(f".{self.path.name}.new")
        lines = [json.dumps(entry) + "\n" for entry in [{"fingerprint": fingerprint}, *entries[1:]]]
        temporary.write_text("".join(lines), encoding="utf-8")
        os.replace(temporary, self.path)
        return kept

    def _append(self, entry: dict[str, Any]) -> None:
        if self.path and self.state.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _whole_lines(path: Path) -> list[Any]:
    """The entries before the first that is torn."""
    entries = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries
