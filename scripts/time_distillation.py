"""How fast a distillation step is, and that it stays the same step: a naive loop beside `spec-distill run`'s.

The naive loop is what one writes first: pad, a pass of the target, a pass of the draft in fp32, both whole logits,
their log-softmax, KL on the response tokens, AdamW. The others are this project's, from plain to all it has. All begin
with the same draft and see the same batches; the loss of every step is printed for the comparison of curves.

    python scripts/time_distillation.py --pair runs/time/pair --responses runs/time/cached --steps 20
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from decode.pair import Pair, load_draft_vocab, load_model
from distill.config import ObjectiveConfig, RunConfig, Stage
from distill.responses import load_responses
from distill.run import distill
from distill.teacher import collate
from train.batches import batch_plan
from train.config import TrainConfig

OURS: dict[str, dict[str, Any]] = {
    "online": {},
    "cached": {"teacher": "cached"},
    "online, compiled": {"compile": True},
    "cached, compiled": {"teacher": "cached", "compile": True},
    "cached, compiled, packed": {"teacher": "cached", "compile": True, "packing_length": 512},
}
WARM_UP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", required=True)
    parser.add_argument("--responses", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--only", nargs="+", choices=["naive", *OURS], default=["naive", *OURS])
    options = parser.parse_args()
    print(f"{'':28s} tokens/s   loss by step")
    for name in options.only:
        tokens_per_second, losses = naive(options) if name == "naive" else ours(OURS[name], options)
        print(f"{name:28s} {tokens_per_second:8,.0f}   " + " ".join(f"{loss:.3f}" for loss in losses), flush=True)


def naive(options: argparse.Namespace) -> tuple[float, list[float]]:
    pair = Pair.load(Path(options.pair))
    target = load_model(pair.target_id(), role="target")
    draft = load_model(f"{options.pair}/draft", "float32", "draft").train()
    draft.requires_grad_(True)
    draft.get_input_embeddings().requires_grad_(False)
    token_ids = load_draft_vocab(Path(options.pair))
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    rows = load_responses(options.responses, "train").select_columns(["input_ids", "response_mask"])
    plan = batch_plan([len(ids) for ids in rows["input_ids"]], options.batch_size, 0, 0)
    losses, rates = [], []
    for indices in plan[: options.steps]:
        started = perf_counter()
        batch = collate([rows[place] for place in indices], 0)
        there = [torch.ones(len(rows[place]["input_ids"])) for place in indices]
        mask = nn.utils.rnn.pad_sequence(there, batch_first=True)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": mask}
        with torch.no_grad():
            log_p = target(**inputs).logits.float().log_softmax(-1)
        logits = draft(**inputs).logits
        if token_ids is not None:
            log_p, logits = log_p[..., token_ids], logits[..., token_ids]
        kl = nn.functional.kl_div(logits.log_softmax(-1), log_p, reduction="none", log_target=True).sum(-1)
        loss = kl[batch["predicts"]].mean()
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(int(batch["predicts"].sum()) / (perf_counter() - started))
    return median(rates[WARM_UP_STEPS:]), losses


def ours(changes: dict[str, Any], options: argparse.Namespace) -> tuple[float, list[float]]:
    output = Path(options.pair).parent / "timed"
    shutil.rmtree(output, ignore_errors=True)
    train = TrainConfig(
        output=str(output),
        max_steps=options.steps,
        batch_size=options.batch_size,
        micro_batch_size=options.batch_size,
        optimizer=options.optimizer,
        learning_rate=1e-3,
        muon_learning_rate=1e-2,
        weight_decay=0.0,
        warmup_fraction=0.0,
        final_learning_rate_fraction=1.0,
        mixed_precision="auto",
        log_every_steps=1,
        checkpoint_every_steps=0,
    )
    objective = ObjectiveConfig(stages=(Stage(losses={"forward_kl": 1.0}),))
    rest = {"objective": objective, "measure_speed": False, "parity_prompts": 0, **changes}
    distill(RunConfig(pair=options.pair, responses=options.responses, train=train, **rest))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    shutil.rmtree(output)
    return median(line["tokens_per_second"] for line in steps[WARM_UP_STEPS:]), [line["loss"] for line in steps]


if __name__ == "__main__":
    main()
