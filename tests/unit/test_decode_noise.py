"""Noise is a function of its seed, its purpose and its place; it is distributed as it should be, and nothing like
the noise of any other seed, purpose, place or token."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.noise import PURPOSES, ROWS_AT_A_TIME, RowNoise, _spread
from decode.sampling import Distribution, sample

CPU = torch.device("cpu")
LARGEST_KEY = 2**64 - 1


def noise(*seeds: int, streams: list[int] | None = None) -> RowNoise:
    return RowNoise(list(seeds), [0] * len(seeds) if streams is None else streams, CPU)


def many_keys(num: int, seed: int = 0, purpose: str = "token") -> np.ndarray:
    return noise(seed).keys(purpose, np.arange(num)[None])[0]


def test_a_row_depends_on_its_own_seed_and_stream_alone() -> None:
    places = np.arange(4)[None]
    alone = noise(7, streams=[3]).keys("token", places)
    among = noise(1, 7, 7, streams=[3, 2, 3]).keys("token", places)
    assert among.shape == (3, 4)
    assert among.dtype == np.uint64
    assert (among[2] == alone[0]).all()
    assert len(np.unique(among)) == 12


def test_keys_differ_by_seed_stream_purpose_and_every_number() -> None:
    large_seeds = [2**32, 2**32 + 1, 2**64 - 1, 2**64, 2**64 + 1, 2**200, 2**200 + 1]
    seeds, streams = [*range(20), *large_seeds], list(range(6))
    pairs = list(itertools.product(seeds, streams))
    rows = noise(*(seed for seed, _ in pairs), streams=[stream for _, stream in pairs])
    places = np.concatenate([np.arange(10), [1000, 2**31, 2**32, 2**40 - 1]])
    first, second = (each.reshape(1, -1) for each in np.meshgrid(places, np.arange(3)))
    keys = [rows.keys(purpose, first, second) for purpose in PURPOSES]
    assert len(np.unique(np.concatenate(keys, axis=1))) == sum(each.size for each in keys)


@pytest.mark.parametrize("stream", [1, 3])
def test_a_seed_beyond_32_bits_is_not_another_seed_and_stream(stream: int) -> None:
    """As it would be if the words of both were joined and filled up with zeros."""
    states = noise(5, 5 + (stream << 32), streams=[stream, 0]).states
    assert (states[0] != states[1]).all()


def test_numbers_broadcast_and_their_order_counts() -> None:
    rows = noise(0, 1)
    starts, steps = np.array([[4], [9]]), np.arange(3)[None]
    keys = rows.keys("draft", starts, steps)
    assert keys.shape == (2, 3)
    for row, step in itertools.product(range(2), range(3)):
        alone = noise(row).keys("draft", starts[row : row + 1], steps[:, step : step + 1])
        assert keys[row, step] == alone[0, 0]
    assert (rows.keys("draft", starts, steps) != rows.keys("draft", steps, starts)).all()
    # not, for instance, a function of their sum
    sums = rows.keys("draft", np.arange(5)[None], 5 - np.arange(5)[None])
    assert len(np.unique(sums)) == sums.size


def test_rows_can_leave_and_change_places() -> None:
    places = np.arange(5)[None]
    rows = noise(0, 1, 2, streams=[0, 1, 2])
    before = rows.keys("next", places)
    rows.select_rows([2, 0])
    assert (rows.keys("next", places) == before[[2, 0]]).all()


def test_nothing_is_drawn_from_a_state() -> None:
    rows, ids = noise(3, 4), torch.arange(50)
    keys = rows.keys("coin", np.arange(6)[None])
    first = rows.uniforms(keys), rows.exponentials(keys, ids)
    torch.randn(10)
    rows.uniforms(keys[:, ::-1])
    keys = rows.keys("coin", np.arange(6)[None])
    assert torch.equal(rows.uniforms(keys), first[0])
    assert torch.equal(rows.exponentials(keys, ids), first[1])


# ---- distributions ----


def kolmogorov(sample: Tensor, cumulative: Callable[[Tensor], Tensor]) -> float:
    """The largest distance from a distribution in units of its deviation; above 2.2 once in 8,000."""
    values = cumulative(sample.flatten().double().sort().values)
    num = len(values)
    steps = torch.arange(num, dtype=torch.float64) / num
    return float(torch.maximum(values - steps, steps + 1 / num - values).max()) * math.sqrt(num)


def excess_chi_square(cells: Tensor, num_cells: int) -> float:
    """In standard deviations above what equally probable cells give."""
    counts = torch.bincount(cells.flatten(), minlength=num_cells).double()
    expected = counts.sum() / num_cells
    return float(((counts - expected) ** 2 / expected).sum() - (num_cells - 1)) / math.sqrt(2 * (num_cells - 1))


def cumulative_exponential(times: Tensor) -> Tensor:
    return -torch.expm1(-times)


def dependence(one: Tensor, other: Tensor) -> float:
    """Of pairs of exponentials, in 8 by 8 equally probable cells; above 5 once in 10^5."""
    cells = [(cumulative_exponential(each.double()) * 8).long().clamp_max(7) for each in (one, other)]
    return excess_chi_square(cells[0] * 8 + cells[1], 64)


def test_uniforms_are_uniform() -> None:
    uniforms = noise(0).uniforms(many_keys(100_000))
    assert uniforms.dtype == torch.float32
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    assert kolmogorov(uniforms, lambda values: values) < 2.2
    assert excess_chi_square((uniforms * 1000).long(), 1000) < 4
    assert kolmogorov(uniforms.square(), lambda values: values) > 20  # the control


def test_uniforms_of_neighbours_are_independent() -> None:
    rows = noise(*range(100))
    uniforms = {purpose: rows.uniforms(rows.keys(purpose, np.arange(400)[None])) for purpose in PURPOSES}
    coins = uniforms["coin"]
    pairs = [(coins[:, 1:], coins[:, :-1]), (coins[1:], coins[:-1])]
    pairs += [(coins, uniforms[purpose]) for purpose in PURPOSES if purpose != "coin"]
    for one, other in pairs:
        assert excess_chi_square((one * 10).long() * 10 + (other * 10).long(), 100) < 4
    assert excess_chi_square((coins * 10).long() * 11, 100) > 100  # the control


def test_exponentials_are_exponential() -> None:
    for keys, ids in (
        (many_keys(3), torch.arange(40_000)),  # few places, many tokens
        (many_keys(30_000), torch.tensor([0, 1, 12_345, 150_000])),  # and the other way round
    ):
        times = noise(0).exponentials(keys, ids)
        assert times.dtype == torch.float32
        assert (times > 0).all()
        assert times.isfinite().all()
        assert abs(times.double().mean() - 1) < 4 / math.sqrt(times.numel())
        assert abs(times.double().var() - 1) < 4 * math.sqrt(8 / times.numel())
        assert kolmogorov(times, cumulative_exponential) < 2.2
        # it is the shortest times that decide which token arrives first
        shortest = times[times < 0.001]
        assert abs(len(shortest) - times.numel() * 0.001) < 4 * math.sqrt(times.numel() * 0.001)
        assert kolmogorov(shortest, lambda values: values / 0.001) < 2.2
        assert kolmogorov(times * 1.05, cumulative_exponential) > 5  # the control


def test_exponentials_of_two_tokens_are_independent() -> None:
    """For tokens whose ids differ in any one bit, in all, or that follow each other; over many places."""
    ids = torch.tensor([0, 1, 2, 3, *(2**bit for bit in range(2, 18)), 2**17 - 1, 151_935])
    times = noise(0).exponentials(many_keys(20_000), ids)
    worst = max(dependence(times[:, i], times[:, j]) for i, j in itertools.combinations(range(len(ids)), 2))
    assert worst < 5  # of 231 pairs
    assert dependence(times[:, 0], times[:, 0] + times[:, 1]) > 50  # the control


@pytest.mark.parametrize("difference", ["place", "seed", "stream", "purpose"])
def test_exponentials_of_two_keys_are_independent(difference: str) -> None:
    ids, places = torch.arange(1000), np.arange(40)[None]
    one = noise(5).keys("token", places)
    other = {
        "place": noise(5).keys("token", places + 1),
        "seed": noise(6).keys("token", places),
        "stream": noise(5, streams=[1]).keys("token", places),
        "purpose": noise(5).keys("draft", places),
    }[difference]
    times = [noise(0).exponentials(keys, ids) for keys in (one, other)]
    assert dependence(*times) < 5
    assert dependence(times[0][..., 1:], times[1][..., :-1]) < 5  # nor is one of them the other moved by a token


def test_any_two_places_have_unrelated_noise() -> None:
    keys, ids = many_keys(120), torch.arange(10_000)
    dependences = [dependence(*noise(0).exponentials(keys[place : place + 2], ids)) for place in range(0, 120, 2)]
    assert max(dependences) < 5
    assert abs(sum(dependences)) / len(dependences) < 4 / math.sqrt(len(dependences))


def test_the_first_to_arrive_is_any_token_alike() -> None:
    first = noise(0).exponentials(many_keys(20_000), torch.arange(50)).argmin(dim=1)
    assert excess_chi_square(first, 50) < 4
    assert excess_chi_square(first[1:] * 50 + first[:-1], 2500) < 4


# ---- noise belongs to a key and a token, however it is asked for ----


def test_a_token_has_the_same_noise_among_all_and_among_few() -> None:
    rows = noise(1, 2)
    keys = rows.keys("token", np.arange(3)[None])
    everything = rows.exponentials(keys, torch.arange(200))
    shared = torch.tensor([5, 199, 0, 77])
    for knows_vocabulary in (250, 200, None):
        others = RowNoise([1, 2], [0, 0], CPU, knows_vocabulary)
        assert torch.equal(others.exponentials(keys, range(200)), everything)
    assert torch.equal(rows.exponentials(keys, shared), everything[..., shared])
    own = torch.randint(200, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows.exponentials(keys, own), everything.gather(2, own))
    # one column of keys, as a draft asks for them, and one key
    assert torch.equal(rows.exponentials(keys[:, 1], torch.arange(200)), everything[:, 1])
    assert torch.equal(rows.exponentials(keys[:, 1], own[:, 1]), everything[:, 1].gather(1, own[:, 1]))
    assert torch.equal(rows.exponentials(keys[0, :1], torch.arange(200)), everything[0, :1])


@pytest.mark.parametrize("num_keys", [0, 1, ROWS_AT_A_TIME, ROWS_AT_A_TIME + 1, 5 * ROWS_AT_A_TIME])
def test_chunks_change_nothing(num_keys: int) -> None:
    keys, ids = many_keys(num_keys), torch.arange(30)
    times = noise(0).exponentials(keys, ids)
    assert times.shape == (num_keys, 30)
    for place in range(num_keys):
        assert torch.equal(times[place], noise(0).exponentials(keys[place : place + 1], ids)[0])
    assert torch.equal(noise(0).exponentials(keys, ids.expand(num_keys, -1)), times)
    assert torch.equal(noise(0).exponentials(keys.reshape(-1, 1), ids), times.unsqueeze(1))


def test_keys_need_not_lie_in_order() -> None:
    keys, ids = many_keys(12).reshape(3, 4), torch.arange(20)
    times = noise(0).exponentials(keys, ids)
    assert torch.equal(noise(0).exponentials(keys.T, ids), times.transpose(0, 1))
    assert torch.equal(noise(0).exponentials(keys[::-1, ::2], ids), times.flip(0)[:, ::2])
    assert torch.equal(noise(0).uniforms(keys.T), noise(0).uniforms(keys).T)


def test_extreme_keys_give_noise_like_any_other() -> None:
    keys = np.array([0, 1, 2**31, 2**32 - 1, 2**32, 2**63, LARGEST_KEY - 1, LARGEST_KEY], dtype=np.uint64)
    uniforms = noise(0).uniforms(keys)
    assert uniforms[0] == 0
    assert uniforms[-1] == 1 - 2**-24
    times = noise(0).exponentials(keys, torch.arange(20_000))
    assert (times > 0).all()
    assert times.isfinite().all()
    for place, key in enumerate(keys):
        assert kolmogorov(times[place], cumulative_exponential) < 2.2, key


def test_every_bit_of_a_key_counts() -> None:
    ids = torch.arange(1000)
    first = noise(0).exponentials(np.array([0], dtype=np.uint64), ids)
    for bit in set(range(64)) - {32}:  # which makes a multiplier odd
        other = noise(0).exponentials(np.array([1 << bit], dtype=np.uint64), ids)
        assert (first == other).float().mean() < 0.6, bit  # the highest leaves every other product alone


def key_that_hashes_to(target: int, multiplier: int, token: int) -> int:
    """A key whose upper half is the multiplier and with which the token's last hash is the target."""
    mixed = (target ^ target >> 16) * pow(0xC2B2AE35, -1, 2**32) % 2**32
    mixed ^= mixed >> 15 ^ mixed >> 30
    spread = int(_spread(torch.tensor([token]))[0]) % 2**32
    return multiplier << 32 | mixed * pow(multiplier | 1, -1, 2**32) % 2**32 ^ spread


@pytest.mark.parametrize("multiplier", [0, 1234567890, 2**32 - 1])
def test_the_extremes_of_32_bits_give_a_positive_finite_time(multiplier: int) -> None:
    hashes = [0, 1, 2, 2**24, 2**31 - 1, 2**31, 2**32 - 2**8, 2**32 - 2**6, 2**32 - 2, 2**32 - 1]
    keys = np.array([key_that_hashes_to(each, multiplier, 4321) for each in hashes], dtype=np.uint64)
    times = noise(0).exponentials(keys, torch.tensor([4321]))[:, 0].tolist()
    for each, time in zip(hashes, times, strict=True):
        uniform = ((each & 0x7FFFFF7F) + 0.5) / 2**31
        assert time == pytest.approx(-math.log1p(-uniform), rel=3e-2 if uniform > 0.999 else 1e-5)


def test_no_two_tokens_differ_in_high_bits_only() -> None:
    """Such a difference outlives every multiplication, and ties their noise together under every key."""
    low_bits = _spread(torch.arange(2**20)) & 0xFFFFF
    assert len(low_bits.unique()) == 2**20


@pytest.mark.parametrize("pair", [(24721, 41410), (5, 5 + 2**16), (100, 100 + 3 * 2**14)])
def test_two_tokens_share_the_draws_as_they_should(pair: tuple[int, int]) -> None:
    """The first pair once won 0.125 of the draws instead of 0.1."""
    ids = torch.tensor(pair)
    probabilities = torch.tensor([0.9, 0.1]).expand(100_000, -1)
    times = noise(0).exponentials(many_keys(100_000), ids)
    tokens = sample(Distribution(probabilities, ids.expand(100_000, -1)), times)
    # four standard deviations
    assert (tokens == pair[1]).float().mean().item() == pytest.approx(0.1, abs=4 * (0.09 / 100_000) ** 0.5)


def test_the_times_of_a_vocabulary_reach_from_end_to_end() -> None:
    times = noise(0).exponentials(many_keys(8), torch.arange(150_000))
    assert 0 < times.min() < 1e-5
    assert 13 < times.max() < 17
    assert times.unique().numel() > 0.95 * times.numel()
