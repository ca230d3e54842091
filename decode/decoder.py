"""Text in, text out: the decoder that people use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .model import reduce_output_vocabulary, refuse_unsupported_cache
from .pair import (
    Dtype,
    Pair,
    describe_target,
    load_draft_vocab,
    load_model,
    load_tokenizer,
    refuse_other_tokenizer,
    stop_token_ids,
)
from .params import Completion, FinishReason, Provenance, SamplingParams
from .plain import PlainDecoder
from .prompts import Prompt, as_messages, encode
from .proposer import DraftModelProposer
from .speculative import SpeculativeEngine, Trace

Chat = str | Sequence[dict[str, str]]


@dataclass(frozen=True)
class Generation:
    """A finished text: its ids (stop token included), where each came from, why it ended, and what it took."""

    text: str
    ids: list[int]
    provenance: list[Provenance]
    finish_reason: FinishReason
    trace: Trace


@dataclass(frozen=True)
class Piece:
    """The text that one token added to a stream, and where the token came from."""

    text: str
    provenance: Provenance


class SpeculativeDecoder:
    """A target and its draft, ready to generate.

    Attributes:
        engine: the speculative loop over token ids.
        plain: the same target without a draft.
        target_description: as in `pair.json`; empty when the decoder was made of models in memory.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: Tokenizer,
        proposer: DraftModelProposer,
        num_draft_tokens: int,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.proposer = proposer
        stop_ids = stop_token_ids(target, tokenizer)
        self.engine = SpeculativeEngine(target, proposer, num_draft_tokens, stop_ids)
        self.plain = PlainDecoder(target, stop_ids)
        self.target_description: dict[str, str | None] = {}

    @classmethod
    def from_pretrained(
        cls, target: str | None, draft: str, *, num_draft_tokens: int | None = None, dtype: Dtype = "auto"
    ) -> "SpeculativeDecoder":
        """Load a target and a draft.

        Args:
            target: hub name or folder; None takes the one that the pair names.
            draft: a pair's folder, or the hub name or folder of any model with the target's tokenizer.
            num_draft_tokens: tokens proposed a round; None takes the pair's, or 3.
            dtype: of both models; "auto" keeps each checkpoint's.

        Raises:
            ValueError: a model is missing, or the tokenizers differ.
        """
        folder = Path(draft)
        pair = Pair.load(folder) if (folder / "pair.json").is_file() else None
        if target is None:
            target = (pair or Pair.load(folder)).target_id()
        draft_name = str(folder / "draft") if pair else draft
        tokenizer = load_tokenizer(target, "target")
        refuse_other_tokenizer(tokenizer, load_tokenizer(draft_name, "draft"), target, draft_name)
        target_model = load_model(target, dtype, "target")
        draft_model = load_model(draft_name, dtype, "draft")
        draft_vocab = load_draft_vocab(folder) if pair else None
        if draft_vocab is not None:
            draft_vocab = draft_vocab.to(draft_model.device)
            reduce_output_vocabulary(draft_model, draft_vocab)
        proposer = DraftModelProposer(draft_model, target_model.get_output_embeddings().out_features, draft_vocab)
        if num_draft_tokens is None:
            num_draft_tokens = pair.num_draft_tokens if pair else 3
        decoder = cls(target_model, tokenizer, proposer, num_draft_tokens)
        decoder.target_description = describe_target(target, tokenizer)
        return decoder

    def encode(self, prompt: Chat) -> list[int]:
        """Token ids of a prompt (a user's message, or a list of chat messages) through the chat template."""
        return encode(self.tokenizer, as_messages(prompt) if isinstance(prompt, str) else tuple(prompt))

    def encode_all(self, prompts: list[Prompt], params: SamplingParams) -> list[list[int]]:
        """Token ids of many prompts, every one of which fits into both contexts with its answer.

        Raises:
            ValueError: names the first that does not.
        """
        encoded = []
        for prompt in prompts:
            try:
                ids = encode(self.tokenizer, prompt.messages)
                for model in (self.target, self.proposer.model):
                    refuse_unsupported_cache(model, self.engine.capacity([ids], params))
            except ValueError as error:
                raise ValueError(f"prompt {prompt.id}: {error}") from error
            encoded.append(ids)
        return encoded

    def generate(self, prompts: Chat | list[str], params: SamplingParams | None = None) -> list[Generation]:
        """Answer prompts, all in one batch.

        Args:
            prompts: one prompt, a list of them, or one conversation as a list of messages.
            params: greedy by default.
        """
        batch = prompts if isinstance(prompts, list) and all(isinstance(item, str) for item in prompts) else [prompts]
        if not batch:
            return []
        encoded = [self.encode(prompt) for prompt in batch]  # type: ignore[arg-type]
        completions, traces = self.engine.generate_ids(encoded, params or SamplingParams())
        return [self._generation(completion, trace) for completion, trace in zip(completions, traces, strict=True)]

    def stream(self, prompt: Chat, params: SamplingParams | None = None, trace: Trace | None = None) -> Iterator[Piece]:
        """Answer one prompt, token by token: what each adds to the text, as soon as its round is over.

        Args:
            prompt: a user's message, or a conversation as a list of messages.
            params: greedy by default.
            trace: filled in place, for who wants to know what it took.
        """
        completion, detokenizer, shown = Completion(), Detokenizer(self.tokenizer), 0
        traces = [Trace() if trace is None else trace]
        for _ in self.engine.rounds([self.encode(prompt)], params or SamplingParams(), [completion], traces):
            for token, provenance in zip(completion.ids[shown:], completion.provenance[shown:], strict=True):
                yield Piece(detokenizer.push(token), provenance)
            shown = len(completion.ids)
        if rest := detokenizer.flush():
            yield Piece(rest, completion.provenance[-1])

    def _generation(self, completion: Completion, trace: Trace) -> Generation:
        text = self.tokenizer.decode(completion.ids, skip_special_tokens=True)
        assert completion.finish_reason is not None and isinstance(text, str)
        return Generation(text, completion.ids, completion.provenance, completion.finish_reason, trace)


class Detokenizer:
    """Turns a stream of ids into text that concatenates to the decoded whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""

    def push(self, token: int) -> str:
        """The text that this token makes certain; empty while a character is incomplete."""
        self.ids.append(token)
        text = self._decoded()
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """What is left at the end, incomplete characters included."""
        return self._show(self._decoded())

    def _decoded(self) -> str:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def _show(self, text: str) -> str:
        new, self.shown = text[len(self.shown) :], text
        return new
