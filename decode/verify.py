"""Speculative verification: which drafted tokens the target accepts, and the token that follows them.

Pure torch, fp32 arithmetic. The noise is an argument, so that tests can enumerate every outcome.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .sampling import sample


def verify_tokenwise(
    target_probabilities: Float[Tensor, "batch drafted_plus_1 vocab"],
    draft_probabilities: Float[Tensor, "batch drafted vocab"],
    drafted_tokens: Int[Tensor, "batch drafted"],
    accept_uniforms: Float[Tensor, "batch drafted"],
    next_uniforms: Float[Tensor, " batch"],
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Token-wise rejection sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

    Token x drafted at position k is accepted when u < p(x) / q(x). At the first rejection the next token is
    drawn from (p - q)+ normalised; after acceptance of them all it is the bonus token, drawn from p. Either
    way the committed tokens follow the target's distribution exactly.

    Args:
        target_probabilities: p at each drafted position and at the one after the last, fp32, rows sum to 1.
        draft_probabilities: q that each drafted token was really sampled from, fp32, rows sum to 1.
        drafted_tokens: token ids, each with q > 0.
        accept_uniforms: in [0, 1), one per drafted token.
        next_uniforms: in [0, 1), for the corrected or bonus token.

    Returns:
        num_accepted, in 0..drafted, and next_token: what to commit after the accepted tokens.
    """
    num_drafted = drafted_tokens.shape[1]
    p_drafted = target_probabilities[:, :num_drafted].gather(2, drafted_tokens.unsqueeze(2)).squeeze(2)
    q_drafted = draft_probabilities.gather(2, drafted_tokens.unsqueeze(2)).squeeze(2)
    # u < p/q without the division; u = 0 makes it false at p = 0, as it must be
    accepted = accept_uniforms * q_drafted < p_drafted
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)

    rows = torch.arange(len(drafted_tokens), device=drafted_tokens.device)
    p_next = target_probabilities[rows, num_accepted]
    # past the last drafted token nothing was proposed: q = 0 and the residual is p itself
    q_next = torch.nn.functional.pad(draft_probabilities, (0, 0, 0, 1))[rows, num_accepted]
    residual = (p_next - q_next).clamp_min(0)
    # p = q up to rounding leaves no mass to draw from
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, p_next)
    return num_accepted, sample(residual, next_uniforms)
