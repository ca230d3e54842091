"""Plain autoregressive decoding: one token per pass. The oracle of the tests and the baseline of every ratio."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .model import CachedModel, HeadInput
from .noise import RowNoise
from .params import Completion, SamplingParams
from .sampling import next_token_distribution, sample


class PlainDecoder:
    """Decodes token ids with one model.

    Args:
        model: a decoder-only model in eval mode.
        stop_ids: tokens that end a text; they are kept as its last token.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int]) -> None:
        self.model = model
        self.stop_ids = stop_ids

    @torch.inference_mode()
    def generate_ids(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        streams: list[int] | None = None,
        keep_hidden_states: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt, all rows in one batch.

        Args:
            prompts: token ids, at least one per prompt.
            params: sampling parameters for all rows.
            streams: which noise stream each row uses; its place in the list by default.
            keep_hidden_states: also return what entered the head, and the normaliser of its logits.
            on_token: called after each pass with the number of tokens it committed.
        """
        completions = [Completion() for _ in prompts]
        capacity = max(map(len, prompts)) + params.max_new_tokens
        cached = CachedModel(self.model, len(prompts), capacity)
        noise = RowNoise(params.seed, streams or list(range(len(prompts))), self.model.device)
        kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        active = list(range(len(prompts)))
        cached.prefill(prompts)
        last_tokens = torch.tensor([prompt[-1] for prompt in prompts], device=self.model.device)
        with HeadInput(self.model) as head_input:
            while active:
                logits = cached.forward(last_tokens.unsqueeze(1))[:, 0]
                p = next_token_distribution(logits, params.temperature, params.top_k, params.top_p)
                last_tokens = sample(p, noise.draw(1).squeeze(1))
                if keep_hidden_states:
                    log_normalizers = _log_normalizers(logits, p, last_tokens, params)
                for place, (row, token) in enumerate(zip(active, last_tokens.tolist(), strict=True)):
                    completions[row].extend([token], ["plain"], self.stop_ids, params.max_new_tokens)
                    if keep_hidden_states:
                        kept[row].append((head_input.states[place, 0], log_normalizers[place]))
                if on_token:
                    on_token(len(active))
                going = [place for place, row in enumerate(active) if completions[row].finish_reason is None]
                if len(going) < len(active):
                    # finished rows would cost as much as running ones
                    active = [active[place] for place in going]
                    last_tokens = last_tokens[going]
                    cached.select_rows(going)
                    noise.select_rows(going)
        if keep_hidden_states:
            for completion, steps in zip(completions, kept, strict=True):
                completion.hidden_states = torch.stack([state for state, _ in steps])
                completion.log_normalizers = torch.stack([normalizer for _, normalizer in steps])
        return completions


def _log_normalizers(logits: Tensor, p: Tensor, tokens: Tensor, params: SamplingParams) -> Tensor:
    """logsumexp of the unprocessed logits [rows, vocab], fp32 [rows]."""
    if (params.temperature, params.top_k, params.top_p) != (1, 0, 1):
        return logits.float().logsumexp(dim=-1)
    # log p = logit - normaliser at any token of an unprocessed p, which spares a pass over the vocabulary
    drawn = tokens.unsqueeze(1)
    return (logits.gather(1, drawn).float() - p.gather(1, drawn).log()).squeeze(1)
