"""Figures as tables for the terminal."""

from collections.abc import Callable
from statistics import median

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .bench import BEST_ASSISTED, Timing
from .export import Export
from .figures import Evaluation, Figures, Interval
from .latency import Spread
from .params import SamplingParams
from .prove import Check


def name_of(sampling: SamplingParams) -> str:
    """A sampling setting in a few characters."""
    if sampling.temperature == 0:
        return "greedy"
    parts = [f"T={sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return ", ".join(parts)


def evaluation_tables(results: list[Evaluation]) -> Group:
    """What `spec-decode evaluate` prints: of each setting its figures, its rounds, and the parts of its texts."""
    tables: list[Table] = []
    for result in results:
        parts = {**result.by_category, **{f"tokens {name}": part for name, part in result.by_position.items()}}
        tables += [_figures_table(result), _rounds_table(result), _parts_table(parts)]
    return Group(*tables)


def _figures_table(result: Evaluation) -> Table:
    title = f"{name_of(result.sampling)}: {result.num_prompts} prompts of {escape(result.prompts)}"
    table = Table("figure", "value", "95% interval", title=title)
    table.add_row("alpha, mean of sum min(p, q)", f"{result.alpha:.3f}", _interval(result.alpha_interval))
    table.add_row("total variation, 1 - alpha", f"{result.tv:.3f}", _interval(result.tv_interval))
    table.add_row("KL(p|q) in nats, where q is not 0", f"{result.kl:.3f}", _interval(result.kl_interval))
    if result.p_beyond_q > 0:
        interval = _interval(result.p_beyond_q_interval)
        table.add_row("mass of p where q is 0: KL infinite", f"{result.p_beyond_q:.3f}", interval)
    interval = _interval(result.top1_agreement_interval)
    table.add_row("same likeliest token", f"{result.top1_agreement:.3f}", interval)
    assert result.block_efficiency is not None and result.block_efficiency_interval is not None
    table.add_row(
        f"block efficiency E, {result.num_draft_tokens} drafted",
        f"{result.block_efficiency:.2f}",
        _interval(result.block_efficiency_interval, 2),
    )
    for name in ("drafted", "verified", "accepted", "committed"):
        low, high = result.counts_intervals[name]
        table.add_row(f"tokens {name}", f"{result.counts[name]}", f"{low:.0f} to {high:.0f}")
    table.add_row("target passes", str(result.counts["target_passes"]), "")
    table.add_row("cost of a draft step, c", f"{result.costs.draft_step:.3f}", "")
    table.add_row("best number of draft tokens", str(result.best_num_draft_tokens), "")
    return table


def _rounds_table(result: Evaluation) -> Table:
    """By number of draft tokens: acceptance of the last of them, rounds that accepted so many, costs and speedup."""
    table = Table(
        "n",
        "n-th accepted",
        "accepted just n",
        "v(n+1)",
        "predicted",
        "timed",
        title="draft tokens a round, and speedup",
    )
    for number, cost in enumerate(result.costs.target_pass):
        beta = share = predicted = measured = ""
        if 1 <= number <= len(result.betas):
            beta = _with_interval(result.betas[number - 1], result.betas_intervals[number - 1])
        if number < len(result.accepted_lengths):
            share = _with_interval(result.accepted_length_shares[number], result.accepted_length_intervals[number])
        if number:
            interval = result.predicted_speedup_intervals[number - 1]
            predicted = _with_interval(result.predicted_speedup[number - 1], interval)
        if number == result.best_num_draft_tokens:
            predicted = f"[bold]{predicted}[/]"
            measured = f"[bold]{result.measured_speedup:.2f}[/]" if result.measured_speedup is not None else ""
        table.add_row(str(number), beta, share, f"{cost:.2f}", predicted, measured)
    return table


def _parts_table(parts: dict[str, Figures]) -> Table:
    table = Table("part", "prompts", "alpha", "KL", "top-1", "E")
    for name, part in parts.items():
        alpha = _with_interval(part.alpha, part.alpha_interval)
        efficiency = _with_interval(part.block_efficiency, part.block_efficiency_interval)
        table.add_row(
            escape(name), str(part.num_prompts), alpha, f"{part.kl:.2f}", f"{part.top1_agreement:.2f}", efficiency
        )
    return table


def _interval(interval: Interval, digits: int = 3) -> str:
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def _with_interval(value: float | None, interval: Interval | None) -> str:
    """In few characters."""
    return "" if value is None or interval is None else f"{value:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"


def proof_table(checks: list[Check]) -> Table:
    """What `spec-decode prove` prints."""
    table = Table("check", "", "found")
    for check in checks:
        table.add_row(check.name, "[green]passed[/]" if check.passed else "[red]failed[/]", escape(check.found))
    return table


def export_summary(exported: Export) -> Group:
    """What `spec-decode export` prints but for the command: what was written, and what the engine cannot be told."""
    table = Table("export", "")
    table.add_row("written", escape(exported.output))
    table.add_row("draft tokens a round", str(exported.num_speculative_tokens))
    table.add_row("loaded back, logits differ by at most", f"{exported.max_logit_difference:.2g}")
    return Group(table, *(escape(f"- {note}") for note in exported.notes))


def bench_tables(timings: list[Timing]) -> Group:
    """What `spec-decode bench` prints: how fast each way of decoding is, and why."""
    return Group(_speed_table(timings), _latency_table(timings), _speedup_table(timings))


def _speed_table(timings: list[Timing]) -> Table:
    num_prompts = len(timings[0].runs["plain"])
    table = Table(title=f"medians over {num_prompts} prompts (lowest to highest)")
    table.add_column("decoding")
    table.add_column("tokens/s", justify="right")
    table.add_column("times plain, by prompt", justify="right")
    for timing in timings:
        names = {
            "plain": "plain",
            "speculative": f"speculative, {timing.num_draft_tokens or 'as many as pay'} drafted",
            "transformers_plain": "transformers plain",
            "transformers_assisted_best": f"transformers assisted, best: {timing.best_assistance} drafted",
            "transformers_assisted_default": "transformers assisted, its default",
        }
        table.add_section()
        table.add_row(f"[bold]{name_of(timing.sampling)}[/]")
        for mode, name in names.items():
            if mode in timing.runs:
                ratios = _median_and_range(timing.ratios(mode), 2) if mode != "plain" else ""
                table.add_row(f"  {name}", _median_and_range(timing.tokens_per_second(mode), 1), ratios)
    return table


def _latency_table(timings: list[Timing]) -> Table:
    caption = "gap: from one arrival to the next, each of one token or more"
    table = Table(title="latency in ms, medians (lowest to highest), and memory", caption=caption)
    table.add_column("decoding", no_wrap=True)
    # broken here, as rich would take the room from the figures
    for header in ("first\ntoken", "each\nafter", "gap at p50,\np90, p99", "peak MB,\ngrown by"):
        table.add_column(header, justify="right")
    names = {
        "plain": "plain",
        "speculative": "speculative",
        "transformers_plain": "transformers",
        "transformers_assisted_best": "assisted, best",
        "transformers_assisted_default": "assisted, default",
    }
    for timing in timings:
        table.add_section()
        table.add_row(f"[bold]{name_of(timing.sampling)}[/]")
        for mode, latency in timing.latency.items():
            first, mean, between, held = "", "", "", ""
            if latency:
                first = _spread_in_ms(latency.first_token_seconds)
                if latency.seconds_per_output_token:
                    mean = f"{1000 * latency.seconds_per_output_token.median:.1f}"
                if latency.arrival_gap_seconds:
                    between = " ".join(f"{1000 * gap:.1f}" for gap in latency.arrival_gap_seconds.values())
            if memory := timing.memory[mode]:
                held = f"{memory.peak_bytes / 1e6:.0f}, {memory.growth_bytes / 1e6:.0f}"
            table.add_row(f"  {names[mode]}", first, mean, between, held)
    return table


def _spread_in_ms(spread: Spread) -> str:
    return f"{1000 * spread.median:.0f} ({1000 * spread.lowest:.0f} to {1000 * spread.highest:.0f})"


def _speedup_table(timings: list[Timing]) -> Table:
    table = Table("speculative decoding", title="where the speedup comes from")
    for timing in timings:
        table.add_column(name_of(timing.sampling), justify="right")

    def add_row(name: str, figure: Callable[[Timing], str]) -> None:
        table.add_row(name, *map(figure, timings))

    add_row("tokens per target pass", lambda timing: f"{timing.trace.block_efficiency:.2f}")
    add_row("cost of a draft step, c", lambda timing: f"{timing.costs.draft_step:.3f}")
    passes = "cost of a target pass, v(1) v(2) …"
    add_row(passes, lambda timing: " ".join(f"{cost:.2f}" for cost in timing.costs.target_pass))
    add_row("predicted speedup", lambda timing: f"{timing.predicted_speedup:.2f}")
    add_row("realised / predicted", lambda timing: f"{timing.ratio / timing.predicted_speedup:.2f}")
    if all(timing.share_outside_models is not None for timing in timings):
        add_row("time outside the models' forward passes", lambda timing: f"{timing.share_outside_models:.1%}")
    add_row("time to draft, to verify, and the rest", _shares_of_time)
    read = "weights read a token, plain, speculative, MB"
    add_row(read, lambda timing: ", ".join(f"{size / 1e6:.0f}" for size in timing.weight_bytes_per_token.values()))
    if first := timings[0].first_call:
        seconds = f"{first.load_seconds:.1f}, {first.first_text_seconds:.1f}"
        table.add_row("seconds to load, and of the first text", *[seconds] * len(timings))
    if roofline := timings[0].roofline:
        summed, copied = roofline.read_bytes_per_second / 1e9, roofline.copy_bytes_per_second / 1e9
        table.add_row("memory, read and copied, GB/s", *[f"{summed:.1f}, {copied:.1f}"] * len(timings))
        sizes = f"{roofline.target_bytes / 1e6:.0f}, {roofline.draft_bytes / 1e6:.0f}"
        table.add_row("weights of target and draft, MB a pass", *[sizes] * len(timings))
        for mode in ("plain", "speculative"):
            shares = [f"{timing.shares_of_bandwidth[mode]:.0%}" for timing in timings]
            table.add_row(f"{mode}: share of the speed of memory", *shares)
    if all(timing.sweep for timing in timings):
        sweep = f"transformers assisted at {' '.join(map(str, timings[0].sweep))}, tokens/s"
        add_row(sweep, lambda timing: " ".join(f"{rate:.1f}" for rate in timing.sweep.values()))
        over = "times transformers assisted at its best"
        add_row(over, lambda timing: _median_and_range(timing.ratios(base=BEST_ASSISTED), 2))
    return table


def _shares_of_time(timing: Timing) -> str:
    seconds = timing.trace.seconds
    return " ".join(f"{each / seconds.total:.0%}" for each in (seconds.draft, seconds.verify, seconds.rest))


def _median_and_range(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
