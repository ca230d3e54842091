"""A round of speculative decoding but for the target's pass, in a few calls of C++ (native_round.cpp).

What sampler.py does with verify.py and sampling.py, and the loop of proposer.py, where all is such as C++ takes: torch
starts a hundred small operations for it.
"""

import ctypes
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import BFloat16, Float, Int, UInt64
from torch import Tensor

from .native_library import Address, Size, native_library
from .native_sampling import KEPT_BYTES, NativeWarper, empty, seeds_of
from .sampling import Distribution

Rule = Literal["equal", "tokenwise", "block"]
RULES: tuple[Rule, ...] = ("equal", "tokenwise", "block")  # as C++ numbers them


class _Rows(ctypes.Structure):
    _fields_ = (
        ("logits", Address),
        *((name, Size) for name in ("row_stride", "position_stride", "size")),
        *((name, Address) for name in ("temperatures", "top_k", "top_p", "min_p", "tokens", "kept")),
        ("num_positions", Size),
    )


class Unwarped:
    """Distributions as logits and what a warper will leave of them, for C++, or for who asks for them.

    Args:
        logits: that `can_draw`, [rows, positions, columns].
        warper: of the rows.
        token_ids: int64 [columns], the token of each column; None where column i is token i.
    """

    def __init__(
        self,
        logits: BFloat16[Tensor, "rows positions columns"],
        warper: NativeWarper,
        token_ids: Int[Tensor, " columns"] | None = None,
    ) -> None:
        assert logits.dtype == torch.bfloat16 and logits.stride(-1) == 1
        if token_ids is not None:
            assert token_ids.dtype == torch.long and len(token_ids) == logits.shape[-1]
            token_ids = token_ids.contiguous()
        self.logits, self.warper, self.token_ids = logits, warper, token_ids
        self.kept = empty(*logits.shape[:-1], KEPT_BYTES, dtype=torch.uint8)
        self._rows = _Rows(
            logits.data_ptr(),
            logits.stride(0),
            logits.stride(1),
            logits.shape[2],
            *(tensor.data_ptr() for tensor in warper.arguments),
            None if token_ids is None else token_ids.data_ptr(),
            self.kept.data_ptr(),
            logits.shape[1],
        )

    @property
    def address(self) -> int:
        """Where C++ finds it."""
        return ctypes.addressof(self._rows)

    def dense(self, vocab_size: int) -> Tensor:
        """Over the whole vocabulary, fp32 [rows, positions, vocab]."""
        return self.distribution().dense(vocab_size)

    def distribution(self) -> Distribution:
        """The distributions themselves, [rows, positions, columns]."""
        found = self.warper(self.logits)
        return found if self.token_ids is None else found.renamed(self.token_ids)


def judge(
    p: Unwarped,
    q: Unwarped | None,
    drafted: Int[Tensor, "rows drafted"],
    num_drafted: Int[Tensor, " rows"],
    rules: Sequence[Rule],
    coins: Float[Tensor, "rows drafted"],
    token_keys: UInt64[np.ndarray, "rows drafted_plus_1"],
    next_keys: UInt64[np.ndarray, " rows"],
    spread: Int[Tensor, " vocab"],
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """How many drafted tokens of each row are accepted, and the token that follows them.

    Args:
        p: of the target, at each drafted position and the one after.
        q: what was drafted from; None where all rows have the rule "equal".
        drafted, num_drafted: as for `verify_tokenwise`.
        rules: `verify_equal` with tokens that `token_keys` draw, or `verify_tokenwise` or `verify_block` with coins
            and a token after them that `next_keys` draw.
        coins: fp32 [rows, drafted], uniform in [0, 1).
        spread: int32, `RowNoise.spread_of` all tokens.
    """
    width = drafted.shape[1]
    assert p.logits.shape[1] == width + 1 and (q is None or q.logits.shape[1] >= width)
    assert q is not None or set(rules) == {"equal"}
    assert spread.dtype == torch.int32 and spread.is_contiguous() and len(spread) >= p.logits.shape[2]
    drafted, num_drafted, coins = drafted.contiguous(), num_drafted.contiguous(), coins.contiguous()
    numbers = np.array([RULES.index(rule) for rule in rules], dtype=np.int64)
    keys = seeds_of(token_keys), seeds_of(next_keys)
    verdicts = empty(len(rules), 2, dtype=torch.long)
    native_library().judge(
        p.address,
        None if q is None else q.address,
        *drafted.shape,
        drafted.data_ptr(),
        num_drafted.data_ptr(),
        numbers.ctypes.data,
        *(tensor.data_ptr() for tensor in (coins, *keys, spread, verdicts)),
        torch.get_num_threads(),
    )
    return verdicts[:, 0], verdicts[:, 1]
