"""What temperature, top-k and top-p mean, in one place: logits in, distributions out, tokens from uniforms.

Pure torch, fp32 arithmetic. The order is that of transformers: temperature, top-k, top-p.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def next_token_distribution(
    logits: Float[Tensor, "*batch vocab"], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Float[Tensor, "*batch vocab"]:
    """The processed distribution p that a token is sampled from.

    Args:
        logits: any floating dtype; arithmetic is fp32.
        temperature: 0 gives an exact one-hot at the first argmax; then top-k and top-p change nothing.
        top_k: keep the k largest logits, and those that tie with the k-th, as transformers does; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.

    Returns:
        fp32 probabilities that sum to 1 over the vocabulary.
    """
    if temperature == 0:
        # argmax of a bf16 tie must not depend on the layout: torch documents the first maximum on every device.
        first_argmax = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros(logits.shape, dtype=torch.float32, device=logits.device).scatter_(-1, first_argmax, 1.0)
    scores = logits.float() if temperature == 1 else logits.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        kth_score = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth_score, -torch.inf)
    probabilities = scores.softmax(dim=-1)
    if top_p < 1:
        probabilities = _keep_nucleus(probabilities, top_p)
    return probabilities


def _keep_nucleus(probabilities: Float[Tensor, "*batch vocab"], top_p: float) -> Float[Tensor, "*batch vocab"]:
    """Zero what lies outside the smallest set of mass top_p and renormalise (Holtzman et al. 2020, section 3.1)."""
    descending, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = descending.cumsum(dim=-1) - descending
    descending = descending.masked_fill(mass_before >= top_p, 0.0)
    # the most probable token stays even when top_p is 0
    descending[..., 0] = probabilities.gather(-1, order[..., :1]).squeeze(-1)
    kept = torch.zeros_like(probabilities).scatter_(-1, order, descending)
    return kept / kept.sum(dim=-1, keepdim=True)


def sample(weights: Float[Tensor, "*batch vocab"], uniforms: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Draw one token per row by inverting the cumulative distribution.

    The noise is an argument, so a row's token depends on its own uniform alone and tests can enumerate.

    Args:
        weights: non-negative, each row with a positive sum; need not be normalised.
        uniforms: in [0, 1).

    Returns:
        token ids; a token of weight 0 is never drawn.
    """
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[..., -1]
    # u * total may round up to total, which no cumulative weight exceeds: stay just below it
    threshold = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)
