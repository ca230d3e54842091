"""How near decoding comes to the speed at which memory can be read, which bounds it at batch 1."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

# far more than any cache of the last level that a few cores own
BUFFER_BYTES = 2**29
REPETITIONS = 7


@dataclass(frozen=True)
class Weights:
    """Bytes of weights that a pass over one token reads; 0 for the draft where there is no draft model."""

    target_bytes: int
    draft_bytes: int

    @classmethod
    def of(cls, target: PreTrainedModel, draft: PreTrainedModel | None) -> "Weights":
        """Counted, not measured."""
        return cls(weight_bytes(target), 0 if draft is None else weight_bytes(draft))

    def bytes_read(self, num_target_passes: int, num_draft_passes: int) -> int:
        """By so many passes, each over few enough tokens that every weight is read once."""
        return num_target_passes * self.target_bytes + num_draft_passes * self.draft_bytes


@dataclass(frozen=True)
class Roofline:
    """What memory allows, and what a pass asks of it.

    Attributes:
        read_bytes_per_second: of a sum over a large buffer, by all threads.
        copy_bytes_per_second: of a copy of one; each byte counts twice, as it is read and written.
        target_bytes, draft_bytes: weights that one pass over one token reads; 0 where there is no draft model.
    """

    read_bytes_per_second: float
    copy_bytes_per_second: float
    target_bytes: int
    draft_bytes: int

    def share(self, num_target_passes: int, num_draft_passes: int, seconds: float) -> float:
        """Bytes of weights that passes had to read a second, over what a sum reads; keys and values not counted."""
        num_bytes = Weights(self.target_bytes, self.draft_bytes).bytes_read(num_target_passes, num_draft_passes)
        return num_bytes / seconds / self.read_bytes_per_second


def measure_roofline(target: PreTrainedModel, draft: PreTrainedModel | None) -> Roofline:
    """Measure the memory of the target's device, by turns; medians."""
    source = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=target.device)
    copy = torch.empty_like(source)
    actions: dict[str, Callable[[], object]] = {"read": source.sum, "copy": lambda: copy.copy_(source)}
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(REPETITIONS + 1):
        for name, action in actions.items():
            started = perf_counter()
            action()
            if target.device.type != "cpu":
                torch.accelerator.synchronize(target.device)
            seconds[name].append(perf_counter() - started)
    read, copied = (BUFFER_BYTES / median(seconds[name][1:]) for name in actions)
    weights = Weights.of(target, draft)
    return Roofline(read, 2 * copied, weights.target_bytes, weights.draft_bytes)


def weight_bytes(model: PreTrainedModel) -> int:
    """What a pass over one token reads: all weights but the table of embeddings, of which it reads a row."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    weights = [weight for weight in model.get_decoder().parameters() if weight is not embeddings]
    num_bytes: int = sum(_bytes(weight) for weight in [*weights, *head.parameters()])
    return num_bytes


def _bytes(weight: Any) -> int:
    """What is read of it; of integers without their scales."""
    if (dtype := getattr(weight, "target_dtype", None)) is not None:
        return int(weight.numel() * (0.5 if "int4" in str(dtype) else 1))
    num_bytes: int = weight.nbytes
    return num_bytes
