"""A causal language model with its cache: feed tokens, get logits, forget tokens."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .cache import KVCache
from .llama import LlamaForward, llama_forward

# hidden states and logits after tokens, at positions, with a cache that has room; False only fills it
Forward = Callable[[Tensor, Tensor, KVCache, bool], tuple[Tensor | None, Tensor | None]]


class CachedModel:
    """One model serving one batch of rows through a `KVCache`.

    Args:
        model: any decoder-only model of transformers, in eval mode.
        batch_size: number of rows.
        capacity: most tokens a text will have.
        spare: room for tokens beyond, which a row that is near its end is fed because its neighbours are not.
        keep_hidden_states: let `hidden_states` be what last entered the head, [batch, n, hidden].

    Raises:
        ValueError: see `refuse_unsupported_cache`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int,
        capacity: int,
        spare: int = 0,
        keep_hidden_states: bool = False,
    ) -> None:
        refuse_unsupported_cache(model, capacity)
        self.model = model
        self.fast: Forward | None = llama_forward(model)
        self.capacity = capacity
        self.spare = spare
        num_layers = model.config.get_text_config().num_hidden_layers
        self.cache = KVCache(num_layers, batch_size, capacity + spare, model.device)
        self.keep_hidden_states = keep_hidden_states
        self.hidden_states: Tensor | None = None
        self.seconds_of_passes = 0.0  # of the last call of `draft`

    def through(self, model: PreTrainedModel, fast: Forward | None) -> "CachedModel":
        """The same cache, with the keys and values of a model of the same layers, or of some of them."""
        other = copy.copy(self)
        other.model, other.fast, other.keep_hidden_states = model, fast, False
        return other

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        width: int = self.model.get_output_embeddings().out_features
        return width

    def forward(self, tokens: Tensor, counts: list[int] | None = None) -> Tensor:
        """Feed tokens and return logits.

        Args:
            tokens: int64 [batch, n]; row b's first counts[b] tokens are real, the rest is padding whose logits
                mean nothing and which the cache forgets at once.
            counts: real tokens per row; all n by default.

        Returns:
            logits in the model's dtype, [batch, n, vocab].
        """
        logits = self._feed(tokens, counts or [tokens.shape[1]] * len(tokens), with_logits=True)
        assert logits is not None
        return logits

    def feed(self, tokens: Tensor) -> None:
        """Feed tokens, int64 [batch, n], whose logits nobody wants."""
        self._feed(tokens, [tokens.shape[1]] * len(tokens), with_logits=False)

    def read(self, sequences: list[list[int]], at_once: bool = True) -> None:
        """Feed what is not in the cache yet of every sequence but for its last token, the first to be asked about.

        Args:
            sequences: the whole text of each row.
            at_once: read once what several rows begin with, where the cache is empty.
        """
        if at_once and len(sequences) > 1 and not any(self.lengths):
            self._read_what_is_shared([ids[:-1] for ids in sequences])
        pending = [ids[start:-1] for start, ids in zip(self.lengths, sequences, strict=True)]
        counts = list(map(len, pending))
        if width := max(counts):
            tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in pending])
            self._feed(tokens.to(self.model.device), counts, with_logits=False)

    def _read_what_is_shared(self, sequences: list[list[int]]) -> None:
        """Read once what several rows begin with: a prompt of which many samples are wanted, or a system prompt."""
        unique = [list(ids) for ids in dict.fromkeys(map(tuple, sequences))]
        if len(unique) == len(sequences):
            unique = [_shared_beginning(sequences)]
            rows = [0] * len(sequences)
        else:
            rows = [unique.index(ids) for ids in sequences]
        if not all(unique):
            return
        once = CachedModel(self.model, len(unique), max(map(len, unique)))
        once.read([[*ids, 0] for ids in unique])
        self.cache.begin_with(once.cache, rows)

    def _feed(self, tokens: Tensor, counts: list[int], with_logits: bool) -> Tensor | None:
        positions = self.cache.write_at(tokens.shape[1])
        if self.spare:  # learned positions end where the context does; what is fed beyond is forgotten at once
            positions = positions.clamp_max(self.capacity - 1)
        logits: Tensor | None = None
        if self.fast:
            hidden, logits = self.fast(tokens, positions, self.cache, with_logits)
            if self.keep_hidden_states and with_logits:
                self.hidden_states = hidden
        else:
            with self._hidden_states_kept() if self.keep_hidden_states else contextlib.nullcontext():
                output = (self.model if with_logits else self.model.get_decoder())(
                    input_ids=tokens,
                    position_ids=positions,
                    attention_mask=self._attention_mask(),
                    cache=self.cache,
                    use_cache=True,
                )
            logits = output.logits if with_logits else None
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, counts, strict=True)]
        return logits

    @property
    def can_draft(self) -> bool:
        """Whether `draft` is there: one call for what `forward` would be called for once a token."""
        return isinstance(self.fast, LlamaForward) and self.fast.can_draft

    def room_for_logits(self, num_steps: int) -> Tensor:
        """For the logits of some steps of every row, bf16 [rows, steps, vocab], as `draft` wants it."""
        assert isinstance(self.fast, LlamaForward) and self.fast.native
        return self.fast.native.room_for_logits(len(self.lengths), num_steps)

    def draft(self, rows: int, num_steps: int, keys: np.ndarray, spread: Tensor) -> Tensor:
        """Draw a token of each row and feed it, time and again; the last one is not fed.

        Args:
            rows: address of `Unwarped` logits, whose first step is known and whose others are written.
            num_steps: tokens to draw.
            keys: of their noise, uint64 [rows, steps].
            spread: `RowNoise.spread_of` the columns, int32.

        Returns:
            tokens, int64 [rows, steps].
        """
        assert isinstance(self.fast, LlamaForward)
        assert max(self.lengths) + num_steps - 1 <= self.cache.capacity
        tokens, self.seconds_of_passes = self.fast.draft(rows, num_steps, keys, spread, self.cache)
        self.cache.lengths = [length + num_steps - 1 for length in self.cache.lengths]
        return tokens

    def rollback(self, lengths: list[int]) -> None:
        self.cache.rollback(lengths)

    def select_rows(self, rows: list[int]) -> None:
        self.cache.select_rows(rows)

    @contextlib.contextmanager
    def _hidden_states_kept(self) -> Iterator[None]:
        def keep(head: object, args: tuple[Tensor, ...]) -> None:
            self.hidden_states = args[0]

        hook = self.model.get_output_embeddings().register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def _attention_mask(self) -> Tensor:
        mask = self.cache.attention_mask()
        if self.model.config.get_text_config()._attn_implementation != "eager":
            return mask
        # eager attention adds its mask to the scores; a bool one would hide nothing
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros_like(mask, dtype=self.model.dtype).masked_fill_(~mask, lowest)


def _shared_beginning(sequences: list[list[int]]) -> list[int]:
    """What all sequences begin with."""
    first, last = min(sequences), max(sequences)  # all others lie between these two
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def refuse_unsupported_cache(model: PreTrainedModel, capacity: int) -> None:
    """Refuse a model that this cache would not serve exactly, or whose context is too short.

    Raises:
        ValueError: layers whose state cannot be rolled back; a sliding window or rotary scaling that sets in below
            `capacity` tokens; attention that takes no positions or no mask of ours; a context below `capacity`.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"model {config.model_type!r} has layers of kind {', '.join(sorted(other))}, "
            "whose state cannot be rolled back; use a model with full attention"
        )
    takes = inspect.signature(type(model).forward).parameters
    if not {"cache", "position_ids"} <= takes.keys() or getattr(config, "alibi", False):
        raise ValueError(
            f"model {config.model_type!r} cannot be told the positions of its tokens, which rows of different lengths "
            "need; use a model with rotary or learned positions"
        )
    if (attention := config._attn_implementation) not in ("eager", "sdpa"):
        raise ValueError(f"attention {attention!r} takes no mask per row; load the model with attention 'sdpa'")
    window = _window(config)
    if window is not None and capacity > window:
        raise ValueError(
            f"model {config.model_type!r} attends through a sliding window of {window} tokens, which cannot be "
            f"rolled back: keep prompt + new tokens at or below {window} (asked for {capacity})"
        )
    original = _length_of_short_rotary(config)
    if original is not None and capacity > original:
        raise ValueError(
            f"model {config.model_type!r} turns its positions differently beyond {original} tokens, which changes "
            f"what is cached: keep prompt + new tokens at or below {original} (asked for {capacity})"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and capacity > limit:
        raise ValueError(
            f"prompt + max_new_tokens is {capacity} tokens, "
            f"longer than the context of {limit} of model {config.model_type!r}: shorten one of the two"
        )


def longest_text(model: PreTrainedModel) -> int:
    """Most tokens that `refuse_unsupported_cache` lets a text have."""
    config = model.config.get_text_config()
    limits = (_window(config), _length_of_short_rotary(config), getattr(config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit is not None), default=2**31)


def _length_of_short_rotary(config: PreTrainedConfig) -> int | None:
    """Up to where the positions of longer texts are turned as they are now; None where that does not change."""
    rotary = getattr(config, "rope_parameters", None) or {}
    original: int | None = rotary.get("original_max_position_embeddings")
    return original if rotary.get("rope_type") == "longrope" else None


def _window(config: PreTrainedConfig) -> int | None:
    """How many tokens the narrowest layer sees; None where all see everything."""
    kinds = getattr(config, "layer_types", None)
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo
        window: int | None = config.window_size
    elif kinds is None or "sliding_attention" in kinds:  # Mistral has a window and names no kinds
        window = getattr(config, "sliding_window", None)
    else:
        window = None
    return window
