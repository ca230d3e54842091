"""What is counted of rounds: drafted, judged, accepted and committed are four different numbers."""

import math

import pytest
import torch

from decode.trace import Round, Seconds, Stopwatch, Trace

ROUNDS = [
    Round(num_drafted=3, num_accepted=1, num_committed=2),  # x, then a correction
    Round(num_drafted=3, num_accepted=3, num_committed=4),  # all, and the bonus
    Round(num_drafted=3, num_accepted=0, num_committed=1),
    Round(num_drafted=3, num_accepted=3, num_committed=2),  # the text ended inside the block
    Round(num_drafted=0, num_accepted=0, num_committed=1),  # one token left: nothing drafted
]


def test_a_trace_counts_what_was_judged() -> None:
    trace = Trace(ROUNDS)
    assert trace.reached == [4, 3, 1]
    assert trace.accepted == [3, 2, 1]
    assert trace.betas == [3 / 4, 2 / 3, 1]
    assert (trace.num_target_passes, trace.num_drafted, trace.num_committed) == (5, 12, 10)
    assert (trace.num_verified, trace.num_accepted) == (8, 6)
    assert trace.block_efficiency == 2


@pytest.mark.parametrize(
    ("each", "num_verified"),
    [
        (Round(4, 0, 1), 1),  # the first was refused; of the others nothing is known
        (Round(4, 2, 3), 3),
        (Round(4, 4, 5), 4),
        (Round(4, 4, 4), 4),  # the text ended with the last drafted one
        (Round(4, 4, 1), 1),  # and with the first
        (Round(4, 1, 1), 1),  # what follows the end was not judged for this text
        (Round(0, 0, 1), 0),
    ],
)
def test_a_round_judges_up_to_the_first_refusal_or_the_end(each: Round, num_verified: int) -> None:
    assert each.num_verified == num_verified
    trace = Trace([each])
    assert trace.num_verified == num_verified == sum(trace.reached)
    assert trace.num_accepted == sum(trace.accepted) <= min(num_verified, each.num_committed)


def test_traces_add_up_whatever_their_lengths() -> None:
    one = Trace([Round(2, 0, 1), Round(2, 1, 2)], Seconds(1.0, 2.0, 3.0), 1)
    other = Trace([Round(5, 2, 3)], Seconds(0.5, 0.25, 0.125), 4)
    total = one + other
    assert total == Trace(one.rounds + other.rounds, Seconds(1.5, 2.25, 3.125), 5)
    assert sum([one, other], Trace()) == total
    assert total.reached == [3, 2, 1, 0, 0]
    assert (other + one).reached == total.reached
    assert total.seconds.total == 6.875
    assert len(one.rounds) == 2  # neither changed
    assert one.seconds == Seconds(1.0, 2.0, 3.0)


def test_positions_that_were_never_reached_have_no_beta() -> None:
    assert Trace().betas == Trace().reached == Trace().accepted == []
    assert math.isnan(Trace().block_efficiency)
    assert Trace([Round(4, 0, 1)]).betas == [0.0]
    assert Trace([Round(0, 0, 1)]).betas == []
    assert Trace([Round(0, 0, 1)]).block_efficiency == 1


def test_traces_do_not_share_what_they_hold() -> None:
    first, second = Trace(), Trace()
    first.rounds.append(Round(1, 1, 2))
    first.seconds += Seconds(1.0)
    assert second == Trace()


def test_a_stopwatch_tells_the_time_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 12.5, 12.5])
    monkeypatch.setattr("decode.trace.perf_counter", lambda: next(times))
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(4):
        watch.mark()
    assert watch.laps() == [0.5, 2.0, 0.0]
