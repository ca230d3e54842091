"""What a run says while it runs: metrics.jsonl, trackers, and a progress bar or plain lines."""

import json
import logging
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .engine import Engine

logger = logging.getLogger(__name__)


class Report:
    """Writes metrics on the main process and is silent on the others.

    On a terminal there is a progress bar; elsewhere each line of metrics is also a log line.
    """

    def __init__(self, engine: Engine, metrics_path: Path, num_steps: int, first_step: int) -> None:
        self._engine = engine
        self._num_steps = num_steps
        self._first_step = first_step
        self._start = time.perf_counter()
        self._file = metrics_path.open("a", encoding="utf-8") if engine.is_main else None
        console = Console()
        self._bar: Progress | None = None
        if engine.is_main and console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:.0f} tokens/s  ETA"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console)
            self._task: TaskID = self._bar.add_task(
                "", total=num_steps, completed=first_step, loss=float("nan"), speed=0.0
            )

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        if self._file:
            self._file.close()

    def advance(self, step: int) -> None:
        """Moves the bar to `step` steps done."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def write(self, line: dict[str, float]) -> None:
        """Records one line of metrics; `line["step"]` is the number of steps done."""
        step = int(line["step"])
        self._engine.track({key: value for key, value in line.items() if key != "step"}, step)
        if not self._file:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._bar and "loss" in line:
            self._bar.update(self._task, loss=line["loss"], speed=line["tokens_per_second"])
        elif not self._bar:
            logger.info("%s", self._plain(line, step))

    def sync(self) -> None:
        """Puts the lines so far on disk, so that a checkpoint is never ahead of them."""
        if self._file:
            os.fsync(self._file.fileno())

    def _plain(self, line: dict[str, float], step: int) -> str:
        if "loss" not in line:
            values = "  ".join(f"{key} {value:.4g}" for key, value in line.items() if "/" in key)
            return f"step {step}/{self._num_steps}  {values}"
        pace = (time.perf_counter() - self._start) / max(1, step - self._first_step)
        minutes, seconds = divmod(round(pace * (self._num_steps - step)), 60)
        return (
            f"step {step}/{self._num_steps}  loss {line['loss']:.4f}  "
            f"{line['tokens_per_second']:.0f} tokens/s  ETA {minutes}:{seconds:02d}"
        )
