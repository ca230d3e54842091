"""What is predicted of a draft from its acceptance along a text, against rounds that are counted one by one."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from decode import costs
from decode.costs import Costs
from decode.sampling import Distribution
from decode.verify import verify_tokenwise
from distill.judge import MAX_DRAFT_TOKENS, Rounds, betas, block_efficiency, expected_rounds, judge


def text(num_tokens: int, seed: int = 0) -> np.ndarray:
    """Acceptance of a text's tokens, with some that are certain and some that are impossible."""
    return np.random.default_rng(seed).uniform(-0.2, 1.2, num_tokens).clip(0, 1)


# --- against every outcome --------------------------------------------------------------------------------


def counted(coins: tuple[bool, ...], num_draft_tokens: int) -> Rounds:
    """Rounds on a text of which is known, for each token, whether it is accepted should it be drafted."""
    start, count = 0, 0
    reached, accepted = np.zeros(num_draft_tokens), np.zeros(num_draft_tokens)
    while start < len(coins):
        drafted = coins[start : start + num_draft_tokens]
        drafted = drafted[: len(coins) - start - 1]  # the last token is the target's own
        num_accepted = next((place for place, passed in enumerate(drafted) if not passed), len(drafted))
        reached[: min(num_accepted + 1, len(drafted))] += 1
        accepted[:num_accepted] += 1
        count += 1
        start += num_accepted + 1
    return Rounds(len(coins), count, reached, accepted)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7])
def test_every_outcome_weighed_with_its_probability(num_tokens: int, num_draft_tokens: int) -> None:
    acceptance = text(num_tokens, seed=3)
    expected = Rounds(num_tokens, 0.0, np.zeros(num_draft_tokens), np.zeros(num_draft_tokens))
    for coins in itertools.product([True, False], repeat=num_tokens):
        probability = math.prod(a if passed else 1 - a for a, passed in zip(acceptance, coins, strict=True))
        outcome = counted(coins, num_draft_tokens)
        expected = Rounds(
            num_tokens,
            expected.count + probability * outcome.count,
            expected.reached + probability * outcome.reached,
            expected.accepted + probability * outcome.accepted,
        )
    found = expected_rounds(acceptance, num_draft_tokens)
    assert found.num_tokens == num_tokens
    # no tokens take no rounds
    assert found.count == pytest.approx(expected.count if num_tokens else 0, rel=1e-12)
    np.testing.assert_allclose(found.reached, expected.reached, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found.accepted, expected.accepted, rtol=1e-12, atol=1e-15)


# --- against a decoder that throws its coins --------------------------------------------------------------

NUM_STATES, NUM_TOKENS, NUM_TEXTS = 5, 13, 4000


def chains(seed: int) -> tuple[Tensor, Tensor]:
    """The target's and the draft's distribution of the next token for each last token."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, NUM_STATES, NUM_STATES, generator=generator).mul(1.5).softmax(-1)
    return p, (p * q.sqrt()) / (p * q.sqrt()).sum(-1, keepdim=True)


def decode(p: Tensor, q: Tensor, num_draft_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative decoding of all texts at once: their numbers of rounds, and how often each position was judged."""
    last, length = torch.zeros(NUM_TEXTS, dtype=torch.long), torch.zeros(NUM_TEXTS, dtype=torch.long)
    count = torch.zeros(NUM_TEXTS)
    reached, accepted = torch.zeros(num_draft_tokens), torch.zeros(num_draft_tokens)
    while bool((length < NUM_TOKENS).any()):
        going_on = length < NUM_TOKENS
        num_drafted = (NUM_TOKENS - length - 1).clamp(0, num_draft_tokens)
        seen = [last]
        for _ in range(num_draft_tokens):
            seen.append(q[seen[-1]].multinomial(1).squeeze(1))
        before, drafted = torch.stack(seen, dim=1), torch.stack(seen[1:], dim=1)
        num_accepted, weights = verify_tokenwise(
            Distribution(p[before]), Distribution(q[before[:, :-1]]), drafted, num_drafted, torch.rand(drafted.shape)
        )
        positions = torch.arange(num_draft_tokens)
        accepted += (positions < num_accepted.unsqueeze(1)).sum(dim=0)
        reached += (positions < torch.minimum(num_accepted + 1, num_drafted).unsqueeze(1)).sum(dim=0)
        count += going_on
        length = torch.where(going_on, length + num_accepted + 1, length)
        last = weights.probabilities.multinomial(1).squeeze(1)
    assert bool((length == NUM_TOKENS).all())
    return count, reached, accepted


def texts_of_the_target(p: Tensor, q: Tensor) -> list[np.ndarray]:
    """min(1, q / p) of the tokens of texts that the target wrote alone."""
    state, ratios = torch.zeros(NUM_TEXTS, dtype=torch.long), []
    for _ in range(NUM_TOKENS):
        token = p[state].multinomial(1).squeeze(1)
        ratios.append((q[state, token] / p[state, token]).clamp_max(1))
        state = token
    return list(torch.stack(ratios, dim=1).double().numpy())


def standard_scores(found: list[Rounds], count: Tensor) -> float:
    """How many standard errors lie between the mean numbers of rounds."""
    predicted = torch.tensor([each.count for each in found])
    error = math.sqrt((predicted.var() + count.var()) / NUM_TEXTS)
    return float((predicted.mean() - count.mean()) / error)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 6])
def test_the_closed_form_is_what_a_decoder_does(num_draft_tokens: int) -> None:
    p, q = chains(0)
    torch.manual_seed(num_draft_tokens)
    count, reached, accepted = decode(p, q, num_draft_tokens)
    texts = texts_of_the_target(p, q)
    found = [expected_rounds(each, num_draft_tokens) for each in texts]
    assert abs(standard_scores(found, count)) < 3.5
    for beta, passed, of in zip(betas(found), accepted.tolist(), reached.tolist(), strict=True):
        # of the simulation; that of the closed form is smaller
        error = math.sqrt(beta * (1 - beta) / of)
        assert abs(beta - passed / of) < 5 * error
    # the controls: of a draft that drafts half as many, or of another target's texts, it is another
    fewer = [expected_rounds(each, num_draft_tokens // 2) for each in texts]
    assert abs(standard_scores(fewer, count)) > 10
    others = [expected_rounds(each, num_draft_tokens) for each in texts_of_the_target(*chains(1))]
    assert abs(standard_scores(others, count)) > 10


# --- ends and identities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 12])
def test_all_accepted_and_none_accepted(num_tokens: int, num_draft_tokens: int) -> None:
    every = expected_rounds(np.ones(num_tokens), num_draft_tokens)
    assert every.count == math.ceil(num_tokens / (num_draft_tokens + 1))
    assert every.accepted.tolist() == every.reached.tolist()
    assert every.accepted.sum() == num_tokens - every.count
    none = expected_rounds(np.zeros(num_tokens), num_draft_tokens)
    assert none.count == num_tokens
    assert not none.accepted.any()
    assert none.reached.tolist() == [num_tokens - 1] + [0] * (num_draft_tokens - 1)


def test_one_token_takes_one_round_and_nothing_is_drafted() -> None:
    for acceptance in (0.0, 0.3, 1.0):
        rounds = expected_rounds(np.array([acceptance]), 3)
        assert (rounds.num_tokens, rounds.count) == (1, 1.0)
        assert not rounds.reached.any()
        assert block_efficiency([rounds]) == 1
        assert betas([rounds]) == [0.0] * 3


def test_a_text_of_nothing_counts_for_nothing() -> None:
    nothing, something = expected_rounds(np.zeros(0), 3), expected_rounds(text(9), 3)
    assert (nothing.num_tokens, nothing.count) == (0, 0.0)
    assert block_efficiency([nothing, something]) == block_efficiency([something])
    assert betas([nothing, something]) == betas([something])


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 8])
def test_each_round_commits_one_token_beside_those_accepted(num_draft_tokens: int) -> None:
    texts = [text(num_tokens, seed=num_tokens) for num_tokens in (1, 4, 30, 200)]
    rounds = [expected_rounds(each, num_draft_tokens) for each in texts]
    for each in rounds:
        assert each.num_tokens == pytest.approx(each.count + each.accepted.sum(), rel=1e-12)
        # every position is reached through the one before it
        np.testing.assert_array_less(each.reached[1:], each.accepted[:-1] + 1e-12)
        assert each.reached[0] <= each.count + 1e-12
    num_tokens, count = sum(each.num_tokens for each in rounds), sum(each.count for each in rounds)
    assert block_efficiency(rounds) == num_tokens / count
    # long texts weigh more: it is no mean of the texts' own
    assert abs(block_efficiency(rounds) - np.mean([block_efficiency([each]) for each in rounds])) > 0.005
    accepted, reached = (sum(getattr(each, name) for each in rounds) for name in ("accepted", "reached"))
    assert betas(rounds) == pytest.approx((accepted / reached).tolist(), rel=1e-12)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("acceptance", [0.1, 0.6, 0.95])
def test_where_all_tokens_are_alike_it_is_the_formula(acceptance: float, num_draft_tokens: int) -> None:
    rounds = [expected_rounds(np.full(4000, acceptance), num_draft_tokens)]
    assert betas(rounds) == pytest.approx([acceptance] * num_draft_tokens, rel=1e-12)
    formula = costs.block_efficiency([acceptance], num_draft_tokens)
    assert block_efficiency(rounds) == pytest.approx(formula, rel=2e-3)  # but for the end of the text


# --- the figures ------------------------------------------------------------------------------------------

FIGURES = {"block_efficiency", "beta_1", "beta_2", "beta_3"}


def test_without_costs_no_speedup_is_predicted() -> None:
    texts = [text(20), text(7, seed=1)]
    figures = judge(texts, 3, None)
    rounds = [expected_rounds(each, 3) for each in texts]
    assert set(figures) == FIGURES
    assert figures["block_efficiency"] == block_efficiency(rounds)
    assert [figures[f"beta_{place}"] for place in (1, 2, 3)] == betas(rounds)


@pytest.mark.parametrize(
    ("acceptance", "draft_step", "pass_slope", "best"),
    [
        (0.05, 0.5, 0.1, 1),  # nothing pays, and one token costs least
        (0.6, 0.1, 0.02, 3),
        (0.98, 0.01, 0.0, MAX_DRAFT_TOKENS),
    ],
)
def test_the_speedup_is_that_of_the_best_number_of_draft_tokens(
    acceptance: float, draft_step: float, pass_slope: float, best: int
) -> None:
    target_pass = [1 + pass_slope * more for more in range(MAX_DRAFT_TOKENS + 1)]
    measured = Costs(seconds_per_token=1.0, draft_step=draft_step, target_pass=target_pass)
    texts = [np.full(200, acceptance), np.full(50, acceptance)]
    figures = judge(texts, 3, measured)
    assert set(figures) == FIGURES | {"predicted_speedup", "best_num_draft_tokens"}
    speedups = {}
    for number in range(1, MAX_DRAFT_TOKENS + 1):
        efficiency = block_efficiency([expected_rounds(each, number) for each in texts])
        speedups[number] = efficiency / (number * draft_step + target_pass[number])
    assert figures["predicted_speedup"] == max(speedups.values())
    assert figures["best_num_draft_tokens"] == best == max(speedups, key=lambda number: speedups[number])
    assert (figures["predicted_speedup"] > 1) == (best > 1)
    # for a number of draft tokens it is what the costs themselves predict, but for the ends of the texts
    assert figures["predicted_speedup"] == pytest.approx(measured.predicted_speedup([acceptance], best), rel=0.05)
    # what block_efficiency and beta_k say is of the number asked for, whatever is best
    assert {name: figures[name] for name in FIGURES} == judge(texts, 3, None)


def test_no_more_tokens_are_drafted_than_were_measured() -> None:
    measured = Costs(seconds_per_token=1.0, draft_step=0.01, target_pass=[1.0, 1.0, 1.0])
    assert judge([np.full(200, 0.98)], 3, measured)["best_num_draft_tokens"] == 2
