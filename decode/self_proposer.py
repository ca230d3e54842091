"""Drafts with a shadow of the target, which reads and writes the target's own cache.

The target's pass writes over what was drafted. So there is no second cache, and what a draft has not read is no worry
of its, but for an adapter with an attention of its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cache import BufferLayer, KVCache
from .llama import LlamaForward, Sublayers
from .model import CachedModel, Forward
from .native import can_multiply
from .proposer import DraftModelProposer, Proposal
from .sampler import BatchSampler
from .self_draft import SelfDraft, self_draft
from .shadow import as_it_is, places_of, shadow, with_forward


class SelfDraftProposer(DraftModelProposer):
    """Drafts with a shadow of the target, in the target's cache.

    Args:
        target: in eval mode.
        spec: what of it drafts.
        draft_vocab: int64 ids of a reduced output vocabulary.
        tensors: those of the pair.

    Raises:
        ValueError: the target has not what is left out.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        spec: SelfDraft,
        draft_vocab: Tensor | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        model = self_draft(target, spec, draft_vocab, tensors)
        super().__init__(model, target.get_output_embeddings().out_features, draft_vocab)
        self.spec = spec
        self.fast_of: Forward | None = None  # the target's fast pass, of which ours is a part
        self.fast: Forward | None = None

    def propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: BatchSampler) -> Proposal:
        """Draft, and forget what was read of it: the target's own pass is to come."""
        known = self.cached.lengths
        proposal = super().propose(sequences, num_drafted, sampler)
        self.cached.rollback(known)
        return proposal

    def select_rows(self, rows: list[int]) -> None:
        """Go on with these rows; the target has told the cache."""
        self.num_committed = [self.num_committed[row] for row in rows]
        self.drafted = self.drafted[rows]

    def _begin(self, sequences: list[list[int]], target: CachedModel) -> CachedModel:
        if target.fast is not self.fast_of:
            self.fast_of = target.fast
            self.fast = self._part(target.fast) if isinstance(target.fast, LlamaForward) else None
        return target.through(self.model, self.fast)

    def _part(self, whole: LlamaForward) -> Forward | None:
        """Of the target's fast pass, what drafts; None where that can only be transformers'."""
        if self._has_own_layers and not (whole.native and can_multiply(self.model)):
            return None
        return whole.part(_uses(self.spec, len(whole.uses)), head=self._own_head(), layers=self._own_layers())

    def _own_head(self) -> nn.Linear | None:
        has_own = self.draft_vocab is not None or self.spec.bits is not None
        return self.model.get_output_embeddings() if has_own else None

    def _own_layers(self) -> Mapping[int, nn.Module] | None:
        decoder: Any = self.model.get_decoder()
        return dict(enumerate(decoder.layers)) if self._has_own_layers else None

    @property
    def _has_own_layers(self) -> bool:
        return self.spec.bits is not None or self.spec.low_rank

    def _num_known(self, sequences: list[list[int]]) -> list[int]:
        """All but the last token of each."""
        return self.cached.lengths


class ExitProposer(SelfDraftProposer):
    """Drafts with the first layers, whose work on drafted tokens the target's pass does not do again.

    An adapter that follows them may have an attention: then its keys and values stand in the target's cache behind
    those of the target's layers, and are the only ones that committed tokens may lack.

    Args:
        target, draft_vocab, tensors: as above.
        spec: with num_layers.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        spec: SelfDraft,
        draft_vocab: Tensor | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(target, spec, draft_vocab, tensors)
        assert spec.num_layers is not None
        places = places_of(target)
        self.num_target_layers = places.num_layers
        first = [f"{places.layers}.{layer}" for layer in range(spec.num_layers)]
        last: Any = self.model.get_submodule(first[-1])

        def leave(*args: Any, **kwargs: Any) -> Tensor:
            left: Tensor = last(*args, **kwargs)
            self.left = left
            return left

        self.left = torch.empty(0)  # what last left the first layers, [rows, n, hidden]
        self.model = shadow(self.model, {first[-1]: with_forward(last, leave)})
        # the whole target, where that is known
        passing = {name: with_forward(target.get_submodule(name), as_it_is) for name in first}
        passing[first[-1]].forward = lambda *args, **kwargs: self.left
        self.rest = shadow(target, passing)
        self.fast_rest: Forward | None = None

    def start(self, sequences: list[list[int]], target: CachedModel) -> None:
        """Begin a new batch."""
        super().start(sequences, target)
        self.num_read = [0] * len(sequences)  # by an adapter's attention

    def propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: BatchSampler) -> Proposal:
        """Draft, and keep what left the first layers."""
        self.states: list[Tensor] = []
        known = self.cached.lengths
        proposal = super().propose(sequences, num_drafted, sampler)
        self.num_read = [length + proposal.tokens.shape[1] for length in known]
        proposal.score = self._score
        return proposal

    def select_rows(self, rows: list[int]) -> None:
        """Go on with these rows; the target has told the cache."""
        super().select_rows(rows)
        self.num_read = [self.num_read[row] for row in rows]

    def _begin(self, sequences: list[list[int]], target: CachedModel) -> CachedModel:
        cached = super()._begin(sequences, target)
        self.cached_rest = target.through(self.rest, self.fast_rest if self.fast else None)
        if self.spec.adapter == "layer" and len(target.cache.layers) == self.num_target_layers:
            target.cache.layers.append(BufferLayer(target.cache))
            target.cache.addresses = None
        return cached

    def _part(self, whole: LlamaForward) -> Forward | None:
        assert self.spec.num_layers is not None
        if self.spec.adapter and not (whole.native and can_multiply(self.model)):
            return None
        first = whole.part(_uses(self.spec, len(whole.uses)), ends=False)
        end = whole.part([], head=self._own_head())
        if self.spec.adapter is not None:
            decoder: Any = self.model.get_decoder()
            # without an attention it has no place in the cache, and any will do
            has_attention = self.spec.adapter == "layer"
            use = Sublayers(self.num_target_layers if has_attention else 0, attention=has_attention)
            end = whole.part([use], head=self._own_head(), layers={use.layer: decoder.layers[self.spec.num_layers]})
        rest = whole.part(whole.uses[self.spec.num_layers :])

        def draft(
            tokens: Tensor, positions: Tensor, cache: KVCache, with_logits: bool
        ) -> tuple[Tensor | None, Tensor | None]:
            left, _ = first(tokens, positions, cache, with_logits)
            assert left is not None
            self.left = left
            return end(tokens, positions, cache, with_logits, left)

        self.fast_rest = lambda tokens, positions, cache, with_logits: rest(
            tokens, positions, cache, with_logits, self.left
        )
        return draft

    def _catch_up(self, sequences: list[list[int]]) -> Tensor:
        logits = super()._catch_up(sequences)
        # of each row's last committed token alone, which came behind others if an adapter had not read them
        rows, counts = torch.arange(len(sequences)), torch.tensor(self.num_pending)
        self.states.append(self.left[rows, counts - 1].unsqueeze(1))
        return logits

    def _step(self, tokens: Tensor) -> Tensor:
        logits = super()._step(tokens)
        self.states.append(self.left)
        return logits

    def _num_known(self, sequences: list[list[int]]) -> list[int]:
        """All but the last token of each, as far as an adapter's attention has read them."""
        if self.spec.adapter != "layer":
            return self.cached.lengths
        return self._num_unchanged(self.num_read, sequences)

    def _read(self, sequences: list[list[int]]) -> None:
        # not at once, which would begin the target's cache anew
        self.cached.read(self._readable_lists(sequences), at_once=False)

    def _score(self, tokens: Tensor) -> Tensor:
        """The target's logits after each token, int64 [rows, n]; all but the last were drafted after."""
        known = self.cached.lengths
        self.cached.cache.lengths = [length + tokens.shape[1] - 1 for length in known]
        self.cached.feed(tokens[:, -1:])
        self.cached.rollback(known)
        self.left = torch.cat([*self.states, self.left], dim=1)
        self.num_read = [length + 1 for length in self.num_read]  # the last drafted token too
        return self.cached_rest.forward(tokens)


def self_draft_proposer(
    target: PreTrainedModel,
    spec: SelfDraft,
    draft_vocab: Tensor | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> SelfDraftProposer:
    """What drafts as `spec` says.

    Raises:
        ValueError: the target has not what is left out.
    """
    return (ExitProposer if spec.keeps_early_states else SelfDraftProposer)(target, spec, draft_vocab, tensors)


def _uses(spec: SelfDraft, num_layers: int) -> list[Sublayers]:
    """What of which layers drafts."""
    each = [
        Sublayers(layer, layer not in spec.skipped_attention, layer not in spec.skipped_mlp)
        for layer in range(num_layers if spec.num_layers is None else spec.num_layers)
    ]
    return [use for use in each if use.attention or use.mlp]
