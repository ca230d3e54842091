"""A causal language model with its cache: feed tokens, get logits, forget tokens."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .cache import KVCache


class CachedModel:
    """One model serving one batch of rows through a `KVCache`.

    Args:
        model: any decoder-only model of transformers, in eval mode.
        batch_size: number of rows.
        capacity: most tokens a row will hold, rejected drafts included.

    Raises:
        ValueError: see `refuse_unsupported_cache`.
    """

    def __init__(self, model: PreTrainedModel, batch_size: int, capacity: int) -> None:
        refuse_unsupported_cache(model, capacity)
        self.model = model
        self.cache = KVCache(model.config.get_text_config().num_hidden_layers, batch_size, capacity, model.device)
        self.num_passes = 0

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    def forward(self, tokens: Tensor, counts: list[int] | None = None, **model_kwargs: Any) -> Tensor:
        """Feed tokens and return logits.

        Args:
            tokens: int64 [batch, n]; row b's first counts[b] tokens are real, the rest is padding whose logits
                mean nothing and which the cache forgets at once.
            counts: real tokens per row; all n by default.

        Returns:
            logits in the model's dtype, [batch, n, vocab].
        """
        num_tokens = tokens.shape[1]
        positions = self.cache.write_at(num_tokens)
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._attention_mask(),
            cache=self.cache,
            use_cache=True,
            **model_kwargs,
        )
        counts = counts or [num_tokens] * len(tokens)
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, counts, strict=True)]
        self.num_passes += 1
        logits: Tensor = output.logits
        return logits

    def prefill(self, prompts: list[list[int]]) -> None:
        """Feed every prompt but for its last token, which is the first to be asked for logits."""
        counts = [len(prompt) - 1 for prompt in prompts]
        if width := max(counts):
            tokens = torch.zeros(len(prompts), width, dtype=torch.long)
            for row, prompt in enumerate(prompts):
                tokens[row, : counts[row]] = torch.tensor(prompt[:-1])
            self.forward(tokens.to(self.model.device), counts, logits_to_keep=1)

    def rollback(self, lengths: list[int]) -> None:
        self.cache.rollback(lengths)

    def select_rows(self, rows: list[int]) -> None:
        self.cache.select_rows(rows)

    def _attention_mask(self) -> Tensor:
        mask = self.cache.attention_mask()
        if self.model.config.get_text_config()._attn_implementation != "eager":
            return mask
        # eager attention adds its mask to the scores; a bool one would hide nothing
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros_like(mask, dtype=self.model.dtype).masked_fill_(~mask, lowest)


class HeadInput:
    """Context manager that keeps what enters the output head: the final hidden states of the latest pass.

    `states` is [batch, n, hidden], in the model's dtype.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.head: nn.Module = model.get_output_embeddings()
        self.states: Tensor

    def _keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.states = args[0]

    def __enter__(self) -> "HeadInput":
        self.handle = self.head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(self, *exception: object) -> None:
        self.handle.remove()


def reduce_output_vocabulary(model: PreTrainedModel, token_ids: Tensor) -> None:
    """Let the head compute logits for these token ids only: column i of its output is token_ids[i].

    A view of the full checkpoint, taken after loading; the rows are copied, so tied embeddings stay whole.

    Raises:
        ValueError: an id that the head does not have.
    """
    head = model.get_output_embeddings()
    if (largest := int(token_ids.max())) >= head.out_features:
        raise ValueError(f"draft vocabulary: id {largest} is beyond the {head.out_features} of the draft's head")
    reduced = nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None, device="meta")
    reduced.weight = nn.Parameter(head.weight.detach()[token_ids].clone(), requires_grad=head.weight.requires_grad)
    if head.bias is not None:
        reduced.bias = nn.Parameter(head.bias.detach()[token_ids].clone(), requires_grad=head.bias.requires_grad)
    model.set_output_embeddings(reduced)


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
    rotary = getattr(config, "rope_parameters", None) or {}
    original = rotary.get("original_max_position_embeddings")
    if rotary.get("rope_type") == "longrope" and original is not None and capacity > original:
        raise ValueError(
            f"model {config.model_type!r} turns its positions differently beyond {original} tokens, which changes "
            f"what is cached: keep prompt + new tokens at or below {original} (asked for {capacity})"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and capacity > limit:
        raise ValueError(
            f"prompt + max_new_tokens + num_draft_tokens is {capacity} tokens, "
            f"longer than the context of {limit} of model {config.model_type!r}: shorten one of the three"
        )


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
