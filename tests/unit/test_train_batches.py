"""The data order: complete, repeatable, cheap to pad, fairly shared."""

import random

import pytest

from train.batches import batch_plan, share, total_steps

LENGTHS = random.Random(0).choices(range(1, 201), k=1003) + [7] * 50


def padded_tokens(batches: list[list[int]]) -> int:
    return sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in batches)


@pytest.mark.parametrize("batch_size", [1, 8, 64, 5000])
def test_every_row_is_seen_exactly_once(batch_size: int) -> None:
    batches = batch_plan(LENGTHS, batch_size, seed=0, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(len(LENGTHS)))
    assert len(batches) == -(-len(LENGTHS) // batch_size)
    assert sorted(map(len, batches))[1:] == [batch_size] * (len(batches) - 1)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    plan = batch_plan(LENGTHS, 8, seed=1, epoch=2)
    assert plan == batch_plan(LENGTHS, 8, seed=1, epoch=2)
    assert plan != batch_plan(LENGTHS, 8, seed=1, epoch=3)
    assert plan != batch_plan(LENGTHS, 8, seed=2, epoch=2)
    # (seed, epoch) must not collapse into something like their sum
    assert batch_plan(LENGTHS, 8, seed=2, epoch=1) != plan


def test_padding_is_small() -> None:
    shuffled = list(range(len(LENGTHS)))
    random.Random(0).shuffle(shuffled)
    plain = [shuffled[i : i + 8] for i in range(0, len(shuffled), 8)]
    planned = batch_plan(LENGTHS, 8, seed=0, epoch=0)
    assert padded_tokens(planned) < 1.1 * sum(LENGTHS)
    assert padded_tokens(plain) > 1.5 * sum(LENGTHS)  # the control: a plain shuffle wastes much


def test_batches_are_not_in_order_of_length() -> None:
    longest = [max(LENGTHS[i] for i in batch) for batch in batch_plan(LENGTHS, 8, seed=0, epoch=0)]
    assert longest != sorted(longest)


@pytest.mark.parametrize(("rows", "world"), [(16, 1), (16, 3), (2, 4)])
def test_shares_partition_the_batch(rows: int, world: int) -> None:
    shares = [share(range(rows), rank, world, micro_batch_size=3) for rank in range(world)]
    assert sorted(i for mine in shares for micro in mine for i in micro) == list(range(rows))
    assert all(len(micro) <= 3 for mine in shares for micro in mine)
    assert ([] in shares) == (rows < world)


def test_shares_have_nearly_equal_tokens() -> None:
    batch = sorted(range(64), key=LENGTHS.__getitem__)
    tokens = [sum(LENGTHS[i] for micro in share(batch, rank, 4, 4) for i in micro) for rank in range(4)]
    halves = [sum(LENGTHS[i] for i in batch[start : start + 16]) for start in range(0, 64, 16)]
    assert max(tokens) < 1.2 * min(tokens)
    assert max(halves) > 2 * min(halves)  # the control: contiguous shares are lopsided


def test_total_steps() -> None:
    assert total_steps(num_rows=17, batch_size=8, num_epochs=1.0, max_steps=None) == 3
    assert total_steps(num_rows=17, batch_size=8, num_epochs=2.5, max_steps=None) == 8
    assert total_steps(num_rows=17, batch_size=8, num_epochs=0.001, max_steps=None) == 1
    assert total_steps(num_rows=17, batch_size=8, num_epochs=9.0, max_steps=2) == 2
