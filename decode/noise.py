"""The noise that sampling consumes: a pure function of the seed, of what the noise is for, and of where in the text.

Nothing is drawn from a stream, so what one row or one round uses cannot shift what another one gets.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# what the noise is for; numbers that are equal for two purposes would couple them
PURPOSES = ("token", "draft", "coin", "next")
GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)
# the finalizer of MurmurHash3, as signed 32-bit numbers
MIX_1, MIX_2, GOLDEN_32 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32, 0x9E3779B1 - 2**32
ROWS_AT_A_TIME = 4  # of a whole vocabulary: what a core's cache holds


class RowNoise:
    """Noise for the rows of a batch.

    Args:
        seeds: one per row.
        streams: a number per row that tells apart rows with the same seed.
        device: where the noise is wanted.
        vocab_size: above all token ids; spares work that is the same for every key.
    """

    def __init__(
        self, seeds: list[int], streams: list[int], device: torch.device, vocab_size: int | None = None
    ) -> None:
        self.device = device
        self.spread = _all_spread(vocab_size, device) if vocab_size else None
        sequences = [
            np.random.SeedSequence(seed, spawn_key=(stream,)) for seed, stream in zip(seeds, streams, strict=True)
        ]
        states = np.array([sequence.generate_state(1, np.uint64)[0] for sequence in sequences])
        self.states = _mixed(states[:, None] + np.arange(1, len(PURPOSES) + 1, dtype=np.uint64))

    def keys(self, purposes: str | Sequence[str], places: np.ndarray, steps: int | np.ndarray = 0) -> np.ndarray:
        """Keys to ask for noise with: uint64 [rows, n].

        Args:
            purposes: one for all, or one for each of the n.
            places, steps: what else tells them apart, below 2^40 and 2^24; they broadcast to [rows, n].
        """
        named = [purposes] if isinstance(purposes, str) else purposes
        states = self.states[:, [PURPOSES.index(purpose) for purpose in named]]
        numbers = (places + (steps << 40)).astype(np.uint64)
        return _mixed(states ^ (numbers * GOLDEN_64))

    def uniforms(self, keys: np.ndarray) -> Tensor:
        """fp32 in [0, 1), in the shape of the keys."""
        return torch.from_numpy((keys >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)).to(self.device)

    def exponentials(self, keys: np.ndarray, token_ids: Tensor | range) -> Tensor:
        """Exponential noise with rate 1, which belongs to a key and a token.

        Args:
            keys: uint64 [*batch].
            token_ids: int64, [*batch, columns], or [columns] for the same tokens everywhere, or a range from 0.

        Returns:
            fp32 [*batch, columns], positive and finite.
        """
        halves = torch.from_numpy(keys.astype(np.uint64)[..., None].view(np.int32)).to(self.device)
        first, second = halves[..., :1], halves[..., 1:] | 1
        spread = self.spread_of(token_ids)
        if spread.ndim > 1 or keys.size <= ROWS_AT_A_TIME:
            return _exponentials(spread, first, second)
        chunks = zip(*(torch.split(half.reshape(-1, 1), ROWS_AT_A_TIME) for half in (first, second)), strict=True)
        return torch.cat([_exponentials(spread, *chunk) for chunk in chunks]).reshape(*keys.shape, -1)

    def select_rows(self, rows: list[int]) -> None:
        self.states = self.states[rows]

    def spread_of(self, token_ids: Tensor | range) -> Tensor:
        """What tells the noise of tokens apart, int32, in the shape of the ids."""
        if isinstance(token_ids, range):
            if self.spread is not None:
                return self.spread[: len(token_ids)]
            token_ids = torch.arange(len(token_ids), device=self.device)
        return _spread(token_ids) if self.spread is None else self.spread.take(token_ids)


@lru_cache(maxsize=8)
def _all_spread(vocab_size: int, device: torch.device) -> Tensor:
    return _spread(torch.arange(vocab_size, device=device))


def _spread(token_ids: Tensor) -> Tensor:
    """Neighbouring ids far apart, int32.

    No two ids below 2^20 share the low 20 bits: ids that differ in high bits only would keep doing so when they are
    multiplied by a key, whatever the key, and so have noise that depends on each other's.
    """
    multiples = token_ids.to(torch.int32) * GOLDEN_32
    return (_mixed_32(multiples) & -(1 << 20)) | (multiples & 0xFFFFF)


def _exponentials(spread: Tensor, first: Tensor, second: Tensor) -> Tensor:
    mixed = (spread ^ first).mul_(second)
    shifted = mixed >> 15
    mixed = mixed.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).mul_(MIX_2)
    torch.bitwise_right_shift(mixed, 16, out=shifted)
    mixed.bitwise_xor_(shifted.bitwise_and_(0xFFFF))
    # 31 bits, of which small numbers keep them all: it is the short times that decide who is first; without one of
    # them, which a large number would round up to 2^31
    return mixed.bitwise_and_(0x7FFFFF7F).float().add_(0.5).mul_(-(2**-31)).log1p_().neg_()


def _mixed(keys: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(keys ^ (keys >> np.uint64(31)))


def _mixed_32(numbers: Tensor) -> Tensor:
    """The finalizer of MurmurHash3; numbers wrap around, and >> keeps the sign, hence the masks."""
    mixed = numbers ^ ((numbers >> 16) & 0xFFFF)
    mixed = mixed.mul_(MIX_1)
    mixed = mixed ^ ((mixed >> 13) & 0x7FFFF)
    mixed = mixed.mul_(MIX_2)
    return mixed ^ ((mixed >> 16) & 0xFFFF)
