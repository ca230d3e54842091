"""The training loop: any task, any number of processes, exact resumption."""

import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from .batches import batch_plan, share, total_steps
from .checkpoint import (
    discard_after,
    load_best,
    load_checkpoint,
    newest_checkpoint,
    publish,
    remove_folder,
    save_best,
    save_checkpoint,
)
from .config import TrainConfig
from .ema import WeightAverage
from .engine import Engine
from .folder import RunFolder
from .optimizers import build_optimizers, learning_rate_factor, set_learning_rates
from .preemption import Preempted, sigterm_noted
from .provenance import provenance
from .report import Report
from .task import Guarded, NonFinite, StepOutput, Task

__all__ = ["FitResult", "NonFinite", "StepOutput", "Task", "fit"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run came to.

    Attributes:
        result: folder of what was trained.
        num_steps: optimiser steps that were taken in all.
        best_step: steps after which the result was evaluated: num_steps, unless select_by chose an earlier one.
        metrics: the last value of everything in metrics.jsonl, but those of the evaluation at best_step.
        resumed_from: steps that were already done when this process began; num_steps if the run was complete.
    """

    result: Path
    num_steps: int
    best_step: int
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
    best_value: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0


@dataclass(frozen=True)
class _MicroBatch:
    """What went through the module at once, kept until the step is known to be sound.

    Attributes:
        rows: indices into the data.
        tensors: as collate made them.
        sums: loss, tokens and metrics; scalars on the module's device.
        fault: what the module raised.
    """

    rows: list[int]
    tensors: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor]
    fault: NonFinite | None


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
    folder. Afterwards the module has the weights of the result.

    Args:
        task: what is trained.
        rows: a datasets.Dataset or any sequence of dicts.
        lengths: tokens of each row, [num_rows]; rows of like length are batched together.
        config: how to train.
        resolved_config: the whole configuration of the command, JSON values; recorded, and compared when
            the run is resumed.
        result_name: name of the folder that the task saves into.

    Raises:
        ValueError: no rows, a folder begun with another configuration or that another run is writing to, or an
            unknown metric in select_by.
        NonFinite: a loss, a gradient or whatever the task looks at.
        Preempted: SIGTERM came; a checkpoint of the last step was written.
    """
    if len(rows) == 0 or len(rows) != len(lengths):
        raise ValueError(f"data: {len(rows)} rows, {len(lengths)} lengths; give one length for each row")
    engine = Engine(config)
    folder = RunFolder(Path(config.output), result_name)
    folder.check(resolved_config)
    num_steps = total_steps(len(rows), config.batch_size, config.num_epochs, config.max_steps)
    if folder.result.exists():
        _say(engine, "%s is complete already; nothing to do", folder.result)
        return _result(folder, num_steps)
    with folder.locked() if engine.is_main else nullcontext():
        first_step = _train(engine, folder, task, rows, lengths, config, resolved_config, num_steps)
    engine.close()
    return _result(folder, num_steps, first_step)


def _train(
    engine: Engine,
    folder: RunFolder,
    task: Task,
    rows: Sequence[Any],
    lengths: Sequence[int],
    config: TrainConfig,
    resolved_config: Mapping[str, Any],
    num_steps: int,
) -> int:
    """From the newest checkpoint to the result; the step it began at."""
    optimizers = build_optimizers(task.module, config)
    guarded = Guarded(task.module)
    engine.prepare(guarded, optimizers)
    average = WeightAverage(task.module, config.ema_decay) if config.ema_decay else None
    checkpoint = newest_checkpoint(folder.checkpoints)
    state = _State()
    if checkpoint:
        saved = load_checkpoint(checkpoint, task.module, optimizers, average.tensors if average else None)
        state = _State(**saved["loop"])
        task.state.clear()
        task.state.update(saved["task"])
        _say(engine, "resuming from %s (step %d of %d)", checkpoint, state.step, num_steps)
        if (before := folder.num_processes()) not in (None, engine.world):
            _say(
                engine, "it was begun by %s processes, now %d: sums are rounded in another order", before, engine.world
            )
    first_step = state.step
    engine.barrier()  # nobody may still be reading what the main process is about to clear up
    if engine.is_main:
        discard_after(folder.checkpoints, checkpoint)
        origin = provenance(resolved_config) | {"num_processes": engine.world}
        folder.begin(resolved_config, origin, first_step)
    engine.start_trackers(resolved_config)
    with Report(engine, folder.metrics, num_steps, first_step) as report, sigterm_noted() as sigterms:
        loop = _Loop(
            engine, task, guarded, average, rows, lengths, config, optimizers, folder, report, sigterms, num_steps
        )
        loop.run(state)
    loop.install_result(state)
    if engine.is_main:
        temporary = folder.path / f".{folder.result.name}.tmp"
        remove_folder(temporary)
        task.save(task.module, temporary)
        publish(temporary, folder.result)
    engine.barrier()
    return first_step


@dataclass(frozen=True)
class _Loop:
    engine: Engine
    task: Task
    guarded: Guarded
    average: WeightAverage | None
    rows: Sequence[Any]
    lengths: Sequence[int]
    config: TrainConfig
    optimizers: Sequence[torch.optim.Optimizer]
    folder: RunFolder
    report: Report
    sigterms: Sequence[int]
    num_steps: int

    def run(self, state: _State) -> None:
        """Takes the steps that are left.

        Raises:
            Preempted: SIGTERM came to a process.
        """
        config, module = self.config, self.task.module
        module.train()
        epoch, batches = -1, batch_plan(self.lengths, config.batch_size, config.seed, 0)
        steps_per_epoch = len(batches)
        started = time.perf_counter() - state.seconds
        while not self._is_over(state):
            if state.step // steps_per_epoch != epoch:
                epoch = state.step // steps_per_epoch
                batches = batch_plan(self.lengths, config.batch_size, config.seed, epoch)
            self._step(state, batches[state.step % steps_per_epoch])
            state.seconds = time.perf_counter() - started
            self.report.advance(state.step)
            epochs = state.step / steps_per_epoch
            last = state.step == self.num_steps
            if last or _due(state.step, config.log_every_steps):
                self._log(state, epochs)
            if last or _due(state.step, config.eval_every_steps):
                self._evaluate(state, epochs)
            if self._is_over(state) and state.window:
                self._log(state, epochs)
            preempted = self.engine.any(bool(self.sigterms))
            if preempted or self._is_over(state) or _due(state.step, config.checkpoint_every_steps):
                self._checkpoint(state)
            if preempted and not self._is_over(state):
                _say(self.engine, "SIGTERM: step %d of %d is kept; run it again to go on", state.step, self.num_steps)
                self.engine.barrier()  # once a process has ended, the launcher kills the others
                self.engine.close()
                raise Preempted
        if state.step < self.num_steps:
            num_evaluations, name = state.evaluations_since_best, config.select_by
            _say(self.engine, "stopped early: %d evaluations without a better %s", num_evaluations, name)

    def install_result(self, state: _State) -> None:
        """Gives the module the weights that the run was for: the best, the average, or those it has."""
        if self.config.select_by:
            self.engine.barrier()  # the main process has written them by then
            load_best(self.folder.checkpoints, state.best_step, self.task.module)
            values = (state.best_step, state.step, self.config.select_by, state.best_value)
            _say(self.engine, "the result is that of step %d of %d, where %s was %.4g", *values)
        elif self.average:
            self.average.install()

    def _is_over(self, state: _State) -> bool:
        patience = self.config.patience
        return state.step == self.num_steps or (patience is not None and state.evaluations_since_best >= patience)

    def _step(self, state: _State, indices: Sequence[int]) -> None:
        """One optimiser step on one batch; updates the counters.

        Raises:
            NonFinite: the loss or its gradient, or what the task looks at; no optimiser step is taken then.
        """
        config, engine = self.config, self.engine
        _seed_everything(config.seed, state.step, engine.rank, 0)
        self.task.begin_step(state.step, self.num_steps)
        shares = self._shares(indices, engine.rank)
        # A process without rows must still take part in the exchange of gradients: it adds zero times a row.
        weight = 1.0 if engine.rank < len(indices) else 0.0
        batches = [self._micro_batch(rows, weight, last=rows is shares[-1]) for rows in shares]
        totals = self._sum(batches, ["loss", "tokens"])
        if not math.isfinite(totals["loss"]):
            advice = "look at them, or lower learning_rate, in another output"
            raise self._stop(state.step + 1, indices, batches, "the loss is not finite", advice)
        totals |= self._sum(batches, [name for name in batches[0].sums if name not in totals])
        set_learning_rates(self.optimizers, learning_rate_factor(state.step, self.num_steps, config))
        norm = engine.step(max(1.0, totals["tokens"]), config.max_grad_norm)
        if not math.isfinite(norm):
            what = f"learning_rate: {config.learning_rate} led to a gradient of norm {norm}"
            advice = "lower it, or raise warmup_fraction, in another output"
            raise self._stop(state.step + 1, indices, batches, what, advice)
        if self.average:
            self.average.update(state.step)
        state.step += 1
        state.tokens += totals["tokens"]
        for name, total in (totals | {"steps": 1.0, "grad_norm": norm}).items():
            state.window[name] = state.window.get(name, 0.0) + total

    def _shares(self, indices: Sequence[int], rank: int) -> list[list[int]]:
        """Rows of the micro-batches of one process, at least one."""
        shares = share(indices, rank, self.engine.world, self.config.micro_batch_size)
        return shares or [[indices[0]]]

    def _micro_batch(self, rows: list[int], weight: float, last: bool) -> _MicroBatch:
        """Adds the gradients of some rows, times `weight`."""
        tensors = self.task.collate([self.rows[i] for i in rows])
        with self.engine.accumulate(last):
            output: StepOutput = self.engine.forward(self.engine.to_device(tensors))
            self.engine.backward(output.loss_sum * weight)
        named = {"loss": output.loss_sum, "tokens": output.num_tokens, **output.metric_sums}
        sums = {name: value.detach().float() * weight for name, value in named.items()}
        return _MicroBatch(rows, tensors, sums, self.guarded.fault)

    def _sum(self, batches: Sequence[_MicroBatch], names: Sequence[str]) -> dict[str, float]:
        """Sums over the micro-batches of all processes."""
        if not names:
            return {}
        sums = torch.stack([torch.stack([batch.sums[name] for name in names]) for batch in batches]).sum(0)
        return dict(zip(names, self.engine.sum(sums).tolist(), strict=True))

    def _stop(
        self, step: int, indices: Sequence[int], batches: Sequence[_MicroBatch], what: str, advice: str
    ) -> NonFinite:
        """What to raise, on every process, for a step that cannot be taken.

        Saves the tensors of the first micro-batch whose loss is not finite; where that cannot be told, each
        process saves those of its whole step.
        """
        rank = self.engine.rank
        path = self.folder.path / f"offending-batch-step-{step}.safetensors"
        offender = self._offender(batches)
        if offender is None:
            rows = [row for batch in batches for row in batch.rows]
            if rank > 0:
                path = path.with_stem(f"{path.stem}-process-{rank}")
            _save_tensors(path, batches)
        else:
            rows = self._shares(indices, offender[0])[offender[1]]
            if rank == offender[0]:
                batch = batches[offender[1]]
                what = f"{batch.fault} is not finite" if batch.fault else what
                _save_tensors(path, [batch])
        self.task.module.zero_grad()  # nothing of this may reach a later run
        self.engine.barrier()  # once a process has ended, the launcher kills the others
        return NonFinite(f"{what} at step {step} on rows {rows}, whose tensors are now in {path}; {advice}")

    def _offender(self, batches: Sequence[_MicroBatch]) -> tuple[int, int] | None:
        """Process and number of the first micro-batch whose loss is not finite; all processes get one answer."""
        faulty = [number for number, batch in enumerate(batches, 1) if not batch.sums["loss"].isfinite()]
        firsts = torch.zeros(self.engine.world)
        firsts[self.engine.rank] = faulty[0] if faulty else 0
        for rank, number in enumerate(self.engine.sum(firsts).tolist()):
            if number:
                return rank, int(number) - 1
        return None

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

    def _evaluate(self, state: _State, epoch: float) -> None:
        """Judges the weights, or their average if there is one, and keeps them if they are the best so far."""
        module = self.task.module
        _seed_everything(self.config.seed, state.step, self.engine.rank, 1)
        module.eval()
        with self.average.installed() if self.average else nullcontext():
            try:
                with torch.no_grad(), self.engine.autocast():
                    metrics = self.task.evaluate(module)
            except NonFinite as fault:
                raise NonFinite(f"{fault} is not finite in the evaluation at step {state.step}") from fault
            if unknown := [name for name, value in metrics.items() if math.isnan(value)]:
                raise NonFinite(f"{unknown[0]} is not a number in the evaluation at step {state.step}")
            name = self.config.select_by
            chosen = self._select(state, metrics, name) if name else {}
        module.train()
        if metrics:
            line = {f"eval/{name}": float(value) for name, value in metrics.items()}
            self.report.write({"step": state.step, "epoch": epoch} | line | chosen)

    def _select(self, state: _State, metrics: Mapping[str, float], name: str) -> dict[str, float]:
        """Keeps the weights if `name` was never better; what metrics.jsonl says about it.

        Raises:
            ValueError: the evaluation has no such metric. NonFinite: it cannot be compared.
        """
        if name not in metrics:
            known = ", ".join(metrics) or "none, for want of data to evaluate on"
            raise ValueError(f"select_by: {name!r} is not a metric of the evaluation; choose from: {known}")
        value = float(metrics[name])
        if not math.isfinite(value):
            raise NonFinite(f"select_by: {name} is {value} at step {state.step}; select by another, in another output")
        if self.engine.agree(state.best_value is None or value > state.best_value):
            state.best_value, state.best_step, state.evaluations_since_best = value, state.step, 0
            if self.engine.is_main:
                save_best(self.folder.checkpoints, state.step, self.task.module)
        else:
            state.evaluations_since_best += 1
        return {"best_step": state.best_step}

    def _checkpoint(self, state: _State) -> None:
        if self.engine.is_main:
            self.report.sync()
            save_checkpoint(
                self.folder.checkpoints,
                state.step,
                self.task.module,
                self.optimizers,
                {"loop": asdict(state), "task": self.task.state},
                self.config.keep_checkpoints,
                self.average.tensors if self.average else None,
            )


def _save_tensors(path: Path, batches: Sequence[_MicroBatch]) -> None:
    """All tensors of some micro-batches, in a file that also says which rows they are."""
    tensors = {
        f"{number}.{name}" if len(batches) > 1 else name: tensor.detach().cpu().contiguous().clone()
        for number, batch in enumerate(batches)
        for name, tensor in batch.tensors.items()
    }
    save_file(tensors, path, metadata={"rows": str([batch.rows for batch in batches])})


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


def _result(folder: RunFolder, planned_steps: int, resumed_from: int | None = None) -> FitResult:
    lines = folder.read_metrics()
    metrics: dict[str, float] = {}
    for line in lines:
        metrics |= line
    num_steps = int(metrics.get("step", planned_steps))
    best_step = int(metrics.get("best_step", num_steps))
    for line in lines:
        if line["step"] == best_step:
            metrics |= {name: value for name, value in line.items() if name.startswith("eval/")}
    return FitResult(
        result=folder.result,
        num_steps=num_steps,
        best_step=best_step,
        metrics=metrics,
        resumed_from=num_steps if resumed_from is None else resumed_from,
    )
