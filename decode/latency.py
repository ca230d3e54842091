"""When tokens arrive: how long it takes to the first, and how long from one to the next.

A round of speculative decoding commits several tokens, which arrive together. So there are two kinds of gaps:

- between arrivals, each of one token or more. Serving engines call this the inter-token latency, as they time the
  pieces of a stream (`vllm bench serve`: ITL). It is what a reader sees: speculation makes it longer, with more tokens
  at a time;
- between tokens, where those of one arrival follow each other in 0 seconds: one gap fewer than tokens.

Neither alone says which decoding is faster; the mean time per output token after the first (TPOT) does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from .memory import Memory

PERCENTILES = (50, 90, 99)

# told how many tokens have just arrived
OnTokens = Callable[[int], None]


class Arrival(NamedTuple):
    """Tokens that came together: seconds since the call that asked for them, and how many they were."""

    seconds: float
    num_tokens: int


class Arrivals:
    """Notes when tokens arrive, counted from now: no more than a clock is read, as this is itself being timed."""

    def __init__(self) -> None:
        self.noted: list[Arrival] = []
        self.started = perf_counter()

    def note(self, num_tokens: int) -> None:
        self.noted.append(Arrival(self.elapsed_seconds, num_tokens))

    @property
    def elapsed_seconds(self) -> float:
        return perf_counter() - self.started


@dataclass(frozen=True)
class Run:
    """One prompt decoded once.

    Attributes:
        num_tokens: of the text.
        seconds: from the call to its return; what passes after the last token is in it.
        arrivals: of the tokens; empty where nobody was told of them.
        memory: held meanwhile; None where that cannot be measured.
    """

    num_tokens: int
    seconds: float
    arrivals: tuple[Arrival, ...] = ()
    memory: Memory | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def first_token_seconds(self) -> float | None:
        """From the call to the first token, the pass over the prompt included (TTFT)."""
        return self.arrivals[0].seconds if self.arrivals else None

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean over all tokens but the first (TPOT); None for a text of one token."""
        gaps = self.token_gaps
        return sum(gaps) / len(gaps) if gaps else None

    @property
    def arrival_gaps(self) -> list[float]:
        """Seconds from one arrival to the next."""
        return [after.seconds - before.seconds for before, after in pairwise(self.arrivals)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds from one token to the next: 0 between those that arrive together."""
        gaps: list[float] = []
        before = None
        for seconds, num_tokens in self.arrivals:
            gaps += [] if before is None else [seconds - before]
            gaps += [0.0] * (num_tokens - 1)
            before = seconds
        return gaps

    def figures(self) -> dict[str, Any]:
        """All of it but for the single arrivals, as JSON values."""
        return {
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "first_token_seconds": self.first_token_seconds,
            "seconds_per_output_token": self.seconds_per_output_token,
            "peak_bytes": self.memory.peak_bytes if self.memory else None,
        }


@dataclass(frozen=True)
class Spread:
    """How a figure differs from run to run."""

    lowest: float
    lower_quartile: float
    median: float
    upper_quartile: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of one value or more; quartiles between two values are interpolated."""
        return cls(*np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist())


@dataclass(frozen=True)
class Latency:
    """Of all runs of one mode. None where no text has a second token, or a second arrival.

    Attributes:
        first_token_seconds: by run.
        seconds_per_output_token: by run.
        arrival_gap_seconds: percentiles over the gaps between arrivals of all runs together, by "p50" and so on: the
            inter-token latency of serving engines.
        token_gap_seconds: the same over the gaps between tokens.
    """

    first_token_seconds: Spread
    seconds_per_output_token: Spread | None
    arrival_gap_seconds: dict[str, float] | None
    token_gap_seconds: dict[str, float] | None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Latency | None":
        """None where nobody was told of the tokens."""
        first = [run.first_token_seconds for run in runs if run.first_token_seconds is not None]
        if not first or len(first) < len(runs):
            return None
        means = [run.seconds_per_output_token for run in runs if run.seconds_per_output_token is not None]
        return cls(
            Spread.of(first),
            Spread.of(means) if means else None,
            percentiles([gap for run in runs for gap in run.arrival_gaps]),
            percentiles([gap for run in runs for gap in run.token_gaps]),
        )


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """By "p50" and so on, interpolated between two values; None of nothing."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES).tolist()
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}
