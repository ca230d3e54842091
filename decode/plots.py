"""Evaluations drawn as SVG, which takes its colours from the page that it stands in."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .figures import Evaluation, Figures, Interval
from .trace import Seconds

# stand for the page's: its text, its background, and a colour for each series
INK, PAPER = "#0a0b0c", "#f0f1f2"
COLOURS = [f"#0000f{number}" for number in range(8)]
VARIABLES = {INK: "currentColor", PAPER: "var(--paper)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(COLOURS)
}
MARKERS = "osD^vPXh"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "text.parse_math": False,  # a dollar sign is one
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "lines.markersize": 4,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
WIDTH_INCHES = 4.4  # 317 units: a phone shows letters of nine about as large
PARTS_OF_TIME = ("draft", "verify", "rest")
ALL = "all prompts"


@dataclass(frozen=True)
class Series:
    """An evaluation, and what it is called in plots and tables."""

    label: str
    found: Evaluation


@dataclass(frozen=True)
class Timed:
    """Speculative decoding that was timed prompt by prompt.

    Attributes:
        label: what it is called.
        colour: that of the series that it belongs to; INK for none.
        seconds: what its rounds went to.
        speedups: over plain decoding, of each prompt.
        num_drafted: tokens drafted a round, on average.
    """

    label: str
    colour: str
    seconds: Seconds
    speedups: list[float]
    num_drafted: float


@dataclass(frozen=True)
class Plot:
    """A drawn plot.

    Attributes:
        name: a word of its own.
        title: what it shows.
        explanation: how to read it.
        numbers: what is drawn, in words, for who cannot see it; empty where there is nothing to draw.
        svg: an element whose ids all begin with the name.
    """

    name: str
    title: str
    explanation: str
    numbers: str
    svg: str


def draw(all_series: Sequence[Series], timed: Sequence[Timed]) -> list[Plot]:
    """Every plot, with at most as many series as COLOURS."""

    def numbers(of_series: Callable[[Evaluation], str]) -> str:
        return "; ".join(f"{series.label}: {of_series(series.found)}" for series in all_series)

    categories = _categories(all_series)
    return [
        _plot(
            "betas",
            "Acceptance by position",
            "beta: how often the token drafted at a position of a round is accepted, once the position is reached.",
            numbers(lambda found: _listed(found.betas)),
            lambda axes: _betas(axes, all_series),
        ),
        _plot(
            "lengths",
            "Accepted length",
            "How many rounds accept so many drafted tokens. Each commits one token more.",
            numbers(lambda found: _listed(found.accepted_length_shares)),
            lambda axes: _lengths(axes, all_series),
        ),
        _plot(
            "speedup",
            "Speedup, predicted and measured",
            "Curve: predicted from acceptance and costs, with the interval that acceptance leaves. "
            "Points: measured, the median and the range over prompts.",
            "; ".join(
                [numbers(lambda found: f"predicted {_listed(found.predicted_speedup)}")]
                + [f"{each.label}: measured {np.median(each.speedups):.2f}" for each in timed]
            ),
            lambda axes: _speedup(axes, all_series, timed),
        ),
        _plot(
            "categories",
            "alpha by category",
            "alpha: the mean of \u03a3 min(p, q) over the positions of the target's own texts.",
            numbers(lambda found: ", ".join(f"{name} {part.alpha:.2f}" for name, part in _parts(found).items())),
            lambda axes: _alphas(axes, all_series, categories),
            height_inches=1.0 + 0.15 * len(all_series) + (1 + len(categories)) * (0.12 + 0.07 * len(all_series)),
        ),
        _plot(
            "costs",
            "Cost",
            "Solid: a target pass over n tokens, v(n). Dashed: drafting n tokens, c each. In passes over one token.",
            numbers(lambda found: f"c {found.costs.draft_step:.3f}, v {_listed(found.costs.target_pass)}"),
            lambda axes: _costs(axes, all_series),
        ),
        _plot(
            "time",
            "Where time goes",
            "In the rounds that were timed: drafting, the target's passes, and the rest: sampling and bookkeeping.",
            "; ".join(f"{each.label}: {_listed(_shares(each.seconds))}" for each in timed),
            lambda axes: _time(axes, timed),
            height_inches=0.8 + 0.45 * len(timed),
        ),
    ]


def _plot(
    name: str, title: str, explanation: str, numbers: str, onto: Callable[[Axes], None], height_inches: float = 2.9
) -> Plot:
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        axes = figure.add_subplot()
        onto(axes)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            longest = max(map(len, labels))
            num_columns = 3 if longest < 14 else 2 if longest < 25 else 1
            figure.legend(handles, labels, loc="outside lower left", ncols=num_columns)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return Plot(name, title, explanation, numbers, _embeddable(file.getvalue(), name))


def _embeddable(svg: str, name: str) -> str:
    """Without a prolog, in the page's colours, and with ids that no other plot has."""
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: VARIABLES.get(found[0], found[0]), svg[svg.index("<svg") :])
    return re.sub(r"""(\bid="|href="#|url\(#)""", rf"\1{name}-", svg)


def _betas(axes: Axes, all_series: Sequence[Series]) -> None:
    for number, series in enumerate(all_series):
        betas, intervals = series.found.betas, series.found.betas_intervals
        places = np.arange(1, len(betas) + 1) + _offset(number, len(all_series), 0.2)
        _points(axes, number, series.label, places, betas, yerr=_errors(betas, intervals), line="-")
    axes.set(xlabel="position in the round", ylabel="beta", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _lengths(axes: Axes, all_series: Sequence[Series]) -> None:
    width = 0.8 / len(all_series)
    for number, series in enumerate(all_series):
        shares = series.found.accepted_length_shares
        places = np.arange(len(shares)) + _offset(number, len(all_series), 0.8 - width)
        bars = axes.bar(places, shares, width, color=COLOURS[number], label=series.label)
        for place, bar in enumerate(bars):
            bar.set_gid(f"bar-{number}-{place}")
        errors = _errors(shares, series.found.accepted_length_intervals)
        axes.errorbar(places, shares, errors, fmt="none", ecolor=INK, elinewidth=0.8)
    axes.set(xlabel="drafted tokens accepted", ylabel="share of rounds", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _speedup(axes: Axes, all_series: Sequence[Series], timed: Sequence[Timed]) -> None:
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    for number, series in enumerate(all_series):
        found, colour = series.found, COLOURS[number]
        lengths = range(1, len(found.predicted_speedup) + 1)
        low, high = zip(*found.predicted_speedup_intervals, strict=True)
        axes.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
        (line,) = axes.plot(lengths, found.predicted_speedup, color=colour, marker=".", label=series.label)
        line.set_gid(f"series-{number}")
    for number, (each, marker) in enumerate(zip(timed, cycle(MARKERS), strict=False)):
        middle = float(np.median(each.speedups))
        errors = _errors([middle], [(min(each.speedups), max(each.speedups))])
        label = each.label if each.colour == INK else None
        point = axes.errorbar([each.num_drafted], [middle], errors, color=each.colour, fmt=marker, label=label)[0]
        point.set(gid=f"timed-{number}", markerfacecolor=PAPER, markersize=6)
    axes.set(xlabel="draft tokens a round", ylabel="times plain decoding")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _alphas(axes: Axes, all_series: Sequence[Series], categories: Sequence[str]) -> None:
    names = [ALL, *categories]
    for number, series in enumerate(all_series):
        parts = _parts(series.found)
        places = [names.index(name) + _offset(number, len(all_series), 0.5) for name in parts]
        alphas, intervals = [part.alpha for part in parts.values()], [part.alpha_interval for part in parts.values()]
        _points(axes, number, series.label, alphas, places, xerr=_errors(alphas, intervals))
    axes.set_yticks(range(len(names)), [_shortened(name, 24) for name in names])
    axes.set(xlabel="alpha", ylim=(len(names) - 0.5, -0.5))


def _costs(axes: Axes, all_series: Sequence[Series]) -> None:
    for number, series in enumerate(all_series):
        costs, colour = series.found.costs, COLOURS[number]
        lengths = np.arange(1, len(costs.target_pass) + 1)
        (line,) = axes.plot(lengths, costs.target_pass, f"-{MARKERS[number]}", color=colour, label=series.label)
        line.set_gid(f"series-{number}")
        (line,) = axes.plot(lengths[:-1], costs.draft_step * lengths[:-1], "--", color=colour)
        line.set_gid(f"drafting-{number}")
    axes.set(xlabel="tokens n", ylabel="cost", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _time(axes: Axes, timed: Sequence[Timed]) -> None:
    """A bar for each, with its label above it, where a long one has room."""
    for row, each in enumerate(timed):
        left = 0.0
        for part, (share, colour) in enumerate(zip(_shares(each.seconds), COLOURS[5:], strict=True)):
            label = PARTS_OF_TIME[part] if row == 0 else None
            (bar,) = axes.barh(row, share, 0.5, left=left, color=colour, label=label)
            bar.set_gid(f"bar-{row}-{part}")
            if share > 0.08:
                axes.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", color=PAPER)
            left += share
        axes.text(0, row - 0.32, each.label, va="bottom")
    axes.set(xlim=(0, 1), ylim=(max(len(timed), 1) - 0.6, -0.8), yticks=[])
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(False)


def _points(
    axes: Axes,
    number: int,
    label: str,
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    *,
    xerr: np.ndarray | None = None,
    yerr: np.ndarray | None = None,
    line: str = "",
) -> None:
    """Of a series, with intervals."""
    style, colour = f"{line}{MARKERS[number]}", COLOURS[number]
    points = axes.errorbar(x, y, yerr, xerr, fmt=style, color=colour, elinewidth=0.8, label=label)[0]
    points.set_gid(f"series-{number}")


def _parts(found: Evaluation) -> dict[str, Figures]:
    return {ALL: found, **found.by_category}


def _categories(all_series: Sequence[Series]) -> list[str]:
    """Of all, in the order in which they are met."""
    return list(dict.fromkeys(name for series in all_series for name in series.found.by_category))


def _shares(seconds: Seconds) -> list[float]:
    return [part / seconds.total for part in (seconds.draft, seconds.verify, seconds.rest)]


def _errors(values: Sequence[float], intervals: Sequence[Interval]) -> np.ndarray:
    """Distances from the value, [2, values], as matplotlib has them."""
    low, high = np.array(intervals).reshape(-1, 2).T
    return np.maximum([np.subtract(values, low), np.subtract(high, values)], 0)


def _offset(number: int, count: int, spread: float) -> float:
    """Where one of several stands beside the others."""
    return spread * (number / (count - 1) - 0.5) if count > 1 else 0.0


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}\u2026"
