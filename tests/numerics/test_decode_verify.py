"""The rules of verification by exact enumeration: what is committed follows the target, for every draft.

Every drafted string counts as often as q draws it. What a rule makes of the string changes only where a coin crosses a
threshold. Thresholds are found by bisection, of the rule as it is and not from any formula, and the coins are
integrated over the cells between them, by a point inside each and its volume: no sampling, and nothing left out.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.sampling import Distribution
from decode.verify import (
    verify_block,
    verify_equal,
    verify_lossy_lenience,
    verify_lossy_typical,
    verify_tokenwise,
)

Verify = Callable[[Distribution, Distribution, Tensor, Tensor, Tensor], tuple[Tensor, Distribution]]
# Conditional distributions by prefix, of many instances: tree[k] is [instances] + [vocab] * k + [vocab].
Tree = list[Tensor]
LARGEST_COIN = 1 - 2**-24
LOSSLESS = [verify_tokenwise, verify_block]
TOLERANCE = 2e-6  # rounding of fp32 probabilities and of 24-bit coins
fixed_examples = settings(derandomize=True, deadline=None, max_examples=30, database=None)


@dataclass
class Rows:
    """Every string that q can draft, of every instance."""

    instance: Tensor  # [rows]
    strings: Tensor  # [rows, gamma]
    mass: Tensor  # fp64 [rows], how often q draws the string
    p: Tensor  # [rows, gamma + 1, vocab]
    q: Tensor  # [rows, gamma, vocab]

    @classmethod
    def of(cls, p: Tree, q: Tree) -> "Rows":
        gamma, (instances, vocab) = len(q), p[0].shape
        strings = torch.tensor(list(itertools.product(range(vocab), repeat=gamma)))
        instance = torch.arange(instances).repeat_interleave(len(strings))
        strings = strings.repeat(instances, 1)
        given_prefix = [(instance, *strings[:, :k].T) for k in range(gamma + 1)]
        p_rows = torch.stack([p[k][given_prefix[k]] for k in range(gamma + 1)], dim=1)
        q_rows = torch.stack([q[k][given_prefix[k]] for k in range(gamma)], dim=1)
        mass = q_rows.double().gather(2, strings.unsqueeze(2)).squeeze(2).prod(dim=1)
        drafted = mass > 0
        return cls(*(each[drafted] for each in (instance, strings, mass, p_rows, q_rows)))


@dataclass
class Outcomes:
    """What a rule makes of each string in each cell of its coins."""

    row: Tensor  # [cells], of which string
    volume: Tensor  # fp64 [cells], of a string's cells they sum to 1
    num_accepted: Tensor  # [cells]
    next_token: Tensor  # fp64 [cells, vocab], normalised


Judge = Callable[[Tensor, Tensor], tuple[Tensor, Distribution]]


def judge_of(verify: Verify, rows: Rows, layout: tuple[str, str], num_beyond: int) -> Judge:
    """The rule on some of the strings with given coins; distributions in a layout, with garbage behind the drafted."""
    generator = torch.Generator().manual_seed(0)
    num_rows, gamma, vocab = rows.q.shape
    garbage = torch.rand(2, num_rows, num_beyond, vocab, generator=generator).softmax(dim=-1)
    p = laid_out(torch.cat([rows.p, garbage[0]], dim=1), layout[0], generator)
    q = laid_out(torch.cat([rows.q, garbage[1]], dim=1), layout[1], generator)
    strings = torch.cat([rows.strings, torch.randint(vocab, (num_rows, num_beyond), generator=generator)], dim=1)

    def judge(row: Tensor, coins: Tensor) -> tuple[Tensor, Distribution]:
        coins = torch.nn.functional.pad(coins, (0, num_beyond))  # a coin of 0 accepts whatever it can
        return verify(p[row], q[row], strings[row], torch.full((len(row),), gamma), coins)

    return judge


def laid_out(dense: Tensor, layout: str, generator: torch.Generator) -> Distribution:
    if layout == "dense":
        return Distribution(dense)
    if layout == "shared":  # a reduced vocabulary: the tokens that ever have mass, in any order
        ids = (dense > 0).flatten(0, -2).any(dim=0).nonzero().squeeze(1)
        ids = ids[torch.randperm(len(ids), generator=generator)]
        return Distribution(dense[..., ids]).renamed(ids)
    # each its own, as top-k leaves them; some columns of no mass where others have more
    order = torch.rand(dense.shape, generator=generator) + (dense > 0)
    ids = order.topk(int((dense > 0).sum(dim=-1).max()), dim=-1, sorted=False).indices
    return Distribution(dense.gather(-1, ids), ids)


def edges_of(judge: Judge, num_rows: int, gamma: int, coin: int) -> Tensor:
    """Where, and for whatever other coins, a rise of this coin lowers the number accepted: fp64 [rows, edges]."""
    others = torch.tensor(list(itertools.product([0.0, LARGEST_COIN], repeat=gamma - 1)))
    others = others.reshape(2 ** (gamma - 1), gamma - 1)
    row, other, level = torch.cartesian_prod(*map(torch.arange, (num_rows, len(others), gamma))).T
    coins = torch.cat([others[:, :coin], torch.zeros(len(others), 1), others[:, coin:]], dim=1)[other]
    edge = torch.zeros(len(row), dtype=torch.float64)
    for bit in range(1, 25):
        coins[:, coin] = (edge + 2.0**-bit).float()
        edge += 2.0**-bit * (judge(row, coins)[0] > level)
    edge[edge == LARGEST_COIN] = 1
    edges = torch.nn.functional.pad(edge.reshape(num_rows, -1), (1, 1))
    edges[:, -1] = 1
    edges = edges.sort(dim=1).values
    edges[:, 1:][edges.diff(dim=1) < 1e-6] = 1  # the same, or none at all
    edges = edges.sort(dim=1).values
    return edges[:, : int((edges < 1).sum(dim=1).max()) + 1]


def outcomes(verify: Verify, rows: Rows, layout: tuple[str, str] = ("dense", "dense"), num_beyond: int = 0) -> Outcomes:
    num_rows, gamma, vocab = rows.q.shape
    judge = judge_of(verify, rows, layout, num_beyond)
    edges = [edges_of(judge, num_rows, gamma, coin) for coin in range(gamma)]
    row, *cells = torch.cartesian_prod(
        torch.arange(num_rows), *(torch.arange(each.shape[1] - 1) for each in edges)
    ).T.unbind()
    volume = torch.ones(len(row), dtype=torch.float64)
    coins = torch.empty(len(row), gamma)
    for coin, (edge, cell) in enumerate(zip(edges, cells, strict=True)):
        low, high = edge[row, cell], edge[row, cell + 1]
        volume *= high - low
        coins[:, coin] = (low + 0.37 * (high - low)).float()  # a middle could be a threshold of a wrong rule
    row, volume, coins = row[volume > 0], volume[volume > 0], coins[volume > 0]
    num_accepted, weights = judge(row, coins)
    next_token = weights.dense(vocab).double()
    return Outcomes(row, volume, num_accepted, next_token / next_token.sum(dim=1, keepdim=True))


def committed(rows: Rows, result: Outcomes, p: Tree) -> Tensor:
    """Joint distribution of the first gamma + 1 tokens, fp64 [instances] + [vocab] * (gamma + 1).

    What a round does not commit is extended by p.
    """
    instances, vocab = p[0].shape
    joint = torch.zeros(instances, dtype=torch.float64)
    for k, conditional in enumerate(p):
        here = result.num_accepted == k
        row = result.row[here]
        prefix = rows.instance[row]
        for place in range(k):
            prefix = prefix * vocab + rows.strings[row, place]
        ended = torch.zeros(instances * vocab**k, vocab, dtype=torch.float64)
        ended.index_add_(0, prefix, (rows.mass[row] * result.volume[here]).unsqueeze(1) * result.next_token[here])
        joint = joint.unsqueeze(-1) * conditional.double() + ended.reshape(conditional.shape)
    return joint


def errors(
    verify: Verify, p: Tree, q: Tree, layout: tuple[str, str] = ("dense", "dense"), num_beyond: int = 0
) -> Tensor:
    """The largest error of each instance's joint distribution, [instances]."""
    rows = Rows.of(p, q)
    joint = committed(rows, outcomes(verify, rows, layout, num_beyond), p)
    assert (joint.flatten(1).sum(dim=1) - 1).abs().max() < 1e-5  # no cell was left out
    target = torch.ones(len(joint), dtype=torch.float64)
    for conditional in p:
        target = target.unsqueeze(-1) * conditional.double()
    return (joint - target).flatten(1).abs().amax(dim=1)


def random_trees(vocab: int, gamma: int, instances: int, hidden: float = 0.15, seed: int = 0) -> tuple[Tree, Tree]:
    """p and q that differ, with zeros in both here and there."""
    generator = torch.Generator().manual_seed(seed)

    def tree(depth: int) -> Tree:
        levels = [1.5 * torch.randn([instances] + [vocab] * (k + 1), generator=generator) for k in range(depth)]
        for level in levels:
            gone = torch.rand(level.shape, generator=generator) < hidden
            gone[..., 0] &= ~gone[..., 1:].all(dim=-1)
            level[gone] = -torch.inf
        return [level.softmax(dim=-1) for level in levels]

    return tree(gamma + 1), tree(gamma)


# ---- the two lossless rules ----


@pytest.mark.parametrize("verify", LOSSLESS)
@pytest.mark.parametrize(("vocab", "gamma", "instances"), [(3, 1, 40), (4, 1, 40), (3, 2, 30), (4, 2, 20), (3, 3, 12)])
def test_what_is_committed_follows_the_target(verify: Verify, vocab: int, gamma: int, instances: int) -> None:
    assert errors(verify, *random_trees(vocab, gamma, instances)).max() < TOLERANCE


LAYOUTS = list(itertools.product(["dense", "shared", "own"], repeat=2))


@pytest.mark.parametrize("verify", LOSSLESS)
@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_distributions_over_few_columns(verify: Verify, layout: tuple[str, str]) -> None:
    p, q = random_trees(5, 2, 8, hidden=0.5)
    for level in q:  # a draft of a reduced vocabulary never says 1
        level[..., 1] = 0
        level[level.sum(dim=-1) == 0] = torch.tensor([0.25, 0, 0.75, 0, 0])
        level /= level.sum(dim=-1, keepdim=True)
    assert errors(verify, p, q, layout).max() < TOLERANCE


@pytest.mark.parametrize("verify", LOSSLESS)
@pytest.mark.parametrize("layout", [("dense", "dense"), ("own", "shared"), ("own", "own")], ids="-".join)
def test_rows_that_drafted_fewer_than_the_widest(verify: Verify, layout: tuple[str, str]) -> None:
    for gamma, num_beyond in ((1, 2), (2, 1)):
        assert errors(verify, *random_trees(3, gamma, 10), layout, num_beyond).max() < TOLERANCE


@pytest.mark.parametrize("verify", LOSSLESS)
@pytest.mark.parametrize("layout", [("dense", "dense"), ("dense", "own"), ("own", "own")], ids="-".join)
def test_proposers_that_draft_without_chance(verify: Verify, layout: tuple[str, str]) -> None:
    """q is a point mass; in a layout of its own it has one column, which is what lookup gives."""
    p, q = random_trees(3, 2, 20)
    q = [torch.nn.functional.one_hot(level.argmax(dim=-1), 3).float() for level in q]
    assert errors(verify, p, q, layout).max() < TOLERANCE


# Every distribution over three tokens in quarters: one-hot, with zeros, equal, disjoint and all between.
QUARTERS = torch.tensor([counts for counts in itertools.product(range(5), repeat=3) if sum(counts) == 4]) / 4


@pytest.mark.parametrize("verify", LOSSLESS)
def test_every_pair_of_distributions_in_quarters(verify: Verify) -> None:
    one, other = torch.cartesian_prod(torch.arange(15), torch.arange(15)).T
    bonus = QUARTERS[torch.stack([one, other, (one + other) % 15], dim=1)]
    assert errors(verify, [QUARTERS[one], bonus], [QUARTERS[other]]).max() < TOLERANCE


@pytest.mark.parametrize("verify", LOSSLESS)
@pytest.mark.parametrize(("gamma", "instances"), [(2, 100), (3, 15)])
def test_strings_of_distributions_in_quarters(verify: Verify, gamma: int, instances: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def tree(depth: int) -> Tree:
        return [QUARTERS[torch.randint(15, [instances] + [3] * k, generator=generator)] for k in range(depth)]

    assert errors(verify, tree(gamma + 1), tree(gamma)).max() < TOLERANCE


# ---- the same check fails for rules that are wrong ----


def residual_from_p(verify: Verify) -> Verify:
    def wrong(p: Distribution, q: Distribution, *others: Tensor) -> tuple[Tensor, Distribution]:
        num_accepted, _ = verify(p, q, *others)
        return num_accepted, p[torch.arange(len(num_accepted)), num_accepted]

    return wrong


def q_of_another_temperature(verify: Verify) -> Verify:
    def wrong(p: Distribution, q: Distribution, *others: Tensor) -> tuple[Tensor, Distribution]:
        flatter = q.probabilities.sqrt()
        return verify(p, Distribution(flatter / flatter.sum(dim=-1, keepdim=True)), *others)

    return wrong


def one_coin(verify: Verify) -> Verify:
    def wrong(*arguments: Tensor) -> tuple[Tensor, Distribution]:
        *others, coins = arguments
        return verify(*others, coins[:, :1].expand_as(coins))

    return wrong


def always_heads(verify: Verify) -> Verify:
    def wrong(*arguments: Tensor) -> tuple[Tensor, Distribution]:
        *others, coins = arguments
        return verify(*others, torch.zeros_like(coins))

    return wrong


def block_as_written(
    p: Distribution,
    q: Distribution,
    strings: Tensor,
    num_drafted: Tensor,
    coins: Tensor,
    mistake: str = "",
) -> tuple[Tensor, Distribution]:
    """Algorithm 2 of Sun et al. 2024 in fp64, for dense distributions and full rows, with room for a mistake."""
    (num_rows, gamma), rows = strings.shape, torch.arange(len(strings))
    p_dense, q_dense = p.probabilities.double(), q.probabilities.double()
    reached, tau = [torch.ones(num_rows, dtype=torch.float64)], torch.zeros_like(num_drafted)
    failed = torch.zeros(num_rows, dtype=torch.bool)
    for i in range(1, gamma + 1):
        token = strings[:, i - 1]
        ratio = p_dense[rows, i - 1, token] / q_dense[rows, i - 1, token]
        if mistake == "ratios clamped one by one":
            ratio = ratio.clamp_max(1)
        reached.append(reached[-1] * ratio if mistake == "not clamped" else (reached[-1] * ratio).clamp_max(1))
        passing = reached[i]
        if i < gamma and mistake != "h is p":
            scale = 1 if mistake == "left over unscaled" else reached[i].unsqueeze(1)
            left_over = (scale * p_dense[:, i] - q_dense[:, i]).clamp_min(0).sum(dim=1)
            passing = (left_over / (left_over + 1 - reached[i])).nan_to_num(nan=0.0)
        passed = coins[:, i - 1].double() < passing
        failed |= ~passed
        if mistake == "stops at the first failure":
            passed &= ~failed
        tau[passed] = i
    scale = torch.stack(reached, dim=1)[rows, tau].unsqueeze(1)
    if mistake == "residual unscaled":
        scale = torch.ones_like(scale)
    beyond = torch.cat([q_dense, torch.zeros_like(q_dense[:, :1])], dim=1)[rows, tau]
    weights = (scale * p_dense[rows, tau] - beyond).clamp_min(0)
    weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, p_dense[rows, tau])
    return tau, Distribution(weights.float())


BLOCK_MISTAKES = [
    "h is p",
    "left over unscaled",
    "residual unscaled",
    "stops at the first failure",
    "not clamped",
    "ratios clamped one by one",
]
WRONG = {
    f"{wrong.__name__} {verify.__name__}": wrong(verify)
    for wrong in (residual_from_p, q_of_another_temperature, one_coin, always_heads)
    for verify in LOSSLESS
}
WRONG |= {mistake: partial(block_as_written, mistake=mistake) for mistake in BLOCK_MISTAKES}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_noticed(name: str) -> None:
    assert errors(WRONG[name], *random_trees(3, 2, 20)).max() > 0.01


@pytest.mark.parametrize("verify", LOSSLESS)
def test_a_draft_that_chooses_by_argmax_and_says_it_sampled_is_noticed(verify: Verify) -> None:
    p, q = random_trees(3, 2, 20, hidden=0)
    rows = Rows.of(p, q)
    rows.mass = (rows.q.argmax(dim=2) == rows.strings).all(dim=1).double()
    first_token = committed(rows, outcomes(verify, rows), p).flatten(2).sum(dim=2)
    assert (first_token - p[0].double()).abs().max() > 0.1


def test_the_algorithm_as_written_passes() -> None:
    assert errors(block_as_written, *random_trees(3, 2, 20)).max() < TOLERANCE


@pytest.mark.parametrize("verify", [*LOSSLESS, one_coin(verify_tokenwise), one_coin(verify_block)])
def test_coins_are_cut_wherever_it_matters(verify: Verify) -> None:
    """The rule does the same at any point of a cell as at the one where it was asked."""
    rows, gamma = Rows.of(*random_trees(3, 3, 4)), 3
    judge = judge_of(verify, rows, ("dense", "dense"), 0)
    edges = [edges_of(judge, len(rows.mass), gamma, coin) for coin in range(gamma)]
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(len(rows.mass), (20_000,), generator=generator)
    coins = torch.rand(len(row), gamma, generator=generator)
    inside = coins.clone()
    for coin, edge in enumerate(edges):
        place = (edge[row] <= coins[:, coin : coin + 1]).sum(dim=1)
        low, high = edge[row, place - 1], edge[row, place]
        inside[:, coin] = (low + 0.37 * (high - low)).float()
    differ = judge(row, coins)[0] != judge(row, inside)[0]
    assert differ.sum() <= 3  # where a random coin falls within 1e-6 of an edge


# ---- how much is accepted ----


def accepted_at_least(rows: Rows, result: Outcomes) -> Tensor:
    """How probable it is that at least 1, 2, ... gamma tokens of each string are accepted, fp64 [rows, gamma]."""
    gamma = rows.strings.shape[1]
    at_least = (result.num_accepted.unsqueeze(1) > torch.arange(gamma)) * result.volume.unsqueeze(1)
    return torch.zeros(len(rows.mass), gamma, dtype=torch.float64).index_add_(0, result.row, at_least)


def mean_accepted(verify: Verify, rows: Rows) -> Tensor:
    of_string = accepted_at_least(rows, outcomes(verify, rows)).sum(dim=1) * rows.mass
    return torch.zeros(int(rows.instance.max()) + 1, dtype=torch.float64).index_add_(0, rows.instance, of_string)


def plain_python(rows: Rows, row: int) -> tuple[list[list[float]], list[list[float]], list[int]]:
    p, q = rows.p[row].double().tolist(), rows.q[row].double().tolist()
    return p, q, rows.strings[row].tolist()


def test_tokenwise_accepts_with_the_product_of_the_ratios() -> None:
    rows = Rows.of(*random_trees(3, 3, 5))
    measured = accepted_at_least(rows, outcomes(verify_tokenwise, rows))
    for row in range(len(rows.mass)):
        p, q, string = plain_python(rows, row)
        expected = list(
            itertools.accumulate((min(1, p[i][x] / q[i][x]) for i, x in enumerate(string)), lambda a, b: a * b)
        )
        assert measured[row].tolist() == pytest.approx(expected, abs=TOLERANCE)


def test_block_accepts_with_the_probabilities_of_the_paper() -> None:
    rows = Rows.of(*random_trees(3, 3, 5))
    measured = accepted_at_least(rows, outcomes(verify_block, rows))
    gamma = 3
    for row in range(len(rows.mass)):
        p, q, string = plain_python(rows, row)
        reached, passing = 1.0, []
        for i, x in enumerate(string, start=1):
            reached = min(reached * p[i - 1][x] / q[i - 1][x], 1)
            if i == gamma:
                passing.append(reached)
            else:
                left_over = sum(max(reached * a - b, 0) for a, b in zip(p[i], q[i], strict=True))
                passing.append(left_over / (left_over + 1 - reached) if left_over else 0.0)
        expected = [1 - math.prod(1 - h for h in passing[i:]) for i in range(gamma)]
        assert measured[row].tolist() == pytest.approx(expected, abs=2 * TOLERANCE)


def test_block_reaches_each_prefix_as_often_as_it_can() -> None:
    """Pr(tau >= i | X_1..i) = p_i over what may be drafted next (Sun et al. 2024, lemma 2 of the proof)."""
    vocab, gamma = 3, 3
    rows = Rows.of(*random_trees(vocab, gamma, 5))
    measured = accepted_at_least(rows, outcomes(verify_block, rows))
    for i in range(1, gamma + 1):
        by_prefix: dict[tuple[int, ...], float] = {}
        expected: dict[tuple[int, ...], float] = {}
        for row in range(len(rows.mass)):
            p, q, string = plain_python(rows, row)
            prefix = (int(rows.instance[row]), *string[:i])
            reached = 1.0
            for place, x in enumerate(string[:i]):
                reached = min(reached * p[place][x] / q[place][x], 1)
            later = math.prod(q[place][string[place]] for place in range(i, gamma))
            expected[prefix] = reached
            by_prefix[prefix] = by_prefix.get(prefix, 0.0) + later * float(measured[row, i - 1])
        assert by_prefix == pytest.approx(expected, abs=2 * TOLERANCE)


def test_block_accepts_no_fewer_than_tokenwise_and_often_more() -> None:
    for vocab, gamma, instances in ((3, 1, 40), (3, 2, 40), (4, 2, 20), (3, 3, 15)):
        rows = Rows.of(*random_trees(vocab, gamma, instances, seed=1))
        gain = mean_accepted(verify_block, rows) - mean_accepted(verify_tokenwise, rows)
        assert gain.min() > -2 * TOLERANCE
        if gamma == 1:
            assert gain.abs().max() < 2 * TOLERANCE  # where they are the same rule
        else:
            assert (gain > 0.01).double().mean() > 0.5


def test_the_example_of_the_paper() -> None:
    """Sun et al. 2024, section 2: 10/9 tokens are accepted token-wise, 11/9 by the block."""
    p, q = torch.tensor([[1 / 3, 2 / 3]]), torch.tensor([[2 / 3, 1 / 3]])
    trees = [p, p.expand(1, 2, 2), p.expand(1, 2, 2, 2)], [q, q.expand(1, 2, 2)]
    rows = Rows.of(*trees)
    assert float(mean_accepted(verify_tokenwise, rows)) == pytest.approx(10 / 9, abs=1e-5)
    assert float(mean_accepted(verify_block, rows)) == pytest.approx(11 / 9, abs=1e-5)


def test_the_overlap_is_what_is_accepted_of_one_token() -> None:
    p, q = random_trees(4, 1, 30)
    overlap = torch.minimum(p[0], q[0]).double().sum(dim=1)
    for verify in LOSSLESS:
        assert (mean_accepted(verify, Rows.of(p, q)) - overlap).abs().max() < TOLERANCE


# ---- corners ----


def of_rows(*positions: list[float], num_rows: int = 1) -> Distribution:
    return Distribution(torch.tensor(positions).expand(num_rows, -1, -1))


def judged(
    verify: Verify, p: Distribution, q: Distribution, string: list[int], coins: list[float]
) -> tuple[int, list[float]]:
    drafted = torch.tensor([string], dtype=torch.long)
    num_accepted, weights = verify(p, q, drafted, torch.tensor([len(string)]), torch.tensor([coins]).reshape(1, -1))
    normalised = weights.probabilities / weights.probabilities.sum()
    return int(num_accepted), normalised[0].tolist()


@pytest.mark.parametrize("verify", LOSSLESS)
class TestCorners:
    def test_the_same_distribution_is_always_accepted(self, verify: Verify) -> None:
        generator = torch.Generator().manual_seed(0)
        p = torch.rand(1000, 4, 7, generator=generator)
        p /= p.sum(dim=-1, keepdim=True)
        strings = torch.randint(7, (1000, 3), generator=generator)
        coins = torch.full((1000, 3), LARGEST_COIN)
        num_accepted, weights = verify(
            Distribution(p), Distribution(p[:, :3].clone()), strings, torch.full((1000,), 3), coins
        )
        assert (num_accepted == 3).all()
        torch.testing.assert_close(weights.probabilities, p[:, 3])

    @pytest.mark.parametrize("coin", [0.0, 2**-24, 0.5, LARGEST_COIN])
    def test_a_token_the_target_never_says_is_rejected_even_by_a_coin_of_0(self, verify: Verify, coin: float) -> None:
        p, q = of_rows([0.0, 0.5, 0.5], [1.0, 0.0, 0.0]), of_rows([0.9, 0.1, 0.0])
        num_accepted, next_token = judged(verify, p, q, [0], [coin])
        assert num_accepted == 0
        assert next_token == pytest.approx([0, 0.4 / 0.9, 0.5 / 0.9])
        # nor is it passed over when what follows it would pass
        p, q = of_rows([0.0, 0.5, 0.5], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]), of_rows([0.9, 0.1, 0.0], [0.1, 0.9, 0.0])
        assert judged(verify, p, q, [0, 0], [coin, coin])[0] == 0

    def test_disjoint_supports_leave_the_target_itself(self, verify: Verify) -> None:
        p, q = of_rows([0.0, 0.0, 0.25, 0.75], [1.0, 0.0, 0.0, 0.0]), of_rows([0.5, 0.5, 0.0, 0.0])
        assert judged(verify, p, q, [1], [0.0]) == (0, [0.0, 0.0, 0.25, 0.75])

    def test_greedy_accepts_while_equal_and_then_corrects(self, verify: Verify) -> None:
        one_hot = torch.eye(4)
        p = Distribution(one_hot[[1, 3, 2]].unsqueeze(0))
        for string in itertools.product(range(4), repeat=2):
            q = Distribution(one_hot[list(string)].unsqueeze(0))
            expected = 0 if string[0] != 1 else 1 if string[1] != 3 else 2
            for coin in (0.0, 0.5, LARGEST_COIN):
                num_accepted, next_token = judged(verify, p, q, list(string), [coin, coin])
                assert num_accepted == expected
                assert next_token == one_hot[[1, 3, 2][expected]].tolist()

    @pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
    def test_no_mass_left_by_rounding_falls_back_to_the_target(self, verify: Verify, layout: tuple[str, str]) -> None:
        q = torch.tensor([[[0.5, 0.25, 0.25]]])
        p = torch.cat([q, q], dim=1)
        p[0, 0, 0] = 0.5 - 2**-25  # the float below: a rejection is possible, yet p exceeds q nowhere
        assert not (p[:, :1] > q).any()
        generator = torch.Generator().manual_seed(0)
        num_accepted, weights = verify(
            laid_out(p, layout[0], generator),
            laid_out(q, layout[1], generator),
            torch.tensor([[0]]),
            torch.tensor([1]),
            torch.tensor([[LARGEST_COIN]]),
        )
        assert num_accepted.tolist() == [0]
        assert torch.equal(weights.dense(3), p[:, 0])

    def test_what_is_left_over_can_be_drawn_from(self, verify: Verify) -> None:
        """A residual too small for a division by noise would draw any token, even one of no probability."""
        p, q = of_rows([0.0, 1.0, 1e-42], [1.0, 0.0, 0.0]), of_rows([0.0, 1.0, 0.0])
        # nothing but a coin beyond 1 rejects here
        num_accepted, weights = verify(p, q, torch.tensor([[1]]), torch.tensor([1]), torch.tensor([[1.5]]))
        assert num_accepted.tolist() == [0]
        assert torch.equal(weights.probabilities, p.probabilities[:, 0])

    @pytest.mark.parametrize("layout", ["dense", "shared", "own"])
    def test_nothing_drafted_leaves_the_target_itself(self, verify: Verify, layout: str) -> None:
        p = torch.tensor([[[0.25, 0.0, 0.75]], [[0.0, 0.5, 0.5]]])
        nothing, columns = torch.zeros(2, 0, 3), torch.arange(3)
        ids = {"dense": None, "shared": columns, "own": columns.expand(2, 0, 3)}[layout]
        num_accepted, weights = verify(
            laid_out(p, layout, torch.Generator().manual_seed(0)),
            Distribution(nothing, ids),
            torch.zeros(2, 0, dtype=torch.long),
            torch.tensor([0, 0]),
            torch.zeros(2, 0),
        )
        assert num_accepted.tolist() == [0, 0]
        assert torch.equal(weights.dense(3), p[:, 0])

    @pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
    def test_a_row_is_what_it_would_be_alone_and_as_narrow_as_it_drafted(
        self, verify: Verify, layout: tuple[str, str]
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        num_rows, width = 60, 3
        num_drafted = torch.arange(num_rows) % (width + 1)
        dense = torch.rand(2, num_rows, width + 1, 5, generator=generator).square()
        dense /= dense.sum(dim=-1, keepdim=True)
        p, q = (laid_out(each, how, generator) for each, how in zip(dense, layout, strict=True))
        strings = torch.randint(5, (num_rows, width), generator=generator)
        coins = torch.rand(num_rows, width, generator=generator)
        num_accepted, weights = verify(p, q[:, :width], strings, num_drafted, coins)
        assert (num_accepted <= num_drafted).all()
        assert len(num_accepted.unique()) == width + 1
        for row, drafted in enumerate(num_drafted.tolist()):
            one = slice(row, row + 1)
            alone = verify(
                p[one, : drafted + 1], q[one, :drafted], strings[one, :drafted], num_drafted[one], coins[one, :drafted]
            )
            assert alone[0] == num_accepted[row]
            expected, found = alone[1].dense(5), weights[one].dense(5)
            torch.testing.assert_close(found / found.sum(), expected / expected.sum())

    def test_arguments_are_left_alone(self, verify: Verify) -> None:
        rows = Rows.of(*random_trees(3, 2, 3))
        arguments = rows.p.clone(), rows.q.clone(), rows.strings.clone(), torch.full((len(rows.mass),), 1)
        verify(Distribution(arguments[0]), Distribution(arguments[1]), *arguments[2:], torch.rand(len(rows.mass), 2))
        for left, before in zip(arguments, (rows.p, rows.q, rows.strings), strict=False):
            assert torch.equal(left, before)


@fixed_examples
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(2, 9), st.sampled_from([0.1, 1.0, 10.0]))
def test_tokenwise_ends_at_the_first_rejection(seed: int, gamma: int, vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(20, gamma + 1, vocab, generator=generator)).softmax(dim=-1)
    q = (scale * torch.randn(20, gamma, vocab, generator=generator)).softmax(dim=-1)
    strings = torch.multinomial(q.reshape(-1, vocab), 1, generator=generator).reshape(20, gamma)
    coins = torch.rand(20, gamma, generator=generator)
    num_accepted, weights = verify_tokenwise(Distribution(p), Distribution(q), strings, torch.full((20,), gamma), coins)
    for row in range(20):
        verdicts = [float(coins[row, k]) < float(p[row, k, x] / q[row, k, x]) for k, x in enumerate(strings[row])]
        k = verdicts.index(False) if False in verdicts else gamma
        assert num_accepted[row] == k
        residual = p[row, k] - q[row, k] if k < gamma else p[row, k]
        torch.testing.assert_close(weights.probabilities[row], residual.clamp_min(0))


@fixed_examples
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(2, 9), st.sampled_from([0.1, 1.0, 10.0]))
def test_block_does_what_is_written(seed: int, gamma: int, vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = Distribution((scale * torch.randn(200, gamma + 1, vocab, generator=generator)).softmax(dim=-1))
    q = Distribution((scale * torch.randn(200, gamma, vocab, generator=generator)).softmax(dim=-1))
    strings = torch.multinomial(q.probabilities.reshape(-1, vocab), 1, generator=generator).reshape(200, gamma)
    arguments = p, q, strings, torch.full((200,), gamma), torch.rand(200, gamma, generator=generator)
    (num_accepted, weights), (expected, expected_weights) = verify_block(*arguments), block_as_written(*arguments)
    assert torch.equal(num_accepted, expected)
    torch.testing.assert_close(weights.probabilities, expected_weights.probabilities, rtol=1e-4, atol=1e-6)


# ---- greedy and seeded ----


def test_equal_accepts_while_equal() -> None:
    for num_drafted in range(3):
        for target in itertools.product(range(2), repeat=3):
            for drafted in itertools.product(range(2), repeat=2):
                found = verify_equal(torch.tensor([target]), torch.tensor([drafted]), torch.tensor([num_drafted]))
                expected = 0
                while expected < num_drafted and target[expected] == drafted[expected]:
                    expected += 1
                assert found.tolist() == [expected]
                assert (*drafted[:expected], target[expected]) == target[: expected + 1]


def test_equal_row_by_row() -> None:
    target = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafted = torch.tensor([[1, 2], [1, 0], [0, 2], [1, 2]])
    assert verify_equal(target, drafted, torch.tensor([2, 2, 2, 1])).tolist() == [2, 1, 0, 1]
    assert verify_equal(target[:, :1], drafted[:, :0], torch.zeros(4, dtype=torch.long)).tolist() == [0] * 4


# ---- lossy rules, which are ----


def lenient(lenience: float) -> Verify:
    return partial(verify_lossy_lenience, lenience=lenience)


def typical(epsilon: float) -> Verify:
    def verify(
        p: Distribution, q: Distribution, strings: Tensor, num_drafted: Tensor, coins: Tensor
    ) -> tuple[Tensor, Distribution]:
        return verify_lossy_typical(p, strings, num_drafted, epsilon)

    return verify


@pytest.mark.parametrize("verify", [lenient(0.5), lenient(0.9), typical(0.3), typical(0.05)])
def test_lossy_rules_do_not_follow_the_target(verify: Verify) -> None:
    assert errors(verify, *random_trees(3, 2, 20)).max() > 0.01


@pytest.mark.parametrize("layout", LAYOUTS, ids="-".join)
def test_lenience_1_is_tokenwise(layout: tuple[str, str]) -> None:
    rows = Rows.of(*random_trees(3, 2, 20))
    exact, lossy = (outcomes(verify, rows, layout) for verify in (verify_tokenwise, lenient(1.0)))
    assert torch.equal(exact.num_accepted, lossy.num_accepted)
    assert torch.equal(exact.next_token, lossy.next_token)
    almost = outcomes(lenient(1 - 1e-6), rows, layout)
    assert (accepted_at_least(rows, almost) - accepted_at_least(rows, exact)).abs().max() < 1e-5


@pytest.mark.parametrize("lenience", [0.3, 0.7])
def test_lenience_accepts_more_and_bounds_what_any_token_gains(lenience: float) -> None:
    p, q = random_trees(4, 1, 40)
    rows = Rows.of(p, q)
    exact, result = outcomes(verify_tokenwise, rows), outcomes(lenient(lenience), rows)
    assert (mean_accepted(lenient(lenience), rows) > mean_accepted(verify_tokenwise, rows) + 0.01).double().mean() > 0.5
    expected = (rows.p[:, 0] / (lenience * rows.q[:, 0])).gather(1, rows.strings).clamp_max(1)
    torch.testing.assert_close(accepted_at_least(rows, result).float(), expected, rtol=0, atol=TOLERANCE)
    rejected = result.num_accepted == 0
    residual = (rows.p[:, 0] - lenience * rows.q[:, 0]).clamp_min(0).double()[result.row[rejected]]
    found = result.next_token[rejected]
    torch.testing.assert_close(found, residual / residual.sum(dim=1, keepdim=True), rtol=0, atol=1e-5)
    first = committed(rows, result, p).sum(dim=2)
    assert (first <= p[0].double() / lenience + TOLERANCE).all()
    assert (first > p[0].double() * (1 + 0.1 * (1 / lenience - 1)) + 0.01).any()  # it is used, too
    assert (committed(rows, exact, p).sum(dim=2) - p[0].double()).abs().max() < TOLERANCE


@pytest.mark.parametrize("layout", ["dense", "shared", "own"])
def test_typical_acceptance_is_a_threshold_that_falls_with_entropy(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p = (3 * torch.randn(300, 2, 6, generator=generator)).softmax(dim=-1)
    p[:, :, 0] = 0
    p /= p.sum(dim=-1, keepdim=True)
    strings = torch.randint(6, (300, 1), generator=generator)
    for epsilon in (0.09, 0.3):
        num_accepted, weights = verify_lossy_typical(
            laid_out(p, layout, generator), strings, torch.ones(300, dtype=torch.long), epsilon
        )
        assert 50 < num_accepted.sum() < 250
        for row, (distribution, (token,)) in enumerate(zip(p[:, 0].tolist(), strings.tolist(), strict=True)):
            entropy = -sum(each * math.log(each) for each in distribution if each)
            accepted = distribution[token] > min(epsilon, math.sqrt(epsilon) * math.exp(-entropy))
            assert num_accepted[row] == accepted
        assert torch.equal(weights.dense(6), p[torch.arange(300), num_accepted])


def test_typical_acceptance_ends_at_the_first_rejection_and_at_what_was_drafted() -> None:
    likely, unlikely = [0.9, 0.05, 0.05], [0.05, 0.9, 0.05]
    p = torch.tensor([[likely, likely, likely], [unlikely, likely, likely], [likely, unlikely, likely], [likely] * 3])
    num_accepted, weights = verify_lossy_typical(
        Distribution(p), torch.zeros(4, 2, dtype=torch.long), torch.tensor([2, 2, 2, 1]), 0.3
    )
    assert num_accepted.tolist() == [2, 0, 1, 1]
    assert torch.equal(weights.probabilities, p[torch.arange(4), num_accepted])
