"""Plain decoding: the loop without a proposer. The baseline of every ratio, and what writes responses."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .completion import Completion
from .head import HeadInput
from .params import SamplingParams
from .speculative import SpeculativeEngine
from .trace import Trace


class PlainDecoder:
    """Decodes token ids with one model, one token per pass.

    Args:
        model: a decoder-only model in eval mode.
        stop_ids: tokens that end a text; they are kept as its last token.
        tokenizer: for stop strings, bad words and text; ids alone need none.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int], tokenizer: Tokenizer | None = None) -> None:
        self.model = model
        self.engine = SpeculativeEngine(model, None, stop_ids=stop_ids, tokenizer=tokenizer)

    def generate_ids(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        *,
        streams: list[int] | None = None,
        keep_hidden_states: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt, all rows in one batch.

        Args:
            prompts, params, streams: as for `SpeculativeEngine.generate_ids`.
            keep_hidden_states: also return what entered the head, and the normaliser of its logits.
            on_token: called after each pass with the number of tokens it committed.
        """
        completions = self.engine.begin(prompts, params)
        if streams is None and isinstance(params, SamplingParams):
            streams = list(range(len(prompts)))
        kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        with HeadInput(self.model) as head_input:
            for rows, logits in self.engine.rounds(completions, [Trace() for _ in prompts], streams):
                if keep_hidden_states:
                    log_normalizers = logits[:, 0].float().logsumexp(dim=-1)
                    for place, row in enumerate(rows):
                        kept[row].append((head_input.states[place, 0], log_normalizers[place]))
                if on_token:
                    on_token(len(rows))
        if keep_hidden_states:
            for completion, steps in zip(completions, kept, strict=True):
                completion.hidden_states = torch.stack([state for state, _ in steps])
                completion.log_normalizers = torch.stack([normalizer for _, normalizer in steps])
        return completions
