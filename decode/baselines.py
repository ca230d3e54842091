"""What speculative decoding is measured against: the generation of transformers, with the same target weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .decoder import SpeculativeDecoder
from .pair import Dtype, load_model
from .params import SamplingParams
from .progress import ProgressBar

NUMS_ASSISTANT_TOKENS = (1, 2, 3, 4, 5)
ASSISTANT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


class TransformersBaselines:
    """Plain and assisted generation of transformers: same target, stop tokens and sampling as a decoder's.

    Args:
        decoder: whose target is used, as it lies in memory.
        draft: folder or hub name of the draft, which is loaded anew: the decoder's may have lost rows of its head.
        dtype: of the draft.

    Raises:
        ValueError: the draft cannot be loaded, or its vocabulary is padded to another size.
    """

    def __init__(self, decoder: SpeculativeDecoder, draft: str, dtype: Dtype) -> None:
        self.target = decoder.target
        self.stop_ids = sorted(decoder.engine.stop_ids)
        self.assistant = load_model(draft, dtype, "assistant")
        own = self.assistant.generation_config
        self.default = GenerationConfig(**{name: getattr(own, name, None) for name in ASSISTANT_SETTINGS})
        sizes = [model.config.get_text_config().vocab_size for model in (self.assistant, self.target)]
        if sizes[0] != sizes[1]:
            # it would translate between them, text by text, and break off when that finds no difference
            raise ValueError(
                f"transformers: takes the draft's vocabulary, padded to {sizes[0]}, for another than the target's of "
                f"{sizes[1]}; leave transformers out"
            )

    def plain(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Continue a prompt."""
        return self._generate(prompt, params)

    def assisted(self, prompt: list[int], params: SamplingParams, num_assistant_tokens: int | None = None) -> list[int]:
        """Continue a prompt with the draft's help.

        Args:
            prompt: token ids.
            params: sampling parameters.
            num_assistant_tokens: drafted every round; None leaves it to transformers and the draft's own settings.
        """
        # the candidate generator looks for its settings here and nowhere else
        self.assistant.generation_config = self.default
        if num_assistant_tokens is not None:
            self.assistant.generation_config = GenerationConfig(
                num_assistant_tokens=num_assistant_tokens,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,  # off; None would be replaced by 0.4
            )
        return self._generate(prompt, params, assistant_model=self.assistant)

    def sweep(self, prompts: list[list[int]], params: SamplingParams, bar: ProgressBar) -> dict[int, float]:
        """Tokens per second of all prompts together, by number of assistant tokens; advances `bar` by each run."""
        tokens, seconds = dict.fromkeys(NUMS_ASSISTANT_TOKENS, 0), dict.fromkeys(NUMS_ASSISTANT_TOKENS, 0.0)
        for prompt in prompts:
            for number in NUMS_ASSISTANT_TOKENS:
                started = perf_counter()
                tokens[number] += len(self.assisted(prompt, params, number))
                seconds[number] += perf_counter() - started
                bar.advance(1)
        return {number: tokens[number] / seconds[number] for number in NUMS_ASSISTANT_TOKENS}

    def _generate(self, prompt: list[int], params: SamplingParams, **assistance: Any) -> list[int]:
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
        with _nothing_else_configured(self.target):
            output = generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config, **assistance)
        ids: list[int] = output[0, len(prompt) :].tolist()
        return ids


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
