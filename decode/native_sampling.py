"""What sampling.py does, in a few calls of C++, on CPUs that have it: torch reads a vocabulary of logits a dozen times.

The tokens are those of sampling.py, but where two of them are within rounding of each other.
"""

import functools
import logging

import numpy as np
import torch
from jaxtyping import BFloat16, Float, Int, UInt64
from torch import Tensor

from .native_library import Unavailable, native_library
from .sampling import DRAFT_NUCLEUS_COLUMNS, Distribution, LogitsWarper

logger = logging.getLogger(__name__)

# of a row, as `bound_rows` describes it: bound, largest and total, fp32, and the count, int64
KEPT_BYTES = 24


def can_draw(logits: Tensor) -> bool:
    """Whether these logits are such as C++ takes, and this machine has what it needs."""
    fits = logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and logits.stride(-1) == 1
    return fits and native_available()


class NativeWarper(LogitsWarper):
    """`LogitsWarper`, which does what C++ cannot."""

    def __call__(self, logits: Float[Tensor, "rows positions vocab"]) -> Distribution:
        if self.is_greedy or not can_draw(logits):
            return super().__call__(logits)
        if self.temperatures:
            return Distribution(probabilities(logits, self.temperatures))
        rows, places = _rows(logits)
        parameters = [each.repeat_interleave(logits.shape[1]) for each in self.arguments]
        temperature, kept = parameters[0], empty(len(rows), KEPT_BYTES, dtype=torch.uint8)
        addresses = [tensor.data_ptr() for tensor in (*parameters, kept)]
        native_library().bound_rows(*places, *addresses, torch.get_num_threads())
        num_columns = max(1, int(kept.view(torch.long)[:, -1].max()))
        weights = empty(*logits.shape[:-1], num_columns)
        tokens = empty(*weights.shape, dtype=torch.long)
        native_library().spread_out(
            *places, temperature.data_ptr(), kept.data_ptr(), num_columns, weights.data_ptr(), tokens.data_ptr()
        )
        found = Distribution(weights, tokens)
        # ids beside a whole vocabulary would cost more than they spare
        return Distribution(found.dense(logits.shape[-1])) if self.some_keep_all else found

    @functools.cached_property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top-k, top-p and min-p of each row, as C++ takes them."""
        temperature, top_k, top_p, min_p = self.parameters
        if not self.exact:  # few columns, as there
            top_k = torch.where((top_p < 1) & (top_k == 0), DRAFT_NUCLEUS_COLUMNS, top_k)
        return temperature.float(), top_k.long(), top_p.float(), min_p.float()


def probabilities(logits: BFloat16[Tensor, "*batch vocab"], temperatures: list[float]) -> Float[Tensor, "*batch vocab"]:
    """softmax(logits / temperature), fp32.

    Args:
        logits: that `can_draw`.
        temperatures: above 0; one for each of the first axis.
    """
    found = empty(*logits.shape)
    _draw(logits, temperatures, found)
    return found


def draw(
    logits: BFloat16[Tensor, "rows vocab"],
    temperatures: list[float],
    keys: UInt64[np.ndarray, " rows"],
    spread: Int[Tensor, " vocab"],
    with_weights: bool = True,
) -> tuple[Int[Tensor, " rows"], Float[Tensor, "rows vocab"]]:
    """A token of each row from softmax(logits / temperature), as `sample` draws it.

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
    columns = empty(len(logits), dtype=torch.long)
    weights = empty(*logits.shape) if with_weights else None
    _draw(logits, temperatures, weights, seeds_of(keys), spread.contiguous(), columns)
    return columns, empty(len(logits), 0) if weights is None else weights


def can_arrive(weights: Distribution) -> bool:
    """Whether `arrive` takes these weights."""
    numbers = weights.probabilities
    return numbers.dtype == torch.float32 and numbers.device.type == "cpu" and native_available()


def arrive(
    weights: Distribution, keys: UInt64[np.ndarray, "*batch"], spread: Int[Tensor, "*#batch columns"]
) -> Int[Tensor, "*batch"]:
    """`sample`, with its noise.

    Args:
        weights: that `can_arrive`.
        keys: of the noise.
        spread: int32, `RowNoise.spread_of` the tokens of the columns.
    """
    of_columns, spread = weights.probabilities.contiguous(), spread.contiguous()
    num_columns, shape = of_columns.shape[-1], of_columns.shape[:-1]
    assert spread.dtype == torch.int32 and spread.shape in (of_columns.shape, (num_columns,))
    seeds, columns = seeds_of(keys), empty(*shape, dtype=torch.long)
    native_library().arrive(
        of_columns.data_ptr(),
        columns.numel(),
        num_columns,
        spread.data_ptr(),
        num_columns if spread.ndim > 1 else 0,
        seeds.data_ptr(),
        columns.data_ptr(),
        torch.get_num_threads(),
    )
    return weights.tokens(columns)


def log_normalizers(logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
    """logsumexp of each row, fp32."""
    if not can_draw(logits):
        return logits.float().logsumexp(dim=-1)
    sums = empty(len(logits))
    native_library().log_sum_exp(*_rows(logits)[1], sums.data_ptr(), torch.get_num_threads())
    return sums


def _draw(logits: Tensor, temperatures: list[float], *others: Tensor | None) -> None:
    assert can_draw(logits)
    rows, places = _rows(logits)
    scales = torch.tensor(temperatures, dtype=torch.float32, device="cpu").repeat_interleave(
        len(rows) // len(temperatures)
    )
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in (scales, *others)]
    addresses += [None] * (5 - len(addresses))
    native_library().draw(*places, *addresses, torch.get_num_threads())


def _rows(logits: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """One row of logits after another, to be kept for as long as C++ reads them, and where and how many they are."""
    rows = logits.flatten(0, -2)
    return rows, (rows.data_ptr(), *rows.shape, rows.stride(0))


def seeds_of(keys: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(keys).view(np.int64))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What C++ writes into, whatever torch's defaults are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


@functools.cache
def native_available() -> bool:
    """Whether this machine has what the C++ needs; if not, the reason is logged once."""
    try:
        native_library()
    except Unavailable as reason:
        logger.info("sampling without C++: %s", reason)
        return False
    return True
