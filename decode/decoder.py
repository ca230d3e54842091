"""Text in, text out: the decoder that people use."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .completion import Completion, Logprobs
from .head import reduce_output_vocabulary
from .llama import leave_to_transformers
from .lookup import CascadeProposer, LookupProposer
from .model import refuse_unsupported_cache
from .pair import (
    Dtype,
    Pair,
    describe_target,
    load_draft_vocab,
    load_model,
    load_tensors,
    load_tokenizer,
    refuse_other_target,
    refuse_other_tokenizer,
    stop_token_ids,
)
from .params import FinishReason, Provenance, SamplingParams, SpeculationParams
from .plain import PlainDecoder
from .prompts import Prompt, as_messages, encode, encode_raw
from .proposer import DraftModelProposer, Proposer
from .self_draft import SelfDraft
from .self_proposer import self_draft_proposer
from .speculative import SpeculativeEngine
from .trace import Trace

logger = logging.getLogger(__name__)

Chat = str | Sequence[dict[str, str]]


@dataclass(frozen=True)
class Generation:
    """A finished text and what it took.

    Attributes:
        text: up to the stop token or stop string, neither of which it holds.
        ids: its tokens; the stop token, or the one that completed the stop string, is the last.
        provenance: where each of them came from.
        finish_reason: "stop" for a stop token or stop string, "length" for max_new_tokens.
        stop_reason: the stop token's id, or the stop string.
        logprobs: of each token, when asked for; empty otherwise.
        trace: counts, acceptance by position and seconds.
        lossy: the lossy rule in use and its strength; None when the text follows the target's distribution.
    """

    text: str
    ids: list[int]
    provenance: list[Provenance]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[Logprobs]
    trace: Trace
    lossy: str | None = None


@dataclass(frozen=True)
class Piece:
    """One token of a stream: the text that it added (none where it only began a character) and where it came from."""

    text: str
    provenance: Provenance
    token: int
    logprobs: Logprobs | None = None


class SpeculativeDecoder:
    """A target and what drafts for it, ready to generate.

    Args:
        target: a decoder-only model in eval mode.
        tokenizer: the target's.
        draft: the draft model with its vocabulary; None where lookup alone drafts.
        speculation: how to draft and verify.
        betas: acceptance at each position of a round, as far as it is known beforehand.
        first_num_draft_tokens: tokens to draft a round before costs are known.

    Several streams may take turns; a decoder is not for several threads at once.

    Attributes:
        engine: the speculative loop over token ids.
        plain: the same target without a draft.
        target_description: as in `pair.json`; empty when the decoder was made of models in memory.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: Tokenizer,
        draft: DraftModelProposer | None = None,
        speculation: SpeculationParams | None = None,
        betas: Sequence[float] = (),
        first_num_draft_tokens: int = 3,
    ) -> None:
        speculation = speculation or SpeculationParams()
        self.target = target
        self.tokenizer = tokenizer
        self.draft = draft
        stop_ids = stop_token_ids(target, tokenizer)
        proposer = _proposer(speculation, draft, tokenizer)
        self.engine = SpeculativeEngine(
            target, proposer, speculation, stop_ids, tokenizer, betas, first_num_draft_tokens
        )
        self.plain = PlainDecoder(target, stop_ids, tokenizer)
        self.target_description: dict[str, str | None] = {}

    @classmethod
    def from_pretrained(
        cls,
        target: str | None,
        draft: str | None = None,
        speculation: SpeculationParams | None = None,
        *,
        dtype: Dtype = "auto",
        draft_dtype: Dtype | None = None,
        draft_device: str | None = None,
        tuned: bool = True,
    ) -> "SpeculativeDecoder":
        """Load a target and a draft.

        Args:
            target: hub name or folder; None takes the one that the pair names.
            draft: a pair's folder, or the hub name or folder of any model with the target's tokenizer; None where
                lookup alone drafts.
            speculation: how to draft and verify.
            dtype: of both models; "auto" keeps each checkpoint's.
            draft_dtype: the draft's, when it is another.
            draft_device: the draft's, when it is not the target's, such as "cpu".
            tuned: pass through models in faster ways than transformers' own where there are such.

        Raises:
            ValueError: a model is missing, or the tokenizers differ.
        """
        speculation = speculation or SpeculationParams()
        if draft is None and speculation.proposer != "lookup":
            raise ValueError(f"proposer: {speculation.proposer} needs a draft; give a pair, or use lookup")
        _reference_text(speculation)  # refuse it before models are loaded
        folder = Path(draft) if draft is not None else None
        pair = Pair.load(folder) if folder and (folder / "pair.json").is_file() else None
        if target is None:
            if folder is None:
                raise ValueError("target: none given, and no pair that names one")
            target = (pair or Pair.load(folder)).target_id()
        tokenizer = load_tokenizer(target, "target")
        proposer: DraftModelProposer | None = None
        if folder is None or draft is None:
            target_model = load_model(target, dtype, "target")
        elif pair and pair.draft_kind != "model":
            for name, value in {"draft_dtype": draft_dtype, "draft_device": draft_device}.items():
                if value is not None:
                    raise ValueError(f"{name}: the target of pair {draft} drafts for itself, as it is; leave it out")
            # a config's hash changes with the release of transformers; what the draft needs of it is checked below
            refuse_other_target(pair.target, describe_target(target, tokenizer), f"pair {draft}", ("tokenizer_sha256",))
            target_model = load_model(target, dtype, "target")
            draft_vocab = load_draft_vocab(folder)
            spec = SelfDraft.of(pair.self_draft)
            proposer = self_draft_proposer(target_model, spec, draft_vocab, load_tensors(folder))
        else:
            draft_name = str(folder / "draft") if pair else draft
            refuse_other_tokenizer(tokenizer, load_tokenizer(draft_name, "draft"), target, draft_name)
            target_model = load_model(target, dtype, "target")
            draft_model = load_model(draft_name, draft_dtype or dtype, "draft", draft_device)
            _share_embeddings(draft_model, target_model)
            draft_vocab = load_draft_vocab(folder) if pair else None
            if draft_vocab is not None:
                draft_vocab = draft_vocab.to(draft_model.device)
                reduce_output_vocabulary(draft_model, draft_vocab)
            proposer = DraftModelProposer(draft_model, target_model.get_output_embeddings().out_features, draft_vocab)
        if not tuned:
            for model in (target_model, *([proposer.model] if proposer else [])):
                leave_to_transformers(model)
        known = (pair.measured.get("betas", ()), pair.num_draft_tokens) if pair else ()
        decoder = cls(target_model, tokenizer, proposer, speculation, *known)
        decoder.target_description = describe_target(target, tokenizer)
        return decoder

    def encode(self, prompt: Chat, raw: bool = False) -> list[int]:
        """Token ids of a prompt: a user's message, or a list of chat messages, through the chat template.

        Args:
            prompt: text or messages.
            raw: continue the text as it stands, without the chat template.
        """
        if raw:
            if not isinstance(prompt, str):
                raise ValueError("raw: continues text; give a text instead of chat messages")
            return encode_raw(self.tokenizer, prompt)
        return encode(self.tokenizer, as_messages(prompt) if isinstance(prompt, str) else tuple(prompt))

    def encode_all(self, prompts: list[Prompt], params: SamplingParams, raw: bool = False) -> list[list[int]]:
        """Token ids of many prompts, every one of which fits into both contexts with its answer.

        Raises:
            ValueError: names the first that does not.
        """
        encoded = []
        for prompt in prompts:
            try:
                if raw and len(prompt.messages) > 1:
                    raise ValueError("raw continues text; this one is a conversation: leave raw out, or give its text")
                ids = self.encode(prompt.raw if raw else prompt.messages, raw)
                for model in (self.target, *([self.draft.model] if self.draft else [])):
                    refuse_unsupported_cache(model, len(ids) + params.max_new_tokens)
            except ValueError as error:
                raise ValueError(f"prompt {prompt.id}: {error}") from error
            encoded.append(ids)
        return encoded

    def generate(
        self,
        prompts: Chat | Sequence[Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
    ) -> list[Generation]:
        """Answer prompts, all in one batch.

        Args:
            prompts: one prompt (a user's message, or a conversation as a list of messages), or a list of them.
            params: for all, or one for each prompt; greedy by default. Prompts that share one seed still draw
                independently; in a list each prompt's seed is its own, and its answer that of decoding it alone.
            raw: continue texts as they stand, without the chat template.

        Raises:
            ValueError: a prompt that does not fit into the context, not as many params as prompts.
        """
        encoded = [self.encode(prompt, raw) for prompt in _as_list(prompts)]
        completions, traces = self.engine.generate_ids(encoded, params or SamplingParams())
        return [self._generation(completion, trace) for completion, trace in zip(completions, traces, strict=True)]

    def stream(
        self, prompt: Chat, params: SamplingParams | None = None, trace: Trace | None = None, *, raw: bool = False
    ) -> Iterator[Piece]:
        """Answer one prompt, token by token: what each adds to the text, as soon as it is certain.

        Args:
            prompt: a user's message, or a conversation as a list of messages.
            params: greedy by default.
            trace: filled in place, for who wants to know what it took.
            raw: continue the text as it stands, without the chat template.
        """
        completions = self.engine.begin([self.encode(prompt, raw)], params or SamplingParams())
        (completion,), shown = completions, 0
        for _ in self.engine.rounds(completions, [Trace() if trace is None else trace]):
            for place in range(shown, completion.num_certain_pieces):
                logprobs = completion.logprobs[place] if completion.logprobs else None
                yield Piece(completion.pieces[place], completion.provenance[place], completion.ids[place], logprobs)
            shown = completion.num_certain_pieces

    def _generation(self, completion: Completion, trace: Trace) -> Generation:
        assert completion.finish_reason is not None
        return Generation(
            text=completion.text,
            ids=completion.ids,
            provenance=completion.provenance,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            logprobs=completion.logprobs,
            trace=trace,
            lossy=self.engine.speculation.lossy if completion.params.temperature else None,
        )


def _as_list(prompts: Chat | Sequence[Chat]) -> list[Chat]:
    """One prompt as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], dict)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _reference_text(speculation: SpeculationParams) -> str:
    if speculation.reference is None:
        return ""
    try:
        return Path(speculation.reference).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"reference {speculation.reference}: cannot be read as UTF-8 text: {error}") from error


def _share_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Let the draft's embeddings and head be the target's own tensors where they are equal: held in memory once."""
    theirs: list[Any] = [target.get_input_embeddings().weight, target.get_output_embeddings().weight]
    spared: dict[int, int] = {}
    modules: list[Any] = [draft.get_input_embeddings(), draft.get_output_embeddings()]
    for module in modules:
        weight = module.weight
        for candidate in theirs:
            if (weight.dtype, weight.device) == (candidate.dtype, candidate.device) and torch.equal(weight, candidate):
                spared[weight.data_ptr()] = weight.nbytes
                module.weight = candidate
                break
    if spared:
        logger.info("draft shares %.1f MiB of embeddings with the target", sum(spared.values()) / 2**20)


def _proposer(speculation: SpeculationParams, draft: DraftModelProposer | None, tokenizer: Tokenizer) -> Proposer:
    if speculation.proposer != "lookup" and draft is None:
        raise ValueError(f"proposer: {speculation.proposer} needs a draft; give a pair, or use lookup")
    if speculation.proposer == "draft" and draft is not None:
        return draft
    text = _reference_text(speculation)
    # as long as it likes: it is searched, not read by a model
    lookup = LookupProposer(tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else [])
    return lookup if draft is None or speculation.proposer == "lookup" else CascadeProposer(lookup, draft)
