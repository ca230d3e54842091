"""SIGTERM, with which schedulers announce that they take the machine back."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Preempted(SystemExit):
    """A run that was asked to end and kept what it had; the program ends with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


@contextmanager
def sigterm_noted() -> Iterator[list[int]]:
    """Meanwhile SIGTERM does nothing but to be put into this list: a lock could be held when a second one comes."""
    announced: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody set handlers
        yield announced
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: announced.append(number))
    try:
        yield announced
    finally:
        signal.signal(signal.SIGTERM, before)
