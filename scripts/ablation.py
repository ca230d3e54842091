"""Which objective makes a draft that is accepted most: the same pair, data and number of steps, one loss after another.

Trains each variant with `spec-distill run`, judges it on all held-out responses, sampled and greedy, with 95% intervals
over the texts, and times it with `spec-decode bench`. The best are trained again with other seeds. Prints a table in
Markdown; --plot draws it. What is finished is kept: run again, it goes on.

    python scripts/ablation.py --plot docs/ablation.png
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import jsonargparse
import numpy as np
import torch

from decode.costs import Costs
from decode.figures import bootstrap_interval
from distill.config import RunConfig
from distill.judge import expected_rounds, judge
from distill.run import prepare
from train.engine import autocasts

KL_FIRST = {"losses": {"forward_kl": 1.0}, "share": 0.6}
VARIANTS: dict[str, dict[str, Any]] = {
    "cross-entropy": {"objective.stages": [{"losses": {"cross_entropy": 1.0}}]},
    "FKL": {"objective.stages": [{"losses": {"forward_kl": 1.0}}]},
    "RKL": {"objective.stages": [{"losses": {"reverse_kl": 1.0}}]},
    "JSD": {"objective.stages": [{"losses": {"jsd": 1.0}}]},
    "TV": {"objective.stages": [{"losses": {"tv": 1.0}}]},
    "FKL then LK": {"objective.stages": [KL_FIRST, {"losses": {"lk": 1.0}}]},
    "FKL then TV": {"objective.stages": [KL_FIRST, {"losses": {"tv": 1.0}}]},
    "FKL then TV, branches": {
        "objective.stages": [KL_FIRST, {"losses": {"tv": 1.0}}],
        "branches.share": 0.25,
        "teacher": "online",
    },
}
# a step on branches has a fifth of the positions of a step on texts: so many more steps make as many tokens
STEPS_RATIO = {"FKL then TV, branches": 1.25}
SETTINGS = ("sampled", "greedy")


@dataclass(frozen=True)
class Run:
    """One variant with one seed, and where it is."""

    name: str
    seed: int
    folder: Path

    def read(self, name: str) -> Any:
        """What was found out about it."""
        return json.loads((self.folder / f"{name}.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/run/smollm2-ablation.yaml", help="what all variants share")
    parser.add_argument("--prompts", default="service", help="to time on")
    parser.add_argument("--output", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--steps", type=int, help="of each; else the recipe's")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first is for all variants")
    parser.add_argument("--again", type=int, default=3, help="so many of the best get the other seeds too")
    parser.add_argument("--plot", type=Path, help="draw alpha by variant into this file")
    options = parser.parse_args()
    runs = [do(name, options.seeds[0], options) for name in options.variants]
    for run in runs:
        if not (run.folder / "bench.json").is_file():
            _call("decode", "bench", *(f"--{key}={value}" for key, value in timing(run, options).items()))
    best = sorted(runs, key=lambda run: run.read("sampled")["alpha"], reverse=True)[: options.again]
    runs += [do(run.name, seed, options) for run in best for seed in options.seeds[1:]]
    print(table(runs))
    if options.plot:
        plot(runs, options.plot)


def do(name: str, seed: int, options: argparse.Namespace) -> Run:
    """Train a variant and judge it."""
    run = Run(name, seed, options.output / f"{name.lower().replace(',', '').replace(' ', '-')}-{seed}")
    overrides = {"train.output": str(run.folder), "train.seed": seed, **VARIANTS[name]}
    steps = options.steps or jsonargparse.get_loader("yaml")(Path(options.config).read_text())["train"]["max_steps"]
    overrides["train.max_steps"] = round(steps * STEPS_RATIO.get(name, 1))
    arguments = [f"--{key}={each if isinstance(each, str) else json.dumps(each)}" for key, each in overrides.items()]
    _call("distill", "run", "--config", options.config, *arguments)
    costs = options.output / "costs.json"  # of drafts that differ in nothing but their weights: one for all
    if not costs.is_file():
        shutil.copy(run.folder / "costs.json", costs)
    if not all((run.folder / f"{setting}.json").is_file() for setting in SETTINGS):
        score(run, Costs(**json.loads(costs.read_text())))
    return run


@torch.no_grad()
def score(run: Run, costs: Costs) -> None:
    """alpha, tokens per target pass and predicted speedup on the held-out responses; intervals over the texts."""
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(RunConfig, "run")
    told = parser.parse_object({"run": jsonargparse.get_loader("yaml")((run.folder / "config.yaml").read_text())})
    config: RunConfig = RunConfig(**vars(parser.instantiate(told)["run"]))
    elsewhere = replace(config.train, output=str(run.folder / "judging"))
    again = replace(config, pair=str(run.folder / "pair"), measure_speed=False, compile=False, train=elsewhere)
    task = prepare(again).task
    gamma = task.pair.num_draft_tokens
    for setting, rows in zip(SETTINGS, (task.texts.heldout, task.texts.heldout_greedy), strict=True):
        with torch.autocast(
            task.module.draft.device.type, torch.bfloat16, enabled=autocasts(config.train.mixed_precision)
        ):
            scores = task.scores(rows)
        passing = [each.acceptance if setting == "sampled" else each.greedy_acceptance for each in scores]
        alphas = [each.alpha if setting == "sampled" else each.greedy_acceptance for each in scores]
        sums, lengths = (np.array([float(of(each)) for each in alphas]) for of in (torch.sum, len))
        acceptances = [each.double().numpy() for each in passing]
        counts = np.array([expected_rounds(each, gamma).count for each in acceptances])
        found = judge(acceptances, gamma, costs) | {"alpha": float(sums.sum() / lengths.sum())}
        found |= {"alpha_interval": bootstrap_interval(sums, lengths)}
        found |= {"block_efficiency_interval": bootstrap_interval(lengths, counts)}
        (run.folder / f"{setting}.json").write_text(json.dumps(found, indent=1))


def timing(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Options of `spec-decode bench`."""
    given = {"pair": run.folder / "pair", "prompts": options.prompts, "output": run.folder / "bench.json"}
    return given | {"temperatures": "[1, 0]", "max_new_tokens": 96, "num_prompts": 16}


def table(runs: list[Run]) -> str:
    """Markdown: means over seeds; intervals over texts or prompts, and the measured speedup, of the first seed."""
    columns = ("alpha, T=1", "E", "predicted", "measured", "alpha, greedy", "E", "predicted", "measured")
    rows = ["| loss | seeds | " + " | ".join(columns) + " | tokens | minutes |", "|" + "---|" * 12]
    for name in dict.fromkeys(run.name for run in runs):
        of_name = [run for run in runs if run.name == name]
        cells = [name, str(len(of_name))]
        for place, setting in enumerate(SETTINGS):
            found = [run.read(setting) for run in of_name]
            cells += [_with_interval(found, "alpha"), _with_interval(found, "block_efficiency")]
            cells.append(f"{fmean(each['predicted_speedup'] for each in found):.2f}")
            cells.append(_measured(of_name[0].read("bench")["timings"][place]["runs"]))
        last = [
            [json.loads(line) for line in (run.folder / "metrics.jsonl").open() if "seconds" in line] for run in of_name
        ]
        cells.append(f"{fmean(lines[-1]['tokens'] for lines in last):,.0f}")
        cells.append(f"{fmean(lines[-1]['seconds'] for lines in last) / 60:.1f}")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def plot(runs: list[Run], path: Path) -> None:
    """alpha of each run, one row for each loss."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(run.name for run in runs))
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.4 * len(names) + 1.5), sharey=True)
    for axis, setting in zip(axes, SETTINGS, strict=True):
        for place, name in enumerate(names):
            of_name = [run for run in runs if run.name == name]
            for number, run in enumerate(of_name):
                found = run.read(setting)
                height = place + 0.15 * (number - (len(of_name) - 1) / 2)
                axis.plot(found["alpha_interval"], [height, height], color="tab:blue", alpha=0.5)
                axis.plot(found["alpha"], height, "o", color="tab:blue", markersize=4)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlabel(f"alpha, {setting}")
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.suptitle("Each seed, with its 95% interval over texts")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _with_interval(found: list[dict[str, Any]], name: str) -> str:
    low, high = found[0][f"{name}_interval"]
    return f"{fmean(each[name] for each in found):.3f} ({low:.3f} to {high:.3f})"


def _measured(runs: dict[str, list[dict[str, float]]]) -> str:
    """How many times sooner a token came than by plain decoding, over all prompts; interval over them."""
    plain, speculative = (
        np.array([run["seconds"] / run["num_tokens"] for run in runs[mode]]) for mode in ("plain", "speculative")
    )
    low, high = bootstrap_interval(plain, speculative)
    return f"{plain.sum() / speculative.sum():.2f} ({low:.2f} to {high:.2f})"


def _call(package: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", package, *arguments], check=True)


if __name__ == "__main__":
    main()
