"""What is said of p and q, token by token, where it is known."""

import math

import pytest
import torch

from decode.agreement import agreement, name_of_range, range_of


def test_ranges_of_positions_double() -> None:
    named = {position: name_of_range(range_of(position)) for position in (0, 15, 16, 31, 32, 63, 64, 127, 128, 300)}
    assert named == {
        **{0: "0-15", 15: "0-15", 16: "16-31", 31: "16-31", 32: "32-63", 63: "32-63"},
        **{64: "64-127", 127: "64-127", 128: "128-255", 300: "256-511"},
    }


def test_what_q_can_say_is_compared_and_the_rest_is_told() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.25, 0.35, 0.4], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    kl = 0.5 * math.log(2) + 0.3 * math.log(0.3 / 0.35) + 0.2 * math.log(0.5)
    expected = [
        [0.25 + 0.3 + 0.2, kl, 0, 0],
        [0.5 + 0.3, 0.3 * math.log(0.6), 0.2, 1],
        [1, 0, 0, 1],
        [0, 0, 1, 0],  # nothing in common: KL is infinite, and nothing of it is left in
    ]
    for found, row in zip(agreement(p, q, None).tolist(), expected, strict=True):
        assert found == pytest.approx(row, abs=1e-6)
    assert agreement(p[:1], p[:1], None).tolist() == [[1, 0, 0, 1]]


def test_columns_of_a_reduced_vocabulary_are_tokens() -> None:
    p = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.1, 0.3]])
    q = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    found = agreement(p, q, torch.tensor([2, 0]))
    both = [0.7 * math.log(1.4) + 0.1 * math.log(0.2), 0.3 * math.log(3) + 0.6 * math.log(0.6 / 0.9)]
    assert found[0].tolist() == pytest.approx([0.5 + 0.1, both[0], 0.2, 1], abs=1e-6)
    assert found[1].tolist() == pytest.approx([0.1 + 0.6, both[1], 0.1, 1], abs=1e-6)
    # a narrower q, without ids, has the first tokens of p
    assert agreement(p, q, None)[0, 2].item() == pytest.approx(0.7)
