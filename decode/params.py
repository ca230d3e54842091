"""What a caller asks of a decoder. No text, no model, no torch: configurations are read without waiting for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
Provenance = Literal["accepted", "corrected", "bonus", "plain"]
Verification = Literal["auto", "block", "tokenwise", "seeded"]
# a model of its own; or the target itself: without some sublayers, its first layers, by factors, or in fewer bits
DraftKind = Literal["model", "skip", "exit", "low_rank", "quantised"]
AdapterKind = Literal["mlp", "layer"]
ProposerKind = Literal["draft", "lookup", "cascade"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, in transformers' meaning and order; the two penalties it lacks are as in vLLM.

    Attributes:
        temperature: 0 is greedy: the first argmax.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as probable as the most probable one; 0 keeps all.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that the prompt or the
            answer holds; 1 changes nothing.
        presence_penalty: taken off the logits of tokens that the answer holds.
        frequency_penalty: taken off the logits of tokens for each time the answer holds them.
        logit_bias: added to the logits of these token ids, such as {50: -2.5}.
        bad_words: words that the answer must not hold, each as its tokens alone and after a space; one, or several.
        min_new_tokens: no stop token or stop string ends the text before it has so many tokens.
        max_new_tokens: the text ends after this many tokens at the latest.
        stop: the text ends before the first of these strings; one, or several.
        stop_token_ids: tokens that end the text beside the model's own.
        logprobs: also give the log-probability of each token, in the model's own distribution before any processing,
            and of this many most probable ones; null gives none.
        seed: same seed, same prompt: the same text, which is that of plain decoding, whatever the draft and its
            neighbours do; in bf16 up to near-ties, which passes of different widths round differently. null draws a
            fresh one, from torch's generator.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[str, ...] | str = ()
    min_new_tokens: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        for name in ("bad_words", "stop"):
            words = getattr(self, name)
            words = (words,) if isinstance(words, str) else tuple(words or ())
            if not all(isinstance(word, str) and word for word in words):
                raise ValueError(f"{name} is {words!r}: give non-empty texts")
            object.__setattr__(self, name, words)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        # JSON has no keys but texts
        try:
            biases = {int(token): float(bias) for token, bias in (self.logit_bias or {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"logit_bias is {self.logit_bias}: give numbers by token id, such as {{50: -2.5}}"
            ) from error
        object.__setattr__(self, "logit_bias", biases)
        numbers = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name, number in (
            *((name, getattr(self, name)) for name in numbers),
            *(("logit_bias", b) for b in biases.values()),
        ):
            if number != number:
                raise ValueError(f"{name} is nan: give a number")
        for name in ("top_k", "min_new_tokens", "max_new_tokens", "logprobs", "seed"):
            if not isinstance(getattr(self, name), int | None):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give a whole number")
        # beyond these bounds fp32 logits would overflow
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 1e6:
            raise ValueError(f"temperature is {self.temperature}: use 0 for greedy or a number from 1e-6 to 1e6")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is {self.top_k}: use 0 to keep all tokens or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: use a number above 0 and at most 1 (1 keeps all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: use a number from 0 (keeps all tokens) to 1")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: use a number near 1, which is none")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -100 <= getattr(self, name) <= 100:
                raise ValueError(f"{name} is {getattr(self, name)}: use a number from -100 to 100 (0 is none)")
        for bias in self.logit_bias.values():
            if not -1e4 <= bias <= 1e4 and bias != float("-inf"):
                raise ValueError(f"logit_bias is {bias}: use a number from -1e4 to 1e4, or -inf to forbid a token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: use at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}: use a number from 0 to max_new_tokens, {self.max_new_tokens}"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= 1000:
            raise ValueError(f"logprobs is {self.logprobs}: use a number from 0 to 1000, or null for none")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed is {self.seed}: use 0 or a positive number")

    @property
    def penalises_repeats(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on more than the model: on the text so far, or on what is forbidden."""
        return self.penalises_repeats or bool(self.logit_bias or self.bad_words or self.min_new_tokens)


@dataclass(frozen=True, kw_only=True)
class SpeculationParams:
    """How to speculate. None of it changes the distribution of the text, but for what is named lossy.

    Attributes:
        proposer: what drafts: the draft model; lookup, which continues as the text did where its last tokens stood
            before (in the prompt, the answer or the reference); cascade, lookup where it finds something, and the
            draft elsewhere.
        reference: a text file that lookup also searches.
        num_draft_tokens: draft so many tokens a round; null drafts as many as pay, by what is measured while running.
        max_draft_tokens: the most that null drafts.
        entropy_bound: draft no further in a round after a distribution of the draft with more nats than this.
        never_slower: decode plainly while speculation is measured to be slower, and try again later.
        verification: block accepts the most; tokenwise is the classic; seeded gives the text of plain decoding with
            the same seed; auto is seeded where a seed is given and block elsewhere. Greedy texts need none of them.
            With block, tokenwise and the lossy rules a seed tells the text only together with num_draft_tokens and
            without never_slower: a number of draft tokens that follows the clock is another one next time.
        draft_temperature: of the draft's distributions; null takes the target's.
        lossy_lenience: in (0, 1): accept a drafted token 1 / lenience times as readily. Changes the distribution.
        lossy_typical: in (0, 1): accept what is typical of the target, with this epsilon. Changes the distribution.
    """

    proposer: ProposerKind = "draft"
    reference: str | None = None
    num_draft_tokens: int | None = None
    max_draft_tokens: int = 8
    entropy_bound: float | None = None
    never_slower: bool = True
    verification: Verification = "auto"
    draft_temperature: float | None = None
    lossy_lenience: float | None = None
    lossy_typical: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        for name in ("num_draft_tokens", "max_draft_tokens"):
            number = getattr(self, name)
            if number is not None and not 1 <= number <= 64:
                raise ValueError(f"{name} is {number}: draft 1 to 64 tokens a round")
        if self.entropy_bound is not None and not self.entropy_bound > 0:
            raise ValueError(f"entropy_bound is {self.entropy_bound}: use a positive number of nats")
        if self.reference is not None and self.proposer == "draft":
            raise ValueError("reference: only lookup reads it; use proposer lookup or cascade")
        if self.draft_temperature is not None and not (
            self.draft_temperature == 0 or 1e-6 <= self.draft_temperature <= 1e6
        ):
            raise ValueError(f"draft_temperature is {self.draft_temperature}: use 0 or a number from 1e-6 to 1e6")
        for name in ("lossy_lenience", "lossy_typical"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name} is {value}: use a number between 0 and 1")
        if self.lossy is not None and self.verification != "auto":
            raise ValueError(f"verification is {self.verification}: a lossy rule takes its place; leave it at auto")
        if self.lossy_lenience is not None and self.lossy_typical is not None:
            raise ValueError("lossy_lenience: given together with lossy_typical; give one of them")

    @property
    def lossy(self) -> str | None:
        """The lossy rule in use and its strength, for results to carry; None when the text is the target's."""
        for name in ("lossy_lenience", "lossy_typical"):
            if (value := getattr(self, name)) is not None:
                return f"{name.removeprefix('lossy_')} {value:g}"
        return None
