"""Which losses are learnt from: weighted sums, stage after stage, and what cannot be meant."""

import json
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from distill import losses
from distill.config import BranchesConfig, LossName, ObjectiveConfig, RunConfig, Stage
from distill.objective import Objective, Stages
from train.config import TrainConfig

VOCAB, NUM_TOKENS = 12, 6
NUM_STEPS = 24
BETA, ETA = 0.2, 1.0

LOG_P, LOG_Q = (
    torch.randn(NUM_TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(-1) for seed in (0, 1)
)
# what is compared may be less than all that the draft says
SOME = torch.tensor([1, 4, 5, 9])
COLUMNS = torch.tensor([3, 0, -1, 11, 7, 7])
SINGLE: dict[LossName, Tensor] = {
    "forward_kl": losses.forward_kl(LOG_P[:, SOME], LOG_Q[:, SOME]),
    "reverse_kl": losses.reverse_kl(LOG_P[:, SOME], LOG_Q[:, SOME]),
    "jsd": losses.jsd(LOG_P[:, SOME], LOG_Q[:, SOME], BETA),
    "tv": losses.total_variation(LOG_P[:, SOME], LOG_Q[:, SOME]),
    "nla": losses.negative_log_acceptance(LOG_P[:, SOME], LOG_Q[:, SOME]),
    "lk": losses.lk(LOG_P[:, SOME], LOG_Q[:, SOME], ETA),
    "cross_entropy": losses.cross_entropy(LOG_Q, COLUMNS),
}


def objective(weights: dict[LossName, float]) -> Objective:
    return Objective(ObjectiveConfig(stages=(Stage(losses=weights),), jsd_beta=BETA, lk_eta=ETA))


def of(learnt: Objective) -> Tensor:
    return learnt(LOG_P[:, SOME], LOG_Q[:, SOME], LOG_Q, COLUMNS)


# --- the sum ----------------------------------------------------------------------------------------------


def test_each_loss_has_its_name() -> None:
    assert set(SINGLE) | {"block_efficiency"} == set(get_args(LossName))
    for name, expected in SINGLE.items():
        assert torch.equal(of(objective({name: 1.0})), expected), name
        others = [other for other in SINGLE if torch.allclose(SINGLE[other], expected)]
        assert others == [name]  # the control: they tell each other apart, and the settings from the defaults
    assert not torch.allclose(SINGLE["jsd"], losses.jsd(LOG_P[:, SOME], LOG_Q[:, SOME]))
    assert not torch.allclose(SINGLE["lk"], losses.lk(LOG_P[:, SOME], LOG_Q[:, SOME]))


@pytest.mark.parametrize(
    "weights", [{"tv": 2.0}, {"forward_kl": 0.5, "tv": 2.0, "cross_entropy": 0.25}, dict.fromkeys(SINGLE, 0.3)]
)
def test_losses_are_weighted_and_added(weights: dict[LossName, float]) -> None:
    expected = sum(weight * SINGLE[name] for name, weight in weights.items())
    torch.testing.assert_close(of(objective(weights)), expected)


def test_block_efficiency_is_no_loss_of_single_tokens() -> None:
    torch.testing.assert_close(of(objective({"block_efficiency": 5.0, "tv": 2.0})), 2 * SINGLE["tv"])


def test_the_weights_are_those_of_the_stage_at_hand() -> None:
    first, second = Stage(losses={"forward_kl": 1.0}, share=0.5), Stage(losses={"tv": 3.0})
    learnt = Objective(ObjectiveConfig(stages=(first, second)))
    assert torch.equal(of(learnt), SINGLE["forward_kl"])
    learnt.weights = second.losses
    torch.testing.assert_close(of(learnt), 3 * SINGLE["tv"])


# --- stages -----------------------------------------------------------------------------------------------


def stages_of(*ends: dict[str, Any]) -> tuple[Stage, ...]:
    """Stages that are told apart by the weight of their loss: 1, 2, …"""
    return tuple(Stage(losses={"tv": float(number)}, **end) for number, end in enumerate(ends, start=1))


def run(
    stages: tuple[Stage, ...],
    held_out: Callable[[int], float] = lambda step: 0.0,
    *,
    eval_every: int = 1,
    interrupted_after: int | None = None,
    num_steps: int = NUM_STEPS,
) -> list[int]:
    """The number of each step's stage; after so many steps, those that a new process finds."""
    state: dict[str, Any] = {}
    followed = Stages(stages, state)
    found = []
    for step in range(num_steps):
        found.append(int(followed.at(step, num_steps).losses["tv"]))
        if (step + 1) % eval_every == 0:
            followed.evaluated(held_out(step))
        if step + 1 == interrupted_after:
            saved = json.dumps(state)
            state = {}
            followed = Stages(stages, state)
            state.clear()  # as the loop gives a state back
            state.update(json.loads(saved))
    return found


def lengths(found: list[int]) -> list[int]:
    assert found == sorted(found)
    return [found.count(number) for number in sorted(set(found))]


def test_stages_last_their_share_and_the_last_one_what_is_left() -> None:
    assert lengths(run(stages_of({"share": 0.25}, {"share": 0.5}, {}))) == [6, 12, 6]
    assert lengths(run(stages_of({}))) == [24]
    assert lengths(run(stages_of({"share": 0.25}, {"share": 0.25}))) == [6, 18]  # the last one has no end
    assert lengths(run(stages_of({"share": 0.5}, {"share": 0.8}, {}))) == [12, 12]  # there is no more
    assert lengths(run(stages_of({"share": 0.001}, {}))) == [1, 23]  # a stage has a step at least
    assert lengths(run(stages_of({"share": 0.3}, {}), num_steps=10)) == [3, 7]
    assert lengths(run(stages_of({"share": 0.3}, {}), num_steps=11)) == [4, 7]


# after the first, 4.0, the first 3.0 and 2.0 are new lowest ones, and nothing behind them is
FALLING = [5.0, 5.0, 4.0, 3.0, 3.5, 3.0, 2.0] + [9.0 - 0.1 * step for step in range(20)]


@pytest.mark.parametrize(
    ("patience", "expected"),
    [
        (1, [2, 22]),  # 5.0 is no lower than 5.0
        (2, [6, 18]),  # 3.5 and 3.0 are no lower than 3.0
        (3, [10, 14]),
        (4, [11, 13]),
        (20, [24]),
    ],
)
def test_a_plateau_ends_a_stage(patience: int, expected: list[int]) -> None:
    assert lengths(run(stages_of({"plateau_evals": patience}, {}), FALLING.__getitem__)) == expected


def test_a_new_stage_waits_for_a_plateau_of_its_own() -> None:
    stages = stages_of({"plateau_evals": 3}, {"plateau_evals": 3}, {})
    # the first evaluation of the second stage is a new lowest, though far above those of the first
    assert lengths(run(stages, lambda step: 1.0 if step < 4 else 7.0)) == [4, 4, 16]
    assert lengths(run(stages, lambda step: -step)) == [24]  # the control
    assert lengths(run(stages, lambda step: 1.0, eval_every=2)) == [8, 8, 8]


def test_share_and_plateau_end_it_whichever_comes_first() -> None:
    stages = stages_of({"share": 0.5, "plateau_evals": 3}, {})
    assert lengths(run(stages, lambda step: 1.0)) == [4, 20]
    assert lengths(run(stages, lambda step: -step)) == [12, 12]


def test_the_last_stage_does_not_end_at_a_plateau() -> None:
    assert lengths(run(stages_of({"share": 0.25}, {"plateau_evals": 1}), lambda step: 1.0)) == [6, 18]


@pytest.mark.parametrize("after", range(1, NUM_STEPS))
def test_an_interruption_changes_nothing(after: int) -> None:
    stages = stages_of({"plateau_evals": 3}, {"share": 0.25, "plateau_evals": 5}, {"plateau_evals": 2}, {})

    def held_out(step: int) -> float:
        return FALLING[step] if step < 16 else 5.0

    whole = run(stages, held_out)
    assert lengths(whole) == [10, 6, 3, 5]
    assert run(stages, held_out, interrupted_after=after) == whole


# --- what cannot be meant ---------------------------------------------------------------------------------


def configure(objective: dict[str, Any], branches: dict[str, Any] | None = None, **values: Any) -> RunConfig:
    return RunConfig(
        pair="pair",
        responses="responses",
        objective=ObjectiveConfig(**objective),
        branches=BranchesConfig(**branches or {}),
        **{"train": TrainConfig(output="run")} | values,
    )


def selecting_by(metric: str) -> TrainConfig:
    return TrainConfig(output="run", eval_every_steps=5, select_by=metric)


TV, BLOCK = Stage(losses={"tv": 1.0}), Stage(losses={"block_efficiency": 1.0})
CE, PLATEAU = Stage(losses={"cross_entropy": 1.0}), Stage(losses={"tv": 1.0}, plateau_evals=2)

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Stage(losses={}), "losses: {} is"),
    (lambda: Stage(losses={"tv": 1.0, "lk": 0.0}), "losses: {'tv': 1.0, 'lk': 0.0} is"),
    (lambda: Stage(losses={"tv": -1.0}), "losses: {'tv': -1.0} is"),
    (lambda: Stage(losses={"tv": float("nan")}), "losses: {'tv': nan} is"),
    (lambda: Stage(losses={"tvd": 1.0}), "losses: there is no 'tvd'"),  # type: ignore[dict-item]
    (lambda: Stage(losses={"tv": 1.0}, share=0.0), "share: 0.0 is"),
    (lambda: Stage(losses={"tv": 1.0}, share=1.1), "share: 1.1 is"),
    (lambda: Stage(losses={"tv": 1.0}, plateau_evals=0), "plateau_evals: 0 is"),
    (lambda: configure({"stages": (TV, TV)}), "stages: only the last may lack both share and plateau_evals"),
    (
        lambda: configure({"stages": (Stage(losses={"tv": 1.0}, share=1.0), TV)}),
        "stages: the shares before the last one are 1 in all, so that it never begins",
    ),
    (lambda: configure({"jsd_beta": 0.0}), "jsd_beta: 0.0 is"),
    (lambda: configure({"jsd_beta": 1.0}), "jsd_beta: 1.0 is"),
    (lambda: configure({"lk_eta": -1.0}), "lk_eta: -1.0 is"),
    (lambda: configure({"selected_fraction": 0.0}), "selected_fraction: 0.0 is"),
    (lambda: configure({"selected_fraction": 1.5, "reference": "pair"}), "selected_fraction: 1.5 is"),
    (lambda: configure({"selected_fraction": 0.5}), "reference: selected_fraction compares"),
    (lambda: configure({"alignment_weight": -0.1}), "alignment_weight: -0.1 is"),
    (lambda: configure({"alignment_weight": float("nan")}), "alignment_weight: nan is"),
    (lambda: configure({"lk_eta": float("nan")}), "lk_eta: nan is"),
    (lambda: configure({}, {"rejected_weight": float("nan")}), "branches.rejected_weight: nan is"),
    (lambda: configure({}, {"share": -0.1}), "branches.share: -0.1 is"),
    (lambda: configure({}, {"share": 1.1}), "branches.share: 1.1 is"),
    (lambda: configure({}, {"num_draft_tokens": 0}), "branches.num_draft_tokens: 0 is"),
    (lambda: configure({}, {"per_text": 0}), "branches.per_text: 0 is"),
    (lambda: configure({}, {"rejected_weight": 0.0}), "branches.rejected_weight: 0.0 is"),
    (lambda: configure({}, {"share": 0.5}, teacher="cached"), "branches.share: no signal is kept"),
    (lambda: configure({}, {"share": 0.5}, packing_length=64), "packing_length: branches need texts of their own"),
    (lambda: configure({"stages": (BLOCK,)}), "losses: block_efficiency is of branches"),
    (lambda: configure({"stages": (BLOCK,)}, {"share": 0.9}), "losses: block_efficiency is of branches"),
    (lambda: configure({}, temperature=0.0), "temperature: 0.0 is"),
    (lambda: configure({}, temperature=float("nan")), "temperature: nan is"),
    (lambda: configure({}, chunk_size=0), "chunk_size: 0 is"),
    (lambda: configure({}, packing_length=1), "packing_length: 1 is"),
    (lambda: configure({}, parity_prompts=-1), "parity_prompts: -1 is"),
    (
        lambda: configure({}, train=selecting_by("predicted_speedup"), measure_speed=False),
        "train.select_by: predicted_s",
    ),
    (lambda: configure({"stages": (PLATEAU, TV)}), "plateau_evals: nothing is evaluated on the way"),
    (lambda: configure({"stages": (CE,)}, {"share": 0.5}), "losses: cross_entropy is of text"),
    (lambda: configure({}, train=selecting_by("alhpa")), "train.select_by: 'alhpa' cannot be selected by"),
    (lambda: configure({}, train=selecting_by("forward_kl")), "train.select_by: 'forward_kl' cannot be selected by"),
]


@pytest.mark.parametrize(("build", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_meant_is_refused_in_one_line(build: Callable[[], Any], message: str) -> None:
    # with what to do instead
    with pytest.raises(ValueError, match=rf"\A{re.escape(message)}[^\n]*; [^\n]+\Z"):
        build()


def test_what_can_be_meant_is_not_refused() -> None:
    configure({"stages": (Stage(losses={"tv": 1.0, "block_efficiency": 1.0}),)}, {"share": 0.5})
    configure({"stages": (BLOCK,)}, {"share": 1.0})
    configure({}, train=selecting_by("greedy_predicted_speedup"))
    configure({"selected_fraction": 0.5, "reference": "pair"})
    assert configure({"stages": ()}).objective.stages_or_default == (
        Stage(losses={"forward_kl": 1.0}, share=0.6),
        Stage(losses={"tv": 1.0}),
    )
    configure({"stages": (PLATEAU, TV)}, train=TrainConfig(output="run", eval_every_steps=5))
    configure({}, {"share": 1.0, "num_draft_tokens": 1, "per_text": 1, "rejected_weight": 0.5})
