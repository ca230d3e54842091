"""A draft's head with all tokens of the target, for engines that cannot be told of a reduced vocabulary."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .heldout import heldout_prompts, spread
from .model import CachedModel, longest_text
from .pair import stop_token_ids
from .prompts import encode

NUM_TEXTS, PROMPT_TOKENS, CONTINUED_TOKENS = 8, 128, 32
# of probability, that tokens outside the vocabulary may take
NEGLIGIBLE = 1e-3
# a bias with which a token is never said, in fp16 too
CLOSED = -1e4


def own_texts(model: PreTrainedModel, tokenizer: Tokenizer, prompts: str, kept: Tensor) -> list[list[int]]:
    """Token ids of a few held-out prompts, each continued by the draft with tokens of its vocabulary."""
    most = max(1, min(PROMPT_TOKENS, longest_text(model) - CONTINUED_TOKENS))
    chosen = spread(heldout_prompts(prompts), NUM_TEXTS)
    texts = [encode(tokenizer, prompt.messages)[-most:] for prompt in chosen]
    starts = [len(ids) for ids in texts]
    cached = CachedModel(model, len(texts), max(starts) + CONTINUED_TOKENS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(CONTINUED_TOKENS):
        cached.read(texts)
        q = cached.forward(torch.tensor([ids[-1:] for ids in texts]))[:, 0, kept].softmax(-1)
        for ids, token in zip(texts, kept[q.multinomial(1, generator=generator)[:, 0]].tolist(), strict=True):
            ids.append(token)
    stop_ids = stop_token_ids(model, tokenizer)
    ends = (
        next((place + 1 for place in range(start, len(ids)) if ids[place] in stop_ids), None)
        for ids, start in zip(texts, starts, strict=True)
    )
    return [ids[:end] for ids, end in zip(texts, ends, strict=True)]


def fit_vocabulary(
    model: PreTrainedModel, kept: Tensor, size: int, texts: list[list[int]], dtype: torch.dtype
) -> list[str]:
    """Give the draft as many tokens as the target has, of which those outside `kept` are hardly ever said.

    Args:
        model: in fp32; changed in place, but for the rows of `kept`.
        kept: ids of its vocabulary, int64 [draft_vocab].
        size: tokens of the target, padding included.
        texts: on which it is found what to write into the other rows.
        dtype: that these will be written in.

    Returns:
        what an engine wants or cannot be told, and what was done about it.
    """
    notes = []
    known = model.get_output_embeddings().out_features
    if known != size:
        model.resize_token_embeddings(size, mean_resizing=False)
        embeddings: Any = model.get_input_embeddings()
        embeddings.weight[known:] = 0
        notes.append(f"wants as many tokens of the draft as of the target: {known} rows became {size}")
    if len(kept) == size:
        return notes
    row = None
    done = "have a bias with which they are never said"
    if model.get_output_embeddings().bias is None:
        row = _row_outside(model, kept, size - len(kept), texts).to(dtype).float()
        done = "point away from the mean of its hidden states" if row.any() else "are zero"
    silence_outside(model, kept, row)
    return [
        *notes,
        f"knows no reduced output vocabulary: the rows of the {size - len(kept)} tokens outside it {done}, "
        f"those of its {len(kept)} are as they were",
    ]


@torch.no_grad()
def silence_outside(model: PreTrainedModel, kept: Tensor, row: Tensor | None = None) -> None:
    """Give all tokens but `kept` a row of the head with which they are hardly ever said; zero unless one is given.

    The head becomes one of its own where it was that of the embeddings. One with a bias has them closed by that.
    """
    head: Any = model.get_output_embeddings()
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    outside = _others(kept.to("cpu"), len(head.weight)).to(head.weight.device)
    head.weight[outside] = 0 if row is None else row
    if head.bias is not None:
        head.bias[outside] = CLOSED


def _row_outside(model: PreTrainedModel, kept: Tensor, num_outside: int, texts: list[list[int]]) -> Tensor:
    """A row of the head, fp32 [hidden], for tokens outside the vocabulary, from whose logits they are hardly ever said.

    Zero, unless that leaves them more than a negligible mass, as where logits are negative; then, if it leaves less,
    the mean direction of hidden states, as far backwards as half of the texts need.
    """

    def measured(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Hidden states, [positions, hidden], and the logarithm of what the vocabulary weighs, [positions]."""
        inputs = [torch.tensor([ids]) for ids in texts]
        states = [model.get_decoder()(input_ids=each, use_cache=False).last_hidden_state[0] for each in inputs]
        return torch.cat(states), torch.cat([logits_of(model, ids)[:, kept].logsumexp(-1) for ids in texts])

    def mass(row: Tensor) -> float:
        return float((states @ row + math.log(num_outside) - weighs).sigmoid().mean())

    states, weighs = measured(texts[::2])
    direction = F.normalize(states.mean(dim=0), dim=0)
    along, highest = states @ direction, weighs - math.log(num_outside / NEGLIGIBLE)
    states, weighs = measured(texts[1::2] or texts)
    zero = torch.zeros_like(direction)
    if mass(zero) <= NEGLIGIBLE or along.min() <= 0:
        return zero
    return min(zero, direction * (highest / along).min(), key=mass)


def mass_outside(model: PreTrainedModel, kept: Tensor, texts: list[list[int]]) -> tuple[float, float]:
    """Mean probability mass of tokens outside `kept`, and the share of positions at which one is likeliest."""
    masses, likeliest = [], []
    for ids in texts:
        q = logits_of(model, ids).softmax(-1)
        outside = _others(kept, q.shape[1])
        masses.append(q[:, outside].sum(-1))
        likeliest.append(outside[q.argmax(-1)].float())
    return float(torch.cat(masses).mean()), float(torch.cat(likeliest).mean())


def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """After each token of a text, fp32 [tokens, vocab]."""
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


def _others(kept: Tensor, size: int) -> Tensor:
    """Which of so many tokens are not among these, bool [size]."""
    return torch.ones(size, dtype=torch.bool).index_fill(0, kept, False)
