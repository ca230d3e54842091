"""The one place that knows accelerate: devices, processes, precision, trackers."""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs

from .config import TrainConfig

logger = logging.getLogger(__name__)


def autocasts(mixed_precision: str) -> bool:
    """Whether forward passes run in bf16: `auto` decides by what this machine has."""
    return mixed_precision == "bf16" or (mixed_precision == "auto" and has_bf16_products())


def resolve_precision(config: dict[str, Any]) -> dict[str, Any]:
    """A command's whole configuration, with what `auto` is here: a run is not to go on where it is something else."""
    precision = "bf16" if autocasts(config["train"]["mixed_precision"]) else "no"
    return config | {"train": config["train"] | {"mixed_precision": precision}}


def has_bf16_products() -> bool:
    """Faster than those of fp32, that is. A CPU without them takes three times as long for the detour."""
    if not torch.accelerator.is_available():
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


class Engine:
    """Runs a module on whatever there is: a CPU, a GPU, or several processes under `accelerate launch`.

    Attributes:
        is_main: whether this process writes files and speaks.
        rank, world: this process and how many there are.

    Raises:
        ValueError: a tracker that is unknown or not installed.
    """

    def __init__(self, config: TrainConfig) -> None:
        available = [str(name) for name in get_available_trackers()]
        for name in config.trackers:
            if name not in available:
                known = ", ".join(available) or "none is installed here"
                raise ValueError(f"trackers: {name!r} is not available; install it or choose from: {known}")
        # Accelerate's own mixed precision rewrites the module's forward for good; autocast around it doesn't.
        self._autocast = autocasts(config.mixed_precision)
        self._accelerator = Accelerator(
            # Unless told, accelerate takes several processes without an accelerator for several single ones.
            cpu=not torch.accelerator.is_available(),
            mixed_precision="no",
            log_with=list(config.trackers) or None,
            project_dir=config.output,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
        # The loop accumulates by itself; a value left in the environment must not divide the loss.
        self._accelerator.gradient_accumulation_steps = 1
        self.is_main: bool = self._accelerator.is_main_process
        if config.mixed_precision == "auto" and self.is_main:
            logger.info("passes run in %s, which this machine multiplies sooner", "bf16" if self._autocast else "fp32")
        self.rank: int = self._accelerator.process_index
        self.world: int = self._accelerator.num_processes
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        assert self.world == launched, (
            f"{launched} processes were launched but accelerate sees {self.world}: it was set up before the "
            "engine; on a machine without accelerator that must be PartialState(cpu=True)"
        )

    def prepare(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Moves the module to its device and wraps it for gradient synchronisation."""
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._module, *self._optimizers = self._accelerator.prepare(module, *optimizers)

    def to_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors on this process's device."""
        return {name: tensor.to(self._accelerator.device) for name, tensor in batch.items()}

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The configured precision of forward passes."""
        with torch.autocast(self._accelerator.device.type, torch.bfloat16, enabled=self._autocast):
            yield

    def forward(self, batch: Mapping[str, torch.Tensor]) -> Any:
        """The wrapped module's output, in the configured precision."""
        with self.autocast():
            return self._module(batch)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around a forward and backward pass: gradients are exchanged between processes only in the last."""
        with nullcontext() if last else self._accelerator.no_sync(self._module):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of a scalar loss."""
        self._accelerator.backward(loss)

    def step(self, denominator: float, max_grad_norm: float) -> float:
        """Divides the gradients summed over all processes by `denominator`, clips them and steps.

        Returns:
            The gradient norm before clipping. When it is not finite, no step is taken.
        """
        # Distributed data parallel has averaged over the processes: `world` turns that back into a sum.
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.world / denominator)
        norm = float(self._accelerator.clip_grad_norm_(self._parameters, max_grad_norm or float("inf")))
        if math.isfinite(norm):
            for optimizer in self._optimizers:
                optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return norm

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over all processes, the same on each."""
        total: torch.Tensor = self._accelerator.reduce(values.to(self._accelerator.device), reduction="sum")
        return total

    def agree(self, answer: bool) -> bool:
        """The main process's answer, on every process."""
        return bool(self.sum(torch.tensor(float(answer and self.is_main))).item())

    def any(self, answer: bool) -> bool:
        """Whether it is true on some process, on every process."""
        return bool(self.sum(torch.tensor(float(answer))).item())

    def barrier(self) -> None:
        """Waits until every process is here."""
        self._accelerator.wait_for_everyone()

    def start_trackers(self, resolved_config: Mapping[str, Any]) -> None:
        """Opens the configured trackers, if any."""
        if self._accelerator.log_with:
            self._accelerator.init_trackers("draftsmith", config=dict(_flat(resolved_config)))

    def track(self, values: Mapping[str, float], step: int) -> None:
        """Hands one line of metrics to the trackers."""
        self._accelerator.log(dict(values), step=step)

    def close(self) -> None:
        """Closes the trackers. The process group stays, for whatever the program does next."""
        for tracker in self._accelerator.trackers:
            tracker.finish()
        self._accelerator.free_memory()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Dotted keys and values of a nested mapping; trackers take scalars and strings only."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str | int | float | bool) else str(value)
