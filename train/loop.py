"""The training loop: any task, any number of processes, exact resumption."""

import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from .batches import batch_plan, share, total_steps
from .checkpoint import (
    discard_after,
    load_checkpoint,
    newest_checkpoint,
    publish,
    remove_folder,
    save_checkpoint,
)
from .config import TrainConfig
from .engine import Engine
from .folder import RunFolder
from .optimizers import build_optimizers, learning_rate_factor, set_learning_rates
from .provenance import provenance
from .report import Report

logger = logging.getLogger(__name__)


class StepOutput(NamedTuple):
    """What a task's module returns for one micro-batch.

    Attributes:
        loss_sum: scalar, summed over the unmasked tokens; carries the gradient.
        num_tokens: scalar, unmasked tokens.
        metric_sums: detached scalars, summed over the unmasked tokens; the same names in every micro-batch.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    metric_sums: dict[str, torch.Tensor]


class Task(Protocol):
    """What is trained, on what, and how it is judged.

    Randomness belongs to the global generators of torch, numpy and random: the loop seeds them before every
    step and every evaluation, which is what makes a resumed run equal an uninterrupted one.
    """

    @property
    def module(self) -> torch.nn.Module:
        """Called as module(batch) -> StepOutput. Everything that needs gradients happens in its forward."""
        ...

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Rows to the tensors of one micro-batch."""
        ...

    def evaluate(self, module: torch.nn.Module) -> dict[str, float]:
        """Metrics of the unwrapped module, in eval mode, without gradients.

        Called on every process at once, so that it may share its work out; the main one's answer is recorded.
        """
        ...

    def save(self, module: torch.nn.Module, folder: Path) -> None:
        """Writes what was trained into this folder, which does not exist yet. Called on the main process."""
        ...


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run came to.

    Attributes:
        result: folder of what was trained.
        num_steps: optimiser steps of the whole run.
        metrics: the last value of everything in metrics.jsonl.
        resumed_from: steps that were already done when this process began; num_steps if the run was complete.
    """

    result: Path
    num_steps: int
    metrics: dict[str, float]
    resumed_from: int


@dataclass
class _State:
    """The loop's counters, kept in each checkpoint. `window` sums what the next line of metrics reports."""

    step: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    seconds_reported: float = 0.0
    window: dict[str, float] = field(default_factory=dict)


def fit(
    task: Task,
    rows: Sequence[Any],
    lengths: Sequence[int],
    config: TrainConfig,
    resolved_config: Mapping[str, Any],
    result_name: str = "model",
) -> FitResult:
    """Trains the task's module and leaves what the task saves in `config.output`/`result_name`.

    Begun again in the same folder it continues from the last complete checkpoint, and with the same number of
    processes it ends with the same weights, bit for bit, as if never stopped. Every process must see the
    folder.

    Args:
        task: what is trained.
        rows: a datasets.Dataset or any sequence of dicts.
        lengths: tokens of each row, [num_rows]; rows of like length are batched together.
        config: how to train.
        resolved_config: the whole configuration of the command, JSON values; recorded, and compared when
            the run is resumed.
        result_name: name of the folder that the task saves into.

    Raises:
        ValueError: no rows, a folder begun with another configuration, or a gradient that is not finite.
    """
    if len(rows) == 0 or len(rows) != len(lengths):
        raise ValueError(f"data: {len(rows)} rows, {len(lengths)} lengths; give one length for each row")
    engine = Engine(config)
    folder = RunFolder(Path(config.output), result_name)
    folder.check(resolved_config)
    num_steps = total_steps(len(rows), config.batch_size, config.num_epochs, config.max_steps)
    if folder.result.exists():
        _say(engine, "%s is complete already; nothing to do", folder.result)
        return _result(folder, num_steps, num_steps)
    optimizers = build_optimizers(task.module, config)
    engine.prepare(task.module, optimizers)
    checkpoint = newest_checkpoint(folder.checkpoints)
    state = _State()
    if checkpoint:
        state = _State(**load_checkpoint(checkpoint, task.module, optimizers))
        _say(engine, "resuming from %s (step %d of %d)", checkpoint, state.step, num_steps)
    first_step = state.step
    engine.barrier()  # nobody may still be reading what the main process is about to clear up
    if engine.is_main:
        discard_after(folder.checkpoints, checkpoint)
        origin = provenance(resolved_config) | {"num_processes": engine.world}
        folder.begin(resolved_config, origin, first_step)
    engine.start_trackers(resolved_config)
    with Report(engine, folder.metrics, num_steps, first_step) as report:
        _Loop(engine, task, rows, lengths, config, optimizers, folder, report, num_steps).run(state)
    if engine.is_main:
        temporary = folder.path / f".{folder.result.name}.tmp"
        remove_folder(temporary)
        task.save(task.module, temporary)
        publish(temporary, folder.result)
    engine.barrier()
    engine.close()
    return _result(folder, num_steps, first_step)


@dataclass(frozen=True)
class _Loop:
    engine: Engine
    task: Task
    rows: Sequence[Any]
    lengths: Sequence[int]
    config: TrainConfig
    optimizers: Sequence[torch.optim.Optimizer]
    folder: RunFolder
    report: Report
    num_steps: int

    def run(self, state: _State) -> None:
        """Takes the steps that are left."""
        config, module = self.config, self.task.module
        module.train()
        epoch, batches = -1, batch_plan(self.lengths, config.batch_size, config.seed, 0)
        steps_per_epoch = len(batches)
        started = time.perf_counter() - state.seconds
        while state.step < self.num_steps:
            if state.step // steps_per_epoch != epoch:
                epoch = state.step // steps_per_epoch
                batches = batch_plan(self.lengths, config.batch_size, config.seed, epoch)
            self._step(state, batches[state.step % steps_per_epoch])
            state.seconds = time.perf_counter() - started
            self.report.advance(state.step)
            last = state.step == self.num_steps
            if last or state.step % config.log_every_steps == 0:
                self._log(state, state.step / steps_per_epoch)
            if last or _due(state.step, config.eval_every_steps):
                self._evaluate(state.step, state.step / steps_per_epoch)
            if last or _due(state.step, config.checkpoint_every_steps):
                self._checkpoint(state)

    def _step(self, state: _State, indices: Sequence[int]) -> None:
        """One optimiser step on one batch; updates the counters."""
        config, engine = self.config, self.engine
        _seed_everything(config.seed, state.step, engine.rank, 0)
        micro_batches = share(indices, engine.rank, engine.world, config.micro_batch_size)
        # A process without rows must still take part in the exchange of gradients: it adds zero times a row.
        weight = 1.0 if micro_batches else 0.0
        micro_batches = micro_batches or [[indices[0]]]
        sums: dict[str, torch.Tensor] = {}
        for index, micro_batch in enumerate(micro_batches):
            batch = engine.to_device(self.task.collate([self.rows[i] for i in micro_batch]))
            with engine.accumulate(last=index == len(micro_batches) - 1):
                output: StepOutput = engine.forward(batch)
                engine.backward(output.loss_sum * weight)
            named = {"loss": output.loss_sum, "tokens": output.num_tokens, **output.metric_sums}
            for name, value in named.items():
                sums[name] = sums.get(name, 0.0) + value.detach().float() * weight
        totals = dict(zip(sums, engine.sum(torch.stack(list(sums.values()))).tolist(), strict=True))
        factor = learning_rate_factor(
            state.step, self.num_steps, config.warmup_fraction, config.final_learning_rate_fraction
        )
        set_learning_rates(self.optimizers, factor)
        state.step += 1
        norm = engine.step(max(1.0, totals["tokens"]), config.max_grad_norm)
        if not np.isfinite(norm):
            raise ValueError(
                f"learning_rate: {config.learning_rate} led to a gradient of norm {norm} at step "
                f"{state.step}; lower it, or raise warmup_fraction, in another output"
            )
        state.tokens += totals["tokens"]
        for name, total in (totals | {"steps": 1.0, "grad_norm": norm}).items():
            state.window[name] = state.window.get(name, 0.0) + total

    def _log(self, state: _State, epoch: float) -> None:
        """Reports the means since the last report, and starts anew."""
        window, state.window = state.window, {}
        seconds, state.seconds_reported = state.seconds - state.seconds_reported, state.seconds
        steps, grad_norm = window.pop("steps"), window.pop("grad_norm")
        loss, tokens = window.pop("loss"), window.pop("tokens")
        line = {
            "step": state.step,
            "epoch": epoch,
            "loss": loss / max(1.0, tokens),
            "learning_rate": self.optimizers[-1].param_groups[0]["lr"],
            "grad_norm": grad_norm / steps,
            "tokens": state.tokens,
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "seconds": state.seconds,
        }
        self.report.write(line | {name: total / max(1.0, tokens) for name, total in window.items()})

    def _evaluate(self, step: int, epoch: float) -> None:
        module = self.task.module
        _seed_everything(self.config.seed, step, self.engine.rank, 1)
        module.eval()
        with torch.no_grad(), self.engine.autocast():
            metrics = self.task.evaluate(module)
        module.train()
        if metrics:
            line = {f"eval/{name}": float(value) for name, value in metrics.items()}
            self.report.write({"step": step, "epoch": epoch} | line)

    def _checkpoint(self, state: _State) -> None:
        if self.engine.is_main:
            self.report.sync()
            save_checkpoint(
                self.folder.checkpoints,
                state.step,
                self.task.module,
                self.optimizers,
                vars(state),
                self.config.keep_checkpoints,
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _seed_everything(*key: int) -> None:
    """Seeds the global generators of torch, numpy and random with a hash of the key."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _say(engine: Engine, message: str, *values: object) -> None:
    if engine.is_main:
        logger.info(message, *values)


def _result(folder: RunFolder, num_steps: int, resumed_from: int) -> FitResult:
    metrics: dict[str, float] = {}
    for line in folder.read_metrics():
        metrics |= line
    return FitResult(result=folder.result, num_steps=num_steps, metrics=metrics, resumed_from=resumed_from)
