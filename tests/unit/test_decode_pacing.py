"""How many tokens are drafted: what pays by made-up seconds, and how little it costs to find out that nothing does."""

import logging
import random
from collections.abc import Callable
from statistics import fmean

import pytest

from decode.pacing import LONGEST_PAUSE, PAUSE, PLAIN_ROUND_EVERY, PLAIN_ROUNDS_FIRST, Costs, Pacer
from decode.params import SpeculationParams
from decode.trace import Round, Seconds

ADAPTIVE = SpeculationParams()


def gently(num_tokens: int) -> float:
    return 1 + 0.02 * (num_tokens - 1)


class Machine:
    """A target and a draft that exist only as an acceptance rate and the seconds they take.

    Coins belong to places in the text, so that two ways of decoding meet the same luck.
    """

    def __init__(
        self,
        pacer: Pacer,
        beta: Callable[[int], float],
        c: float = 0.12,
        v: Callable[[int], float] = gently,
        noise: float = 0.0,
        seed: int = 0,
        num_rows: int = 1,
        slow_start: float = 1.0,
    ) -> None:
        self.pacer, self.beta, self.c, self.v, self.noise, self.num_rows = pacer, beta, c, v, noise, num_rows
        self.coins, self.clock = random.Random(2 * seed), random.Random(2 * seed + 1)
        self.slow_start = slow_start
        self.drafted: list[int] = []
        self.num_paused = 0
        self.place = 0

    def text(self, num_tokens: int) -> float:
        """Seconds of a text."""
        coins = [self.coins.random() for _ in range(num_tokens)]
        done, seconds = 0, 0.0
        while done < num_tokens:
            number = self.pacer.num_draft_tokens(self.num_rows, num_tokens - done - 1)
            self.num_paused += self.pacer.paused
            accepted = 0
            while accepted < number and coins[done + accepted] < self.beta(self.place + done):
                accepted += 1
            spent = Seconds(number * self.c * self._luck(), self.v(number + 1) * self._luck())
            self.slow_start = 1.0
            self.pacer.observe(self.num_rows, number, [Round(number, accepted, accepted + 1)] * self.num_rows, spent)
            self.drafted.append(number)
            done += accepted + 1
            seconds += spent.total
        self.place += num_tokens
        return seconds

    def _luck(self) -> float:
        return max(0.5, 1 + self.noise * self.clock.gauss(0, 1)) * self.slow_start


def always(beta: float) -> Callable[[int], float]:
    return lambda place: beta


def fixed(number: int) -> Pacer:
    return Pacer(SpeculationParams(num_draft_tokens=number, never_slower=False))


def tell(pacer: Pacer, rounds: int, drafted: int, accepted: int, draft: float, verify: float, rows: int = 1) -> None:
    for _ in range(rounds):
        pacer.observe(rows, drafted, [Round(drafted, accepted, accepted + 1)] * rows, Seconds(draft, verify))


@pytest.mark.parametrize("speculation", [ADAPTIVE, SpeculationParams(num_draft_tokens=3)])
def test_the_first_rounds_are_plain_to_learn_their_cost(speculation: SpeculationParams) -> None:
    machine = Machine(Pacer(speculation), always(0.7))
    machine.text(400)
    assert machine.drafted[:PLAIN_ROUNDS_FIRST] == [0] * PLAIN_ROUNDS_FIRST
    drafting = machine.drafted[PLAIN_ROUNDS_FIRST : PLAIN_ROUNDS_FIRST + PLAIN_ROUND_EVERY]
    assert all(drafting)
    assert machine.drafted[PLAIN_ROUNDS_FIRST + PLAIN_ROUND_EVERY] == 0  # and one now and then
    assert machine.num_paused == 0


def test_a_fixed_number_that_may_be_slower_is_always_drafted() -> None:
    machine = Machine(fixed(4), always(0.0), c=1.0)
    machine.text(200)
    assert machine.drafted == [4] * 196 + [3, 2, 1, 0]  # but for what the text has no room for
    assert machine.num_paused == 0
    careful = Machine(Pacer(SpeculationParams(num_draft_tokens=4)), always(0.0), c=1.0)
    careful.text(200)
    assert careful.num_paused > 100
    assert set(careful.drafted[:-4]) == {0, 4}


@pytest.mark.parametrize(
    ("beta", "c", "v", "best"),
    [
        (0.9, 0.0, lambda n: 1.0, 8),  # a free draft
        (0.9, 0.5, gently, 3),
        (0.6, 0.12, gently, 3),
        (0.2, 0.12, gently, 1),
        (0.9, 0.05, lambda n: 1.0 if n <= 4 else 2.0, 3),  # the pass has a step
        (0.95, 0.05, lambda n: 1.0 if n <= 8 else 1.6, 7),
    ],
)
def test_it_settles_on_the_number_that_pays_most(beta: float, c: float, v: Callable[[int], float], best: int) -> None:
    def rate(number: int) -> float:
        return sum(beta**k for k in range(number + 1)) / (number * c + v(number + 1))

    assert max(range(1, 9), key=rate) == best
    pacer = Pacer(SpeculationParams(never_slower=False), betas=[beta] * 8)
    machine = Machine(pacer, always(beta), c, v, seed=4)
    machine.text(4000)
    assert machine.place == 4000
    tail = [number for number in machine.drafted[len(machine.drafted) // 2 : -8] if number]
    # what is near the best in number is near it in worth
    assert fmean(rate(number) for number in tail) > 0.97 * rate(best)


def test_known_acceptance_decides_until_rounds_speak() -> None:
    for betas, expected in (([0.9] * 8, 8), ([0.9, 0.9, 0.0], 2), ([0.05], 1)):
        pacer = Pacer(ADAPTIVE, betas)
        tell(pacer, PLAIN_ROUNDS_FIRST, 0, 0, 0.0, 1.0)
        tell(pacer, 1, 8, 0, 8 * 0.02, 1.0)
        assert pacer.num_draft_tokens(1, 20) == expected
    assert Pacer(ADAPTIVE, [0.7, 0.2]).betas(4) == pytest.approx([0.7, 0.2, 0.2, 0.2])
    pacer = Pacer(ADAPTIVE, [0.7, 0.2])
    tell(pacer, 200, 2, 2, 0.1, 1.0)
    assert min(pacer.betas(4)) > 0.9  # positions not reached follow those that were


def test_positions_that_were_not_reached_teach_nothing() -> None:
    pacer = Pacer(ADAPTIVE, [0.5, 0.5, 0.5])
    tell(pacer, 100, 3, 1, 0.1, 1.0)  # the second is always refused, the third never judged
    first, second, third = pacer.betas(3)
    assert first > 0.9
    assert second < 0.1
    assert third == pytest.approx(0.5)


def test_fewer_are_drafted_when_acceptance_falls() -> None:
    machine = Machine(Pacer(SpeculationParams(never_slower=False)), lambda place: 0.9 if place < 1000 else 0.2)
    machine.text(1000)
    before = machine.drafted[-60:-10]
    machine.drafted.clear()
    machine.text(1000)
    after = machine.drafted[150:-10]
    assert fmean(before) > 6
    assert fmean(after) < 2


def test_there_is_no_room_at_the_end_of_a_text() -> None:
    pacer = Pacer(ADAPTIVE, [0.9] * 8)
    tell(pacer, PLAIN_ROUNDS_FIRST, 0, 0, 0.0, 1.0)
    assert pacer.num_draft_tokens(1, 1) == 1
    assert pacer.num_draft_tokens(1, 0) == 0
    assert not pacer.paused


def test_an_unmeasured_pass_costs_what_the_next_shorter_one_does_until_it_is_measured() -> None:
    costs = Costs()
    for drafted, verify in ((2, 1.2), (6, 3.2)):
        for _ in range(3):
            costs.add(drafted, Seconds(0.1 * drafted, verify, 0.05))
    passes = [seconds - 0.1 * number - 0.05 for number, seconds in enumerate(costs.rounds(8), start=1)]
    assert passes == pytest.approx([1.2, 1.2, 1.2, 1.2, 1.2, 3.2, 3.2, 3.2])
    costs.add(4, Seconds(0.4, 1.9, 0.05))  # once is not enough
    assert costs.rounds(4)[3] == pytest.approx(0.4 + 1.2 + 0.05)
    costs.add(4, Seconds(0.4, 1.9, 0.05))
    costs.add(4, Seconds(0.4, 9.9, 0.05))
    assert costs.rounds(8)[3:5] == pytest.approx([0.4 + 1.9 + 0.05, 0.5 + 1.9 + 0.05])
    alone = Costs()
    alone.add(4, Seconds(0.4, 1.3))
    assert alone.rounds(8)[::7] == pytest.approx([0.1 + 1.3, 0.8 + 1.3])


def test_one_odd_pass_does_not_rule_its_length_out() -> None:
    """A length is only measured while it is chosen: what rules it out must be more than one slow moment."""
    pacer = Pacer(SpeculationParams(never_slower=False), [0.9] * 8)
    tell(pacer, 3, 0, 0, 0.0, 1.0)
    tell(pacer, 3, 3, 3, 0.06, 1.06)
    assert pacer.num_draft_tokens(1, 20) == 8
    tell(pacer, 1, 8, 8, 0.16, 10.0)
    assert pacer.num_draft_tokens(1, 20) == 8
    tell(pacer, 2, 8, 8, 0.16, 10.0)
    assert pacer.num_draft_tokens(1, 20) < 8  # the control: always slow


def test_batches_of_different_sizes_have_costs_and_pauses_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    pacer = Pacer(ADAPTIVE, [0.5] * 8)
    for rows, verify in ((1, 1.0), (16, 4.0)):
        tell(pacer, PLAIN_ROUNDS_FIRST, 0, 0, 0.0, 1.0, rows)
        assert pacer.num_draft_tokens(rows, 20) > 0
        with caplog.at_level(logging.INFO):
            tell(pacer, 8, 2, 1, 0.1, verify, rows)
    assert pacer.num_draft_tokens(1, 20) > 0
    assert not pacer.paused
    assert pacer.num_draft_tokens(16, 20) == 0
    assert pacer.paused
    assert pacer.num_draft_tokens(17, 20) == 0  # about as many
    assert pacer.num_draft_tokens(4, 20) == 0  # a size not met before begins plainly
    assert not pacer.paused
    assert caplog.text.count("of plain decoding's speed here: 32 tokens without it") == 1


def pauses(drafted: list[int]) -> list[int]:
    """Lengths of runs of plain rounds."""
    lengths, run = [], 0
    for number in [*drafted, 1]:
        if number == 0:
            run += 1
        elif run:
            lengths.append(run)
            run = 0
    return lengths


def test_pauses_grow_while_nothing_changes_and_end_when_acceptance_comes_back() -> None:
    machine = Machine(Pacer(ADAPTIVE), lambda place: 0.0 if place < 3000 else 0.8)
    machine.text(3000)
    found = [length for length in pauses(machine.drafted) if length >= PAUSE]
    assert found[:5] == [32, 64, 128, 256, 512]
    assert set(found[5:-1]) <= {LONGEST_PAUSE}
    machine.drafted.clear()
    machine.text(3000)
    resumed = machine.drafted.index(next(number for number in machine.drafted if number > 0))
    assert resumed <= LONGEST_PAUSE
    later = machine.drafted[resumed + 30 : -8]
    assert later.count(0) / len(later) < 0.03
    # and the next time it fails, pauses are short again
    machine.beta = always(0.0)
    machine.drafted.clear()
    machine.text(300)
    assert PAUSE in pauses(machine.drafted)


def test_a_useless_draft_costs_little() -> None:
    machine = Machine(Pacer(ADAPTIVE), always(0.0))
    assert machine.text(128) <= 1.05 * 128
    for _ in range(6):
        assert machine.text(128) <= 1.03 * 128
    # the control: what it costs who drafts nevertheless
    assert Machine(fixed(3), always(0.0)).text(128) > 1.4 * 128


def test_a_first_pass_that_is_slow_does_not_make_drafting_look_good() -> None:
    """The first pass of a process allocates and compiles: three times its later cost."""
    machine = Machine(Pacer(ADAPTIVE), always(0.0), slow_start=3.0)
    assert machine.text(128) - 2.0 <= 1.05 * 128


def test_a_good_draft_is_used_about_as_well_as_by_who_knows_it() -> None:
    losses, num_paused = [], 0
    for seed in range(12):
        machine = Machine(Pacer(ADAPTIVE), always(0.6), noise=0.05, seed=seed)
        seconds = machine.text(1000)
        best = min(Machine(fixed(n), always(0.6), noise=0.05, seed=seed).text(1000) for n in range(1, 9))
        losses.append(seconds / best)
        num_paused += machine.num_paused
        assert seconds < 0.75 * 1000
    assert fmean(losses) < 1.03
    assert max(losses) < 1.05
    assert num_paused < 0.01 * 12 * 1000


def test_a_draft_that_just_pays_is_not_given_up_for_long() -> None:
    seconds = [Machine(Pacer(ADAPTIVE), always(0.3), noise=0.05, seed=seed).text(2000) for seed in range(8)]
    ideal = 2000 * 1.14 / 1.3
    assert fmean(seconds) < 1.05 * ideal
    assert ideal < 0.9 * 2000


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_batch_paces_by_the_mean_of_its_rows(num_rows: int) -> None:
    pacer = Pacer(ADAPTIVE)
    tell(pacer, PLAIN_ROUNDS_FIRST, 0, 0, 0.0, 1.0, num_rows)
    for _ in range(20):
        rounds = [Round(3, 3, 4), Round(3, 0, 1)] * (num_rows // 2) or [Round(3, 3, 4)]
        pacer.observe(num_rows, 3, rounds, Seconds(0.3, 1.1))
    betas = pacer.betas(2)
    assert betas[0] == pytest.approx(0.95 if num_rows == 1 else 0.51, abs=0.03)
    assert betas[1] > 0.8  # where the first was accepted, so was the second
