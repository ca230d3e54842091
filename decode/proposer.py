"""What proposes tokens: the `Proposer` protocol, and a draft model that fulfils it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from .model import CachedModel
from .native_round import Unwarped
from .sampler import BatchSampler
from .sampling import Distribution

# of text that a draft has not read: it reads more in a pass of its own, whose logits nobody needs
MAX_UNREAD_WITH_LOGITS = 16


@dataclass
class Proposal:
    """What was drafted, one chain of tokens a row.

    Attributes:
        tokens: int64 [rows, drafted].
        num_drafted: int64 [rows], how many of them each row really drafted; the rest means nothing.
        q: what each token was sampled from, [rows, drafted, columns]; None when the sampler needs none.
        score: the target's logits [rows, drafted + 1, vocab] after the last committed token and each drafted one, int64
            [rows, drafted + 1], where drafting has done some of that work; None leaves it to the target.
    """

    tokens: Tensor
    num_drafted: Tensor
    q: Distribution | Unwarped | None
    score: Callable[[Tensor], Tensor] | None = None


class Proposer(Protocol):
    """Proposes continuations for a batch of rows; keeps whatever state it needs between rounds.

    A proposer that shares the target's cache, or reads its hidden states, finds them in the `target` it is started
    with; between a call of `propose` and the next, that cache holds the committed tokens but for the last.
    """

    def start(self, sequences: list[list[int]], target: CachedModel) -> None:
        """Begin a new batch."""

    def propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: BatchSampler) -> Proposal:
        """Draft after `sequences`, the committed tokens of each row, prompt included.

        Args:
            sequences: may have lost drafted tokens, and gained others, since the last call.
            num_drafted: how many tokens each row may draft; fewer are fine.
            sampler: draws tokens; whatever is proposed without it must come with the q it was sampled from.
        """

    def select_rows(self, rows: list[int]) -> None:
        """Go on with these rows only, in this order."""


class DraftModelProposer:
    """Drafts token by token with a small model.

    Args:
        model: the draft, in eval mode; its dtype and device need not be the target's.
        vocab_size: width of the target's logits, whatever the padding of the draft's vocabulary.
        draft_vocab: int64 ids behind the columns of the draft's logits, for a reduced output vocabulary.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, draft_vocab: Tensor | None = None) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.draft_vocab = draft_vocab

    def start(self, sequences: list[list[int]], target: CachedModel) -> None:
        self.device = target.model.device
        self.token_ids = None if self.draft_vocab is None else self.draft_vocab.to(self.device)
        self.columns: Tensor | None = None
        # nothing is read yet: a draft that is never asked costs nothing
        self.cached = self._begin(sequences, target)
        # what each row had when it was last drafted for, and what was drafted then
        self.num_committed = [0] * len(sequences)
        self.drafted = torch.empty(len(sequences), 0, dtype=torch.long, device=self.device)

    def _begin(self, sequences: list[list[int]], target: CachedModel) -> CachedModel:
        return CachedModel(self.model, len(sequences), target.capacity, target.spare)

    def propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: BatchSampler) -> Proposal:
        logits, allowed = self._catch_up(sequences), torch.tensor(num_drafted, device=self.device)
        if self.cached.can_draft and sampler.can_draft_at_once(logits):
            tokens, q = sampler.draft_at_once(self.cached, logits, max(num_drafted), self.token_ids)
            proposal = Proposal(tokens, allowed, q if sampler.needs_q else None)
        else:
            proposal = self._step_by_step(logits, allowed, max(num_drafted), sampler)
        self.num_committed, self.drafted = list(map(len, sequences)), proposal.tokens
        return proposal

    def _step_by_step(self, logits: Tensor, allowed: Tensor, most: int, sampler: BatchSampler) -> Proposal:
        bound = sampler.speculation.entropy_bound
        tokens = torch.empty(len(allowed), most, dtype=torch.long, device=self.device)
        qs = []
        for step in range(most):
            if step:
                logits = self._step(tokens[:, step - 1])
            tokens[:, step], q = sampler.draft(logits, tokens[:, :step], self.token_ids, self._columns(logits))
            if sampler.needs_q:
                qs.append(q)
            if bound is not None:
                unsure = torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1) > bound
                allowed = torch.where(unsure, allowed.clamp_max(step + 1), allowed)
                if bool((allowed <= step + 1).all()):
                    tokens = tokens[:, : step + 1]
                    break
        return Proposal(tokens, allowed, stack(qs) if qs else None)

    def select_rows(self, rows: list[int]) -> None:
        self.cached.select_rows(rows)
        self.num_committed = [self.num_committed[row] for row in rows]
        self.drafted = self.drafted[rows]

    def score(self, tokens: Tensor) -> Tensor:
        """Logits after every token of whole texts, int64 [rows, n] to [rows, n, columns]; no cache involved."""
        logits: Tensor = self.model(input_ids=self._readable(tokens.to(self.model.device)), use_cache=False).logits
        return self._meaningful(logits)

    def _catch_up(self, sequences: list[list[int]]) -> Tensor:
        """Forget rejected tokens, feed what was committed since, and return logits [rows, columns] after the last."""
        known = self._with_room(self._num_known(sequences), list(map(len, sequences)))
        self.cached.rollback(known)
        if max(len(ids) - start for start, ids in zip(known, sequences, strict=True)) > MAX_UNREAD_WITH_LOGITS:
            self._read(sequences)
        pending = [ids[start:] for start, ids in zip(self.cached.lengths, sequences, strict=True)]
        counts = self.num_pending = list(map(len, pending))
        width = max(counts)
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in pending], device=self.model.device)
        logits = self.cached.forward(self._readable(padded), counts)
        last = logits[:, 0] if width == 1 else logits[torch.arange(len(counts)), torch.tensor(counts) - 1]
        return self._meaningful(last).to(self.device)

    def _with_room(self, known: list[int], lengths: list[int]) -> list[int]:
        """Less of rows near the end of the cache, which are fed as many tokens as the row furthest behind."""
        room = self.cached.capacity + self.cached.spare
        while max(known) + (width := max(length - start for length, start in zip(lengths, known, strict=True))) > room:
            known = [min(start, room - width) for start in known]
        return known

    def _read(self, sequences: list[list[int]]) -> None:
        """What is not known of each but for its last token."""
        self.cached.read(self._readable_lists(sequences))

    def _num_known(self, sequences: list[list[int]]) -> list[int]:
        """Of each row, how many of its tokens the cache holds."""
        return self._num_unchanged(self.cached.lengths, sequences)

    def _num_unchanged(self, lengths: list[int], sequences: list[list[int]]) -> list[int]:
        """Of so many tokens that were read of each row, those that are still its own: what was drafted may not be.

        Since then there may have been rounds in which others drafted, or nobody did.
        """
        known = []
        for length, ids, start, drafted in zip(
            lengths, sequences, self.num_committed, self.drafted.tolist(), strict=True
        ):
            end = min(length, len(ids) - 1)
            rejected = (place for place in range(start, end) if ids[place] != drafted[place - start])
            known.append(next(rejected, end))
        return known

    def _step(self, tokens: Tensor) -> Tensor:
        readable = self._readable(tokens.unsqueeze(1).to(self.model.device))
        return self._meaningful(self.cached.forward(readable)[:, 0]).to(self.device)

    def _columns(self, logits: Tensor) -> Tensor | None:
        """The column of each of the target's tokens; None where they are the same."""
        width = logits.shape[-1]
        if self.columns is None and (self.token_ids is not None or width < self.vocab_size):
            ids = torch.arange(width, device=self.device) if self.token_ids is None else self.token_ids
            self.columns = torch.full((self.vocab_size,), width, device=self.device)
            self.columns[ids] = torch.arange(width, device=self.device)
        return self.columns

    def _readable(self, tokens: Tensor) -> Tensor:
        """Replace ids beyond the draft's embeddings: padding of a wider target, drawn once in a blue moon."""
        num_embeddings: int = self.model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        return tokens.clamp_max(num_embeddings - 1)

    def _readable_lists(self, sequences: list[list[int]]) -> list[list[int]]:
        return [self._readable(torch.tensor(ids)).tolist() for ids in sequences]

    def _meaningful(self, logits: Tensor) -> Tensor:
        """Drop padding columns that the target does not have: they are no tokens."""
        return logits if self.draft_vocab is not None else logits[..., : self.vocab_size]


def stack(steps: list[Distribution]) -> Distribution:
    """Distributions [rows, columns] of successive positions as one, [rows, positions, columns] of the widest."""
    width = max(q.probabilities.shape[-1] for q in steps)
    probabilities = torch.stack([pad(q.probabilities, (0, width - q.probabilities.shape[-1])) for q in steps], dim=1)
    ids = steps[0].token_ids
    if ids is None or ids.ndim == 1:
        return Distribution(probabilities, ids)
    no_tokens = torch.arange(-width, 0, device=ids.device).expand(len(ids), -1)
    padded = [
        torch.cat([q.token_ids, no_tokens[:, q.token_ids.shape[-1] :]], dim=1) for q in steps if q.token_ids is not None
    ]
    return Distribution(probabilities, torch.stack(padded, dim=1))
