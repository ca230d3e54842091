"""The demo's closing table, from what its stages measured.

python scripts/demo_summary.py runs/demo-service [--svg FILE]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = {0.0: "greedy", 1.0: "T=1"}


def summary(folder: Path) -> Table:
    """Rows of before.json, after.json and bench.json in `folder`."""
    before, after, timings = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after", "bench")
    )
    table = Table("", "before", "after", title=f"{after['prompts']}: {after['num_prompts']} held-out prompts")
    table.add_row("alpha at T=1, 95% interval", *(_interval(figures, "alpha") for figures in (before, after)))
    gammas = [str(figures["num_draft_tokens"]) for figures in (before, after)]
    table.add_row("tokens drafted a round", *gammas)
    table.add_row("block efficiency at T=1", *(_interval(figures, "block_efficiency") for figures in (before, after)))
    for timing in timings:
        name = NAMES[timing["sampling"]["temperature"]]
        plain, fast = timing["plain_tokens_per_second"], timing["speculative_tokens_per_second"]
        low, high = min(timing["ratios"]), max(timing["ratios"])
        table.add_row(f"tokens/s {name}, plain -> speculative", "", f"{plain:.1f} -> {fast:.1f}")
        table.add_row("    ratio (lowest to highest)", "", f"[bold]{timing['ratio']:.2f}x[/] ({low:.2f} to {high:.2f})")
    table.add_row("pair", "", str(folder / "run" / "pair"))
    return table


def _interval(figures: dict[str, Any], name: str) -> str:
    low, high = figures[f"{name}_interval"]
    return f"[bold]{figures[name]:.3f}[/] ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo's closing table.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--svg", type=Path, help="also draw it")
    options = parser.parse_args()
    console = Console(record=options.svg is not None, highlight=False)
    console.print(summary(options.folder))
    if options.svg:
        console.save_svg(str(options.svg), title="scripts/demo")


if __name__ == "__main__":
    main()
