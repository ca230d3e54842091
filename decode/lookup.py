"""Proposers that copy: what followed the last tokens where they stood before, alone or in front of a draft model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .model import CachedModel
from .proposer import Proposal, Proposer
from .sampler import BatchSampler
from .sampling import Distribution

MAX_NGRAM, MIN_NGRAM = 4, 2


class NgramIndex:
    """Where each n-gram of a growing text was followed by something last, for n from MIN_NGRAM to MAX_NGRAM."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is known once something follows it: never the one that ends the text."""
        for token in tokens:
            end = len(self.tokens)
            for size in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self.ends[tuple(self.tokens[end - size :])] = end
            self.tokens.append(token)

    def continuation(self, context: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the longest n-gram that ends the context; empty when none is known."""
        for size in range(min(MAX_NGRAM, len(context)), MIN_NGRAM - 1, -1):
            end = self.ends.get(tuple(context[len(context) - size :]))
            if end is not None:
                return self.tokens[end : end + most]
        return []


class LookupProposer:
    """Prompt lookup (Saxena 2023): proposes what followed the row's last tokens earlier in the row, or in a reference.

    Its q has all mass on the proposed token, so a row without a match proposes nothing.

    Args:
        reference: token ids of a text that is also searched, where the row itself has no match.
    """

    def __init__(self, reference: Sequence[int] = ()) -> None:
        self.reference = NgramIndex(reference)

    def start(self, sequences: list[list[int]], target: CachedModel) -> None:
        self.device = target.model.device
        self.indices = [NgramIndex() for _ in sequences]

    def propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: BatchSampler) -> Proposal:
        found = self.continuations(sequences, num_drafted)
        most = max(map(len, found))
        tokens = torch.tensor([ids + [0] * (most - len(ids)) for ids in found], device=self.device).long()
        counts = torch.tensor([len(ids) for ids in found], device=self.device)
        tokens = tokens.reshape(len(found), most)
        q = Distribution(torch.ones(*tokens.shape, 1, device=self.device), tokens.unsqueeze(2))
        return Proposal(tokens, counts, q)

    def select_rows(self, rows: list[int]) -> None:
        self.indices = [self.indices[row] for row in rows]

    def continuations(self, sequences: list[list[int]], num_drafted: list[int]) -> list[list[int]]:
        """What each row's text, or the reference, has after the row's last tokens; empty without a match."""
        found = []
        for index, sequence, most in zip(self.indices, sequences, num_drafted, strict=True):
            index.extend(sequence[len(index.tokens) :])
            found.append(index.continuation(sequence, most) or self.reference.continuation(sequence, most))
        return found


class CascadeProposer:
    """Lookup where it has a match, another proposer elsewhere.

    Args:
        lookup: asked first.
        draft: asked when a row has no match; then for all rows, of which those with a match keep theirs.
    """

    def __init__(self, lookup: LookupProposer, draft: Proposer) -> None:
        self.lookup = lookup
        self.draft = draft

    def start(self, sequences: list[list[int]], target: CachedModel) -> None:
        self.vocab_size = target.vocab_size
        self.lookup.start(sequences, target)
        self.draft.start(sequences, target)

    def propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: BatchSampler) -> Proposal:
        found = self.lookup.propose(sequences, num_drafted, sampler)
        matched = found.num_drafted > 0
        if bool(matched.all()):
            return found
        drafted = self.draft.propose(sequences, num_drafted, sampler)
        if not bool(matched.any()):
            return drafted
        return self._row_by_row(matched, found, drafted)

    def select_rows(self, rows: list[int]) -> None:
        self.lookup.select_rows(rows)
        self.draft.select_rows(rows)

    def _row_by_row(self, matched: Tensor, found: Proposal, drafted: Proposal) -> Proposal:
        """One proposal or the other."""
        width = max(found.tokens.shape[1], drafted.tokens.shape[1])
        tokens = torch.where(matched.unsqueeze(1), _widened(found.tokens, width), _widened(drafted.tokens, width))
        num_drafted = torch.where(matched, found.num_drafted, drafted.num_drafted)
        if drafted.q is None:
            return Proposal(tokens, num_drafted, None)
        q = torch.zeros(*tokens.shape, self.vocab_size, device=tokens.device)
        q[:, : drafted.tokens.shape[1]] = drafted.q.dense(self.vocab_size)
        q[matched] = torch.nn.functional.one_hot(tokens[matched], self.vocab_size).float()
        return Proposal(tokens, num_drafted, Distribution(q))


def _widened(tokens: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
