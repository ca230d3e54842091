"""What the loop promises a task: averaging, the choice of the result, the task's own state, and faults."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from train import checkpoint
from train.config import TrainConfig
from train.loop import FitResult, NonFinite, StepOutput, fit

Weights = dict[str, torch.Tensor]
NUM_STEPS = 12
# Peaks after 4 steps, once more to the same height after 6, and never again.
SCORES = {2: 0.1, 4: 0.5, 6: 0.5, 8: 0.3, 10: 0.2, 12: 0.4}


class Regression(nn.Module):
    """Least squares, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        error = (self.layer(self.dropout(batch["x"])) - batch["y"]).square().sum()
        return StepOutput(error, torch.tensor(len(batch["x"])), {"error": error.detach()})


class RegressionTask:
    """Regression that is judged by `scores`, by number of steps done, and remembers what happened to it."""

    def __init__(self, scores: Mapping[int, float] = SCORES) -> None:
        self.module: nn.Module = Regression()
        self.state: dict[str, Any] = {"evaluated": []}
        self.alias = self.state
        self.scores = scores
        self.calls: list[Any] = []
        self.before_step: list[Weights] = []
        self.evaluated: dict[int, Weights] = {}
        self.step = -1

    def begin_step(self, step: int, num_steps: int) -> None:
        self.step = step
        self.calls.append(("begin", step, num_steps, list(self.alias["evaluated"]), torch.rand(()).item()))
        self.before_step.append(copy_of(self.module))

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.calls.append("collate")
        return {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")}

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        done = self.step + 1
        self.evaluated[done] = copy_of(module)
        self.state["evaluated"].append(done)
        return {"score": self.scores[done], "loss": 1.0}

    def save(self, module: nn.Module, folder: Path) -> None:
        folder.mkdir()
        save_file(module.state_dict(), folder / "model.safetensors")


def copy_of(module: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def identical(one: Weights, two: Weights) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randn(n, generator=generator) for name, n in (("x", 3), ("y", 2))} for _ in range(24)]


def configure(output: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "output": str(output),
        "max_steps": NUM_STEPS,
        "batch_size": 6,
        "micro_batch_size": 2,
        "learning_rate": 0.05,
        "log_every_steps": 5,
        "eval_every_steps": 2,
        "checkpoint_every_steps": 3,
    }
    return TrainConfig(**values | changes)


def train(task: RegressionTask, config: TrainConfig, rows: list[dict[str, torch.Tensor]] | None = None) -> FitResult:
    rows = rows or data()
    return fit(task, rows, [1] * len(rows), config, {"train": asdict(config)})


def result_of(config: TrainConfig) -> Weights:
    return load_file(Path(config.output) / "model" / "model.safetensors")


def raw_weights(config: TrainConfig, step: int = NUM_STEPS) -> Weights:
    """What is trained, whatever the result is."""
    return load_file(Path(config.output) / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def metric_lines(config: TrainConfig) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


class StopRunError(Exception):
    """Raised in place of a kill, where the process must live on."""


def train_until_write(config: TrainConfig, number: int) -> None:
    """Lets the checkpoint or the best weights with this number stay a temporary folder, and stops there."""
    published = []
    publish = checkpoint.publish

    def stop(temporary: Path, final: Path) -> None:
        published.append(final)
        if len(published) == number:
            raise StopRunError
        publish(temporary, final)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "publish", stop)
        with pytest.raises(StopRunError):
            train(RegressionTask(), config)


# --- the schedule -------------------------------------------------------------------------------------------


def test_the_configured_schedule_is_used(tmp_path: Path) -> None:
    changes = {"schedule": "wsd", "warmup_fraction": 0.25, "decay_fraction": 0.25, "log_every_steps": 1}
    config = configure(tmp_path, **changes)
    train(RegressionTask(), config)
    rates = [line["learning_rate"] / config.learning_rate for line in metric_lines(config) if "loss" in line]
    assert rates == pytest.approx([1 / 3, 2 / 3, *[1] * 7, 0.7, 0.4, 0.1])


# --- the average of the weights -----------------------------------------------------------------------------


def test_the_average_is_evaluated_and_saved_and_does_not_touch_training(tmp_path: Path) -> None:
    task, plain_task = RegressionTask(), RegressionTask()
    config, plain = configure(tmp_path / "ema", ema_decay=0.5), configure(tmp_path / "plain")
    train(task, config)
    train(plain_task, plain)
    assert identical(raw_weights(config), raw_weights(plain))
    assert identical(result_of(plain), raw_weights(plain))

    history = [*task.before_step, raw_weights(config)]
    average = {name: value.double() for name, value in history[0].items()}
    for step, weights in enumerate(history[1:]):
        decay = min(0.5, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * weights[name].double() for name in average}
        if step + 1 in task.evaluated:
            for name, value in task.evaluated[step + 1].items():
                torch.testing.assert_close(value.double(), average[name], rtol=0, atol=1e-6)
    assert identical(result_of(config), task.evaluated[NUM_STEPS])
    assert identical(result_of(config), copy_of(task.module))
    # the controls: the warm-up of the decay and the average itself make a difference
    assert not identical(result_of(config), result_of(plain))
    fixed = history[0]
    for weights in history[1:]:
        fixed = {name: 0.5 * fixed[name] + 0.5 * weights[name] for name in fixed}
    assert max((fixed[name] - result_of(config)[name]).abs().max().item() for name in fixed) > 1e-5


# --- the choice of the result -------------------------------------------------------------------------------


def test_gradients_are_clipped_before_a_step(tmp_path: Path) -> None:
    def norms(max_grad_norm: float) -> list[float]:
        found: list[float] = []

        def note(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            found.append(float(torch.stack([weight.grad.norm() for weight in weights]).norm()))

        hook = register_optimizer_step_pre_hook(note)
        try:
            train(RegressionTask(), configure(tmp_path / f"{max_grad_norm}", max_grad_norm=max_grad_norm))
        finally:
            hook.remove()
        return found

    assert norms(0.01) == pytest.approx([0.01] * NUM_STEPS, rel=1e-3)
    assert min(norms(0.0)) > 0.02  # the control


def test_without_select_by_the_last_weights_are_the_result(tmp_path: Path) -> None:
    config = configure(tmp_path)
    result = train(task := RegressionTask(), config)
    assert (result.num_steps, result.best_step) == (NUM_STEPS, NUM_STEPS)
    assert identical(result_of(config), task.evaluated[NUM_STEPS])
    assert not list((tmp_path / "checkpoints").glob("best-*"))


@pytest.mark.parametrize("ema_decay", [0.0, 0.5])
def test_the_weights_of_the_best_evaluation_are_the_result(
    ema_decay: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(tmp_path, select_by="score", ema_decay=ema_decay)
    with caplog.at_level(logging.INFO):
        result = train(task := RegressionTask(), config)
    assert (result.num_steps, result.best_step) == (NUM_STEPS, 4)  # of equal ones the first
    assert identical(result_of(config), task.evaluated[4])
    assert identical(result_of(config), copy_of(task.module))
    assert not identical(task.evaluated[4], task.evaluated[6])
    assert "step 4 of 12, where score was 0.5" in caplog.text
    assert result.metrics["eval/score"] == 0.5
    evaluations = [line for line in metric_lines(config) if "eval/score" in line]
    assert [(line["step"], line["best_step"]) for line in evaluations] == [(2, 2), *((n, 4) for n in range(4, 13, 2))]
    # the checkpoints that are kept, of steps 9 and 12, would resume with these weights and no others
    assert [path.name for path in (tmp_path / "checkpoints").glob("best-*")] == ["best-000004"]


def test_the_run_stops_when_patience_is_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configure(tmp_path, select_by="score", patience=2)
    with caplog.at_level(logging.INFO):
        result = train(task := RegressionTask(), config)
    assert "stopped early: 2 evaluations without a better score" in caplog.text
    assert (result.num_steps, result.best_step, result.resumed_from) == (8, 4, 0)
    assert identical(result_of(config), task.evaluated[4])
    lines = metric_lines(config)
    assert [line["step"] for line in lines if "loss" in line] == [5, 8]  # the last one covers steps 6 to 8
    assert lines[-1]["tokens"] == 8 * 6
    assert (tmp_path / "checkpoints" / "step-000008").is_dir()
    again = train(RegressionTask(), config)
    assert (again.num_steps, again.best_step, again.resumed_from) == (8, 4, 8)
    assert again.metrics == result.metrics


def test_more_patience_does_not_stop(tmp_path: Path) -> None:
    """The control of the test above."""
    assert train(RegressionTask(), configure(tmp_path, select_by="score", patience=5)).num_steps == NUM_STEPS


# best 2, step 3, best 4, step 6, step 8
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_stopped_run_chooses_and_stops_as_if_never_stopped(number: int, tmp_path: Path) -> None:
    changes = {"select_by": "score", "patience": 2, "ema_decay": 0.5}
    whole, parts = configure(tmp_path / "whole", **changes), configure(tmp_path / "parts", **changes)
    expected = train(RegressionTask(), whole)
    train_until_write(parts, number)
    result = train(task := RegressionTask(), parts)
    assert result.resumed_from == [0, 0, 3, 3, 6][number - 1]
    assert (result.num_steps, result.best_step) == (expected.num_steps, expected.best_step) == (8, 4)
    assert identical(result_of(parts), result_of(whole))
    assert metric_lines(parts) == metric_lines(whole)
    for name in ("model", "optimizer", "average"):
        one, two = (
            load_file(Path(config.output) / "checkpoints" / "step-000008" / f"{name}.safetensors")
            for config in (whole, parts)
        )
        assert identical(one, two)
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*"))
    assert task.alias["evaluated"] == [2, 4, 6, 8]


def test_a_forgotten_average_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: the average of a resumed run is not that of a run begun at the checkpoint."""
    whole, parts = (configure(tmp_path / name, ema_decay=0.9) for name in ("whole", "parts"))
    train(RegressionTask(), whole)
    train_until_write(parts, 3)
    load = checkpoint.load_checkpoint
    monkeypatch.setattr(
        "train.loop.load_checkpoint", lambda path, module, optimizers, _: load(path, module, optimizers)
    )
    train(RegressionTask(), parts)
    assert identical(raw_weights(whole), raw_weights(parts))
    assert not identical(result_of(whole), result_of(parts))


def test_broken_best_weights_are_not_used(tmp_path: Path) -> None:
    config = configure(tmp_path, select_by="score")
    train_until_write(config, 6)  # step 12, after best 2 and 4 and steps 3, 6 and 9
    weights = tmp_path / "checkpoints" / "best-000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"^output: .*best-000004.*does not match its hash"):
        train(RegressionTask(), config)
    assert not (tmp_path / "model").exists()


def test_an_unknown_metric_is_refused_by_naming_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^select_by: 'speed' is not a metric .*: score, loss$"):
        train(RegressionTask(), configure(tmp_path, select_by="speed"))


def test_a_metric_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NonFinite, match=r"^select_by: score is inf at step 4"):
        train(RegressionTask(SCORES | {4: math.inf}), configure(tmp_path, select_by="score"))


# --- the task's own state -----------------------------------------------------------------------------------


def test_each_step_begins_after_its_seeding_and_before_its_first_batch(tmp_path: Path) -> None:
    train(task := RegressionTask(), configure(tmp_path / "run"))
    assert [call if call == "collate" else call[:3] for call in task.calls] == [
        call for step in range(NUM_STEPS) for call in (("begin", step, NUM_STEPS), *["collate"] * 3)
    ]
    again = RegressionTask()
    torch.rand(7)  # the state of the global generators must not matter
    train(again, configure(tmp_path / "again"))
    assert again.calls == task.calls
    assert len({call[-1] for call in task.calls if call != "collate"}) == NUM_STEPS


def test_state_is_restored_in_place_before_the_first_step(tmp_path: Path) -> None:
    config = configure(tmp_path)
    train_until_write(config, 3)  # step 9; the newest checkpoint is of step 6, written after its evaluation
    task = RegressionTask()
    task.state["evaluated"].append("something else")
    task.state["more"] = 1
    assert train(task, config).resumed_from == 6
    assert task.calls[0][:4] == ("begin", 6, NUM_STEPS, [2, 4, 6])
    assert task.alias is task.state
    assert task.state == {"evaluated": [2, 4, 6, 8, 10, 12]}


# --- what is not finite -------------------------------------------------------------------------------------


def poisoned() -> list[dict[str, torch.Tensor]]:
    """Row 5 is poison."""
    rows = data()
    rows[5]["x"] = torch.full((3,), float("nan"))
    return rows


def teacher_fault(module: nn.Module, inputs: tuple[dict[str, torch.Tensor]]) -> None:
    if inputs[0]["x"].isnan().any():
        raise NonFinite("the teacher's output")


@pytest.mark.parametrize(
    ("hook", "what"), [(None, "the loss is not finite"), (teacher_fault, "the teacher's output is not finite")]
)
def test_a_loss_that_is_not_finite_stops_and_keeps_the_micro_batch(
    hook: Callable[..., None] | None, what: str, tmp_path: Path
) -> None:
    task = RegressionTask()
    if hook:
        task.module.register_forward_pre_hook(hook)
    config = configure(tmp_path, checkpoint_every_steps=1, keep_checkpoints=9, micro_batch_size=2)
    with pytest.raises(NonFinite, match=rf"^{what} at step \d+ on rows \[\d+, \d+\], .*; \w+") as raised:
        train(task, config, poisoned())
    step = task.step + 1
    assert f"at step {step} on" in str(raised.value)
    path = tmp_path / f"offending-batch-step-{step}.safetensors"
    assert str(path) in str(raised.value)
    with safe_open(path, "pt") as file:
        rows = json.loads(file.metadata()["rows"])[0]
    assert 5 in rows
    assert f"on rows {rows}," in str(raised.value)
    saved = load_file(path)
    assert set(saved) == {"x", "y"}
    assert torch.equal(saved["y"], torch.stack([data()[row]["y"] for row in rows]))
    assert saved["x"].isnan().any(-1).tolist() == [row == 5 for row in rows]
    assert identical(copy_of(task.module), task.before_step[-1])  # no step has been taken
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step-{n:06d}" for n in range(1, step)]
    assert not (tmp_path / "model").exists()


def test_a_gradient_that_is_not_finite_keeps_the_whole_step_and_says_what_to_do(tmp_path: Path) -> None:
    task = RegressionTask()

    def root_of_zero(module: nn.Module, inputs: Any, output: StepOutput) -> StepOutput:
        return output._replace(loss_sum=output.loss_sum + (0 * module.layer.weight.sum()).sqrt())

    task.module.register_forward_hook(root_of_zero)
    with pytest.raises(NonFinite, match=r"^learning_rate: 0.05 led to a gradient of norm nan at step 1 .*; lower"):
        train(task, configure(tmp_path))
    path = tmp_path / "offending-batch-step-1.safetensors"
    assert set(load_file(path)) == {f"{number}.{name}" for number in range(3) for name in "xy"}
    with safe_open(path, "pt") as file:
        rows = json.loads(file.metadata()["rows"])
    assert [len(each) for each in rows] == [2, 2, 2]
    assert torch.equal(load_file(path)["1.x"], torch.stack([data()[row]["x"] for row in rows[1]]))
    assert identical(copy_of(task.module), task.before_step[0])


def test_what_is_not_finite_in_an_evaluation_is_named_with_its_step(tmp_path: Path) -> None:
    task = RegressionTask()

    def fault(module: nn.Module) -> dict[str, float]:
        raise NonFinite("the teacher's output")

    task.evaluate = fault  # type: ignore[method-assign]
    with pytest.raises(NonFinite, match=r"^the teacher's output is not finite in the evaluation at step 2$"):
        train(task, configure(tmp_path))


def test_a_figure_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFinite, match=r"^score is not a number in the evaluation at step 4$"):
        train(RegressionTask({2: 1.0, 4: math.nan}), configure(tmp_path, select_by=None))


def test_another_number_of_processes_is_noted_when_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NonFinite):
        train(RegressionTask({2: 1.0, 4: math.nan}), configure(tmp_path, select_by=None, checkpoint_every_steps=1))
    noted = tmp_path / "provenance.json"
    noted.write_text(json.dumps(json.loads(noted.read_text()) | {"num_processes": 3}))
    with caplog.at_level(logging.INFO):
        train(RegressionTask(), configure(tmp_path, select_by=None, checkpoint_every_steps=1))
    assert "it was begun by 3 processes, now 1" in caplog.text
