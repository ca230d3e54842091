"""What an evaluation reports: means over texts, counts of rounds, and intervals of both over prompts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import compress
from typing import Any

import numpy as np

from .agreement import QUANTITIES, name_of_range, range_of
from .costs import Costs
from .params import Provenance, SamplingParams
from .trace import Seconds, Trace

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of some texts, or of a range of positions in them. Intervals are of 95%, by bootstrap over prompts.

    Attributes:
        num_prompts: with tokens there.
        num_tokens: response tokens that the means are over.
        alpha: mean of sum_v min(p, q) over positions of target-distributed text.
        tv: total variation of p and q, 1 - alpha.
        kl: KL(p|q) in nats on what q can say; see `decode.agreement.agreement`.
        p_beyond_q: mass of p where q is 0, which kl leaves out. Where it is not 0, KL(p|q) itself is infinite.
        top1_agreement: share of positions at which p and q find the same token likeliest.
        block_efficiency: tokens committed per target pass, the bonus token included, counted in the rounds that begin
            there; None where none does.
    """

    num_prompts: int
    num_tokens: int
    alpha: float
    alpha_interval: Interval
    tv: float
    tv_interval: Interval
    kl: float
    kl_interval: Interval
    p_beyond_q: float
    p_beyond_q_interval: Interval
    top1_agreement: float
    top1_agreement_interval: Interval
    block_efficiency: float | None
    block_efficiency_interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class Category(Figures):
    """`Figures` of the prompts of a category, and what was counted in the rounds of those that were decoded.

    Attributes:
        betas, betas_intervals, counts: as in `Evaluation`; no betas where none was decoded.
    """

    betas: list[float]
    betas_intervals: list[Interval]
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text that was decoded while counting, token by token.

    Attributes:
        prompt: as the models read it, special tokens included.
        category: of the prompt, if it has one.
        pieces: the text that each token of the answer added.
        provenance: where each came from.
        p, q: of each, after all processing and what stands before it.
    """

    prompt: str
    category: str | None
    pieces: list[str]
    provenance: list[Provenance]
    p: list[float]
    q: list[float]


@dataclass(frozen=True, kw_only=True)
class Evaluation(Figures):
    """What `evaluate` found at one setting: `Figures` of all texts, and more.

    Attributes:
        prompts: which prompts.
        sampling: the setting.
        by_category: of the prompts that have one.
        by_position: by range of positions, counted from the answer's first token, which is 0.
        num_draft_tokens: tokens proposed a round while counting.
        betas: acceptance counted at each position of a round, given that it was reached.
        first_position_interval: that of betas[0]. It may lie below alpha's: rounds begin more often where the draft has
            just failed than where it has just succeeded.
        counts: drafted, verified, accepted and committed tokens, and target passes; their intervals are of as many
            prompts.
        accepted_lengths: how many rounds accepted 0, 1, 2, … drafted tokens; shares of all rounds with their intervals.
        costs: measured here.
        predicted_speedup: by num_draft_tokens, from 1; their intervals are those of acceptance, with costs as measured.
        best_num_draft_tokens: for which that is largest.
        measured_speedups: with so many, over plain decoding, of each prompt that was timed; their median.
        measured_seconds: of the rounds in which they were measured.
        samples: a few of the texts decoded while counting.
    """

    prompts: str
    sampling: SamplingParams
    by_category: dict[str, Category]
    by_position: dict[str, Figures]
    num_draft_tokens: int
    betas: list[float]
    betas_intervals: list[Interval]
    first_position_interval: Interval
    counts: dict[str, int]
    counts_intervals: dict[str, Interval]
    accepted_lengths: list[int]
    accepted_length_shares: list[float]
    accepted_length_intervals: list[Interval]
    costs: Costs
    predicted_speedup: list[float]
    predicted_speedup_intervals: list[Interval]
    best_num_draft_tokens: int
    measured_speedups: list[float]
    measured_speedup: float | None
    measured_seconds: Seconds
    samples: list[Sample]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Evaluation":
        """What `as_json` gave, whatever stands beside it.

        Raises:
            KeyError, TypeError, ValueError: `found` is something else.
        """
        result = cls(**{field.name: found[field.name] for field in fields(cls)})
        return replace(
            result,
            sampling=SamplingParams(**found["sampling"]),
            costs=Costs(**found["costs"]),
            by_category={name: Category(**part) for name, part in found["by_category"].items()},
            by_position={name: Figures(**part) for name, part in found["by_position"].items()},
            measured_seconds=Seconds(**found["measured_seconds"]),
            samples=[Sample(**each) for each in found["samples"]],
        )


def bootstrap_interval(numerators: np.ndarray, denominators: np.ndarray, seed: int = 0) -> Interval:
    """95% percentile interval of sum(numerators) / sum(denominators) when the prompts are drawn anew.

    Args:
        numerators, denominators: one entry per prompt; resampled together, 2,000 times.
        seed: of the resampling.
    """
    rows = _drawn_anew(len(numerators), seed)
    with np.errstate(invalid="ignore"):
        return _interval(numerators[rows].sum(axis=1) / denominators[rows].sum(axis=1))


def _drawn_anew(num_prompts: int, seed: int = 0) -> np.ndarray:
    """Places of prompts, [2000, num_prompts]."""
    return np.random.default_rng(seed).integers(num_prompts, size=(2000, num_prompts))


def _interval(values: np.ndarray) -> Interval:
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def padded(rows: Sequence[Sequence[Sequence[float]]], num_ranges: int) -> np.ndarray:
    """Rows [ranges, numbers] of different lengths as one array [rows, num_ranges, numbers], with zeros."""
    array = np.zeros((len(rows), num_ranges, len(rows[0][0])))
    for place, row in enumerate(rows):
        array[place, : len(row)] = row
    return array


def passes_by_range(trace: Trace) -> list[list[float]]:
    """By range of positions of an answer, target passes whose round began there, and tokens that these committed."""
    found: list[list[float]] = []
    position = 0
    for each in trace.rounds:
        number = range_of(position)
        found += [[0.0, 0.0] for _ in range(number + 1 - len(found))]
        found[number][0] += 1
        found[number][1] += each.num_committed
        position += each.num_committed
    return found


def means(sums: np.ndarray, passes: np.ndarray) -> dict[str, Any]:
    """The fields of `Figures`.

    Args:
        sums: [texts, ranges, 5], the number of tokens and the sum of each of QUANTITIES; some token somewhere.
        passes: [decoded texts, ranges, 2], target passes and tokens committed.
    """
    sums, passes = sums.sum(axis=1), passes.sum(axis=1)
    sums, passes = sums[sums[:, 0] > 0], passes[passes[:, 0] > 0]
    found: dict[str, Any] = {"num_prompts": len(sums), "num_tokens": int(sums[:, 0].sum())}
    for column, name in enumerate(QUANTITIES, start=1):
        found[name] = float(sums[:, column].sum() / sums[:, 0].sum())
        found[f"{name}_interval"] = bootstrap_interval(sums[:, column], sums[:, 0])
    low, high = found["alpha_interval"]
    found |= {"tv": 1 - found["alpha"], "tv_interval": (1 - high, 1 - low)}
    found |= {"block_efficiency": None, "block_efficiency_interval": None}
    if len(passes):
        found["block_efficiency"] = float(passes[:, 1].sum() / passes[:, 0].sum())
        found["block_efficiency_interval"] = bootstrap_interval(passes[:, 1], passes[:, 0])
    return found


def by_category(
    sums: np.ndarray,
    categories: Sequence[str | None],
    passes: np.ndarray,
    traces: Sequence[Trace],
    of_decoded: Sequence[str | None],
) -> dict[str, Category]:
    """Of each category that texts have, in the order of their first texts.

    Args:
        sums, passes: as for `means`.
        traces: of the decoded texts.
        categories, of_decoded: of all texts, and of those.
    """
    found = {}
    for name in dict.fromkeys(each for each in categories if each is not None):
        here, there = (np.array([each == name for each in names]) for names in (categories, of_decoded))
        decoded = list(compress(traces, there))
        found[name] = Category(
            **means(sums[here], passes[there]),
            betas=sum(decoded, Trace()).betas,
            betas_intervals=_betas_intervals(decoded),
            counts={count: sum(each) for count, each in _counts(decoded).items()},
        )
    return found


def by_position(sums: np.ndarray, passes: np.ndarray) -> dict[str, Figures]:
    """Of each range of positions that texts reach; arguments as for `means`."""
    columns = range(sums.shape[1])
    ranges = [slice(number, number + 1) for number in columns]
    return {
        name_of_range(number): Figures(**means(sums[:, ranges[number]], passes[:, ranges[number]]))
        for number in columns
        if sums[:, number, 0].any()
    }


def of_rounds(traces: Sequence[Trace], num_draft_tokens: int) -> dict[str, Any]:
    """The fields of `Evaluation` that count rounds, from one trace per prompt."""
    betas_intervals, counts = _betas_intervals(traces), _counts(traces)
    of_each = np.full(len(traces), 1 / len(traces))
    lengths = np.array([_accepted_lengths(trace, num_draft_tokens) for trace in traces])
    rounds = lengths.sum(axis=1)
    return {
        "betas": sum(traces, Trace()).betas,
        "betas_intervals": betas_intervals,
        "first_position_interval": betas_intervals[0],
        "counts": {name: sum(each) for name, each in counts.items()},
        "counts_intervals": {name: bootstrap_interval(np.array(each), of_each) for name, each in counts.items()},
        "accepted_lengths": lengths.sum(axis=0).tolist(),
        "accepted_length_shares": (lengths.sum(axis=0) / rounds.sum()).tolist(),
        "accepted_length_intervals": [bootstrap_interval(column, rounds) for column in lengths.T],
    }


def predicted_speedup_intervals(traces: Sequence[Trace], costs: Costs) -> list[Interval]:
    """Of `Costs.predicted_speedup` at 1, 2, … draft tokens: prompts drawn anew, costs as measured."""
    accepted, reached = (columns[:, _drawn_anew(len(traces))].sum(axis=2) for columns in _accepted_and_reached(traces))
    numbers = range(1, len(costs.target_pass))
    speedups = []
    for successes, trials in zip(accepted.T, reached.T, strict=True):
        betas = (successes[trials > 0] / trials[trials > 0]).tolist()
        speedups.append([costs.predicted_speedup(betas, number) for number in numbers])
    return [_interval(column) for column in np.array(speedups).T]


def _betas_intervals(traces: Sequence[Trace]) -> list[Interval]:
    return [bootstrap_interval(*columns) for columns in zip(*_accepted_and_reached(traces), strict=True)]


def _accepted_and_reached(traces: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray]:
    """How often each position of a round was accepted, and reached, [positions, traces] each."""
    width = max((len(trace.betas) for trace in traces), default=0)
    accepted = np.array([(trace.accepted + [0] * width)[:width] for trace in traces])
    reached = np.array([(trace.reached + [0] * width)[:width] for trace in traces])
    return accepted.T, reached.T


def _counts(traces: Sequence[Trace]) -> dict[str, list[int]]:
    """Of each trace."""
    return {
        "target_passes": [trace.num_target_passes for trace in traces],
        "drafted": [trace.num_drafted for trace in traces],
        "verified": [trace.num_verified for trace in traces],
        "accepted": [trace.num_accepted for trace in traces],
        "committed": [trace.num_committed for trace in traces],
    }


def _accepted_lengths(trace: Trace, num_draft_tokens: int) -> list[int]:
    """How many rounds have 0, 1, 2, … accepted tokens that are part of the text."""
    found = [0] * (num_draft_tokens + 1)
    for each in trace.rounds:
        found[min(each.num_accepted, each.num_verified)] += 1
    return found
