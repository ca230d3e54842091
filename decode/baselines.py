"""What speculative decoding is measured against: the generation of transformers, with the same target weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from .decoder import SpeculativeDecoder
from .full_head import silence_outside
from .latency import OnTokens
from .pair import Dtype, load_model
from .params import SamplingParams
from .progress import ProgressBar

NUMS_ASSISTANT_TOKENS = (1, 2, 3, 4, 5)
# of a target that exits early: after these shares of its layers, and so many tokens
EXITS, NUMS_EXIT_TOKENS = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6), (1, 3)
ASSISTANT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


@dataclass(frozen=True)
class Assistance:
    """A fixed way of transformers' assisted generation.

    Attributes:
        num_tokens: drafted every round.
        exit_layer: layers of the target that draft; None for a draft model.
    """

    num_tokens: int
    exit_layer: int | None = None

    def __str__(self) -> str:
        return f"{self.num_tokens}" if self.exit_layer is None else f"{self.num_tokens} by {self.exit_layer} layers"


class TransformersBaselines:
    """Plain and assisted generation of transformers: same target, stop tokens and sampling as a decoder's.

    Args:
        decoder: whose target is used, as it lies in memory.
        draft: folder or hub name of the draft, which is loaded anew: the decoder's may have lost rows of its head. Here
            a bias closes them, so that tokens that it has not learnt are not drafted. None for a target that drafts for
            itself, which transformers lets exit early (`assistant_early_exit`).
        dtype: of the draft.

    Attributes:
        assistances: the fixed ways, of which the best is looked for.

    Raises:
        ValueError: the draft cannot be loaded, or its vocabulary is padded to another size.
    """

    def __init__(self, decoder: SpeculativeDecoder, draft: str | None, dtype: Dtype) -> None:
        self.target = decoder.target
        self.stop_ids = sorted(decoder.engine.stop_ids)
        self.exits = draft is None
        self.assistances = [Assistance(number) for number in NUMS_ASSISTANT_TOKENS]
        if draft is None:
            num_layers = self.target.config.get_text_config().num_hidden_layers
            exits = sorted({max(1, round(share * num_layers)) for share in EXITS})
            self.assistances = [Assistance(number, layer) for layer in exits for number in NUMS_EXIT_TOKENS]
        self.assistant = self.target if draft is None else load_model(draft, dtype, "assistant")
        if draft is not None and decoder.draft is not None and (kept := decoder.draft.draft_vocab) is not None:
            head: Any = self.assistant.get_output_embeddings()
            if head.bias is None:  # by which they are closed; it is not saved, so that it may have one
                head.bias = nn.Parameter(head.weight.new_zeros(len(head.weight)), requires_grad=False)
            silence_outside(self.assistant, kept)
        own = self.assistant.generation_config
        self.default = GenerationConfig(**{name: getattr(own, name, None) for name in ASSISTANT_SETTINGS})
        sizes = [model.config.get_text_config().vocab_size for model in (self.assistant, self.target)]
        if sizes[0] != sizes[1]:
            # it would translate between them, text by text, and break off when that finds no difference
            raise ValueError(
                f"transformers: takes the draft's vocabulary, padded to {sizes[0]}, for another than the target's of "
                f"{sizes[1]}; leave transformers out"
            )

    def plain(self, prompt: list[int], params: SamplingParams, on_tokens: OnTokens | None = None) -> list[int]:
        """Continue a prompt; `on_tokens` is told of the tokens as they come."""
        return self._generate(prompt, params, on_tokens=on_tokens)

    def assisted(
        self,
        prompt: list[int],
        params: SamplingParams,
        assistance: Assistance | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        """Continue a prompt with the draft's help.

        Args:
            prompt: token ids.
            params: sampling parameters.
            assistance: a fixed way; None leaves it to transformers and the draft's own settings, and has a target that
                exits early do so after half of its layers.
            on_tokens: told of the tokens as they come.
        """
        settings = self.default
        if assistance is not None:
            settings = GenerationConfig(
                num_assistant_tokens=assistance.num_tokens,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,  # off; None would be replaced by 0.4
            )
        if self.exits:
            middle = max(1, self.target.config.get_text_config().num_hidden_layers // 2)
            exit_layer = middle if assistance is None else assistance.exit_layer
            return self._generate(prompt, params, settings, on_tokens, assistant_early_exit=exit_layer)
        return self._generate(prompt, params, settings, on_tokens, assistant_model=self.assistant)

    def sweep(self, prompts: list[list[int]], params: SamplingParams, bar: ProgressBar) -> dict[Assistance, float]:
        """Tokens per second of all prompts together, by way of assisting; advances `bar` by each run."""
        tokens, seconds = dict.fromkeys(self.assistances, 0), dict.fromkeys(self.assistances, 0.0)
        for prompt in prompts:
            for each in self.assistances:
                started = perf_counter()
                tokens[each] += len(self.assisted(prompt, params, each))
                seconds[each] += perf_counter() - started
                bar.advance(1)
        return {each: tokens[each] / seconds[each] for each in self.assistances}

    def _generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        settings: GenerationConfig | None = None,
        on_tokens: OnTokens | None = None,
        **assistance: Any,
    ) -> list[int]:
        sampling: dict[str, Any] = {"do_sample": False}
        if params.temperature:
            # top_k is said even when it is 0: transformers' default is 50
            sampling = dict(do_sample=True, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
        config = GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            eos_token_id=self.stop_ids or None,
            pad_token_id=self.stop_ids[0] if self.stop_ids else 0,  # never used, but asked for
            **sampling,
        )
        tokens = torch.tensor([prompt], device=self.target.device)
        generate: Any = self.target.generate
        if on_tokens:
            assistance["streamer"] = _Told(on_tokens)
        with _nothing_else_configured(self.target):
            if settings is not None:
                # the candidate generator looks for its settings here and nowhere else
                self.assistant.generation_config = settings
            output = generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config, **assistance)
        ids: list[int] = output[0, len(prompt) :].tolist()
        return ids


class _Told(BaseStreamer):
    """Passes on how many tokens came."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.on_tokens = on_tokens
        self.has_prompt = False

    def put(self, value: Tensor) -> None:
        """Tokens, int64 [n] or [1, n]; first of all those of the prompt."""
        if self.has_prompt:
            self.on_tokens(value.numel())
        self.has_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


@contextmanager
def _nothing_else_configured(target: PreTrainedModel) -> Iterator[None]:
    """Set aside the target's generation config, whose penalties and such the decoder does not apply either."""
    logger = logging.getLogger("transformers.generation.utils")
    own, level = target.generation_config, logger.level
    target.generation_config = GenerationConfig()
    logger.setLevel(logging.ERROR)  # assisted sampling warns of the processors that it hands to the draft itself
    try:
        yield
    finally:
        target.generation_config = own
        logger.setLevel(level)
