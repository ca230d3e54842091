"""A preallocated key-value cache with rollback by length, per row.

Row b keeps its tokens at positions 0..lengths[b]-1 of the buffers, so rows of different lengths need no padding,
forgetting tokens is a smaller number, and a position id is a place in the buffer.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class BufferLayer(CacheLayerMixin):
    """Keys and values of one layer, [batch, kv_heads, capacity, head_dim] each, allocated at the first write."""

    is_croppable = True
    is_sliding = False

    def __init__(self, owner: "KVCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, _ = key_states.shape
        capacity = self.owner.capacity
        # zeros, not empty: masked positions take part in the products, and 0 * NaN is NaN
        self.keys = key_states.new_zeros(batch, heads, capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, heads, capacity, value_states.shape[-1])
        self.is_initialized = True
        self.owner.addresses = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [batch, kv_heads, n, head_dim] at the owner's positions; return views of all that is in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        if (start := self.owner.common_start) is not None:
            buffer[:, :, start : start + states.shape[2]] = states
        else:
            rows = torch.arange(len(buffer), device=buffer.device).unsqueeze(1)
            buffer[rows, :, self.owner.positions] = states.transpose(1, 2)
        return buffer[:, :, : self.owner.extent]

    def get_seq_length(self) -> int:
        return max(self.owner.lengths, default=0)

    def get_max_length(self) -> int:
        return self.owner.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.extent, 0


class KVCache(Cache):
    """Buffers for num_layers layers and batch_size rows of up to `capacity` tokens each.

    `lengths` (a host-side list, one per row) is how many tokens each row remembers; only `write_at` and the
    methods below change it.
    """

    def __init__(self, num_layers: int, batch_size: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[BufferLayer(self) for _ in range(num_layers)])
        self.capacity = capacity
        self.device = device
        self.lengths = [0] * batch_size
        self.positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        self.common_start: int | None = 0
        self.extent = 0
        self.addresses: tuple[Any, Any] | None = None  # of the buffers, for who writes into them from outside of torch

    def allocate(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """The buffers, for who writes into them by address; layers that have theirs keep them."""
        for layer in self.layers:
            assert isinstance(layer, BufferLayer)
            if not layer.is_initialized:
                empty = torch.empty(len(self.lengths), num_kv_heads, 0, head_dim, dtype=dtype, device=self.device)
                layer.lazy_initialization(empty, empty)

    def write_at(self, num_tokens: int) -> Tensor:
        """Make room for num_tokens more in every row and return their positions, int64 [batch, num_tokens]."""
        self.extent = max(self.lengths) + num_tokens
        assert self.extent <= self.capacity, f"cache of {self.capacity} tokens asked to hold {self.extent}"
        starts = torch.tensor(self.lengths, device=self.device).unsqueeze(1)
        self.positions = starts + torch.arange(num_tokens, device=self.device)
        self.common_start = self.lengths[0] if len(set(self.lengths)) == 1 else None
        return self.positions

    def attention_mask(self) -> Tensor:
        """Which buffer positions each new token sees, bool [batch, 1, num_tokens, extent]: itself and all before."""
        return (torch.arange(self.extent, device=self.device) <= self.positions.unsqueeze(-1)).unsqueeze(1)

    def begin_with(self, other: "KVCache", rows: list[int]) -> None:
        """Let row b, which is empty as all are, remember what row rows[b] of another cache does."""
        self.lengths = [other.lengths[row] for row in rows]
        length = max(self.lengths)
        for layer, theirs in zip(self.layers, other.layers, strict=True):
            assert isinstance(layer, BufferLayer) and isinstance(theirs, BufferLayer)
            assert theirs.keys is not None and theirs.values is not None
            keys, values = (states[rows, :, :length] for states in (theirs.keys, theirs.values))
            layer.lazy_initialization(keys, values)
            assert layer.keys is not None and layer.values is not None
            layer.keys[:, :, :length], layer.values[:, :, :length] = keys, values

    def rollback(self, lengths: list[int]) -> None:
        """Forget all but the first lengths[b] tokens of each row b."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)

    def select_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        to, origin = torch.tensor(moved, dtype=torch.long, device=self.device).view(-1, 2).unbind(1)
        for layer in self.layers:
            assert isinstance(layer, BufferLayer)
            if layer.keys is not None and layer.values is not None:
                # in place: to copy all rows whenever one ends costs more than the pass
                if moved:
                    layer.keys[to], layer.values[to] = layer.keys[origin], layer.values[origin]
                layer.keys, layer.values = layer.keys[: len(rows)], layer.values[: len(rows)]
