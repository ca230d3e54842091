"""How good a draft is on held-out text of the target: acceptance, tokens per target pass, speedup to be expected.

Rounds of token-wise verification are followed in closed form. A drafted token that is accepted is the target's text,
so along a given text the draft's branch is accepted at each position with probability min(1, q / p) of the text's own
token, and the text itself tells with which probability a round begins at each of its positions: no branch is sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decode.costs import Costs

MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True)
class Rounds:
    """Rounds that are to be expected on one text.

    Attributes:
        num_tokens: of the text, all of them committed.
        count: of rounds, a target pass each.
        reached, accepted: [num_draft_tokens], how many times a drafted token at each position of a round is expected
            to be reached, and to be accepted.
    """

    num_tokens: int
    count: float
    reached: np.ndarray
    accepted: np.ndarray


def expected_rounds(acceptance: np.ndarray, num_draft_tokens: int) -> Rounds:
    """Follow the probability that a round begins at each position of a text.

    Args:
        acceptance: fp [tokens], min(1, q / p) of each token of the text.
        num_draft_tokens: drafted a round; fewer where the text ends, whose last token is the target's own.
    """
    num_tokens = len(acceptance)
    passing = acceptance.tolist()  # single numbers are several times faster outside arrays
    begins = [1.0] + [0.0] * num_tokens
    reached, accepted = [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
    for start in range(num_tokens):
        going_on = begins[start]
        drafted = min(num_draft_tokens, num_tokens - start - 1)
        for position in range(drafted):
            passed = going_on * passing[start + position]
            reached[position] += going_on
            accepted[position] += passed
            begins[start + position + 1] += going_on - passed
            going_on = passed
        begins[start + drafted + 1] += going_on
    return Rounds(num_tokens, sum(begins[:num_tokens]), np.array(reached), np.array(accepted))


def block_efficiency(rounds: Sequence[Rounds]) -> float:
    """E: tokens committed per target pass, over several texts."""
    return sum(each.num_tokens for each in rounds) / sum(each.count for each in rounds)


def betas(rounds: Sequence[Rounds]) -> list[float]:
    """Acceptance at each position of a round, given that it is reached, over several texts."""
    reached = np.sum([each.reached for each in rounds], axis=0)
    accepted = np.sum([each.accepted for each in rounds], axis=0)
    return (accepted / np.maximum(reached, np.finfo(float).tiny)).tolist()  # type: ignore[no-any-return]


def judge(acceptances: Sequence[np.ndarray], num_draft_tokens: int, costs: Costs | None) -> dict[str, float]:
    """Figures of a draft from the acceptance of the tokens of held-out texts.

    Returns:
        block_efficiency and beta_1, beta_2, … with num_draft_tokens; with costs also predicted_speedup, at the number
        of draft tokens for which it is largest, and that number, best_num_draft_tokens.
    """
    rounds = [expected_rounds(each, num_draft_tokens) for each in acceptances]
    figures = {"block_efficiency": block_efficiency(rounds)}
    figures |= {f"beta_{place}": beta for place, beta in enumerate(betas(rounds), start=1)}
    if costs is None:
        return figures
    speedups = {}
    for number in range(1, min(MAX_DRAFT_TOKENS, len(costs.target_pass) - 1) + 1):
        efficiency = block_efficiency([expected_rounds(each, number) for each in acceptances])
        speedups[number] = efficiency / (number * costs.draft_step + costs.target_pass[number])
    best = max(speedups, key=lambda number: speedups[number])
    return figures | {"predicted_speedup": speedups[best], "best_num_draft_tokens": float(best)}
