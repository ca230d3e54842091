"""`spec-decode report`: what evaluate and bench found, as one HTML page."""

import json
import logging
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, StrictUndefined

from .config import ReportConfig
from .figures import Evaluation, Interval
from .files import refuse_unwritable, write_text
from .pair import Pair
from .params import SamplingParams
from .plots import COLOURS, INK, Series, Timed, draw
from .tables import name_of
from .trace import Seconds

logger = logging.getLogger(__name__)

# what a token of a sample is, by its provenance
ORIGINS = {
    "accepted": "drafted and accepted",
    "corrected": "the target's correction",
    "bonus": "bonus, after all drafted were accepted",
    "plain": "the target's, nothing drafted",
}


def report(config: ReportConfig) -> None:
    """Write the page.

    Raises:
        ValueError: a result that is not what evaluate or bench writes, or more than a plot can tell apart.
        OSError: one that cannot be read.
    """
    found = {source: _read(source) for source in config.results}
    all_series = _all_series(found)
    if len(all_series) > len(COLOURS):
        raise ValueError(
            f"compare: with all their settings, these are {len(all_series)} results, and a plot tells {len(COLOURS)} "
            "apart; give fewer"
        )
    timed = [
        Timed(series.label, colour, series.found.measured_seconds, series.found.measured_speedups, best)
        for series, colour in zip(all_series, COLOURS, strict=False)
        if series.found.measured_speedups and (best := series.found.best_num_draft_tokens)
    ]
    benched: list[dict[str, Any]] = []
    if config.bench:
        found[config.bench] = _read(config.bench)
        timed += _timed(config.bench, found[config.bench])
        benched = found[config.bench]["timings"]
    refuse_unwritable(config.output)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["probability"] = _probability
    page = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8")).render(
        series=all_series,
        plots=draw(all_series, timed),
        rows=_rows(all_series),
        benched=[(name_of(SamplingParams(**each["sampling"])), each) for each in benched],
        sources=found,
        origins=ORIGINS,
        zip=zip,
    )
    write_text(Path(config.output), page)
    logger.info("report in %s", config.output)


def _read(source: str) -> dict[str, Any]:
    """What a file holds, or what was measured of a pair."""
    path = Path(source)
    if path.is_dir():
        if not (measured := Pair.load(path).measured):
            raise ValueError(f"result {source}: was never measured; run `spec-decode evaluate --pair {source}`")
        return measured
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"result {source}: is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _all_series(found: dict[str, dict[str, Any]]) -> list[Series]:
    """One for each setting of each result, called by what tells it from the others."""
    names = _names(list(found))
    series = []
    for source, result in found.items():
        try:
            evaluations = [Evaluation.from_json(each) for each in result.get("settings", [result])]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"result {source}: is not what this release's `spec-decode evaluate` writes ({error}); evaluate anew"
            ) from error
        for each in evaluations:
            parts = [names[source]] if len(found) > 1 else []
            parts += [name_of(each.sampling)] if len(evaluations) > 1 or len(found) == 1 else []
            series.append(Series(", ".join(parts), each))
    return series


def _names(sources: list[str]) -> dict[str, str]:
    """A file's name without its ending, if no other has the same; a folder as it was given; the end of what is long."""
    stems = [Path(source).stem for source in sources]
    names = {
        source: source if Path(source).is_dir() or stems.count(stem) > 1 else stem
        for source, stem in zip(sources, stems, strict=True)
    }
    return {source: name if len(name) <= 40 else f"…{name[-39:]}" for source, name in names.items()}


def _timed(source: str, bench: dict[str, Any]) -> list[Timed]:
    """Of each setting of a bench."""
    try:
        return [
            Timed(
                f"bench, {name_of(SamplingParams(**timing['sampling']))}",
                INK,
                Seconds(**timing["trace"]["seconds"]),
                timing["ratios"],
                timing["trace"]["drafted"] / timing["trace"]["target_passes"],
            )
            for timing in bench["timings"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"bench {source}: is not what `spec-decode bench` writes ({error})") from error


def _rows(all_series: list[Series]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The table of figures: the name of each, and its value and interval in each series."""
    results = [series.found for series in all_series]

    def row(name: str, value: str, digits: int = 3) -> tuple[str, list[tuple[str, str]]]:
        cells = [(getattr(each, value), getattr(each, f"{value}_interval")) for each in results]
        return name, [(f"{number:.{digits}f}", _interval(interval, digits)) for number, interval in cells]

    def counted(name: str) -> tuple[str, list[tuple[str, str]]]:
        cells = [(each.counts[name], each.counts_intervals[name]) for each in results]
        return f"tokens {name}", [(str(number), _interval(interval, 0)) for number, interval in cells]

    def plain(name: str, values: list[str]) -> tuple[str, list[tuple[str, str]]]:
        return name, [(value, "") for value in values]

    return [
        plain("prompts", [f"{each.num_prompts} of {Path(each.prompts).name}" for each in results]),
        row("alpha, mean of Σ min(p, q)", "alpha"),
        row("KL(p|q) in nats, where q is not 0", "kl"),
        row("mass of p where q is 0", "p_beyond_q"),
        row("same likeliest token", "top1_agreement"),
        plain("tokens drafted a round while counting", [str(each.num_draft_tokens) for each in results]),
        row("block efficiency E with these", "block_efficiency", 2),
        *map(counted, ("drafted", "verified", "accepted", "committed")),
        plain("target passes", [str(each.counts["target_passes"]) for each in results]),
        plain("milliseconds a token, plainly", [f"{1000 * each.costs.seconds_per_token:.1f}" for each in results]),
        plain("cost of a draft step, c", [f"{each.costs.draft_step:.3f}" for each in results]),
        plain("best number of draft tokens", [str(each.best_num_draft_tokens) for each in results]),
        (
            "predicted speedup with it",
            [
                (f"{each.predicted_speedup[best]:.2f}", _interval(each.predicted_speedup_intervals[best], 2))
                for each in results
                for best in [each.best_num_draft_tokens - 1]
            ],
        ),
        (
            "measured speedup, median and range",
            [
                (f"{median(each.measured_speedups):.2f}", _interval(_range(each.measured_speedups), 2))
                if each.measured_speedups
                else ("not measured", "")
                for each in results
            ],
        ),
    ]


def _range(values: list[float]) -> Interval:
    return min(values), max(values)


def _interval(interval: Interval, digits: int) -> str:
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def _probability(value: float) -> str:
    """Three digits, and of what is smaller its order of magnitude."""
    return f"{value:.3f}" if value == 0 or value >= 0.0005 else f"{value:.0e}"
