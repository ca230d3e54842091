"""What each way is worth in which a target drafts for itself: built, trained if it can learn, measured.

Builds every kind with `spec-distill build`, trains adapters and factors with `spec-distill run`, and measures all with
`spec-decode evaluate` on held-out prompts, greedy and at temperature 0.8: acceptance, costs, and the speedup that they
predict beside the measured one. Prints a table in Markdown. What is finished is kept: run again, it goes on.

    python scripts/self_speculation.py --responses runs/demo-service/responses
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from decode.pair import Pair, load_tensors
from decode.prompts import load_prompts

VOCAB = "--vocab_size=4096"
# options of `spec-distill build`; and whether the pair then has something to learn
KINDS: dict[str, tuple[list[str], bool]] = {
    "8 bits": (["--kind=quantised", VOCAB], False),
    "4 bits": (["--kind=quantised", "--bits=4", VOCAB], False),
    "skip": (["--kind=skip", VOCAB], False),
    "skip, 8 bits": (["--kind=skip", "--bits=8", VOCAB], False),
    "exit": (["--kind=exit", VOCAB], False),
    "exit, adapter": (["--kind=exit", "--exit_layer=3", "--adapter=layer", VOCAB], True),
    "low rank": (["--kind=low_rank", "--low_rank_share=0.25", VOCAB], True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--responses", required=True, help="what `spec-distill respond` wrote, with kept states")
    parser.add_argument("--prompts", default="service", help="whose held-out ones are measured on")
    parser.add_argument("--num_prompts", type=int, default=40)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--config", default="configs/run/smollm2-demo.yaml", help="recipe of what is trained")
    parser.add_argument("--steps", type=int, help="of what is trained; else the recipe's")
    parser.add_argument("--output", type=Path, default=Path("runs/self"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    prompts = options.output / "prompts.jsonl"
    heldout = [prompt for prompt in load_prompts(options.prompts) if prompt.split != "train"][: options.num_prompts]
    prompts.write_text("".join(json.dumps({"id": each.id, "messages": each.messages}) + "\n" for each in heldout))
    rows = [row for kind in options.kinds for row in rows_of(kind, measured(kind, prompts, options))]
    columns = ("kind", "own weights", "minutes", "sampling", "alpha", "beta", "c", "E", "predicted", "measured")
    print("\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *rows]))


def measured(kind: str, prompts: Path, options: argparse.Namespace) -> Path:
    """The folder of a kind's pair and figures."""
    folder = options.output / kind.replace(",", "").replace(" ", "-")
    build, learns = KINDS[kind]
    minutes: dict[str, float] = {}
    kept = folder / "minutes.json"
    if kept.is_file():
        minutes = json.loads(kept.read_text())

    def timed(what: str, *arguments: str) -> None:
        if what not in minutes:
            started = perf_counter()
            subprocess.run([sys.executable, "-m", *arguments], check=True)
            minutes[what] = (perf_counter() - started) / 60
            folder.mkdir(exist_ok=True)
            kept.write_text(json.dumps(minutes))

    responses, pair = f"--responses={options.responses}", folder / "built"
    timed("build", "distill", "build", f"--target={options.target}", responses, f"--output={pair}", *build)
    if learns:
        steps = [] if options.steps is None else [f"--train.max_steps={options.steps}"]
        given = [f"--config={options.config}", f"--pair={pair}", responses, f"--train.output={folder / 'run'}", *steps]
        timed("train", "distill", "run", *given)
        pair = folder / "run" / "pair"
    sampling = f"--sampling={json.dumps({'temperature': 0.8, 'max_new_tokens': options.max_new_tokens, 'seed': 0})}"
    given = [f"--pair={pair}", f"--prompts={prompts}", sampling, '--more_sampling=[{"temperature": 0}]']
    counts = [f"--num_{what}_prompts={options.num_prompts}" for what in ("decoded", "timed")]
    timed("evaluate", "decode", "evaluate", *given, *counts, f"--output={folder / 'evaluation.json'}")
    return folder


def rows_of(kind: str, folder: Path) -> list[str]:
    """Markdown: a row for each sampling setting."""
    minutes = json.loads((folder / "minutes.json").read_text())
    pair = folder / "run" / "pair" if "train" in minutes else folder / "built"
    own = sum(tensor.numel() for tensor in load_tensors(pair).values())
    spent = minutes["build"] + minutes.get("train", 0.0)
    first = [kind + said(Pair.load(pair).self_draft), f"{own / 1e6:.1f}M", f"{spent:.0f}"]
    rows = []
    for found in json.loads((folder / "evaluation.json").read_text())["settings"]:
        best = found["best_num_draft_tokens"]
        ratios = sorted(found["measured_speedups"])
        figures = [
            f"T={found['sampling']['temperature']:g}",
            interval(found, "alpha"),
            ", ".join(f"{beta:.2f}" for beta in found["betas"]),
            f"{found['costs']['draft_step']:.2f}",
            interval(found, "block_efficiency"),
            f"{found['predicted_speedup'][best - 1]:.2f} with {best}",
            f"{found['measured_speedup']:.2f} ({ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f})",
        ]
        rows.append("| " + " | ".join([*first, *figures]) + " |")
    return rows


def said(self_draft: dict[str, Any]) -> str:
    """What of the target drafts, where it was searched for."""
    if self_draft["num_layers"]:
        return f" after {self_draft['num_layers']} layers"
    gone = [len(self_draft[name]) for name in ("skipped_attention", "skipped_mlp")]
    return f", without {gone[0]} attentions and {gone[1]} MLPs" if any(gone) else ""


def interval(found: dict[str, Any], name: str) -> str:
    low, high = found[f"{name}_interval"]
    return f"{found[name]:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
