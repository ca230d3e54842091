"""What a task and the training loop are to each other."""

import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch


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


class NonFinite(ValueError):
    """Something that training cannot go on from holds an infinity or a NaN.

    A task's module raises it with the name of the thing, such as "the teacher's output". The loop then stops on
    every process, keeps the tensors of the batch, and says where.
    """


class Task(Protocol):
    """What is trained, on what, and how it is judged.

    Randomness belongs to the global generators of torch, numpy and random: the loop seeds them before every
    step and every evaluation, which is what makes a resumed run equal an uninterrupted one.
    """

    @property
    def module(self) -> torch.nn.Module:
        """Called as module(batch) -> StepOutput. Everything that needs gradients happens in its forward."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """What the task must remember, JSON values with string keys; the same on every process.

        Part of every checkpoint. On resumption this very dict is given its content back, before anything else
        is called.
        """
        ...

    def begin_step(self, step: int, num_steps: int) -> None:
        """Called on every process before each step's first collate, after the seeding.

        Args:
            step: steps done before this one.
            num_steps: of the whole run, should it not stop early.
        """
        ...

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Rows to the tensors of one micro-batch."""
        ...

    def evaluate(self, module: torch.nn.Module) -> dict[str, float]:
        """Metrics of the unwrapped module, in eval mode, without gradients. May change `state`.

        Called on every process at once, so that it may share its work out. Every process names the same
        metrics; the main one's values are recorded.
        """
        ...

    def save(self, module: torch.nn.Module, folder: Path) -> None:
        """Writes what was trained into this folder, which does not exist yet. Called on the main process."""
        ...


class Guarded(torch.nn.Module):
    """A task's module, whose NonFinite becomes a loss that is NaN.

    The process that raised it thus still takes part in the exchange of gradients and losses, and all processes
    learn from the sum of the losses, at no cost of its own, that they must stop.

    Attributes:
        fault: what the last forward pass raised, if anything.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.fault: NonFinite | None = None

    def forward(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        """The module's output; metric_sums is empty when there is a fault."""
        self.fault = None
        try:
            output: StepOutput = self.module(batch)
        except NonFinite as fault:
            self.fault = fault
            sums = [p.float().sum() for p in self.module.parameters() if p.requires_grad]
            loss = torch.stack(sums).sum() * math.nan
            return StepOutput(loss, torch.zeros_like(loss), {})
        return output
