"""SIGTERM, with which schedulers announce that they take the machine back."""

import signal
import threading
from types import FrameType, TracebackType


class Preempted(SystemExit):
    """A run that was asked to end and kept what it had; the program ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Preemption:
    """While it is entered, SIGTERM does nothing but to be remembered.

    Attributes:
        announced: whether it came.
    """

    def __init__(self) -> None:
        self.announced = False

    def __enter__(self) -> "Preemption":
        # elsewhere Python lets nobody set handlers
        self._ours = threading.current_thread() is threading.main_thread()
        if self._ours:
            self._before = signal.signal(signal.SIGTERM, self._remember)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._ours:
            signal.signal(signal.SIGTERM, self._before)

    def _remember(self, _: int, frame: FrameType | None) -> None:
        self.announced = True
