"""Distributions are those of transformers; a token is drawn exactly as often as its weight says."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decode.sampling import next_token_distribution, sample

SETTINGS = list(itertools.product((0.3, 1.0, 1.7), (0, 1, 5, 1000), (1.0, 0.9, 0.4)))
LARGEST_UNIFORM = 1 - 2**-24
fixed_examples = settings(derandomize=True, deadline=None, max_examples=100, database=None)
Process = Callable[[Tensor, float, int, float], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_transformers(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    scores = logits.float().reshape(-1, logits.shape[-1])
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(dim=-1).reshape(logits.shape)


def top_p_before_top_k(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    return next_token_distribution(next_token_distribution(logits, temperature, 0, top_p).log(), 1.0, top_k, 1.0)


def temperature_last(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    return next_token_distribution(next_token_distribution(logits, 1.0, top_k, top_p).log(), temperature)


def largest_error(process: Process, logits: Tensor) -> float:
    errors = [process(logits, *chosen) - of_transformers(logits, *chosen) for chosen in SETTINGS]
    return torch.stack(errors).abs().max().item()


@pytest.mark.parametrize("shape", [(50,), (1, 50), (7, 50), (2, 3, 259), (3, 1, 2, 2), (4, 1)])
def test_it_equals_the_processors_of_transformers(shape: tuple[int, ...]) -> None:
    assert largest_error(next_token_distribution, normal(*shape)) < 1e-6


@pytest.mark.parametrize("process", [top_p_before_top_k, temperature_last])
def test_another_order_is_noticed(process: Process) -> None:
    assert largest_error(process, normal(7, 50)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_processed_in_fp32(dtype: torch.dtype) -> None:
    logits = normal(20, 259).to(dtype)
    for temperature, top_k, _ in SETTINGS:
        p = next_token_distribution(logits, temperature, top_k, 1.0)
        assert p.dtype == torch.float32
        torch.testing.assert_close(p, of_transformers(logits, temperature, top_k, 1.0), rtol=0, atol=1e-6)


def test_a_nucleus_of_ties_has_the_size_that_transformers_gives_it() -> None:
    """Which of several equal tokens the nucleus takes is left open; how many, and that they are the best, is not."""
    logits = (normal(50, 259) * 2).round().bfloat16()
    for chosen in SETTINGS:
        p, reference = next_token_distribution(logits, *chosen), of_transformers(logits, *chosen)
        torch.testing.assert_close(p.sort(dim=-1).values, reference.sort(dim=-1).values, rtol=0, atol=1e-6)
        worst_kept = logits.float().masked_fill(p == 0, torch.inf).amin(dim=-1)
        best_dropped = logits.float().masked_fill(p > 0, -torch.inf).amax(dim=-1)
        assert (worst_kept >= best_dropped).all()


def test_all_that_tie_with_the_kth_are_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 3.0, 1.0, -1.0]])
    assert next_token_distribution(logits, 1.0, 3)[0].gt(0).tolist() == [False, True, True, True, True, True, False]
    coarse = normal(30, 40).round()
    p = next_token_distribution(coarse, 0.7, 8)
    assert (p.gt(0).sum(dim=-1) > 8).any()
    torch.testing.assert_close(p, of_transformers(coarse, 0.7, 8, 1.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_0_is_one_at_the_first_argmax(dtype: torch.dtype) -> None:
    logits = normal(300, 64).round().clamp_max(2).to(dtype)
    assert (logits == logits.amax(dim=-1, keepdim=True)).sum(dim=-1).median() > 3  # ties are the rule here
    for top_k, top_p in ((0, 1.0), (1, 0.1), (5, 0.9)):
        p = next_token_distribution(logits, 0.0, top_k, top_p)
        expected = torch.zeros(logits.shape)
        for row, values in enumerate(logits.tolist()):
            expected[row, values.index(max(values))] = 1
        assert torch.equal(p, expected)


def test_the_best_token_stays_whatever_top_p() -> None:
    logits = normal(100, 30)
    p = next_token_distribution(logits, 1.0, 0, 1e-9)
    assert torch.equal(p, next_token_distribution(logits, 0.0))
    tied = torch.tensor([0.0, 5.0, 5.0])
    assert next_token_distribution(tied, 1.0, 0, 0.3).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.49, [0]), (0.51, [0, 2]), (0.74, [0, 2]), (0.76, [0, 2, 3]), (0.99, [0, 1, 2, 3])]
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: list[int]) -> None:
    p = torch.tensor([0.5, 0.1, 0.25, 0.15])
    nucleus = next_token_distribution(p.log(), 1.0, 0, top_p)
    assert nucleus.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(nucleus[kept], p[kept] / p[kept].sum())


@fixed_examples
@given(
    st.lists(st.floats(-50, 50, width=16), min_size=1, max_size=12),
    st.floats(0.05, 20),
    st.integers(0, 14),
    st.floats(0.01, 1),
)
def test_properties_of_every_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    scores = torch.tensor(logits)
    p = next_token_distribution(scores, temperature, top_k, top_p)
    assert p.sum().item() == pytest.approx(1, abs=1e-5)
    assert (p >= 0).all()
    assert p[scores.argmax()] == p.max()
    untouched = next_token_distribution(scores, temperature)
    # what is left keeps its proportions
    torch.testing.assert_close(p, untouched * (p > 0) / untouched[p > 0].sum(), rtol=1e-4, atol=1e-6)
    if top_k and len(set(logits)) == len(logits):
        assert (p > 0).sum() <= top_k


def naive_sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = weights.cumsum(dim=-1)
    return torch.searchsorted(cumulative, (uniforms * cumulative[..., -1]).unsqueeze(-1), right=True).squeeze(-1)


def ignoring_the_total(weights: Tensor, uniforms: Tensor) -> Tensor:
    return sample(weights / weights.max(), uniforms.sqrt())


WEIGHTS = [
    [0.2, 0.3, 0.5],
    [1.0],
    [0.0, 3.0, 0.0, 0.25, 1.0, 0.0],  # not normalised
    [1e-12, 3e-12, 0.0],
    [0.0, 1.0, 0.0],
    [1e6, 1.0, 1e6],
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_token_gets_its_share_of_the_uniforms(weights: list[float]) -> None:
    assert largest_share_error(sample, weights) < 2 / 2**16


def test_shares_that_are_wrong_are_noticed() -> None:
    assert largest_share_error(ignoring_the_total, WEIGHTS[0]) > 0.1


def largest_share_error(
    draw: Callable[[Tensor, Tensor], Tensor], weights: list[float], num_cells: int = 2**16
) -> float:
    """Draw at the middle of every cell of a grid over [0, 1): each boundary between tokens may cost one cell."""
    row = torch.tensor(weights)
    uniforms = (torch.arange(num_cells) + 0.5) / num_cells
    tokens = draw(row.expand(num_cells, -1), uniforms)
    shares = torch.bincount(tokens, minlength=len(weights)) / num_cells
    return (shares - row / row.sum()).abs().max().item()


EXTREMES = torch.tensor([0.0, 2**-30, 0.5, LARGEST_UNIFORM])


def test_a_token_of_weight_0_is_never_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(20_000, 9, generator=generator)
    weights *= torch.rand(20_000, 9, generator=generator) < 0.4
    weights *= 10.0 ** torch.randint(-9, 9, (20_000, 1), generator=generator)  # totals that round
    weights = weights[weights.sum(dim=-1) > 0]
    for uniform in EXTREMES:
        tokens = sample(weights, uniform.expand(len(weights)))
        assert (weights.gather(1, tokens.unsqueeze(1)) > 0).all()


@pytest.mark.gpu
def test_a_token_of_weight_0_is_never_drawn_on_a_gpu() -> None:
    """Where a parallel cumulative sum, which rounds each place in its own way, could give it a sliver."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = torch.rand(50_000, generator=generator, device="cuda")
    weights *= torch.rand(50_000, generator=generator, device="cuda") < 0.5
    for _ in range(100):
        tokens = sample(weights.expand(4096, -1), torch.rand(4096, generator=generator, device="cuda"))
        assert (weights[tokens] > 0).all()


def test_the_end_of_the_smallest_totals_is_not_overrun() -> None:
    denormal = torch.tensor([[0.0, 1e-45, 0.0]])
    largest = torch.tensor([LARGEST_UNIFORM])
    assert sample(denormal, largest).tolist() == [1]
    assert naive_sample(denormal, largest).tolist() == [3]  # the control: u * total rounds up to total


def test_large_vocabularies_reach_their_ends() -> None:
    weights = torch.full((2, 150_000), 1 / 150_000)
    assert sample(weights, torch.tensor([0.0, LARGEST_UNIFORM])).tolist() == [0, 149_999]


def test_any_batch_shape() -> None:
    weights, uniforms = normal(2, 3, 5).exp(), torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    tokens = sample(weights, uniforms)
    assert tokens.shape == (2, 3)
    assert tokens.dtype == torch.int64
    for row in itertools.product(range(2), range(3)):
        assert tokens[row] == sample(weights[row], uniforms[row])


@fixed_examples
@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=10).filter(lambda weights: max(weights) > 0),
    st.floats(0, LARGEST_UNIFORM, width=32),
    st.floats(0, LARGEST_UNIFORM, width=32),
)
@example([1.0, 0.0], LARGEST_UNIFORM, 0.0)
def test_properties_of_every_draw(weights: list[float], one: float, other: float) -> None:
    low, high = sample(torch.tensor([weights] * 2), torch.tensor(sorted([one, other]))).tolist()
    assert low <= high  # the inverse of a cumulative distribution rises
    total = sum(weights)
    for token, uniform in ((low, min(one, other)), (high, max(one, other))):
        assert weights[token] > 0
        assert sum(weights[:token]) <= uniform * total * (1 + 1e-5) + 1e-30
        assert sum(weights[: token + 1]) >= uniform * total * (1 - 1e-5)
