"""Means, counts and intervals of an evaluation, from sums and rounds that are known."""

import numpy as np
import pytest

from decode.costs import Costs
from decode.figures import (
    bootstrap_interval,
    by_category,
    by_position,
    means,
    of_rounds,
    padded,
    passes_by_range,
    predicted_speedup_intervals,
)
from decode.trace import Round, Trace

# drafted, accepted, committed
TRACES = [
    Trace([Round(3, 0, 1), Round(3, 3, 4), Round(3, 1, 2)]),
    Trace([Round(3, 3, 2)]),  # the text ended with the second of three accepted tokens
]


def test_the_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    """Prompts of different lengths, each with an acceptance of its own; the truth is the ratio of means."""
    generator = np.random.default_rng(0)
    num_trials, num_prompts, truth = 1000, 60, 0.6

    def covered(shrink: float) -> float:
        hits = 0
        for trial in range(num_trials):
            lengths = generator.integers(10, 100, size=num_prompts)
            rates = generator.beta(6, 4, size=num_prompts)
            low, high = bootstrap_interval(generator.binomial(lengths, rates), lengths, seed=trial)
            middle, half = (low + high) / 2, shrink * (high - low) / 2
            hits += middle - half <= truth <= middle + half
        return hits / num_trials

    assert 0.93 < covered(1.0) < 0.97
    assert covered(0.5) < 0.8  # the control: half the width covers far less


def test_the_bootstrap_resamples_prompts_not_tokens() -> None:
    lengths = np.full(20, 1000)
    accepted = np.array([0, 1000] * 10)  # one prompt is all or nothing, so 20 prompts say little
    low, high = bootstrap_interval(accepted, lengths)
    assert (low, high) == (pytest.approx(0.3, abs=0.06), pytest.approx(0.7, abs=0.06))
    assert bootstrap_interval(accepted, lengths) == (low, high)
    assert bootstrap_interval(lengths, lengths) == (1, 1)


def test_rounds_are_counted_by_what_they_accepted() -> None:
    found = of_rounds(TRACES, 3)
    assert found["accepted_lengths"] == [1, 1, 1, 1]
    assert found["accepted_length_shares"] == [0.25] * 4
    assert found["counts"] == {"target_passes": 4, "drafted": 12, "verified": 8, "accepted": 6, "committed": 9}
    assert found["betas"] == [3 / 4, 2 / 3, 1]
    assert found["first_position_interval"] == found["betas_intervals"][0]
    # drawn anew, there are two of either prompt, or one of each
    assert found["counts_intervals"]["committed"] == (4, 14)
    assert found["counts_intervals"]["accepted"] == (4, 8)
    assert found["betas_intervals"][1] == (0.5, 1)


def test_rounds_belong_to_the_positions_at_which_they_begin() -> None:
    trace = Trace([Round(9, 9, 10), Round(9, 9, 10), Round(2, 0, 1), Round(12, 11, 12), Round(1, 0, 1)])
    assert passes_by_range(trace) == [[2, 20], [2, 13], [1, 1]]


def test_means_are_ratios_of_sums_over_the_texts_that_have_some() -> None:
    sums = padded([[[2, 1.0, 0.5, 0.1, 1]], [[2, 2.0, 0.1, 0.0, 2], [1, 0.5, 0.4, 0.2, 0]]], 2)
    passes = padded([[[1, 2]], [[1, 2], [1, 1]]], 2)
    found = means(sums, passes)
    assert (found["num_prompts"], found["num_tokens"]) == (2, 5)
    assert found["alpha"] == pytest.approx(3.5 / 5)
    assert found["tv"] == pytest.approx(1.5 / 5)
    assert found["alpha_interval"] == pytest.approx((0.5, 2.5 / 3))
    assert found["tv_interval"] == pytest.approx((0.5 / 3, 0.5))
    assert found["kl"] == pytest.approx(1.0 / 5)
    assert found["p_beyond_q"] == pytest.approx(0.3 / 5)
    assert found["top1_agreement"] == pytest.approx(3 / 5)
    assert found["block_efficiency"] == pytest.approx(5 / 3)
    parts = by_position(sums, passes)
    assert {name: (part.num_prompts, part.alpha, part.block_efficiency) for name, part in parts.items()} == {
        "0-15": (2, 0.75, 2.0),
        "16-31": (1, 0.5, 1.0),
    }


def test_a_category_may_have_no_decoded_prompt() -> None:
    sums = padded([[[2, 1.0, 0, 0, 1]], [[2, 2.0, 0, 0, 2]], [[2, 0.5, 0, 0, 0]]], 1)
    parts = by_category(sums, ["b", None, "a"], padded([[[2, 3]]], 1), [Trace([Round(2, 1, 2), Round(1, 0, 1)])], ["b"])
    assert list(parts) == ["b", "a"]
    assert (parts["b"].alpha, parts["b"].block_efficiency) == (0.5, 1.5)
    assert (parts["a"].alpha, parts["a"].block_efficiency, parts["a"].block_efficiency_interval) == (0.25, None, None)
    assert (parts["b"].betas, parts["b"].betas_intervals) == ([0.5, 0.0], [(0.5, 0.5), (0, 0)])
    assert parts["b"].counts == {"target_passes": 2, "drafted": 3, "verified": 3, "accepted": 1, "committed": 3}
    assert (parts["a"].betas, parts["a"].betas_intervals, set(parts["a"].counts.values())) == ([], [], {0})


def test_predicted_speedups_are_drawn_anew_with_the_prompts() -> None:
    """Of two prompts, one accepts everything and the other nothing: drawn twice, either is all there is."""
    costs = Costs(seconds_per_token=1.0, draft_step=0.5, target_pass=[1.0, 1.0, 1.5])
    traces = [Trace([Round(2, 2, 3)] * 4), Trace([Round(2, 0, 1)] * 4)]
    found = predicted_speedup_intervals(traces, costs)
    assert found == [pytest.approx((1 / 1.5, 2 / 1.5)), pytest.approx((1 / 2.5, 3 / 2.5))]
    total = sum(traces, Trace())
    for number, (low, high) in enumerate(found, start=1):
        assert low < costs.predicted_speedup(total.betas, number) < high
    assert predicted_speedup_intervals(traces[:1] * 5, costs) == [(2 / 1.5, 2 / 1.5), (3 / 2.5, 3 / 2.5)]
