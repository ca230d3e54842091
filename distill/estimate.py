"""What a run will take, before it is begun: a few of its steps are taken here and measured."""

import resource
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Table

from train.batches import batch_plan, total_steps
from train.config import TrainConfig
from train.engine import autocasts
from train.folder import RunFolder
from train.loop import fit

from .config import RunConfig
from .run import Prepared, prepare
from .size import disk_bytes
from .texts import column

WARM_UP_STEPS, MEASURED_STEPS = 2, 6


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        num_steps: optimiser steps; num_tokens: response tokens of their texts, each as often as it is met.
        tokens_per_second: response tokens.
        minutes: of training and evaluations; evaluation_minutes: the evaluations among them.
        disk_bytes: at most, of the run's folder.
        memory_bytes: the most that this process held while it took a few steps; of the accelerator where there is one.
    """

    num_steps: int
    num_tokens: int
    tokens_per_second: float
    minutes: float
    evaluation_minutes: float
    disk_bytes: int
    memory_bytes: int


def estimate(config: RunConfig) -> Estimate:
    """Take a few steps of a run in a folder that is then deleted, and print what all of it will take.

    Raises:
        ValueError: the run could not begin.
    """
    if PartialState(cpu=not torch.accelerator.is_available()).num_processes > 1:
        raise ValueError("estimate: measures one process; run it without `accelerate launch`")
    train, share = config.train, config.branches.share
    # steps on text and on branches take different times, and few of one kind might not be met among few steps
    kinds = {0.0: 1 - share, 1.0: share} if 0 < share < 1 else {share: 1.0}
    measured, held = [], list[Prepared]()
    for all_or_none, weight in kinds.items():
        held.clear()  # two at a time would be twice the memory
        prepared, lines = _few_steps(replace(config, branches=replace(config.branches, share=all_or_none)))
        held.append(prepared)
        del prepared
        measured.append((weight, *_of_a_step(lines)))
    (prepared,) = held
    started = perf_counter()
    device = prepared.task.module.draft.device
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocasts(train.mixed_precision)):
        prepared.task.evaluate(prepared.task.module)
    seconds = sum(weight * of_step for weight, of_step, _ in measured)
    tokens = sum(weight * of_step for weight, _, of_step in measured)
    result = _extrapolated(config, prepared, seconds, tokens, perf_counter() - started)
    _print(result)
    return result


def _few_steps(config: RunConfig) -> tuple[Prepared, list[dict[str, float]]]:
    """Take them; what was prepared for them, and the lines of metrics.jsonl."""
    with tempfile.TemporaryDirectory(prefix=".estimate-", dir=_existing(Path(config.train.output))) as folder:
        few = replace(
            config.train,
            output=folder,
            max_steps=WARM_UP_STEPS + MEASURED_STEPS,
            log_every_steps=1,
            eval_every_steps=0,
            checkpoint_every_steps=0,
            select_by=None,
            patience=None,
            trackers=(),
        )
        # nothing is evaluated, so that no stage can end
        stages = tuple(replace(stage, plateau_evals=None) for stage in config.objective.stages_or_default[:1])
        objective = replace(config.objective, stages=stages)
        prepared = prepare(replace(config, train=few, parity_prompts=0, objective=objective))
        fit(prepared.task, prepared.rows, prepared.lengths, few, prepared.resolved_config, result_name="pair")
        return prepared, RunFolder(Path(folder), "pair").read_metrics()


def _of_a_step(lines: list[dict[str, float]]) -> tuple[float, float]:
    """Seconds and response tokens: medians, for a step of a new shape may have to wait for its program."""
    steps = [line for line in lines if "seconds" in line]
    taken = list(pairwise(steps[WARM_UP_STEPS - 1 :]))
    return tuple(median(ended[name] - begun[name] for begun, ended in taken) for name in ("seconds", "tokens"))  # type: ignore[return-value]


def _extrapolated(
    config: RunConfig, prepared: Prepared, seconds: float, tokens: float, evaluation_seconds: float
) -> Estimate:
    train = config.train
    num_steps = total_steps(len(prepared.rows), train.batch_size, train.num_epochs, train.max_steps)
    num_evaluations = 1 + (num_steps - 1) // train.eval_every_steps if train.eval_every_steps else 1
    evaluating = num_evaluations * evaluation_seconds
    return Estimate(
        num_steps=num_steps,
        num_tokens=_response_tokens(prepared, train, num_steps),
        tokens_per_second=tokens / seconds,
        minutes=(num_steps * seconds + evaluating) / 60,
        evaluation_minutes=evaluating / 60,
        disk_bytes=disk_bytes(prepared.task.module, train, saves_all=not prepared.task.own),
        memory_bytes=_peak_memory_bytes(),
    )


def _response_tokens(prepared: Prepared, train: TrainConfig, num_steps: int) -> int:
    counts = [int(np.sum(mask[1:])) for mask in column(prepared.rows, "response_mask")]
    steps_per_epoch = total_steps(len(counts), train.batch_size, 1.0, None)
    num_epochs, rest = divmod(num_steps, steps_per_epoch)
    last = batch_plan(prepared.lengths, train.batch_size, train.seed, num_epochs)[:rest]
    return num_epochs * sum(counts) + sum(counts[place] for batch in last for place in batch)


def _peak_memory_bytes() -> int:
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: estimates are for the disk that the run will use."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _print(result: Estimate) -> None:
    table = Table(title="What this run will take here", show_header=False)
    for name, value in (
        ("optimiser steps", f"{result.num_steps:,}"),
        ("response tokens", f"{result.num_tokens:,}"),
        ("response tokens per second", f"{result.tokens_per_second:,.0f}"),
        ("minutes", f"{result.minutes:,.1f}, of which {result.evaluation_minutes:.1f} for evaluations"),
        ("disk, at most", f"{result.disk_bytes / 1e9:.2f} GB"),
        ("memory, peak", f"{result.memory_bytes / 1e9:.2f} GB"),
    ):
        table.add_row(name, value)
    Console().print(table)
