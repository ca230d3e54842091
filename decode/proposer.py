"""What proposes tokens: the `Proposer` protocol, and a draft model that fulfils it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .model import CachedModel
from .sampling import sample

ProcessLogits = Callable[[Tensor], Tensor]


@dataclass
class Proposal:
    """Drafted tokens, int64 [rows, drafted], and the q each was sampled from, fp32 [rows, drafted, vocab]."""

    tokens: Tensor
    probabilities: Tensor


class Proposer(Protocol):
    """Proposes continuations for a batch of rows; keeps whatever state it needs between rounds."""

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        """Begin a new batch whose rows will hold up to `capacity` tokens."""

    def propose(self, sequences: list[list[int]], process: ProcessLogits, uniforms: Tensor) -> Proposal:
        """Draft after `sequences`, the committed tokens of each row, prompt included.

        Args:
            sequences: may have lost drafted tokens, and gained others, since the last call.
            process: logits [rows, vocab] to the distribution to sample from.
            uniforms: fp32 [rows, drafted]; its width is how many tokens to draft.
        """

    def select_rows(self, rows: list[int]) -> None:
        """Go on with these rows only, in this order."""


class DraftModelProposer:
    """Drafts token by token with a small model.

    Args:
        model: the draft, in eval mode.
        vocab_size: width of the target's logits; q gets the same, whatever the padding of the draft's vocabulary.
        draft_vocab: int64 ids behind the columns of the draft's logits, for a reduced output vocabulary.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, draft_vocab: Tensor | None = None) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.draft_vocab = draft_vocab

    def start(self, prompts: list[list[int]], capacity: int) -> None:
        self.cached = CachedModel(self.model, len(prompts), capacity)
        self.cached.prefill(prompts)

    def propose(self, sequences: list[list[int]], process: ProcessLogits, uniforms: Tensor) -> Proposal:
        num_drafted = uniforms.shape[1]
        tokens = torch.empty(len(sequences), num_drafted, dtype=torch.long, device=uniforms.device)
        probabilities = torch.zeros(len(sequences), num_drafted, self.vocab_size, device=uniforms.device)
        for step in range(num_drafted):
            logits = self._catch_up(sequences) if step == 0 else self._step(tokens[:, step - 1])
            q = process(logits)
            columns = sample(q, uniforms[:, step])
            if self.draft_vocab is None:
                tokens[:, step] = columns
                probabilities[:, step, : q.shape[1]] = q
            else:
                tokens[:, step] = self.draft_vocab[columns]
                probabilities[:, step, self.draft_vocab] = q
        return Proposal(tokens, probabilities)

    def select_rows(self, rows: list[int]) -> None:
        self.cached.select_rows(rows)

    def score(self, tokens: Tensor) -> Tensor:
        """Logits after every token of whole texts, int64 [rows, n] to [rows, n, columns]; no cache involved."""
        logits: Tensor = self.model(input_ids=self._readable(tokens.to(self.model.device)), use_cache=False).logits
        return self._meaningful(logits)

    def _catch_up(self, sequences: list[list[int]]) -> Tensor:
        """Forget rejected tokens, feed what was committed since, and return logits [rows, vocab] after the last."""
        # the last committed token was chosen by the target: the cache may hold a rejected one in its place
        known = [min(length, len(ids) - 1) for length, ids in zip(self.cached.lengths, sequences, strict=True)]
        self.cached.rollback(known)
        pending = [ids[start:] for start, ids in zip(known, sequences, strict=True)]
        counts = list(map(len, pending))
        width = max(counts)
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in pending], device=self.model.device)
        logits = self.cached.forward(self._readable(padded), counts)
        return self._meaningful(logits[torch.arange(len(counts)), torch.tensor(counts) - 1])

    def _step(self, tokens: Tensor) -> Tensor:
        return self._meaningful(self.cached.forward(tokens.unsqueeze(1).to(self.model.device))[:, 0])

    def _readable(self, tokens: Tensor) -> Tensor:
        """Replace ids beyond the draft's embeddings: padding of a wider target, drawn once in a blue moon."""
        num_embeddings: int = self.model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        return tokens.clamp_max(num_embeddings - 1)

    def _meaningful(self, logits: Tensor) -> Tensor:
        """Drop padding columns that the target does not have: they are no tokens."""
        return logits if self.draft_vocab is not None else logits[..., : self.vocab_size]
