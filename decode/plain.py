"""Plain decoding: the loop without a proposer. The baseline of every ratio, and what writes responses."""

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .completion import Completion
from .params import SamplingParams
from .speculative import OnPass, SpeculativeEngine
from .trace import Trace


class PlainDecoder:
    """Decodes token ids with one model, one token per pass.

    Args:
        model: a decoder-only model in eval mode.
        stop_ids: tokens that end a text; they are kept as its last token.
        tokenizer: for stop strings, bad words and text; ids alone need none.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int], tokenizer: Tokenizer | None = None) -> None:
        self.engine = SpeculativeEngine(model, None, stop_ids=stop_ids, tokenizer=tokenizer)

    def generate_ids(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        *,
        streams: list[int] | None = None,
        on_token: Callable[[int], None] | None = None,
        on_pass: OnPass | None = None,
    ) -> list[Completion]:
        """Continue every prompt, all rows in one batch.

        Args:
            prompts, params, streams: as for `SpeculativeEngine.generate_ids`.
            on_token: called after each pass with the number of tokens it committed.
            on_pass: called after each pass, before its tokens are chosen.
        """
        completions = self.engine.begin(prompts, params)
        if streams is None and isinstance(params, SamplingParams):
            streams = list(range(len(prompts)))
        for rows in self.engine.rounds(completions, [Trace() for _ in prompts], streams, on_pass):
            if on_token:
                on_token(len(rows))
        return completions
