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


def probabilities(logits: BFloat16[Tensor, "*batch vocab"], temperatures: list[float]) -> Float[Tensor, "*batch vocab"]:
    """softmax(logits / temperature), fp32.

    Args:
        logits: that `can_draw`.
        temperatures: above 0; one for each of the first axis.
    """
    found = torch.empty(logits.shape)
    _draw(logits, temperatures, found)
    return found


def draw(
    logits: BFloat16[Tensor, "rows vocab"],
    temperatures: list[float],
    keys: UInt64[np.ndarray, " rows"],
    spread: Int[Tensor, " vocab"],
    with_weights: bool = True,
) -> tuple[Int[Tensor, " rows"], Float[Tensor, "rows vocab"]]:
    """A token of each row from softmax(logits / temperature): what `sample` draws, but for ties within rounding.

    Args:
        logits: that `can_draw`.
        temperatures: above 0.
        keys: of the noise.
        spread: int32, `RowNoise.spread_of` the tokens of the columns.
        with_weights: False leaves the second result empty.

    Returns:
        columns, int64, and the softmax, fp32.
    """
    assert spread.dtype == torch.int32 and len(spread) == logits.shape[-1]
    seeds = torch.from_numpy(np.ascontiguousarray(keys).view(np.int64))
    columns = torch.empty(len(logits), dtype=torch.long)
    weights = torch.empty(logits.shape) if with_weights else None
    _draw(logits, temperatures, weights, seeds, spread.contiguous(), columns)
    return columns, torch.empty(len(logits), 0) if weights is None else weights


def _draw(logits: Tensor, temperatures: list[float], *others: Tensor | None) -> None:
    assert can_draw(logits)
    rows = logits.flatten(0, -2)
    scales = torch.tensor(temperatures).repeat_interleave(len(rows) // len(temperatures))
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in (scales, *others)]
    addresses += [None] * (5 - len(addresses))
    native_library().draw(rows.data_ptr(), *rows.shape, rows.stride(0), *addresses, torch.get_num_threads())


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
