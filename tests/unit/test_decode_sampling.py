"""Distributions are those of transformers, row by row; a token is drawn exactly as often as its weight says."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decode.sampling import (
    DRAFT_NUCLEUS_COLUMNS,
    NUCLEUS_COLUMNS,
    SPARE_COLUMNS,
    Distribution,
    LogitsWarper,
    next_token_distribution,
    sample,
)

Setting = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
Process = Callable[[Tensor, float, int, float, float], Tensor]

CPU = torch.device("cpu")
SETTINGS = list(itertools.product((0.3, 1.0, 1.7), (0, 1, 5, 1000), (1.0, 0.9, 0.4), (0.0, 0.1)))
LAYOUTS = ("dense", "shared", "own")
fixed_examples = settings(derandomize=True, deadline=None, max_examples=60, database=None)


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def warped(logits: Tensor, rows: list[Setting], exact: bool = True) -> Tensor:
    """Dense distributions of logits [rows, positions, vocab]."""
    temperature, top_k, top_p, min_p = map(list, zip(*rows, strict=True))
    return LogitsWarper(temperature, top_k, top_p, min_p, CPU, exact)(logits).dense(logits.shape[-1])


def of_transformers(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    scores = logits.float().reshape(-1, logits.shape[-1])
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(dim=-1).reshape(logits.shape)


def by_hand(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token by token in fp64: {token: probability} of those that are kept."""
    scores = [score / temperature for score in logits]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if top_k:
        kth = scores[order[min(top_k, len(order)) - 1]]
        order = [token for token in order if scores[token] >= kth]
    masses = [math.exp(scores[token] - scores[order[0]]) for token in order]
    cumulative = list(itertools.accumulate(masses))
    last = masses[next((i for i, mass in enumerate(cumulative) if mass >= top_p * cumulative[-1]), -1)]
    kept = {token: mass for token, mass in zip(order, masses, strict=True) if mass >= max(last, min_p)}
    return {token: mass / sum(kept.values()) for token, mass in kept.items()}


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(found > 0, expected > 0)


# ---- the distributions of transformers ----


@pytest.mark.parametrize("shape", [(50,), (1, 50), (7, 50), (2, 3, 259), (3, 1, 2, 2), (4, 1)])
def test_it_equals_the_processors_of_transformers(shape: tuple[int, ...]) -> None:
    logits = normal(*shape)
    for chosen in SETTINGS:
        assert_close(next_token_distribution(logits, *chosen), of_transformers(logits, *chosen))


@pytest.mark.parametrize("vocab", [9, SPARE_COLUMNS + 3, 300, NUCLEUS_COLUMNS[0] + 500])
def test_every_row_has_its_own_parameters(vocab: int) -> None:
    logits = normal(len(SETTINGS), 2, vocab)
    p = warped(logits, SETTINGS)
    for row, chosen in enumerate(SETTINGS):
        assert_close(p[row], of_transformers(logits[row], *chosen))


@fixed_examples
@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 5, SPARE_COLUMNS, SPARE_COLUMNS + 1, 40, 200, 1500]),
    st.sampled_from([0.1, 1.0, 4.0]),
    st.lists(
        st.tuples(
            st.floats(0.1, 10), st.sampled_from([0, 0, 1, 3, 17, 250, 10_000]), st.floats(0.01, 1), st.floats(0, 1)
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_any_parameters_in_any_company(seed: int, vocab: int, scale: float, rows: list[Setting]) -> None:
    logits = normal(len(rows), 2, vocab, seed=seed, scale=scale)
    p = warped(logits, rows)
    for row, position in itertools.product(range(len(rows)), range(2)):
        expected = torch.zeros(vocab)
        for token, probability in by_hand(logits[row, position].tolist(), *rows[row]).items():
            expected[token] = probability
        torch.testing.assert_close(p[row, position], expected, rtol=1e-4, atol=1e-6)


def top_p_before_top_k(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    return next_token_distribution(next_token_distribution(logits, temperature, 0, top_p).log(), 1.0, top_k, 1.0, min_p)


def temperature_last(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    return next_token_distribution(next_token_distribution(logits, 1.0, top_k, top_p, min_p).log(), temperature)


def min_p_before_top_p(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    return next_token_distribution(next_token_distribution(logits, temperature, top_k, 1.0, min_p).log(), 1.0, 0, top_p)


@pytest.mark.parametrize("process", [top_p_before_top_k, temperature_last, min_p_before_top_p])
def test_another_order_is_noticed(process: Process) -> None:
    logits = normal(7, 50)
    errors = [(process(logits, *chosen) - of_transformers(logits, *chosen)).abs().max() for chosen in SETTINGS]
    assert max(errors) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_processed_in_fp32(dtype: torch.dtype) -> None:
    logits = normal(20, 259).to(dtype)
    for temperature, top_k, _, min_p in SETTINGS:
        p = next_token_distribution(logits, temperature, top_k, 1.0, min_p)
        assert p.dtype == torch.float32
        assert_close(p, of_transformers(logits, temperature, top_k, 1.0, min_p))


@pytest.mark.parametrize("exact", [True, False])
def test_saturated_logits(exact: bool) -> None:
    rows = [
        [1e4, -1e4, 0.0, 9999.0, 1e4, -math.inf],
        [-math.inf, -1e4, -math.inf, -math.inf, -math.inf, -math.inf],
        [-1e4, -1e4 - 1, -math.inf, -1e4, -1e4, -math.inf],
        [-math.inf, 1e30, 1e38, -1e38, 1.0, 0.0],
    ]
    for chosen in itertools.product((0.5, 1.0, 2.0), (0, 2, 5), (1.0, 0.7), (0.0, 0.2)):
        p = warped(torch.tensor(rows).unsqueeze(1), [chosen] * len(rows), exact).squeeze(1)
        for row, logits in enumerate(rows):
            expected = torch.zeros(6)
            for token, probability in by_hand(logits, *chosen).items():
                expected[token] = probability
            assert p[row].sum() == pytest.approx(1)
            if exact:
                torch.testing.assert_close(p[row], expected)


@pytest.mark.parametrize("vocab", [*range(1000, 1010), 20_011])
def test_the_largest_are_found_wherever_they_are(vocab: int) -> None:
    rising = torch.arange(vocab) / 100
    logits = torch.stack([rising, rising.flip(0), *normal(4, vocab), *normal(2, vocab).clamp_max(3)])
    for chosen in ((1.0, 1, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (2.0, 40, 1.0, 0.0)):
        assert_close(next_token_distribution(logits, *chosen), of_transformers(logits, *chosen))
    logits, chosen = logits[:6], (1.0, 0, 0.5, 0.0)
    assert_close(next_token_distribution(logits, *chosen), of_transformers(logits, *chosen))


# ---- ties ----


def test_all_that_tie_with_the_kth_are_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 3.0, 1.0, -1.0]])
    assert next_token_distribution(logits, 1.0, 3)[0].gt(0).tolist() == [False, True, True, True, True, True, False]


@pytest.mark.parametrize("vocab", [10, 40, 500])
@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_more_may_tie_than_there_are_spare_columns(vocab: int, top_k: int) -> None:
    equal = torch.zeros(3, vocab)
    assert torch.equal(next_token_distribution(equal, 1.0, top_k), torch.full((3, vocab), 1 / vocab))
    coarse = (normal(40, vocab) / 2).round().clamp_max(1).to(torch.bfloat16)  # hundreds are largest
    p = next_token_distribution(coarse, 0.7, top_k)
    assert vocab < 500 or (p > 0).sum(dim=-1).min() > top_k + SPARE_COLUMNS
    assert_close(p, of_transformers(coarse, 0.7, top_k, 1.0, 0.0))


def test_bf16_logits_of_a_large_vocabulary_tie_as_in_transformers() -> None:
    logits = normal(4, 50_000, scale=2.0).to(torch.bfloat16)
    p = next_token_distribution(logits, 1.0, 48)
    assert (p > 0).sum(dim=-1).max() > 48
    assert_close(p, of_transformers(logits, 1.0, 48, 1.0, 0.0))


@pytest.mark.parametrize("top_k", [0, 6, 30])
@pytest.mark.parametrize("vocab", [20, 400])
def test_all_that_tie_with_the_last_of_the_nucleus_are_kept(top_k: int, vocab: int) -> None:
    logits = (normal(40, vocab) / 2).round()
    for top_p in (0.05, 0.5, 0.83):
        p = next_token_distribution(logits, 1.0, top_k, top_p)
        for row, scores in enumerate(logits.tolist()):
            assert p[row].nonzero().flatten().tolist() == sorted(by_hand(scores, 1.0, top_k, top_p, 0.0))
        # transformers keeps some of them, and which is left open
        some = of_transformers(logits, 1.0, top_k, top_p, 0.0)
        assert not (some.gt(0) & p.eq(0)).any()
        worst_kept = logits.masked_fill(p == 0, torch.inf).amin(dim=-1)
        assert torch.equal(worst_kept, logits.masked_fill(some == 0, torch.inf).amin(dim=-1))
        assert (p.gt(0) & some.eq(0)).any()


# ---- the nucleus ----


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.49, [0]), (0.51, [0, 2]), (0.74, [0, 2]), (0.76, [0, 2, 3]), (0.99, [0, 1, 2, 3])]
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: list[int]) -> None:
    p = torch.tensor([0.5, 0.1, 0.25, 0.15])
    nucleus = next_token_distribution(p.log(), 1.0, 0, top_p)
    assert nucleus.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(nucleus[kept], p[kept] / p[kept].sum())


def test_the_best_token_stays_whatever_top_p() -> None:
    logits = normal(100, 30)
    for top_k in (0, 5):
        assert torch.equal(next_token_distribution(logits, 1.0, top_k, 1e-9), next_token_distribution(logits, 0.0))
    assert next_token_distribution(torch.tensor([0.0, 5.0, 5.0]), 1.0, 0, 0.3).tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("scale", "top_p"), [(0.1, 0.04), (0.1, 0.7), (0.5, 0.2), (0.5, 0.95), (1.5, 0.9), (3.0, 0.999)]
)
def test_a_nucleus_wider_than_the_columns_it_is_sought_in(scale: float, top_p: float) -> None:
    logits = normal(2, 20_000, scale=scale)
    p = next_token_distribution(logits, 1.0, 0, top_p)
    whole = logits.double().softmax(dim=-1)
    sizes = (p > 0).sum(dim=-1)
    for row in range(2):
        values, ids = whole[row].sort(descending=True, stable=True)
        size = int((values.cumsum(dim=0) < top_p).sum()) + 1
        assert abs(int(sizes[row]) - size) <= 1 + 2e-6 / float(values[size - 1])  # rounding of the sum
        kept = ids[: int(sizes[row])]
        assert (p[row, kept] > 0).all()  # the most probable
        expected = whole[row, kept] / whole[row, kept].sum()
        torch.testing.assert_close(p[row, kept].double(), expected, rtol=1e-5, atol=0)


def test_flat_distributions_do_leave_the_columns() -> None:
    """Such as those of the test above; where all are equal, all are in the nucleus."""
    equal = torch.full((20_000,), 1 / 20_000)
    torch.testing.assert_close(next_token_distribution(torch.zeros(20_000), 1.0, 0, 0.01), equal, rtol=1e-5, atol=0)
    sizes = [
        int((next_token_distribution(normal(20_000, scale=scale), 1.0, 0, top_p) > 0).sum())
        for scale, top_p in ((3.0, 0.5), (1.5, 0.6), (0.5, 0.95))
    ]
    _, few, more = NUCLEUS_COLUMNS
    assert sizes[0] < few < sizes[1] < more < sizes[2]


# ---- greedy ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_0_is_one_at_the_first_argmax(dtype: torch.dtype) -> None:
    logits = normal(300, 64).round().clamp_max(2).to(dtype)
    assert (logits == logits.amax(dim=-1, keepdim=True)).sum(dim=-1).median() > 3  # ties are the rule here
    expected = torch.zeros(logits.shape)
    for row, values in enumerate(logits.tolist()):
        expected[row, values.index(max(values))] = 1
    for others in ((0, 1.0, 0.0), (1, 0.1, 0.0), (5, 0.9, 0.3)):
        assert torch.equal(next_token_distribution(logits, 0.0, *others), expected)


def test_greedy_needs_one_column() -> None:
    p = LogitsWarper([0.0] * 2, [0, 5], [1.0, 0.9], [0.0] * 2, CPU)(normal(2, 3, 40))
    assert p.probabilities.shape == (2, 3, 1)
    assert p.token_ids is not None


# ---- rows and positions ----

KINDS: list[Setting] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.2),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 0.6, 0.05),
    (1.0, 5, 1.0, 0.0),
    (0.5, 50, 0.8, 0.0),
    (1.0, 700, 1.0, 0.1),
]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("vocab", [12, 2000])
def test_a_row_depends_neither_on_its_neighbours_nor_on_other_positions(vocab: int, exact: bool) -> None:
    logits = normal(len(KINDS), 3, vocab)
    together = warped(logits, KINDS, exact)
    for row, chosen in enumerate(KINDS):
        for position in range(3):
            alone = warped(logits[row : row + 1, position : position + 1], [chosen], exact)
            assert_close(together[row, position], alone[0, 0])
    pairs = itertools.product(range(len(KINDS)), repeat=2)
    for one, other in pairs:  # rows of one kind are processed together
        both = warped(logits[[one, other]], [KINDS[one], KINDS[other]], exact)
        assert_close(both, together[[one, other]])


@pytest.mark.parametrize("top_k", [0, 50])
def test_a_neighbours_top_p_takes_nothing_from_the_tail(top_k: int) -> None:
    logits = -torch.arange(50.0).expand(2, 1, 50)
    p = warped(logits, [(1.0, top_k, 0.9, 0.0), (1.0, top_k, 1.0, 0.0)])
    assert (p[1] > 0).all()
    assert_close(p[1], of_transformers(logits[1], 1.0, top_k, 1.0, 0.0))


def test_few_columns_where_all_rows_allow_it() -> None:
    logits = normal(2, 3, 5000)
    for rows, columns in (
        ([(1.0, 5, 1.0, 0.0), (2.0, 20, 0.9, 0.1)], 20 + SPARE_COLUMNS),
        ([(1.0, 0, 0.5, 0.0), (0.5, 0, 0.9, 0.0)], NUCLEUS_COLUMNS[0]),
        ([(1.0, 5, 1.0, 0.0), (1.0, 0, 1.0, 0.0)], 5000),
    ):
        temperature, top_k, top_p, min_p = map(list, zip(*rows, strict=True))
        p = LogitsWarper(temperature, top_k, top_p, min_p, CPU)(logits)
        assert p.probabilities.shape == (2, 3, columns)
        assert (p.probabilities.sum(dim=-1) - 1).abs().max() < 1e-5
        if p.token_ids is not None:
            assert all(len(each.unique()) == columns for each in p.token_ids.flatten(0, 1))


# ---- for a draft, whose q is whatever it samples from ----


@pytest.mark.parametrize("chosen", [(1.0, 5, 1.0, 0.0), (0.7, 20, 0.8, 0.1), (1.0, 0, 0.9, 0.0), (1.5, 0, 0.5, 0.05)])
def test_inexact_is_a_distribution_and_usually_the_same(chosen: Setting) -> None:
    # a nucleus is of the mass that its columns hold: here all of it, for the comparison
    logits = normal(2, 3, 5000, scale=4.0 if chosen[1] else 40.0)
    assert_close(warped(logits, [chosen] * 2, exact=False), warped(logits, [chosen] * 2))
    logits = normal(2, 3, 5000, scale=4.0)
    inexact, exact = warped(logits, [chosen] * 2, exact=False), warped(logits, [chosen] * 2)
    assert not ((inexact > 0) & (exact == 0)).any()
    flat_or_tied = torch.cat([torch.zeros(1, 2, 20_000), normal(1, 2, 20_000).round()])
    p = warped(flat_or_tied, [chosen] * 2, exact=False)
    assert (p.sum(dim=-1) - 1).abs().max() < 1e-5
    assert (p > 0).sum(dim=-1).max() <= (chosen[1] or DRAFT_NUCLEUS_COLUMNS)
    assert (p[0][p[0] > 0] - 1 / (p[0, 0] > 0).sum()).abs().max() < 1e-6  # in proportion


# ---- what it costs ----


class LargeOperations(TorchDispatchMode):
    """Names of the operations that read, and of those that write, so many numbers; views of them do neither."""

    VIEWS = ("view", "_unsafe_view", "unsqueeze", "expand", "slice", "select", "detach", "alias")

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least = at_least
        self.reading: list[str] = []
        self.writing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            for names, tensors in ((self.reading, [args, kwargs]), (self.writing, result)):
                if any(isinstance(each, Tensor) and each.numel() >= self.at_least for each in tree_leaves(tensors)):
                    names.append(name)
        return result


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_top_k_the_vocabulary_is_read_once_and_never_written(dtype: torch.dtype, exact: bool) -> None:
    vocab = 150_000
    logits = normal(1, 5, vocab).to(dtype)
    warper = LogitsWarper([0.7], [50], [0.9], [0.05], CPU, exact)
    with LargeOperations(vocab // 4) as large:
        p = warper(logits)
    # a gather has all of it as its argument and reads few
    assert large.reading in (["topk"], ["amax", "gather"])
    assert not large.writing
    assert p.probabilities.shape[-1] <= 50 + SPARE_COLUMNS
    with LargeOperations(vocab // 4) as large:  # the control
        LogitsWarper([0.7], [0], [0.9], [0.0], CPU)(logits)
    assert {"div", "_softmax"} <= set(large.reading)
    assert "div" in large.writing
    with LargeOperations(vocab // 4) as large:
        LogitsWarper([0.0], [50], [0.9], [0.0], CPU, exact)(logits)
    assert large.reading == ["max"]


# ---- Distribution ----


def sparse_distributions(*batch: int, vocab: int = 7, seed: int = 0) -> Tensor:
    """A reduced vocabulary, and zeros beside."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*batch, vocab, generator=generator)
    weights[torch.rand(weights.shape, generator=generator) < 0.4] = 0
    weights[..., seed % vocab] = 0
    weights[..., (seed + 2) % vocab] += 0.1
    return weights / weights.sum(dim=-1, keepdim=True)


def laid_out(dense: Tensor, layout: str) -> Distribution:
    generator = torch.Generator().manual_seed(0)
    if layout == "dense":
        return Distribution(dense)
    if layout == "shared":
        ids = (dense > 0).flatten(0, -2).any(dim=0).nonzero().squeeze(1)
        ids = ids[torch.randperm(len(ids), generator=generator)]
        return Distribution(dense[..., ids], ids)
    order = torch.rand(dense.shape, generator=generator) + (dense > 0)
    ids = order.topk(int((dense > 0).sum(dim=-1).max()), dim=-1, sorted=False).indices
    return Distribution(dense.gather(-1, ids), ids)


BATCHES = [(2,), (4, 3), (2, 3, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
class TestDistribution:
    def test_dense_and_of_give_every_token_its_probability(self, batch: tuple[int, ...], layout: str) -> None:
        dense = sparse_distributions(*batch)
        distribution = laid_out(dense, layout)
        assert torch.equal(distribution.dense(7), dense)
        assert torch.equal(distribution.dense(9), torch.nn.functional.pad(dense, (0, 2)))
        assert torch.equal(distribution.dense(4), dense[..., :4])
        for token in range(9):
            expected = dense[..., token] if token < 7 else torch.zeros(batch)
            assert torch.equal(distribution.of(torch.full(batch, token)), expected)
        mixed = torch.randint(9, batch, generator=torch.Generator().manual_seed(0))
        expected = torch.nn.functional.pad(dense, (0, 2)).gather(-1, mixed.unsqueeze(-1)).squeeze(-1)
        assert torch.equal(distribution.of(mixed), expected)

    def test_tokens_name_the_columns(self, batch: tuple[int, ...], layout: str) -> None:
        dense = sparse_distributions(*batch)
        distribution = laid_out(dense, layout)
        for column in range(distribution.probabilities.shape[-1]):
            tokens = distribution.tokens(torch.full(batch, column))
            expected = dense.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            assert torch.equal(distribution.probabilities[..., column], expected)

    def test_renamed_moves_every_token(self, batch: tuple[int, ...], layout: str) -> None:
        dense = sparse_distributions(*batch)
        names = torch.tensor([11, 3, 0, 5, 12, 7, 1])
        renamed = laid_out(dense, layout).renamed(names)
        expected = torch.zeros(*batch, 13)
        expected[..., names] = dense
        assert torch.equal(renamed.dense(13), expected)
        back = torch.empty(13, dtype=torch.long)
        back[names] = torch.arange(7)
        assert torch.equal(renamed.renamed(back).dense(7), dense)

    @pytest.mark.parametrize("other_layout", LAYOUTS)
    def test_excess_is_the_positive_part_of_the_difference(
        self, batch: tuple[int, ...], layout: str, other_layout: str
    ) -> None:
        one, other = sparse_distributions(*batch), sparse_distributions(*batch, seed=1)
        ours, theirs = laid_out(one, layout), laid_out(other, other_layout)
        scale = torch.rand(batch, generator=torch.Generator().manual_seed(0))
        for factor in (None, scale, torch.zeros(batch)):
            scaled = one.double() if factor is None else one.double() * factor.double().unsqueeze(-1)
            expected = (scaled - other.double()).clamp_min(0)
            found = Distribution(ours.excess(theirs, factor), ours.token_ids).dense(7)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-7)
            mass = ours.excess_mass(theirs, factor).double()
            torch.testing.assert_close(mass, expected.sum(dim=-1), rtol=0, atol=3e-7)
        assert torch.equal(ours.dense(7), one)  # neither has changed
        assert torch.equal(theirs.dense(7), other)

    @pytest.mark.parametrize("other_layout", LAYOUTS)
    def test_vocabularies_padded_differently(self, batch: tuple[int, ...], layout: str, other_layout: str) -> None:
        for vocab, other_vocab in ((7, 10), (10, 7)):
            one, other = (
                sparse_distributions(*batch, vocab=vocab),
                sparse_distributions(*batch, vocab=other_vocab, seed=1),
            )
            ours, theirs = laid_out(one, layout), laid_out(other, other_layout)
            expected = (one - torch.nn.functional.pad(other, (0, vocab - other_vocab))).clamp_min(0)
            torch.testing.assert_close(Distribution(ours.excess(theirs), ours.token_ids).dense(vocab), expected)
            torch.testing.assert_close(ours.excess_mass(theirs), expected.sum(dim=-1))

    def test_some_of_the_batch(self, batch: tuple[int, ...], layout: str) -> None:
        dense = sparse_distributions(*batch)
        distribution = laid_out(dense, layout)
        for index in (slice(1, None), torch.tensor([1, 0, 1]), torch.tensor([True] + [False] * (batch[0] - 1))):
            assert torch.equal(distribution[index].dense(7), dense[index])
        if len(batch) > 1:
            for index in (
                (slice(None), slice(1, None)),
                (slice(None), 0),
                (torch.tensor([0, 1]), torch.tensor([2, 1])),
            ):
                assert torch.equal(distribution[index].dense(7), dense[index])


# ---- drawing ----


def exponentials(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed)).clamp_min_(1e-9)


def excess_chi_square(tokens: Tensor, weights: Tensor) -> float:
    """In standard deviations above what draws from the weights give."""
    counts = torch.bincount(tokens, minlength=len(weights)).double()[weights > 0]
    expected = (weights[weights > 0] / weights.sum()).double() * len(tokens)
    degrees = len(expected) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * max(degrees, 1)))


WEIGHTS = [
    [0.2, 0.3, 0.5],
    [1.0],
    [0.0, 3.0, 0.0, 0.25, 1.0, 0.0],  # not normalised
    [1e-12, 3e-12, 0.0],
    [0.0, 1.0, 0.0],
    [1e6, 1e4, 1e6],
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_token_is_drawn_as_often_as_its_weight_says(weights: list[float]) -> None:
    row = torch.tensor(weights)
    noise = exponentials(50_000, len(weights))
    tokens = sample(Distribution(row.expand(50_000, -1)), noise)
    assert tokens.dtype == torch.int64
    assert (row[tokens] > 0).all()
    assert excess_chi_square(tokens, row) < 4
    if (row > 0).sum() > 1:  # the controls
        assert excess_chi_square(sample(Distribution(row.sqrt().expand(50_000, -1)), noise), row) > 100
        assert excess_chi_square(sample(Distribution(row.expand(50_000, -1)), noise.sqrt()), row) > 100


def test_a_token_of_weight_0_is_never_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(5000, 9, generator=generator)
    weights *= torch.rand(weights.shape, generator=generator) < 0.3
    weights *= 10.0 ** torch.randint(-36, 9, (5000, 1), generator=generator)
    weights = weights[weights.sum(dim=-1) > torch.finfo(torch.float32).tiny]
    shortest, longest = 2.0**-32, 22.2  # what 32 bits give
    for noise in (
        torch.full(weights.shape, shortest),
        torch.full(weights.shape, longest),
        torch.where(weights > 0, longest, shortest),
        exponentials(*weights.shape),
    ):
        tokens = sample(Distribution(weights), noise)
        assert (weights.gather(1, tokens.unsqueeze(1)) > 0).all()
    smallest = torch.zeros(1, 150_000)
    smallest[:, 7] = torch.finfo(torch.float32).tiny
    assert sample(Distribution(smallest), torch.where(smallest > 0, longest, shortest)).tolist() == [7]


@pytest.mark.gpu
def test_a_token_of_weight_0_is_never_drawn_on_a_gpu() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    weights = torch.rand(50_000, generator=generator, device="cuda")
    weights *= torch.rand(50_000, generator=generator, device="cuda") < 0.5
    noise = torch.empty(256, 50_000, device="cuda")
    for _ in range(20):
        tokens = sample(Distribution(weights.expand(256, -1)), noise.exponential_(generator=generator).clamp_min_(1e-9))
        assert (weights[tokens] > 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_noise_of_tokens_draws_the_same_from_any_columns(batch: tuple[int, ...], layout: str) -> None:
    for seed in range(10):
        dense, noise = sparse_distributions(*batch, seed=seed), exponentials(*batch, 7, seed=seed)
        distribution = laid_out(dense, layout)
        ids = distribution.token_ids
        own_noise = noise if ids is None else noise[..., ids] if ids.ndim == 1 else noise.gather(-1, ids)
        tokens = sample(distribution, own_noise)
        assert tokens.shape == batch
        assert torch.equal(tokens, sample(Distribution(dense), noise))


def shared_noise(p: Distribution, q: Distribution, noise: Tensor) -> Tensor:
    return sample(p, noise) == sample(q, noise)


def noise_of_its_own(p: Distribution, q: Distribution, noise: Tensor) -> Tensor:
    return sample(p, noise) == sample(q, exponentials(*noise.shape, seed=99))


def noise_of_columns(p: Distribution, q: Distribution, noise: Tensor) -> Tensor:
    order = torch.arange(noise.shape[1]).flip(0)
    return sample(p, noise) == sample(Distribution(q.probabilities[:, order], order), noise)


@pytest.mark.parametrize("scale", [0.2, 0.7, 2.0])
def test_two_distributions_that_share_noise_draw_the_same_token_as_often_as_promised(scale: float) -> None:
    num_draws, vocab = 20_000, 30
    for seed in range(4):
        logits = normal(vocab, seed=seed, scale=1.0)
        p, q = logits.softmax(0), (logits + normal(vocab, seed=seed + 10, scale=scale)).softmax(0)
        distance = float((p - q).abs().sum() / 2)
        bound = (1 - distance) / (1 + distance)
        wide = Distribution(p.expand(num_draws, -1)), Distribution(q.expand(num_draws, -1))
        noise = exponentials(num_draws, vocab, seed=seed)
        same = float(shared_noise(*wide, noise).double().mean())
        # the first to arrive are the same token x with probability 1 / sum_y max(p_y / p_x, q_y / q_x)
        expected = float(torch.maximum(p / p.unsqueeze(1), q / q.unsqueeze(1)).sum(dim=1).reciprocal().sum())
        assert expected >= bound
        assert same == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / num_draws))
        assert same >= bound - 4 * math.sqrt(bound * (1 - bound) / num_draws)
        assert same <= 1 - distance + 0.02
        if scale < 2:  # the controls
            assert float(noise_of_its_own(*wide, noise).double().mean()) < bound - 0.1
            assert float(noise_of_columns(*wide, noise).double().mean()) < bound - 0.1


def test_large_vocabularies_reach_their_ends() -> None:
    noise = torch.ones(2, 150_000)
    noise[0, 0] = noise[1, -1] = 0.5
    assert sample(Distribution(torch.full((2, 150_000), 1 / 150_000)), noise).tolist() == [0, 149_999]
