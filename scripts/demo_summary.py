"""The demo's closing table, from what its stages measured: python scripts/demo_summary.py runs/demo-service"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def summary(folder: Path) -> Table:
    """Rows of before.json, after.json and bench.json in `folder`."""
    before, after, bench = (json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after", "bench"))
    table = Table("", "before", "after", title=f"{after['prompts']}: {after['num_prompts']} held-out prompts")
    table.add_row("alpha at T=1 (95% interval)", *(_interval(figures, "alpha") for figures in (before, after)))
    drafted = after["num_draft_tokens"]
    table.add_row(
        f"block efficiency at T=1, {drafted} drafted",
        *(_interval(figures, "block_efficiency") for figures in (before, after)),
    )
    table.add_row("best number of draft tokens", *(str(f["best_num_draft_tokens"]) for f in (before, after)))
    for timing in bench["timings"]:
        temperature = timing["sampling"]["temperature"]
        name = f"T={temperature:g}" if temperature else "greedy"
        plain, fast = (timing["median_tokens_per_second"][mode] for mode in ("plain", "speculative"))
        low, high = min(timing["ratios"]), max(timing["ratios"])
        table.add_row(f"tokens/s {name}: plain, speculative", "", f"{plain:.1f}, {fast:.1f}")
        table.add_row("    ratio (lowest to highest)", "", f"[bold]{timing['ratio']:.2f}x[/] ({low:.2f} to {high:.2f})")
    table.add_row("pair", "", str(folder / "run" / "pair"))
    return table


def _interval(figures: dict[str, Any], name: str) -> str:
    low, high = figures[f"{name}_interval"]
    return f"[bold]{figures[name]:.3f}[/] ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    Console(highlight=False).print(summary(Path(sys.argv[1])))
