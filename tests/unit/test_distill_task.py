"""What the training loop is given: how a draft is judged, what a step learns, what is left."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from decode.costs import Costs
from decode.pair import Pair, load_draft_vocab
from decode.sampling import next_token_distribution
from distill.config import BranchesConfig, ObjectiveConfig, RunConfig, Stage
from distill.judge import expected_rounds
from distill.responses import load_responses
from distill.run import prepare
from distill.task import DistillTask
from distill.texts import Rows

Configure = Callable[..., RunConfig]

NAMES = {"alpha", "forward_kl", "top1_agreement", "block_efficiency", "beta_1", "beta_2", "beta_3"}
SPEED = {"predicted_speedup", "best_num_draft_tokens"}
GREEDY = {f"greedy_{name}" for name in ("alpha", "block_efficiency", "beta_1", "beta_2", "beta_3")}
COSTS = Costs(seconds_per_token=0.1, draft_step=0.1, target_pass=[1.0 + 0.05 * n for n in range(9)])


@pytest.fixture
def task(configure_run: Configure) -> DistillTask:
    return prepare(configure_run()).task


def evaluated(task: DistillTask) -> dict[str, float]:
    with torch.no_grad():
        return task.evaluate(task.module.eval())


@torch.no_grad()
def true_figures(folders: dict[str, Path], temperature: float, split: str = "heldout") -> dict[str, float]:
    """Token by token, from p and q as sampling makes them of the models' own logits."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (folders["target"], folders["reduced"] / "draft")
    )
    token_ids = load_draft_vocab(folders["reduced"])
    assert token_ids is not None
    alphas, agreements, tokens, passes = [], [], 0, 0.0
    for row in load_responses(str(folders["responses"]), split):
        ids, start = torch.tensor([row["input_ids"]]), row["response_mask"].index(True)
        p_logits, q_logits = (model(input_ids=ids).logits[0, start - 1 : -1] for model in (target, draft))
        outside = torch.ones_like(q_logits, dtype=torch.bool).index_fill_(1, token_ids, False)
        q_logits = q_logits.masked_fill(outside, -torch.inf)
        p, q = (next_token_distribution(logits, temperature).double() for logits in (p_logits, q_logits))
        own = ids[0, start:].unsqueeze(1)
        alphas += torch.minimum(p, q).sum(1).tolist()
        agreements += (p[:, token_ids].argmax(1) == q[:, token_ids].argmax(1)).tolist()
        rounds = expected_rounds((q.gather(1, own) / p.gather(1, own)).clamp_max(1).squeeze(1).numpy(), 3)
        tokens, passes = tokens + rounds.num_tokens, passes + rounds.count
    return {"alpha": np.mean(alphas), "top1_agreement": np.mean(agreements), "block_efficiency": tokens / passes}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_figures_are_those_of_all_heldout_tokens(
    size: int, temperature: float, distill_folders: dict[str, Path], configure_run: Configure
) -> None:
    figures = evaluated(prepare(configure_run(micro_batch_size=size, temperature=temperature)).task)
    for name, value in true_figures(distill_folders, temperature).items():
        assert figures[name] == pytest.approx(value, rel=1e-4)
    # the texts are greedy, and so is the draft: a token is proposed or not
    greedy = true_figures(distill_folders, 0.0, "heldout_greedy")
    assert figures["greedy_alpha"] == pytest.approx(greedy["alpha"])
    assert figures["greedy_block_efficiency"] == pytest.approx(greedy["block_efficiency"])
    assert figures["alpha"] != pytest.approx(figures["greedy_alpha"], rel=1e-2)


def test_figures_have_their_names(distill_folders: dict[str, Path], configure_run: Configure) -> None:
    task = prepare(configure_run()).task
    assert set(evaluated(task)) == NAMES | GREEDY
    task.costs = COSTS
    assert set(evaluated(task)) == NAMES | GREEDY | SPEED | {f"greedy_{name}" for name in SPEED}
    task.texts = task.texts.__class__(task.texts.train, task.texts.heldout, None, by_target=True)
    assert set(evaluated(task)) == NAMES | SPEED
    task.pair.num_draft_tokens = 5
    assert set(evaluated(task)) == NAMES | SPEED | {"beta_4", "beta_5"}
    kept = prepare(configure_run(responses=distill_folders["hidden_states"], teacher="cached")).task
    assert set(evaluated(kept)) == NAMES | GREEDY


def test_scores_are_in_the_order_of_the_rows(task: DistillTask) -> None:
    rows: Rows = [task.texts.train[place] for place in (5, 0, 9, 2, 7)]
    together = task.scores(rows)
    for scores, row in zip(together, rows, strict=True):
        (alone,) = task.scores([row])
        assert len(scores.alpha) == sum(row["response_mask"])
        torch.testing.assert_close(scores.alpha, alone.alpha, rtol=1e-4, atol=1e-5)
        assert torch.equal(scores.greedy_acceptance, alone.greedy_acceptance)
    first, second = together[:2]
    assert len(first.alpha) != len(second.alpha) or not torch.allclose(first.alpha, second.alpha)


def test_a_step_is_of_its_stage_and_of_text_or_branches(configure_run: Configure) -> None:
    stages = (Stage(losses={"forward_kl": 1.0}, share=0.5), Stage(losses={"tv": 1.0}))
    changes = {"objective": ObjectiveConfig(stages=stages), "branches": BranchesConfig(share=0.3)}

    def steps(**more: int) -> list[tuple[str, bool]]:
        task, found = prepare(configure_run(**changes, **more)).task, []
        for step in range(200):
            task.begin_step(step, 200)
            found.append((next(iter(task.module.objective.weights)), task.module.branching))
        return found

    first = steps()
    assert [loss for loss, _ in first] == ["forward_kl"] * 100 + ["tv"] * 100
    assert 35 < sum(branching for _, branching in first) < 85
    torch.manual_seed(7)
    assert steps() == first  # whatever was drawn before
    assert steps(seed=1) != first


def test_how_far_the_stages_came_is_its_state(configure_run: Configure) -> None:
    stages = (Stage(losses={"forward_kl": 1.0}, plateau_evals=2), Stage(losses={"tv": 1.0}))
    task = prepare(configure_run(objective=ObjectiveConfig(stages=stages), eval_every_steps=5)).task
    for _ in range(3):
        evaluated(task)
    kept = dict(task.state)
    task.begin_step(5, 10)
    assert list(task.module.objective.weights) == ["tv"]
    again = prepare(configure_run(objective=ObjectiveConfig(stages=stages), eval_every_steps=5)).task
    again.begin_step(5, 10)
    assert list(again.module.objective.weights) == ["forward_kl"]  # the control
    again.state.clear()
    again.state.update(kept)
    again.begin_step(5, 10)
    assert list(again.module.objective.weights) == ["tv"]


def test_all_processes_end_a_stage_by_the_loss_of_the_main_one(
    configure_run: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (Stage(losses={"forward_kl": 1.0}, plateau_evals=2), Stage(losses={"tv": 1.0}))
    task = prepare(configure_run(objective=ObjectiveConfig(stages=stages), eval_every_steps=5)).task
    of_main = iter([3.0, 2.0, 1.0])
    monkeypatch.setattr("distill.task.broadcast", lambda loss: torch.full_like(loss, next(of_main)))
    for _ in range(3):
        evaluated(task)  # the same each time here, which would be a plateau
    assert task.state["stage_best"] == 1.0
    assert task.state["stage_evals_without_best"] == 0


def test_a_draft_that_is_read_back_otherwise_is_refused(
    task: DistillTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(self: LlamaForCausalLM, folder: Path) -> None:
        other = copy.deepcopy(self)
        other.model.layers[0].mlp.up_proj.weight.data.mul_(1.01)
        save(other, folder)

    save = LlamaForCausalLM.save_pretrained
    task.save(task.module, tmp_path / "sound")
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", spoilt)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj.weight is not what was trained when it is read"):
        task.save(task.module, tmp_path / "spoilt")


def test_dropout_of_the_draft_is_left_out(task: DistillTask) -> None:
    dropout = torch.nn.Dropout(0.5)
    task.module.draft.add_module("dropout", dropout)
    task.module.train()
    assert task.module.training
    assert not dropout.training


def test_what_is_saved_is_the_draft_and_the_pair(
    task: DistillTask, distill_folders: dict[str, Path], tmp_path: Path
) -> None:
    task.module.draft.model.norm.weight.data += 1
    task.save(task.module, tmp_path / "pair")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "pair" / "draft")
    assert torch.equal(saved.model.norm.weight, task.module.draft.model.norm.weight)
    assert task.module.draft.dtype == torch.float32
    assert Pair.load(tmp_path / "pair").target == Pair.load(distill_folders["reduced"]).target
    assert torch.equal(load_draft_vocab(tmp_path / "pair"), load_draft_vocab(distill_folders["reduced"]))
