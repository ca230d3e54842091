"""Whole vocabularies of bf16 logits in one call of C++, on CPUs that have it; torch reads them a dozen times."""

import functools

import numpy as np
import torch
from jaxtyping import BFloat16, Float, Int, UInt64
from torch import Tensor

from .native import Unavailable, native_library


def can_draw(logits: Tensor) -> bool:
    """Whether these logits are such as `draw` takes, and this machine has what it needs."""
    return logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and logits.stride(-1) == 1 and _available()


def draw(
    logits: BFloat16[Tensor, "rows vocab"],
    temperatures: list[float],
    keys: UInt64[np.ndarray, " rows"],
    spread: Int[Tensor, " vocab"],
) -> Int[Tensor, " rows"]:
    """A token of each row from softmax(logits / temperature): what `sample` draws, but for ties within rounding.

    Args:
        logits: that `can_draw`.
        temperatures: above 0.
        keys: of the noise.
        spread: int32, `RowNoise.spread`.
    """
    assert can_draw(logits) and spread.dtype == torch.int32 and len(spread) >= logits.shape[-1]
    scales = torch.tensor(temperatures, dtype=torch.float32)
    seeds = torch.from_numpy(np.ascontiguousarray(keys).view(np.int64))
    spread, tokens = spread.contiguous(), torch.empty(len(logits), dtype=torch.long)
    addresses = [tensor.data_ptr() for tensor in (scales, seeds, spread, tokens)]
    native_library().draw(logits.data_ptr(), *logits.shape, logits.stride(0), *addresses, torch.get_num_threads())
    return tokens


def log_normalizers(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
    """logsumexp of each row, fp32."""
    if not can_draw(logits):
        return logits.float().logsumexp(dim=-1)
    sums = torch.empty(len(logits))
    rows = (logits.data_ptr(), *logits.shape, logits.stride(0))
    native_library().log_sum_exp(*rows, sums.data_ptr(), torch.get_num_threads())
    return sums


@functools.cache
def _available() -> bool:
    try:
        native_library()
    except Unavailable:  # which is logged where a model is looked at
        return False
    return True
