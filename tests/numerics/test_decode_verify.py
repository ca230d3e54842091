"""The token-wise rule by exact enumeration: what is committed follows the target, for every draft.

The rule is constant between the points where a uniform crosses a ratio p(x)/q(x) or a cumulative probability. So the
uniforms are integrated over the cells between all such points (and a regular grid, for rules that are wrong), by
the middle of each cell and its width: no sampling, and nothing left out.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.sampling import sample
from decode.verify import verify_tokenwise

Verify = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# Conditional distributions by prefix: tree[k] is [vocab] * k + [vocab], the distribution after k tokens.
Tree = list[Tensor]
LARGEST_UNIFORM = 1 - 2**-24


def residual_from_p(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    num_accepted, _ = verify_tokenwise(p, q, tokens, accept, follow)
    return num_accepted, sample(p[torch.arange(len(p)), num_accepted], follow)


def accepted_without_q(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    num_accepted, _ = verify_tokenwise(p, torch.ones_like(q), tokens, accept, follow)
    rows = torch.arange(len(p))
    residual = (p - torch.nn.functional.pad(q, (0, 0, 0, 1)))[rows, num_accepted].clamp_min(0)
    return num_accepted, sample(torch.where(residual.sum(1, keepdim=True) > 0, residual, p[rows, num_accepted]), follow)


def q_of_another_temperature(
    p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor
) -> tuple[Tensor, Tensor]:
    flatter = q.sqrt() / q.sqrt().sum(dim=-1, keepdim=True)
    return verify_tokenwise(p, flatter, tokens, accept, follow)


def one_coin(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    return verify_tokenwise(p, q, tokens, accept[:, :1].expand_as(accept), follow)


def coin_used_twice(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    return verify_tokenwise(p, q, tokens, accept, accept[:, 0].contiguous())


def always_accepted(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    return verify_tokenwise(p, q, tokens, torch.zeros_like(accept), follow)


WRONG = [residual_from_p, accepted_without_q, q_of_another_temperature, one_coin, coin_used_twice, always_accepted]


def cells(points: Tensor) -> tuple[Tensor, Tensor]:
    """Middles and widths of the cells into which these points and a grid of twelfths cut [0, 1)."""
    points = points[points.isfinite()].double().clamp(0, 1)
    edges = torch.cat([points, torch.arange(13) / 12]).unique()
    # points that differ by rounding are one point
    edges = torch.cat([edges[:-1][edges.diff() > 1e-6], edges[-1:]])
    return (edges[:-1] + edges.diff() / 2).float(), edges.diff()


def committed(verify: Verify, p: Tree, q: Tree) -> Tensor:
    """Joint distribution of the first gamma + 1 tokens, fp64 [vocab] * (gamma + 1).

    Every drafted sequence counts as often as q draws it; what the round does not commit is extended by p.
    """
    gamma, vocab = len(q), len(p[0])
    sequences = torch.tensor(list(itertools.product(range(vocab), repeat=gamma))).reshape(-1, gamma)
    p_rows = torch.stack([p[k][tuple(sequences[:, :k].T)].expand(len(sequences), -1) for k in range(gamma + 1)], dim=1)
    q_rows = torch.stack([q[k][tuple(sequences[:, :k].T)].expand(len(sequences), -1) for k in range(gamma)], dim=1)
    drafted = q_rows.double().gather(2, sequences.unsqueeze(2)).squeeze(2).prod(dim=1)

    ratios = p_rows[:, :gamma] / q_rows  # nan or infinite where q is 0: no token is drafted there
    accept_cells = [cells(ratios[:, k].flatten()) for k in range(gamma)]
    residuals = (p_rows[:, :gamma] - q_rows).clamp_min(0)
    next_points = [p_rows.cumsum(-1), residuals.cumsum(-1) / residuals.sum(-1, keepdim=True)]
    next_cell = cells(torch.cat([points.flatten() for points in next_points]))

    sizes = [len(sequences), *(len(middles) for middles, _ in [*accept_cells, next_cell])]
    index = torch.cartesian_prod(*map(torch.arange, sizes))
    index = index[drafted[index[:, 0]] > 0]
    row = index[:, 0]
    accept = torch.stack([accept_cells[k][0][index[:, k + 1]] for k in range(gamma)], dim=1)
    mass = drafted[row] * next_cell[1][index[:, -1]]
    for k in range(gamma):
        mass = mass * accept_cells[k][1][index[:, k + 1]]
    num_accepted, next_token = verify(p_rows[row], q_rows[row], sequences[row], accept, next_cell[0][index[:, -1]])

    joint = torch.zeros((), dtype=torch.float64)
    for k in range(gamma + 1):
        ended_here = num_accepted == k
        block = torch.cat([sequences[row, :k], next_token.unsqueeze(1)], dim=1)[ended_here]
        ended = torch.zeros([vocab] * (k + 1), dtype=torch.float64)
        ended.index_put_(tuple(block.T), mass[ended_here], accumulate=True)
        joint = joint.unsqueeze(-1) * p[k].double() + ended
    return joint


def target(p: Tree) -> Tensor:
    joint = torch.ones((), dtype=torch.float64)
    for conditional in p:
        joint = joint.unsqueeze(-1) * conditional.double()
    return joint


def error(verify: Verify, p: Tree, q: Tree) -> float:
    joint = committed(verify, p, q)
    assert joint.sum().item() == pytest.approx(1, abs=1e-6)  # no cell was left out
    return (joint - target(p)).abs().max().item()


def random_trees(vocab: int, gamma: int, seed: int) -> tuple[Tree, Tree]:
    """p and q that differ, with a zero in both here and there."""
    generator = torch.Generator().manual_seed(seed)

    def tree(depth: int) -> Tree:
        logits = [1.5 * torch.randn([vocab] * (k + 1), generator=generator) for k in range(depth)]
        hidden = [torch.rand(level.shape, generator=generator) < 0.15 for level in logits]
        for level, gone in zip(logits, hidden, strict=True):
            gone[..., 0] &= ~gone[..., 1:].all(dim=-1)
            level[gone] = -torch.inf
        return [level.softmax(dim=-1) for level in logits]

    return tree(gamma + 1), tree(gamma)


@pytest.mark.parametrize(("vocab", "gamma"), [(3, 1), (4, 1), (3, 2), (4, 2), (2, 3)])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_what_is_committed_follows_the_target(vocab: int, gamma: int, seed: int) -> None:
    assert error(verify_tokenwise, *random_trees(vocab, gamma, seed)) < 1e-6


@pytest.mark.parametrize("verify", WRONG)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_wrong_rules_are_noticed(verify: Verify, seed: int) -> None:
    assert error(verify, *random_trees(3, 2, seed)) > 1e-3


# Every distribution over three tokens in quarters: one-hot, with zeros, equal, disjoint and all between.
QUARTERS = [torch.tensor(counts) / 4 for counts in itertools.product(range(5), repeat=3) if sum(counts) == 4]
BONUS = torch.tensor([[0.25, 0.25, 0.5], [0.0, 1.0, 0.0], [0.75, 0.0, 0.25]])


@pytest.mark.parametrize("p", QUARTERS, ids=str)
def test_every_pair_of_distributions_in_quarters(p: Tensor) -> None:
    for q in QUARTERS:
        assert error(verify_tokenwise, [p, BONUS], [q]) < 1e-6, q


def test_many_pairs_in_quarters_expose_a_wrong_rule() -> None:
    for verify in (residual_from_p, accepted_without_q, coin_used_twice, always_accepted):
        wrong = [error(verify, [p, BONUS], [q]) > 1e-2 for p in QUARTERS[::2] for q in QUARTERS[1::2]]
        assert sum(wrong) > len(wrong) / 4, verify


@pytest.mark.parametrize("seed", [1, 2])
def test_three_drafted_tokens_of_three_in_quarters(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def tree(depth: int) -> Tree:
        chosen = [torch.randint(len(QUARTERS), [3] * k, generator=generator) for k in range(depth)]
        return [torch.stack(QUARTERS)[level] for level in chosen]

    p, q = tree(4), tree(3)
    assert error(verify_tokenwise, p, q) < 1e-6
    assert error(one_coin, p, q) > 1e-3


def rows_of(*distributions: list[float]) -> Tensor:
    return torch.tensor(distributions).unsqueeze(0)


UNIFORMS = torch.cat([torch.tensor([0.0, 2**-30, LARGEST_UNIFORM]), (torch.arange(1000) + 0.5) / 1000])


def verify_at(p: Tensor, q: Tensor, tokens: list[int], accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    """One drafted sequence, judged with each of many uniforms."""
    rows = len(follow)
    drafted = torch.tensor([tokens], dtype=torch.long).expand(rows, -1)
    accept = accept.reshape(rows, -1).expand(rows, len(tokens))
    return verify_tokenwise(p.expand(rows, -1, -1), q.expand(rows, -1, -1), drafted, accept, follow)


def test_greedy_accepts_while_equal_and_then_corrects() -> None:
    one_hot = torch.eye(4)
    for drafted in itertools.product(range(4), repeat=2):
        q = one_hot[list(drafted)].unsqueeze(0)
        p = one_hot[[1, 3, 2]].unsqueeze(0)
        num_accepted, tokens = verify_at(p, q, list(drafted), UNIFORMS, UNIFORMS.flip(0))
        expected = 0 if drafted[0] != 1 else 1 if drafted[1] != 3 else 2
        assert num_accepted.unique().tolist() == [expected]
        assert tokens.unique().tolist() == [[1, 3, 2][expected]]


def test_a_token_the_target_never_says_is_rejected_even_at_u_0() -> None:
    p, q = rows_of([0.0, 0.5, 0.5], [1.0, 0.0, 0.0]), rows_of([0.9, 0.1, 0.0])
    num_accepted, tokens = verify_at(p, q, [0], torch.zeros(len(UNIFORMS)), UNIFORMS)
    assert not num_accepted.any()
    assert tokens.unique().tolist() == [1, 2]


def test_disjoint_supports_leave_the_target_itself() -> None:
    p, q = rows_of([0.0, 0.0, 0.25, 0.75], [1.0, 0.0, 0.0, 0.0]), rows_of([0.5, 0.5, 0.0, 0.0])
    grid = (torch.arange(4000) + 0.5) / 4000
    num_accepted, tokens = verify_at(p, q, [1], grid.flip(0), grid)
    assert not num_accepted.any()
    assert torch.bincount(tokens, minlength=4).tolist() == [0, 0, 1000, 3000]


def test_the_same_distribution_is_always_accepted() -> None:
    p = torch.rand(len(UNIFORMS), 4, 7, generator=torch.Generator().manual_seed(0))
    p /= p.sum(dim=-1, keepdim=True)
    tokens = torch.randint(7, (len(UNIFORMS), 3), generator=torch.Generator().manual_seed(1))
    accept = UNIFORMS.unsqueeze(1).expand(-1, 3)
    num_accepted, _ = verify_tokenwise(p, p[:, :3], tokens, accept, UNIFORMS)
    assert (num_accepted == 3).all()


def test_no_mass_left_by_rounding_falls_back_to_the_target() -> None:
    q = rows_of([0.5, 0.25, 0.25])
    p = torch.cat([q.clone(), q], dim=1)
    p[0, 0, 0] = 0.5 - 2**-25  # the float below: a rejection is possible, yet p exceeds q nowhere
    assert (p[:, :1] - q).clamp_min(0).sum() == 0
    grid = (torch.arange(4000) + 0.5) / 4000
    rejected, tokens = verify_at(p, q, [0], torch.full((4000,), LARGEST_UNIFORM), grid)
    assert not rejected.any()
    assert torch.bincount(tokens, minlength=3).tolist() == [2000, 1000, 1000]


def test_nothing_drafted_is_plain_sampling() -> None:
    p = rows_of([0.25, 0.0, 0.75])
    grid = (torch.arange(4000) + 0.5) / 4000
    num_accepted, tokens = verify_at(p, torch.zeros(1, 0, 3), [], torch.zeros(4000, 0), grid)
    assert not num_accepted.any()
    assert torch.bincount(tokens, minlength=3).tolist() == [1000, 0, 3000]


def test_acceptance_is_the_overlap_of_p_and_q() -> None:
    p, q = random_trees(4, 1, seed=3)
    grid = (torch.arange(10_000) + 0.5) / 10_000
    accepted = [
        verify_at(torch.stack([p[0], p[1][x]]).unsqueeze(0), q[0].reshape(1, 1, 4), [x], grid, grid)[0].double().mean()
        for x in range(4)
    ]
    overlap = torch.minimum(p[0], q[0]).sum().item()
    assert (torch.stack(accepted) * q[0]).sum().item() == pytest.approx(overlap, abs=1e-4)


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(2, 9), st.sampled_from([0.1, 1.0, 10.0]))
def test_a_row_ends_at_its_first_rejection(seed: int, gamma: int, vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(20, gamma + 1, vocab, generator=generator)).softmax(dim=-1)
    q = (scale * torch.randn(20, gamma, vocab, generator=generator)).softmax(dim=-1)
    uniforms = torch.rand(20, 2 * gamma + 1, generator=generator)
    tokens = sample(q, uniforms[:, :gamma])
    arguments = p, q, tokens, uniforms[:, gamma : 2 * gamma], uniforms[:, -1]
    num_accepted, next_tokens = verify_tokenwise(*arguments)
    for row in range(20):
        ratios = [float(p[row, k, x] / q[row, k, x]) for k, x in enumerate(tokens[row])]
        verdicts = [float(u) < ratio for u, ratio in zip(arguments[3][row], ratios, strict=True)]
        assert num_accepted[row] == (verdicts.index(False) if False in verdicts else gamma)
        k, next_token = num_accepted[row], next_tokens[row]
        assert p[row, k, next_token] > (q[row, k, next_token] if k < gamma else 0)
    order = torch.randperm(20, generator=generator)
    shuffled = verify_tokenwise(*(tensor[order] for tensor in arguments))
    assert torch.equal(shuffled[0], num_accepted[order])
    assert torch.equal(shuffled[1], next_tokens[order])
