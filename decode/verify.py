"""Speculative verification: which drafted tokens the target accepts, and what the token after them is drawn from.

Pure torch, fp32 arithmetic. The coins are an argument and the next token is left to be drawn, so that tests can
enumerate every outcome. Rows may have drafted fewer tokens than the widest: where nothing was drafted q is zero, which
makes the residual p itself, and so the token after the last drafted one comes from p without a special case.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .sampling import Distribution

# less than this, which `sample` could not divide, is nothing but rounding
SMALLEST_MASS = torch.finfo(torch.float32).tiny


def verify_tokenwise(
    p: Distribution,
    q: Distribution,
    drafted_tokens: Int[Tensor, "rows drafted"],
    num_drafted: Int[Tensor, " rows"],
    coins: Float[Tensor, "rows drafted"],
) -> tuple[Int[Tensor, " rows"], Distribution]:
    """Token-wise rejection sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

    Token x drafted at position k is accepted when u < p(x) / q(x). At the first rejection the next token is
    drawn from (p - q)+ normalised; after acceptance of them all it is the bonus token, drawn from p. Either
    way the committed tokens follow the target's distribution exactly.

    Args:
        p: target's distributions at each drafted position and at the one after, [rows, drafted + 1, columns].
        q: what each drafted token was really sampled from, [rows, drafted, columns].
        drafted_tokens: token ids; those beyond a row's num_drafted mean nothing.
        num_drafted: in 0..drafted.
        coins: uniform in [0, 1), one per drafted token.

    Returns:
        num_accepted, in 0..num_drafted, and the weights [rows, columns] of the token to commit after them.
    """
    # u < p/q without the division; u = 0 makes it false at p = 0, as it must be
    passed = coins * q.of(drafted_tokens) < p[:, :-1].of(drafted_tokens)
    num_accepted = _leading(passed & _is_drafted(drafted_tokens, num_drafted))
    return num_accepted, _residual(p.at(num_accepted), _with_zeros(q, num_drafted).at(num_accepted))


def verify_block(
    p: Distribution,
    q: Distribution,
    drafted_tokens: Int[Tensor, "rows drafted"],
    num_drafted: Int[Tensor, " rows"],
    coins: Float[Tensor, "rows drafted"],
) -> tuple[Int[Tensor, " rows"], Distribution]:
    """Block verification (Sun et al. 2024, Algorithm 2): as exact as token-wise, never accepting fewer on average.

    With p_0 = 1, p_i = min(p_{i-1} p(X_i) / q(X_i), 1), R_i = sum_x (p_i p(x | X_1..i) - q(x | X_1..i))+ and
    h_i = R_i / (R_i + 1 - p_i), the number accepted is the largest i with u_i <= h_i. The next token comes from
    (p_i p - q)+ normalised. At a row's last drafted token q is zero behind it, so R_i = p_i = h_i as the paper has it.

    Args and returns: as for `verify_tokenwise`.
    """
    ratios = p[:, :-1].of(drafted_tokens) / q.of(drafted_tokens)
    ratios = torch.where(_is_drafted(drafted_tokens, num_drafted), ratios, 0.0)
    reached = [torch.ones_like(num_drafted, dtype=torch.float32)]
    for ratio in ratios.unbind(dim=1):
        reached.append((reached[-1] * ratio).clamp_max(1))
    probability = torch.stack(reached, dim=1)
    q = _with_zeros(q, num_drafted)
    mass = p.excess_mass(q, probability)
    # p_i = 1 makes h_i = 1, unless there is nothing left to draw from, when the token after is the next one's concern
    passing = mass / (mass + (1 - probability)).clamp_min(SMALLEST_MASS)
    # u in [0, 1) stands for 1 - u in the paper: u < h has probability h, and h = 0, as beyond the drafted, never passes
    positions = torch.arange(1, len(reached), device=coins.device)
    num_accepted = torch.nn.functional.pad((coins < passing[:, 1:]) * positions, (1, 0)).amax(dim=1)
    reached_there = probability.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    return num_accepted, _residual(p.at(num_accepted), q.at(num_accepted), reached_there)


def verify_equal(
    target_tokens: Int[Tensor, "rows drafted_plus_1"],
    drafted_tokens: Int[Tensor, "rows drafted"],
    num_drafted: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """Accept while drafted and target agree; the target's own token follows. Greedy and seeded decoding.

    The text is token for token what the target says alone, whatever was drafted.

    Args:
        target_tokens: what the target chooses at each drafted position and at the one after.
        drafted_tokens, num_drafted: as for `verify_tokenwise`.

    Returns:
        num_accepted, in 0..num_drafted.
    """
    return _leading((target_tokens[:, :-1] == drafted_tokens) & _is_drafted(drafted_tokens, num_drafted))


def verify_lossy_lenience(
    p: Distribution,
    q: Distribution,
    drafted_tokens: Int[Tensor, "rows drafted"],
    num_drafted: Int[Tensor, " rows"],
    coins: Float[Tensor, "rows drafted"],
    lenience: float,
) -> tuple[Int[Tensor, " rows"], Distribution]:
    """Token-wise with q divided: accept when u < p(x) / (lenience q(x)) (Leviathan et al. 2023, appendix A.5).

    Lossy: the text does not follow the target's distribution, but no token has more than p / lenience.

    Args:
        lenience: in (0, 1]; 1 is `verify_tokenwise`.
        others, and returns: as for `verify_tokenwise`.
    """
    lenient = Distribution(q.probabilities * lenience, q.token_ids)
    passed = coins * lenient.of(drafted_tokens) < p[:, :-1].of(drafted_tokens)
    num_accepted = _leading(passed & _is_drafted(drafted_tokens, num_drafted))
    return num_accepted, _residual(p.at(num_accepted), _with_zeros(lenient, num_drafted).at(num_accepted))


def verify_lossy_typical(
    p: Distribution,
    drafted_tokens: Int[Tensor, "rows drafted"],
    num_drafted: Int[Tensor, " rows"],
    epsilon: float,
) -> tuple[Int[Tensor, " rows"], Distribution]:
    """Typical acceptance: p(x) > min(epsilon, sqrt(epsilon) exp(-H(p))) (Cai et al. 2024, section 3.3.1).

    Lossy: the text does not follow the target's distribution. The next token is drawn from p.

    Args:
        epsilon: in (0, 1); the smaller, the more is accepted.
        others, and returns: as for `verify_tokenwise`.
    """
    entropy = torch.special.entr(p.probabilities[:, :-1]).sum(dim=-1)
    threshold = (epsilon**0.5 * (-entropy).exp()).clamp_max(epsilon)
    passed = p[:, :-1].of(drafted_tokens) > threshold
    num_accepted = _leading(passed & _is_drafted(drafted_tokens, num_drafted))
    return num_accepted, p.at(num_accepted)


def _is_drafted(drafted_tokens: Tensor, num_drafted: Tensor) -> Tensor:
    return torch.arange(drafted_tokens.shape[1], device=num_drafted.device) < num_drafted.unsqueeze(1)


def _with_zeros(q: Distribution, num_drafted: Tensor) -> Distribution:
    """q, and zero where a row drafted nothing and at one position behind them all."""
    probabilities = torch.nn.functional.pad(q.probabilities, (0, 0, 0, 1))
    beyond = torch.arange(probabilities.shape[1], device=num_drafted.device) >= num_drafted.unsqueeze(1)
    ids = q.token_ids
    if ids is not None and ids.ndim > 1:
        ids = torch.nn.functional.pad(ids, (0, 0, 0, 1))
    return Distribution(probabilities.masked_fill(beyond.unsqueeze(2), 0.0), ids)


def _leading(passed: Tensor) -> Tensor:
    """How many of each row are True before the first False."""
    return passed.long().cumprod(dim=1).sum(dim=1)


def _residual(p: Distribution, q: Distribution, scale: Tensor | None = None) -> Distribution:
    """(scale p - q)+ of each row, or p itself where rounding leaves nothing."""
    left_over = p.excess(q, scale)
    mass = left_over.sum(dim=-1, keepdim=True)
    return Distribution(torch.where(mass >= SMALLEST_MASS, left_over, p.probabilities), p.token_ids)
