"""Tokens drawn from whole vocabularies by C++ are those that `sample` draws."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import decode.native_sampling
import decode.sampler
from decode.completion import Completion
from decode.native_sampling import (
    NativeWarper,
    arrive,
    can_arrive,
    can_draw,
    draw,
    log_normalizers,
    native_available,
    probabilities,
)
from decode.noise import RowNoise
from decode.params import SamplingParams, SpeculationParams
from decode.proposer import stack
from decode.sampler import BatchSampler
from decode.sampling import Distribution, LogitsWarper, sample

pytestmark = pytest.mark.skipif(not native_available(), reason="needs a compiler and a CPU with AVX-512")

CPU = torch.device("cpu")
ROWS = 12


def logits_of(vocab_size: int, spread: float = 3.0, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return (spread * torch.randn(rows, vocab_size, generator=generator)).bfloat16()


def noise_for(vocab_size: int, rows: int = ROWS) -> RowNoise:
    return RowNoise(list(range(rows)), [0] * rows, CPU, vocab_size)


def keys_of(noise: RowNoise, place: int) -> np.ndarray:
    return noise.keys("next", np.full((len(noise.states), 1), place))


def by_torch(logits: Tensor, temperatures: list[float], keys: np.ndarray, noise: RowNoise) -> Tensor:
    rows, vocab_size = logits.shape
    warper = LogitsWarper(temperatures, [0] * rows, [1.0] * rows, [0.0] * rows, CPU)
    return sample(warper(logits.unsqueeze(1)), noise.exponentials(keys, range(vocab_size))).squeeze(1)


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 150, 49152])
@pytest.mark.parametrize("spread", [0.0, 3.0, 40.0])
def test_it_draws_what_sample_draws(vocab_size: int, spread: float) -> None:
    logits, noise = logits_of(vocab_size, spread), noise_for(vocab_size)
    temperatures = [0.3 + 0.2 * row for row in range(ROWS)]
    drawn = []
    spread_of = noise.spread_of(range(vocab_size))
    for place in range(8):
        keys = keys_of(noise, place)
        columns, weights = draw(logits, temperatures, keys[:, 0], spread_of)
        drawn.append(columns)
        assert torch.equal(columns, by_torch(logits, temperatures, keys, noise))
        assert torch.equal(weights, probabilities(logits, temperatures))
    # a negative control: other keys draw other tokens, unless one token has all the mass
    assert vocab_size == 1 or spread == 40.0 or len(set(torch.stack(drawn).flatten().tolist())) > 3


def test_rows_may_lie_apart_and_threads_do_not_matter() -> None:
    wide, noise = logits_of(160), noise_for(160)
    logits, keys = wide[:, :150], keys_of(noise, 0)[:, 0]
    spread = noise.spread_of(range(150))
    found = draw(logits, [1.0] * ROWS, keys, spread)[0]
    assert torch.equal(found, draw(logits.contiguous(), [1.0] * ROWS, keys, spread)[0])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(found, draw(logits, [1.0] * ROWS, keys, spread)[0])
    finally:
        torch.set_num_threads(threads)


def test_a_token_without_mass_is_never_drawn() -> None:
    logits, noise = torch.full((400, 150), -torch.inf, dtype=torch.bfloat16), noise_for(150, 400)
    logits[:, 77] = -3.0
    found, weights = draw(logits, [5.0] * 400, keys_of(noise, 3)[:, 0], noise.spread_of(range(150)))
    assert torch.equal(weights, (torch.arange(150) == 77).float().expand(400, 150))
    assert found.tolist() == [77] * 400


def test_tokens_come_as_often_as_they_should() -> None:
    """Chi-square over 20,000 draws, whose critical value at 0.1% with 7 degrees of freedom is 24.3."""
    rows = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -2.0, 0.25, 1.5]).bfloat16()
    noise = noise_for(8, rows)
    keys, spread = keys_of(noise, 0)[:, 0], noise.spread_of(range(8))
    found, _ = draw(logits.expand(rows, 8).contiguous(), [0.7] * rows, keys, spread, with_weights=False)

    def chi_square(temperature: float) -> float:
        expected = rows * (logits.double() / temperature).softmax(0)
        return float(((found.bincount(minlength=8) - expected) ** 2 / expected).sum())

    assert chi_square(0.7) < 24.3 < chi_square(0.75)


def test_normalizers_are_those_of_torch() -> None:
    tail = torch.full((1, 2**18), -18.0).bfloat16()
    tail[0, 7] = 0
    for logits in (logits_of(1), logits_of(150, 40.0)[:, 3:130], logits_of(49152), tail):
        expected = logits.double().logsumexp(dim=-1).float()
        torch.testing.assert_close(log_normalizers(logits), expected, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(log_normalizers(logits.float()), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 7, 150, 4096])
def test_probabilities_are_those_of_torch(vocab_size: int) -> None:
    logits = logits_of(vocab_size, rows=ROWS).unflatten(0, (3, 4))
    temperatures = [0.4, 1.0, 1.7]
    expected = (logits.double() / torch.tensor(temperatures).double().view(3, 1, 1)).softmax(dim=-1).float()
    torch.testing.assert_close(probabilities(logits, temperatures), expected, atol=1e-7, rtol=2e-6)


TRUNCATIONS = [
    dict(top_k=[5, 5, 5]),
    dict(top_k=[1, 40, 1000]),
    dict(top_p=[0.9, 0.5, 0.1]),
    dict(top_p=[0.95, 1.0, 0.3], top_k=[0, 50, 0]),
    dict(min_p=[0.1, 0.0, 0.9]),
    dict(top_k=[50, 20, 3], top_p=[0.9, 0.4, 0.99], min_p=[0.02, 0.1, 0.0]),
    dict(top_p=[0.9, 0.9, 0.9], temperature=[0.0, 1.0, 1.5]),
    dict(top_k=[0, 0, 3], temperature=[1.0, 0.0, 0.7]),
    dict(top_p=[1e-9, 0.9999, 0.5]),  # beyond that, what is in and what is out is rounding
]


@pytest.mark.parametrize("parameters", TRUNCATIONS)
@pytest.mark.parametrize("vocab_size", [1, 7, 150, 5000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0])
def test_what_is_left_of_a_row_is_what_torch_leaves(
    parameters: dict[str, list[float]], vocab_size: int, spread: float
) -> None:
    """Ties included: of 5,000 bf16 logits many are equal, and at spread 0 all."""
    neutral = dict(temperature=[0.8, 1.0, 1.3], top_k=[0] * 3, top_p=[1.0] * 3, min_p=[0.0] * 3)
    arguments: dict[str, Any] = neutral | parameters
    logits = logits_of(vocab_size, spread).unflatten(0, (3, 4))
    expected = LogitsWarper(**arguments, device=CPU)(logits)
    found = NativeWarper(**arguments, device=CPU)(logits)
    assert found.probabilities.dtype == torch.float32
    torch.testing.assert_close(found.dense(vocab_size), expected.dense(vocab_size), atol=1e-7, rtol=1e-5)
    if found.token_ids is not None:
        assert all(len(set(ids)) == len(ids) for ids in found.token_ids.flatten(0, 1).tolist())
        for probabilities_, ids in zip(found.probabilities.flatten(0, 1), found.token_ids.flatten(0, 1), strict=True):
            assert 0 <= int(ids.min()) <= int(ids.max()) < vocab_size
            assert probabilities_.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 5000), (1, 1, 1)])
@pytest.mark.parametrize("ids", ["of each", "of all", "none"])
def test_arrivals_are_those_of_sample(shape: tuple[int, ...], ids: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weights, vocab_size, rows = torch.rand(shape, generator=generator), 6000, shape[0]
    weights[..., ::3] = 0
    weights[..., 0] = 1e-30
    token_ids = None
    if ids != "none":
        orders = torch.rand((*shape[:-1], vocab_size), generator=generator).argsort(-1)[..., : shape[-1]]
        token_ids = orders if ids == "of each" else orders.flatten(0, -2)[0].contiguous()
    distribution, noise = Distribution(weights, token_ids), noise_for(vocab_size, rows)
    columns = range(shape[-1]) if token_ids is None else token_ids
    for place in range(20):
        keys = noise.keys("next", np.arange(rows * weights[..., 0].numel() // rows).reshape(rows, -1) + 100 * place)
        keys = keys.reshape(shape[:-1])
        found = arrive(distribution, keys, noise.spread_of(columns))
        assert torch.equal(found, sample(distribution, noise.exponentials(keys, columns)))


def test_rows_without_numbers_choose_some_token() -> None:
    logits = logits_of(150, rows=3).unsqueeze(1)
    logits[0], logits[1, 0, ::2] = torch.nan, torch.nan
    for temperature in (0.0, 1.0):
        warper = NativeWarper([temperature, 1.0, 1.0], [0] * 3, [0.9] * 3, [0.0] * 3, CPU)
        found = warper(logits)
        assert found.token_ids is not None
        assert all(0 <= token < 150 for token in found.token_ids.flatten().tolist())
        assert found.probabilities[0].sum() == 0
    # nor is what memory held before taken for tokens
    found = NativeWarper([1.0] * 3, [200] * 3, [1.0] * 3, [0.0] * 3, CPU)(logits)
    assert found.token_ids is not None
    assert found.token_ids.shape[-1] == 150
    assert set(found.token_ids[1, 0].tolist()) == set(range(150))
    assert found.probabilities[1, 0].isfinite().all()


def test_the_defaults_of_torch_do_not_matter() -> None:
    logits, noise = logits_of(150, rows=2), noise_for(150, 2)
    keys, spread = keys_of(noise, 0), noise.spread_of(range(150))
    nucleus = ([1.0] * 2, [0] * 2, [0.9] * 2, [0.0] * 2, CPU)

    def everything() -> tuple[Tensor, ...]:
        p = NativeWarper(*nucleus)(logits.unsqueeze(1))
        assert p.token_ids is not None
        arrived = arrive(p, keys, noise.spread_of(p.token_ids))
        return (*draw(logits, [1.0] * 2, keys[:, 0], spread), p.probabilities, arrived, log_normalizers(logits))

    expected = everything()
    torch.set_default_dtype(torch.float64)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert not can_arrive(Distribution(torch.rand(2, 3).double()))


def test_a_draft_keeps_few_columns_and_whole_rows_none_of_their_ids() -> None:
    flat = logits_of(5000, 0.1, rows=2).unsqueeze(1)
    nucleus: dict[str, Any] = dict(temperature=[1.0] * 2, top_k=[0] * 2, min_p=[0.0] * 2, device=CPU)
    exact, draft = (NativeWarper(top_p=[0.95] * 2, exact=each, **nucleus)(flat) for each in (True, False))
    assert exact.probabilities.shape[-1] > 4000
    expected = LogitsWarper(top_p=[0.95] * 2, exact=False, **nucleus)(flat)
    # of those that tie with the last, torch has taken some
    assert expected.probabilities.shape[-1] == 128
    assert 100 < (draft.probabilities > 0).sum(-1).min() <= draft.probabilities.shape[-1] < 400
    assert NativeWarper(top_p=[0.95, 1.0], **nucleus)(flat).token_ids is None


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.05}])
def test_a_sampler_drafts_and_judges_the_same_with_it_and_without(
    more: dict[str, Any], reduced: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target_logits = logits_of(64, rows=2), logits_of(150, rows=6).unflatten(0, (2, 3))
    token_ids = torch.arange(10, 138, 2) if reduced else None
    params = [SamplingParams(temperature=each, seed=seed, **more) for each in (0.8, 1.0)]

    def once() -> tuple[Tensor, ...]:
        rows = [Completion([5], each, frozenset(), None) for each in params]
        sampler = BatchSampler(rows, [1, 2], [0, 0], SpeculationParams(), CPU, 150)
        sampler.begin_round(2)
        first, q1 = sampler.draft(logits, torch.empty(2, 0, dtype=torch.long), token_ids)
        second, q2 = sampler.draft(logits.flip(1), first.unsqueeze(1), token_ids)
        drafted = torch.stack([first, second], dim=1)
        p = sampler.distribution(target_logits, drafted)
        verdict = sampler.judge(target_logits, stack([q1, q2]), drafted, torch.tensor([2, 2]))
        return drafted, *verdict, q1.dense(150), p.dense(150)

    found = once()
    for name in ("can_draw", "can_arrive"):
        monkeypatch.setattr(decode.sampler, name, lambda tensor: False)
    monkeypatch.setattr(decode.native_sampling, "can_draw", lambda logits: False)
    for ours, theirs in zip(found, once(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_only_what_it_can_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_draw(torch.zeros(2, 5)) and not can_draw(torch.zeros(5, 2).bfloat16().T)
    taken: list[int] = []

    def watched(logits: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        taken.append(len(logits))
        return draw(logits, *arguments, **named)

    monkeypatch.setattr(decode.sampler, "draw", watched)
    plain = SamplingParams(temperature=0.8, seed=1)
    other = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}, {"repetition_penalty": 1.2}]
    logits = logits_of(150, rows=2).unsqueeze(1)
    for params in (plain, *(SamplingParams(**{"temperature": 0.8, "seed": 1} | each) for each in other)):
        rows = [Completion([5], each, frozenset(), None) for each in (plain, params)]
        sampler = BatchSampler(rows, [1, 2], [0, 0], SpeculationParams(), CPU, 150)
        sampler.begin_round(0)
        chosen = sampler.choose(logits)
        with monkeypatch.context() as patch:
            patch.setattr(decode.sampler, "can_draw", lambda logits: False)
            assert torch.equal(chosen, sampler.choose(logits))
    assert taken == [2]
