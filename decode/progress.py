"""A progress bar with an ETA; plain log lines where there is no terminal."""

import logging
import os
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

logger = logging.getLogger(__name__)


class ProgressBar:
    """Shows how far a stage has come, out of `total` (in any unit), on stderr.

    Args:
        description: what is going on, in a few words.
        total: the amount of work.
    """

    def __init__(self, description: str, total: float) -> None:
        self.description, self.total, self.done = description, total, 0.0
        self._began_at = 0.0
        self._started = self._logged = time.perf_counter()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal and os.environ.get("RANK", "0") == "0":  # of several processes, the main one shows it
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(description, total=total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        elif kind is None:
            logger.info("%s: done in %.0f s", self.description, time.perf_counter() - self._started)

    def advance(self, amount: float) -> None:
        self.set(self.done + amount)

    def set(self, done: float) -> None:
        """So much is done now; work found done at the start does not count towards the pace."""
        now = time.perf_counter()
        self.done = done
        if self._bar:
            self._bar.update(self._task, completed=done)
        elif now - self._logged >= 20 and done > self._began_at:
            self._logged = now
            seconds_left = (now - self._started) * (self.total - done) / (done - self._began_at)
            logger.info("%s: %.0f%%, ETA %.0f s", self.description, 100 * done / self.total, seconds_left)

    def skip(self, done: float) -> None:
        """So much was done before this process began."""
        self._began_at = done
        self.set(done)
