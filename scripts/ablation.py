"""Which objective makes a draft that is accepted most: the same pair, data and number of steps, one loss after another.

Trains each variant with `spec-distill run`, measures it with `spec-decode evaluate` (sampled at the recipe's
temperature, and greedy) and `spec-decode bench`, and prints a table in Markdown; --plot draws it. What is finished is
kept: run again, it goes on.

    python scripts/ablation.py --pair runs/demo-service/untrained --responses runs/demo-service/responses \\
        --output runs/ablation --steps 250
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

KL_FIRST = {"losses": {"forward_kl": 1.0}, "share": 0.6}
VARIANTS: dict[str, dict[str, Any]] = {
    "cross-entropy": {"objective.stages": [{"losses": {"cross_entropy": 1.0}}]},
    "FKL": {},
    "RKL": {"objective.stages": [{"losses": {"reverse_kl": 1.0}}]},
    "JSD": {"objective.stages": [{"losses": {"jsd": 1.0}}]},
    "TV": {"objective.stages": [{"losses": {"tv": 1.0}}]},
    "LK": {"objective.stages": [{"losses": {"lk": 1.0}}]},
    "FKL then LK": {"objective.stages": [KL_FIRST, {"losses": {"lk": 1.0}}]},
    "FKL then TV": {"objective.stages": [KL_FIRST, {"losses": {"tv": 1.0}}]},
    "FKL then TV, branches": {
        "objective.stages": [KL_FIRST, {"losses": {"tv": 1.0}}],
        "branches.share": 0.25,
        "teacher": "online",
    },
}


@dataclass(frozen=True)
class Run:
    """One variant with one seed, and where it is."""

    name: str
    seed: int
    folder: Path

    def figures(self) -> dict[str, Any]:
        """What its training and its measurements left."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        metrics: dict[str, Any] = {}
        for line in lines:
            metrics |= line
        found = {
            name: json.loads((self.folder / f"{name}.json").read_text()) for name in ("sampled", "greedy", "bench")
        }
        return {"tokens": metrics["tokens"], "seconds": metrics["seconds"], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", required=True, help="to start from")
    parser.add_argument("--responses", required=True)
    parser.add_argument("--prompts", default="service", help="the set that the responses answer")
    parser.add_argument("--config", default="configs/run/smollm2-ablation.yaml")
    parser.add_argument("--output", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--plot", type=Path, help="draw alpha by variant into this file")
    options = parser.parse_args()
    runs = []
    for name in options.variants:
        for seed in options.seeds:
            slug = name.lower().replace(",", "").replace(" ", "-")
            run = Run(name, seed, options.output / f"{slug}-{seed}")
            train(run, options)
            measure(run, options)
            runs.append(run)
    print(table(runs))
    if options.plot:
        plot(runs, options.plot)


def train(run: Run, options: argparse.Namespace) -> None:
    overrides = {
        "pair": options.pair,
        "responses": options.responses,
        "train.output": str(run.folder),
        "train.max_steps": options.steps,
        "train.seed": run.seed,
        **VARIANTS[run.name],
    }
    arguments = [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()
    ]
    _call("distill", "run", "--config", options.config, *arguments)


def measure(run: Run, options: argparse.Namespace) -> None:
    common = ["--pair", str(run.folder / "pair"), "--prompts", options.prompts]
    limit = ["--sampling.max_new_tokens", "96"]
    commands = {
        "sampled": ["evaluate", *common, "--responses", options.responses, *limit],
        "greedy": ["evaluate", *common, "--sampling.temperature", "0", *limit],
        "bench": ["bench", *common, "--temperatures", "[0, 1]", "--max_new_tokens", "96"],
    }
    for name, command in commands.items():
        path = run.folder / f"{name}.json"
        if not path.is_file():
            _call("decode", *command, "--output", str(path))


def table(runs: list[Run]) -> str:
    """Markdown: means over seeds; intervals over prompts, of the first seed."""
    head = (
        "| loss | seeds | alpha, T=1 | E | predicted | measured | alpha, greedy | E | predicted | measured | minutes |"
    )
    rows = [head, "|" + "---|" * 11]
    for name in dict.fromkeys(run.name for run in runs):
        figures = [run.figures() for run in runs if run.name == name]
        cells = [name, str(len(figures))]
        for place, setting in enumerate(("greedy", "sampled")[::-1]):
            of_setting = [each[setting] for each in figures]
            cells += [_with_interval(of_setting, "alpha"), _with_interval(of_setting, "block_efficiency")]
            cells.append(f"{fmean(max(each['predicted_speedup']) for each in of_setting):.2f}")
            cells.append(f"{fmean(each['bench']['timings'][1 - place]['ratio'] for each in figures):.2f}")
        cells.append(f"{fmean(each['seconds'] for each in figures) / 60:.1f}")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(run.name for run in runs))
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.4 * len(names) + 1.5), sharey=True)
    for axis, setting in zip(axes, ("sampled", "greedy"), strict=True):
        for place, name in enumerate(names):
            for run in (run for run in runs if run.name == name):
                figures = run.figures()[setting]
                low, high = figures["alpha_interval"]
                axis.plot([low, high], [place, place], color="tab:blue", alpha=0.5)
                axis.plot(figures["alpha"], place, "o", color="tab:blue")
        axis.set_yticks(range(len(names)), names)
        axis.set_xlabel(f"alpha, {setting}, with 95% interval over prompts")
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def _with_interval(figures: list[dict[str, Any]], name: str) -> str:
    low, high = figures[0][f"{name}_interval"]
    return f"{fmean(each[name] for each in figures):.3f} ({low:.3f} to {high:.3f})"


def _call(package: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", package, *arguments], check=True)


if __name__ == "__main__":
    main()
