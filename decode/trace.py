"""What happened while a text was decoded: counts and seconds."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch


class Round(NamedTuple):
    """One target pass for one row: how many tokens were drafted before it, and accepted and committed after it."""

    num_drafted: int
    num_accepted: int
    num_committed: int

    @property
    def num_verified(self) -> int:
        """Drafted tokens that were judged: up to the first that was not accepted, or to the end of the text."""
        return min(self.num_accepted + 1, self.num_drafted, self.num_committed)


@dataclass
class Seconds:
    """Wall time by what it was spent on; `rest` is sampling by the target, verification and bookkeeping."""

    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.draft + other.draft, self.verify + other.verify, self.rest + other.rest)

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


@dataclass
class Trace:
    """What it took to decode one row, or several whose traces were added.

    Attributes:
        rounds: in order.
        seconds: of its rounds; the rows of a batch share their rounds' time, and each counts it whole.
        num_paused: rounds without drafting because speculation was measured to be slower than plain decoding.
    """

    rounds: list[Round] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)
    num_paused: int = 0

    def __add__(self, other: "Trace") -> "Trace":
        return Trace(self.rounds + other.rounds, self.seconds + other.seconds, self.num_paused + other.num_paused)

    @property
    def num_target_passes(self) -> int:
        """Passes that committed tokens to this row, one a round."""
        return len(self.rounds)

    @property
    def num_drafted(self) -> int:
        """Tokens proposed, judged or not."""
        return sum(each.num_drafted for each in self.rounds)

    @property
    def num_verified(self) -> int:
        """Proposed tokens that were judged."""
        return sum(each.num_verified for each in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Judged tokens that were accepted and are part of the text."""
        return sum(self.accepted)

    @property
    def num_committed(self) -> int:
        """Tokens of the text."""
        return sum(each.num_committed for each in self.rounds)

    @property
    def reached(self) -> list[int]:
        """reached[k] counts rounds in which position k was judged: all before it were accepted."""
        return self._count(lambda each: each.num_verified)

    @property
    def accepted(self) -> list[int]:
        """accepted[k] counts those in which the token drafted there was accepted."""
        return self._count(lambda each: min(each.num_accepted, each.num_verified))

    @property
    def betas(self) -> list[float]:
        """Share accepted of the tokens judged at each position, up to the last position that was reached."""
        return [accepted / reached for accepted, reached in zip(self.accepted, self.reached, strict=True) if reached]

    @property
    def block_efficiency(self) -> float:
        """Tokens committed per target pass, the bonus token included."""
        return self.num_committed / self.num_target_passes if self.rounds else float("nan")

    def figures(self) -> dict[str, Any]:
        """All of it but for the single rounds, as JSON values."""
        return {
            "target_passes": self.num_target_passes,
            "drafted": self.num_drafted,
            "verified": self.num_verified,
            "accepted": self.num_accepted,
            "committed": self.num_committed,
            "paused": self.num_paused,
            "betas": self.betas,
            "block_efficiency": self.block_efficiency,
            "seconds": asdict(self.seconds),
        }

    def _count(self, length: Callable[[Round], int]) -> list[int]:
        lengths = [length(each) for each in self.rounds]
        most = max((each.num_drafted for each in self.rounds), default=0)
        return [sum(each > position for each in lengths) for position in range(most)]


class Stopwatch:
    """Marks moments of a device's work, without making it wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[float | torch.Event] = []

    def mark(self) -> None:
        if self.device.type == "cpu":
            self.marks.append(perf_counter())
        else:
            event = torch.Event(self.device, enable_timing=True)
            event.record()
            self.marks.append(event)

    def laps(self) -> list[float]:
        """Seconds between one mark and the next; the last one's work must have ended."""
        laps = []
        for before, after in zip(self.marks, self.marks[1:], strict=False):
            if isinstance(before, float) and isinstance(after, float):
                laps.append(after - before)
            else:
                assert isinstance(before, torch.Event) and isinstance(after, torch.Event)
                after.synchronize()
                laps.append(before.elapsed_time(after) / 1000)
        return laps
