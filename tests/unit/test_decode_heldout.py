"""Which prompts are measured on."""

from itertools import pairwise

from decode.heldout import spread


def test_a_sample_of_a_sorted_list_is_spread_over_it() -> None:
    assert spread(list(range(9)), 3) == [0, 4, 8]
    assert spread(list("abc"), 1) == ["a"]
    assert spread(list("abc"), 3) == spread(list("abc"), 7) == ["a", "b", "c"]
    chosen = spread(list(range(80)), 32)
    assert len(set(chosen)) == 32
    assert max(later - earlier for earlier, later in pairwise(chosen)) == 3
