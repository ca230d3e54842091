"""What follows from when tokens arrived."""

import pytest

from decode.latency import Arrival, Arrivals, Latency, Run, Spread, percentiles

ROUNDS = Run(6, 2.5, (Arrival(1.0, 1), Arrival(1.3, 3), Arrival(2.3, 2)))


def test_tokens_of_a_round_arrive_together() -> None:
    assert ROUNDS.first_token_seconds == 1.0
    assert ROUNDS.arrival_gaps == pytest.approx([0.3, 1.0])
    assert ROUNDS.token_gaps == pytest.approx([0.3, 0, 0, 1.0, 0])
    assert ROUNDS.seconds_per_output_token == pytest.approx(1.3 / 5)
    # what passed after the last token is in neither
    assert 1.0 + sum(ROUNDS.token_gaps) == pytest.approx(2.3)
    assert ROUNDS.figures()["first_token_seconds"] == 1.0


def test_a_first_round_may_commit_several() -> None:
    assert Run(3, 1.0, (Arrival(0.5, 2), Arrival(0.75, 1))).token_gaps == [0, 0.25]


def test_percentiles_of_a_known_series() -> None:
    assert percentiles([float(number) for number in range(101)]) == pytest.approx({"p50": 50, "p90": 90, "p99": 99})
    assert percentiles([1.0, 2.0]) == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99})
    assert percentiles([]) is None


def test_the_spread_of_a_known_series() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(1, 2, 3, 4, 5)


def test_latency_pools_the_gaps_of_all_runs() -> None:
    slow = Run(2, 9.0, (Arrival(4.0, 1), Arrival(6.0, 1)))
    found = Latency.of([ROUNDS, slow])
    assert found is not None
    assert (found.first_token_seconds.lowest, found.first_token_seconds.highest) == (1.0, 4.0)
    assert found.seconds_per_output_token is not None
    assert found.seconds_per_output_token.highest == 2.0
    assert found.arrival_gap_seconds == pytest.approx({"p50": 1.0, "p90": 1.8, "p99": 1.98})  # of 0.3, 1, 2
    assert found.token_gap_seconds is not None
    assert found.token_gap_seconds["p50"] == pytest.approx(0.15)  # of 0, 0, 0, 0.3, 1, 2


def test_nothing_is_made_up() -> None:
    assert Latency.of([ROUNDS, Run(3, 1.0)]) is None
    one = Latency.of([Run(1, 1.0, (Arrival(0.9, 1),))])
    assert one is not None
    assert one.seconds_per_output_token is one.arrival_gap_seconds is one.token_gap_seconds is None


def test_arrivals_are_noted_in_order() -> None:
    arrivals = Arrivals()
    for number in (1, 3, 2):
        arrivals.note(number)
    assert [each.num_tokens for each in arrivals.noted] == [1, 3, 2]
    seconds = [0.0, *(each.seconds for each in arrivals.noted), arrivals.elapsed_seconds]
    assert seconds == sorted(seconds)
