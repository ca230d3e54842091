"""What a caller asks of a decoder, and what comes back. Token ids only; no text, no model."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # configurations are read, and --help answered, without waiting for torch
    from torch import Tensor

FinishReason = Literal["stop", "length"]
Provenance = Literal["accepted", "corrected", "bonus", "plain"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, in transformers' meaning and order.

    Attributes:
        temperature: 0 is greedy: the first argmax.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
        max_new_tokens: the text ends after this many tokens at the latest.
        seed: same seed, same prompts, same machine: same text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        # logits divided by less would overflow
        if self.temperature != 0 and not 1e-6 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: use 0 for greedy or a number of at least 1e-6")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: use 0 to keep all tokens or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: use a number above 0 and at most 1 (1 keeps all tokens)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: use at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: use 0 or a positive number")


@dataclass
class Completion:
    """What one prompt was continued with.

    Attributes:
        ids: the new tokens, the stop token included when there is one.
        provenance: where each of them came from.
        finish_reason: "stop" for a stop token, "length" for max_new_tokens.
        hidden_states: [len(ids), hidden], what entered the output head for each token, when asked for.
        log_normalizers: fp32 [len(ids)], logsumexp of the unprocessed logits of each token, when asked for.
    """

    ids: list[int] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    hidden_states: "Tensor | None" = None
    log_normalizers: "Tensor | None" = None

    def extend(
        self, tokens: list[int], provenance: list[Provenance], stop_ids: frozenset[int], max_new_tokens: int
    ) -> int:
        """Append tokens up to the end of the text, wherever in the block it falls; return how many were kept."""
        for kept, (token, origin) in enumerate(zip(tokens, provenance, strict=True), start=1):
            self.ids.append(token)
            self.provenance.append(origin)
            if token in stop_ids:
                self.finish_reason = "stop"
            elif len(self.ids) == max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return kept
        return len(tokens)
