"""Which rows make up which step: a pure function of the lengths, the seed and the epoch."""

import math
import random
from collections.abc import Sequence

# Sorting by length within this many batches keeps padding small and leaves the order random enough.
WINDOW_BATCHES = 32


def batch_plan(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch, the same on every process and after every resume.

    Args:
        lengths: tokens of each row, [num_rows].
        batch_size: rows per batch; one batch is smaller when it does not divide num_rows.
        seed, epoch: together decide the order.

    Returns:
        Row indices, ceil(num_rows / batch_size) lists, each sorted by ascending length. Every row is in
        exactly one of them.
    """
    generator = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    generator.shuffle(order)
    window = batch_size * WINDOW_BATCHES
    batches = []
    for start in range(0, len(order), window):
        rows = sorted(order[start : start + window], key=lengths.__getitem__)
        batches += [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    generator.shuffle(batches)
    return batches


def share(indices: Sequence[int], rank: int, world: int, micro_batch_size: int) -> list[list[int]]:
    """The micro-batches of one process.

    Args:
        indices: one batch, sorted by length, as `batch_plan` gives it.
        rank, world: this process and how many there are.
        micro_batch_size: most rows in one micro-batch.

    Returns:
        Lists of row indices; none when there are fewer rows than processes. Dealing the sorted rows out in
        turn gives every process nearly the same number of tokens, and each micro-batch rows of like length.
    """
    mine = indices[rank::world]
    return [list(mine[i : i + micro_batch_size]) for i in range(0, len(mine), micro_batch_size)]


def total_steps(num_rows: int, batch_size: int, num_epochs: float, max_steps: int | None) -> int:
    """Optimiser steps of the whole run, at least one."""
    if max_steps is not None:
        return max_steps
    return max(1, math.ceil(num_epochs * math.ceil(num_rows / batch_size)))
