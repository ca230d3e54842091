"""A row's noise is its own: the same whoever its neighbours are, and different from theirs."""

import itertools

import torch

from decode.noise import RowNoise

CPU = torch.device("cpu")


def test_a_stream_depends_on_its_seed_and_number_alone() -> None:
    first = RowNoise(0, [3], CPU).draw(5)
    again = RowNoise(0, [8, 3, 1], CPU).draw(5)
    assert torch.equal(again[1], first[0])
    distinct = {tuple(RowNoise(seed, [stream], CPU).draw(3)[0].tolist()) for seed in range(30) for stream in range(30)}
    assert len(distinct) == 900  # not, for instance, a function of seed + stream


def test_streams_go_on_and_rows_can_leave() -> None:
    whole = RowNoise(7, [0, 1, 2], CPU).draw(6)
    noise = RowNoise(7, [0, 1, 2], CPU)
    assert torch.equal(noise.draw(2), whole[:, :2])
    noise.select_rows([2, 0])
    assert torch.equal(noise.draw(4), whole[[2, 0], 2:])
    assert noise.draw(0).shape == (2, 0)


def test_streams_are_uniform_and_do_not_follow_each_other() -> None:
    uniforms = RowNoise(0, list(range(200)), CPU).draw(200)
    assert uniforms.dtype == torch.float32
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    for pairs in (uniforms.reshape(-1, 2), uniforms.T.reshape(-1, 2)):  # within a stream, and between neighbours
        assert chi_square(pairs) < 155  # 99 degrees of freedom: exceeded once in 3,000
    assert chi_square(uniforms.sort(dim=1).values.reshape(-1, 2)) > 1000  # the control


def chi_square(pairs: torch.Tensor) -> float:
    """Of pairs in [0, 1)^2 against uniformity, in 10 by 10 cells."""
    cells = (pairs * 10).long()
    counts = torch.bincount(cells[:, 0] * 10 + cells[:, 1], minlength=100)
    expected = len(pairs) / 100
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_largest_uniform_is_below_1() -> None:
    draws = itertools.islice((RowNoise(seed, [0], CPU).draw(100_000) for seed in itertools.count()), 20)
    assert max(float(draw.max()) for draw in draws) < 1
