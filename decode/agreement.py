"""How well p and q agree on the target's text: sums over its tokens, from one pass of each model."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .decoder import SpeculativeDecoder
from .heldout import Text
from .model import CachedModel
from .params import SamplingParams
from .sampling import next_token_distribution

# what is summed over tokens, beside their number
QUANTITIES = ("alpha", "kl", "p_beyond_q", "top1_agreement")
# tokens whose two full distributions exist at a time
CHUNK_TOKENS = 512


def range_of(position: int) -> int:
    """Which range of positions of an answer one is in: 0 to 15, 16 to 31, 32 to 63, 64 to 127, … from 0."""
    return max(0, position.bit_length() - 4)


def name_of_range(number: int) -> str:
    """Its first and last position."""
    return f"{8 << number if number else 0}-{(16 << number) - 1}"


@torch.inference_mode()
def sums_on_text(decoder: SpeculativeDecoder, text: Text, params: SamplingParams) -> list[list[float]]:
    """By range of positions, the number of tokens and the sum of each of QUANTITIES over them; see `agreement`."""
    found = [agreement(p, q, token_ids) for p, q, token_ids in _distributions(decoder, text, params)]
    of_tokens = torch.cat(found).double().cpu().numpy()
    ranges = [range_of(position) for position in range(len(of_tokens))]
    sums = np.zeros((ranges[-1] + 1, 1 + len(QUANTITIES)))
    np.add.at(sums, ranges, np.column_stack([np.ones(len(of_tokens)), of_tokens]))
    return sums.tolist()


@torch.inference_mode()
def probabilities_on_text(
    decoder: SpeculativeDecoder, text: Text, params: SamplingParams
) -> tuple[list[float], list[float]]:
    """p and q of each token of the answer, after what stands before it."""
    answer = torch.tensor(text.ids[text.start :], device=decoder.target.device)
    of_p, of_q = [], []
    chunks = _distributions(decoder, text, params)
    for tokens, (p, q, token_ids) in zip(torch.split(answer, CHUNK_TOKENS), chunks, strict=True):
        of_p.append(p.gather(1, tokens[:, None])[:, 0])
        columns = torch.arange(q.shape[1], device=q.device) if token_ids is None else token_ids
        of_q.append(torch.where(columns == tokens[:, None], q, 0.0).sum(dim=-1))
    return torch.cat(of_p).tolist(), torch.cat(of_q).tolist()


def _distributions(
    decoder: SpeculativeDecoder, text: Text, params: SamplingParams
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """p and q at the answer's positions, CHUNK_TOKENS at a time, and the token ids of q's columns; see `agreement`."""
    assert decoder.draft is not None
    tokens = torch.tensor([text.ids[:-1]], device=decoder.target.device)
    target = CachedModel(decoder.target, 1, len(text.ids))  # p by the passes that decoding makes
    target.read([text.prompt])
    p_logits = target.forward(tokens[:, text.start - 1 :])[0]
    q_logits = decoder.draft.score(tokens)[0, text.start - 1 :]
    token_ids = decoder.draft.draft_vocab
    if token_ids is not None:
        token_ids = token_ids.to(p_logits.device)
    warped = (params.temperature, params.top_k, params.top_p, params.min_p)
    for p_chunk, q_chunk in zip(torch.split(p_logits, CHUNK_TOKENS), torch.split(q_logits, CHUNK_TOKENS), strict=True):
        p, q = next_token_distribution(p_chunk, *warped), next_token_distribution(q_chunk.to(p_chunk.device), *warped)
        yield p, q, token_ids


def agreement(p: Tensor, q: Tensor, token_ids: Tensor | None) -> Tensor:
    """QUANTITIES of each token, fp32 [tokens, 4].

    - alpha: sum_v min(p, q); TV is what is missing to 1.
    - kl: sum of p log(p / q) in nats over what q can say. KL(p|q) itself is that where q can say all that p can, and
      infinite elsewhere, which truncation, greedy decoding and a reduced vocabulary make common. As in the losses, p is
      not renormalised; where most of its mass is left out, the sum may lie a little below 0.
    - p_beyond_q: the mass of p where q is 0, left out of kl.
    - top1_agreement: 1 where both find the same token likeliest, of the whole vocabulary.

    Args:
        p: fp32 [tokens, vocab], after all processing.
        q: fp32 [tokens, columns].
        token_ids: int64 [columns], for a reduced vocabulary; None where column i is token i.
    """
    shared = p[:, : q.shape[1]] if token_ids is None else p[:, token_ids]
    inside = torch.where(q > 0, shared, 0.0)
    tiny = torch.finfo(torch.float32).tiny  # 0 log 0 is 0; and several times as fast as xlogy
    kl = shared.clamp_min(tiny).div_(q.clamp_min(tiny)).log_().mul_(inside).sum(dim=-1)
    beyond = (p.sum(dim=-1) - inside.sum(dim=-1)).clamp_min_(0)
    likeliest = q.argmax(dim=-1)
    same = p.argmax(dim=-1) == (likeliest if token_ids is None else token_ids[likeliest])
    return torch.stack([torch.minimum(shared, q).sum(dim=-1), kl, beyond, same.float()], dim=-1)
