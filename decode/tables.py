"""Figures as tables for the terminal."""

from rich.table import Table

from .bench import Timing
from .evaluate import Evaluation
from .params import SamplingParams


def name_of(sampling: SamplingParams) -> str:
    """A sampling setting in a few characters."""
    if sampling.temperature == 0:
        return "greedy"
    parts = [f"T={sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    return ", ".join(parts)


def evaluation_table(result: Evaluation) -> Table:
    """What `spec-decode evaluate` prints."""
    table = Table("figure", "value", "95% interval", title=f"{result.prompts}, {name_of(result.sampling)}")
    low, high = result.alpha_interval
    table.add_row("alpha, mean of sum min(p, q)", f"{result.alpha:.3f}", f"{low:.3f} to {high:.3f}")
    low, high = result.first_position_interval
    table.add_row("acceptance counted at position 1", f"{result.betas[0]:.3f}", f"{low:.3f} to {high:.3f}")
    if len(result.betas) > 1:
        table.add_row("at the positions after it", " ".join(f"{beta:.3f}" for beta in result.betas[1:]), "")
    low, high = result.block_efficiency_interval
    table.add_row(
        f"block efficiency, {result.num_draft_tokens} drafted",
        f"{result.block_efficiency:.2f}",
        f"{low:.2f} to {high:.2f}",
    )
    table.add_row("cost of a draft step, c", f"{result.costs.draft_step:.3f}", "")
    passes = " ".join(f"{cost:.2f}" for cost in result.costs.target_pass)
    table.add_row("cost of a target pass, v(1) v(2) …", passes, "")
    predicted = " ".join(f"{speedup:.2f}" for speedup in result.predicted_speedup)
    table.add_row("predicted speedup, 1 2 … drafted", predicted, "")
    table.add_row("best number of draft tokens", str(result.best_num_draft_tokens), "")
    return table


def bench_table(timings: list[Timing]) -> Table:
    """What `spec-decode bench` prints."""
    table = Table(
        "sampling",
        "plain",
        "speculative",
        "ratio",
        "lowest to highest",
        "predicted",
        "tokens per pass",
        title="tokens/s",
    )
    for timing in timings:
        table.add_row(
            name_of(timing.sampling),
            f"{timing.plain_tokens_per_second:.1f}",
            f"{timing.speculative_tokens_per_second:.1f}",
            f"{timing.ratio:.2f}",
            f"{min(timing.ratios):.2f} to {max(timing.ratios):.2f}",
            f"{timing.predicted_speedup:.2f}",
            f"{timing.trace.block_efficiency:.2f}",
        )
    return table
