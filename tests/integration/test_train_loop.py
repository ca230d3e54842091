"""The loop as a whole: normalisation, two processes, exact resumption after any kill.

Run as a program this file is the worker that the tests start, stop and kill:
    python test_train_loop.py OUTPUT MICRO_BATCH_SIZE [KILL_AT_CHECKPOINT]
or, launched as two processes, what they do together:
    accelerate launch test_train_loop.py OUTPUT
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from train import checkpoint, loop
from train.batches import batch_plan
from train.config import TrainConfig
from train.loop import FitResult, NonFinite, StepOutput, fit
from train.preemption import Preempted

Difference = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], float]
ROOT = Path(__file__).parents[2]
VOCABULARY = 30
# 5 batches of 8 and one of a single row, of which one of two processes gets nothing.
NUM_ROWS = 41
FAULTS = ["loss", "teacher"]


class Toy(nn.Module):
    """Next-token prediction by an embedding and two layers, with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        ids = batch["ids"]
        logits = self.head(self.dropout(self.norm(self.hidden(self.embed(ids[:, :-1])).tanh())))
        labels = ids[:, 1:]
        real = labels > 0
        loss = nn.functional.cross_entropy(logits[real], labels[real], reduction="sum")
        correct = (logits.argmax(-1) == labels)[real].sum()
        return StepOutput(loss, real.sum(), {"accuracy": correct})


class ToyTask:
    """The toy, counting its evaluations. With `mean_of_means` it normalises each micro-batch by itself."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32, mean_of_means: bool = False) -> None:
        self.module: nn.Module = Toy(dropout).to(dtype)
        self.state: dict[str, Any] = {}
        self.evaluations: list[tuple[bool, bool]] = []
        if mean_of_means:
            self.module.register_forward_hook(
                lambda module, inputs, out: StepOutput(out.loss_sum / out.num_tokens, torch.tensor(1), out.metric_sums)
            )

    def begin_step(self, step: int, num_steps: int) -> None:
        self.state["step"] = step

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["ids"]) for row in rows)
        return {"ids": torch.tensor([row["ids"] + [0] * (longest - len(row["ids"])) for row in rows])}

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        self.evaluations.append((module.training, torch.is_grad_enabled()))
        return {"noise": torch.rand(()).item()}

    def save(self, module: nn.Module, folder: Path) -> None:
        folder.mkdir()
        save_file(module.state_dict(), folder / "model.safetensors")


def toy_rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (NUM_ROWS,), generator=generator).tolist()
    return [{"ids": torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def uneven_rows() -> list[dict[str, Any]]:
    """Rows of one length, of which most have one token to predict and some have nineteen."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, VOCABULARY, (NUM_ROWS, 20), generator=generator)
    rows[torch.arange(NUM_ROWS) % 3 > 0, 1:-1] = 0
    return [{"ids": row.tolist()} for row in rows]


def toy_config(output: Path, **changes: Any) -> TrainConfig:
    values = {
        "output": str(output),
        "batch_size": 8,
        "micro_batch_size": 8,
        "num_epochs": 3,
        "learning_rate": 1e-2,
        "log_every_steps": 3,
        "checkpoint_every_steps": 4,
    }
    return TrainConfig(**(values | changes))


def toy_fit(task: ToyTask, config: TrainConfig, rows: list[dict[str, Any]] | None = None) -> FitResult:
    rows = rows or toy_rows()
    return fit(task, rows, [len(row["ids"]) for row in rows], config, {"train": asdict(config)})


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def relative_difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Of all weights together, in the Euclidean norm."""
    a, b = (torch.cat([values[name].double().flatten() for name in sorted(one)]) for values in (one, two))
    return ((a - b).norm() / a.norm()).item()


def largest_relative_difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """The largest of the single tensors' relative differences.

    Only for float64. AdamW's first step divides a gradient by its own size, so where a gradient happens to be
    near AdamW's epsilon, as for one element of the norm's bias here, it magnifies rounding: to 2e-4 of that
    tensor in fp32, to 2e-13 in float64.
    """
    return max(relative_difference({name: one[name]}, {name: two[name]}) for name in one)


# What the tests of the trajectory ask for in each precision, far below what the controls find.
TOLERANCES = [
    (torch.float32, relative_difference, 1e-5),
    (torch.float64, largest_relative_difference, 1e-11),
]


def identical(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def metric_lines(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


class StopRunError(Exception):
    """Raised in place of a kill, where the process must live on."""


def fit_until_checkpoint(task: ToyTask, config: TrainConfig, number: int) -> None:
    """Lets the checkpoint with this number stay a temporary folder, and stops there."""
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
            toy_fit(task, config)


# --- one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "difference", "tolerance"), TOLERANCES)
def test_accumulation_does_not_change_the_trajectory(
    dtype: torch.dtype, difference: Difference, tolerance: float, tmp_path: Path
) -> None:
    for size in (8, 3, 1):
        toy_fit(ToyTask(dtype=dtype), toy_config(tmp_path / str(size), micro_batch_size=size))
    assert difference(weights(tmp_path / "8"), weights(tmp_path / "1")) < tolerance
    assert difference(weights(tmp_path / "8"), weights(tmp_path / "3")) < tolerance


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in metric_lines(output) if "loss" in line]


def test_accumulation_does_not_change_it_either_when_rows_differ_in_their_tokens(tmp_path: Path) -> None:
    for size in (8, 1):
        config = toy_config(tmp_path / str(size), micro_batch_size=size, log_every_steps=1)
        toy_fit(ToyTask(), config, uneven_rows())
    assert losses(tmp_path / "8") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    assert relative_difference(weights(tmp_path / "8"), weights(tmp_path / "1")) < 1e-5


@pytest.mark.parametrize("rows", [toy_rows(), uneven_rows()], ids=["even", "uneven"])
def test_normalising_each_micro_batch_would_change_it(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """The control of the tests above and of the one with two processes."""
    for size in (8, 1):
        toy_fit(ToyTask(mean_of_means=True), toy_config(tmp_path / str(size), micro_batch_size=size), rows)
    assert relative_difference(weights(tmp_path / "8"), weights(tmp_path / "1")) > 1e-2


def test_reported_loss_is_the_mean_over_tokens(tmp_path: Path) -> None:
    initial = ToyTask()
    with torch.no_grad():
        output = initial.module(initial.collate(toy_rows()))
    # one batch of everything, so that the order of the data does not matter
    config = toy_config(tmp_path / "run", batch_size=64, micro_batch_size=4, max_steps=1, log_every_steps=1)
    toy_fit(ToyTask(), config)
    (line,) = [line for line in metric_lines(tmp_path / "run") if "loss" in line]
    assert line["tokens"] == output.num_tokens.item()
    assert line["loss"] == pytest.approx((output.loss_sum / output.num_tokens).item(), rel=1e-5)
    assert line["accuracy"] == pytest.approx((output.metric_sums["accuracy"] / output.num_tokens).item())


def test_log_lines_cover_every_step_once(tmp_path: Path) -> None:
    toy_fit(ToyTask(), toy_config(tmp_path / "fine", log_every_steps=1))
    toy_fit(ToyTask(), toy_config(tmp_path / "coarse", log_every_steps=4))
    fine, coarse = ([line for line in metric_lines(tmp_path / name) if "loss" in line] for name in ("fine", "coarse"))
    assert [line["step"] for line in fine] == list(range(1, 19))
    assert [line["step"] for line in coarse] == [4, 8, 12, 16, 18]
    tokens = [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *fine], fine, strict=False)]
    losses = [line["loss"] * n for line, n in zip(fine, tokens, strict=True)]
    assert coarse[0]["loss"] == pytest.approx(sum(losses[:4]) / sum(tokens[:4]))
    assert coarse[-1]["loss"] == pytest.approx(sum(losses[16:]) / sum(tokens[16:]))
    assert fine[-1]["epoch"] == 3
    assert fine[-1]["learning_rate"] == pytest.approx(1e-3)


def test_evaluation_is_in_eval_mode_without_gradients_and_on_time(tmp_path: Path) -> None:
    task = ToyTask(dropout=0.1)
    toy_fit(task, toy_config(tmp_path / "run", eval_every_steps=5))
    assert task.evaluations == [(False, False)] * 4
    lines = [line for line in metric_lines(tmp_path / "run") if "eval/noise" in line]
    assert [line["step"] for line in lines] == [5, 10, 15, 18]


@pytest.mark.parametrize("number", [1, 3, 5])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stopped_run_ends_as_if_never_stopped(
    number: int, optimizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"optimizer": optimizer, "eval_every_steps": 5, "muon_learning_rate": 1e-2}
    toy_fit(ToyTask(dropout=0.2), toy_config(tmp_path / "whole", **changes))
    config = toy_config(tmp_path / "parts", **changes)
    fit_until_checkpoint(ToyTask(dropout=0.2), config, number)
    assert not (tmp_path / "parts" / "model").exists()
    torch.rand(number)  # the state of the global generators must not matter
    with caplog.at_level(logging.INFO):
        result = toy_fit(ToyTask(dropout=0.2), config)
    assert result.resumed_from == 4 * (number - 1)
    assert caplog.text.count("resuming from") == (number > 1)
    assert identical(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    timing = ("seconds", "tokens_per_second")
    whole, parts = (
        [{k: v for k, v in line.items() if k not in timing} for line in metric_lines(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert whole == parts
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*"))


def test_dropout_and_seed_matter_to_the_weights(tmp_path: Path) -> None:
    """The control of the test above: its equality could have failed."""
    toy_fit(ToyTask(dropout=0.2), toy_config(tmp_path / "a"))
    toy_fit(ToyTask(dropout=0.2), toy_config(tmp_path / "b", seed=1))
    toy_fit(ToyTask(dropout=0.0), toy_config(tmp_path / "c"))
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert not identical(a, b)
    assert not identical(a, c)


def test_every_step_draws_its_own_noise(tmp_path: Path) -> None:
    task = ToyTask()
    drawn: list[float] = []
    task.module.register_forward_pre_hook(lambda module, inputs: drawn.append(torch.rand(()).item()))
    toy_fit(task, toy_config(tmp_path / "run"))
    assert len(set(drawn)) == len(drawn) == 18


def test_unseeded_steps_would_not_resume_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for seeding every step: without it, dropout after a resumption differs."""
    monkeypatch.setattr(loop, "_seed_everything", lambda *key: None)
    torch.manual_seed(1)
    toy_fit(ToyTask(dropout=0.2), toy_config(tmp_path / "whole"))
    fit_until_checkpoint(ToyTask(dropout=0.2), toy_config(tmp_path / "parts"), 3)
    toy_fit(ToyTask(dropout=0.2), toy_config(tmp_path / "parts"))
    assert not identical(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_complete_run_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = toy_config(tmp_path / "run")
    first = toy_fit(ToyTask(), config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    task = ToyTask()
    with caplog.at_level(logging.INFO):
        again = toy_fit(task, config)
    assert "complete already" in caplog.text
    assert task.evaluations == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert (first.resumed_from, again.resumed_from, again.metrics) == (0, 18, first.metrics)


def test_another_configuration_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    toy_fit(ToyTask(), toy_config(tmp_path / "run"))
    before = metric_lines(tmp_path / "run")
    with pytest.raises(ValueError, match=r"^train\.seed: 1 differs from 0"):
        toy_fit(ToyTask(), toy_config(tmp_path / "run", seed=1))
    assert metric_lines(tmp_path / "run") == before


def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_spoilt(tmp_path: Path) -> None:
    task = ToyTask()
    task.module.register_forward_hook(
        # finite itself, but its slope at zero is not
        lambda module, inputs, out: out._replace(loss_sum=out.loss_sum + (0 * module.head.bias.sum()).sqrt())
    )
    initial = {name: p.clone() for name, p in task.module.state_dict().items()}
    with pytest.raises(ValueError, match=r"^learning_rate: .* norm (inf|nan) at step 1"):
        toy_fit(task, toy_config(tmp_path / "run"))
    assert identical(initial, task.module.state_dict())
    assert not (tmp_path / "run" / "model").exists()


def test_bfloat16_keeps_weights_in_fp32_and_leaves_the_module_unpatched(tmp_path: Path) -> None:
    task = ToyTask()
    seen: list[torch.dtype] = []
    task.module.head.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))  # type: ignore[union-attr]
    toy_fit(task, toy_config(tmp_path / "run", mixed_precision="bf16", max_steps=2))
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in task.module.parameters()} == {torch.float32}
    task.module(task.collate(toy_rows()))
    assert seen[-1] == torch.float32


@pytest.mark.parametrize(("has_products", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_that_is_faster(
    has_products: bool, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.engine.has_bf16_products", lambda: has_products)
    task = ToyTask()
    seen: list[torch.dtype] = []
    task.module.head.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))  # type: ignore[union-attr]
    toy_fit(task, toy_config(tmp_path / "run", mixed_precision="auto", max_steps=2))
    assert set(seen) == {expected}


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trackers: 'nonesuch'"):
        toy_fit(ToyTask(), toy_config(tmp_path / "run", trackers=("nonesuch",)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rows", [[], [{"ids": [1, 2]}]])
def test_rows_and_lengths_must_match(rows: list[Any], tmp_path: Path) -> None:
    config = toy_config(tmp_path / "run")
    with pytest.raises(ValueError, match="data: "):
        fit(ToyTask(), rows, [], config, {})


# --- several processes, and real kills ---------------------------------------------------------------------


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "error::UserWarning:train",
    }


def worker(output: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(output), *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Waits; the exit code must be 0. What it wrote to stderr."""
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stderr


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have done what `together` says."""
    output = tmp_path_factory.mktemp("two")
    # accelerate's --cpu starts one process whatever --num_processes says; --multi_gpu starts two, also here
    options = "--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--dynamo_backend", "no"]
    done = subprocess.run(
        [*launch, __file__, str(output)],
        env=environment() | {"ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.slow
def test_two_processes_train_what_one_does(two_processes: Path, tmp_path: Path) -> None:
    """41 rows in batches of 8 leave one row over, so a process without rows takes part in 3 of 18 steps."""
    for dtype, difference, tolerance in TOLERANCES:
        one, two = tmp_path / str(dtype), two_processes / str(dtype)
        toy_fit(ToyTask(dtype=dtype), toy_config(one))
        processes = [json.loads((path / "provenance.json").read_text())["num_processes"] for path in (one, two)]
        assert processes == [1, 2]  # otherwise the rest would compare a thing with itself
        assert difference(weights(one), weights(two)) < tolerance
        one_lines, two_lines = ([line for line in metric_lines(p) if "loss" in line] for p in (one, two))
        for a, b in zip(one_lines, two_lines, strict=True):
            assert (a["step"], a["tokens"]) == (b["step"], b["tokens"])
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_train_what_one_does_when_rows_differ_in_their_tokens(
    two_processes: Path, tmp_path: Path
) -> None:
    toy_fit(ToyTask(), toy_config(tmp_path, log_every_steps=1), uneven_rows())
    assert losses(two_processes / "uneven") == pytest.approx(losses(tmp_path), rel=1e-5)
    assert relative_difference(weights(two_processes / "uneven"), weights(tmp_path)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_both_processes_end_and_the_one_whose_rows_they_are_keeps_them(kind: str, two_processes: Path) -> None:
    output = two_processes / kind
    main, other = (Path(f"{output}-{rank}.txt").read_text() for rank in range(2))
    path = output / "offending-batch-step-1.safetensors"
    for error in (main, other):
        assert f"at step 1 on rows [{poisonous_row()}, " in error
        assert f"whose tensors are now in {path};" in error
    # the main process does not know what the other's module found
    assert main.startswith("the loss is not finite")
    assert other.startswith("the loss is not finite" if kind == "loss" else "the teacher is not finite")
    (ids,) = load_file(path).values()
    assert ids[0, : len(toy_rows()[poisonous_row()]["ids"])].tolist() == toy_rows()[poisonous_row()]["ids"]
    assert not (output / "model").exists()


@pytest.mark.slow
def test_both_processes_end_when_one_is_asked_to(two_processes: Path) -> None:
    assert all((two_processes / f"terminated-{rank}.txt").exists() for rank in (0, 1))
    assert [path.name for path in sorted((two_processes / "terminated" / "checkpoints").iterdir())][-1] == "step-000007"


@pytest.mark.slow
def test_both_processes_stop_when_the_main_one_finds_no_better(two_processes: Path) -> None:
    assert [line["best_step"] for line in metric_lines(two_processes / "judged") if "best_step" in line] == [2, 2, 2]
    assert metric_lines(two_processes / "judged")[-1]["step"] == 6


@pytest.mark.slow
def test_a_killed_run_ends_as_if_never_killed(tmp_path: Path) -> None:
    """Killed from outside once a second checkpoint is there, then while one is being written."""
    whole = worker(tmp_path / "whole", 8)
    parts = worker(tmp_path / "parts", 8)
    second = tmp_path / "parts" / "checkpoints" / "step-000008"
    deadline = time.monotonic() + 60
    while not second.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    parts.kill()
    parts.communicate()
    assert parts.returncode == -signal.SIGKILL, "the run was over before it could be killed; make it longer"
    finish(whole)

    writing = worker(tmp_path / "parts", 8, 1)
    _, stderr = writing.communicate(timeout=120)
    assert writing.returncode == -signal.SIGKILL, stderr
    leftovers = list((tmp_path / "parts" / "checkpoints").glob(".step-*.tmp"))
    assert leftovers, "the kill was meant to leave a half-written checkpoint"
    assert not (tmp_path / "parts" / "model").exists()

    assert "resuming from" in finish(worker(tmp_path / "parts", 8))
    assert identical(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    steps = [(line["step"], "loss" in line) for line in metric_lines(tmp_path / "parts")]
    assert steps == [(line["step"], "loss" in line) for line in metric_lines(tmp_path / "whole")]
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*"))


class TerminatedTask(ToyTask):
    """Asks its own process to end, as a scheduler would, while a step is under way."""

    def begin_step(self, step: int, num_steps: int) -> None:
        super().begin_step(step, num_steps)
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_is_asked_to_end_keeps_its_last_step_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level(logging.INFO), pytest.raises(Preempted) as stopped:
        toy_fit(TerminatedTask(0.5), toy_config(tmp_path / "parts"))
    assert stopped.value.code == 0
    assert "SIGTERM: step 7 of 18 is kept" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / "parts" / "model").exists()
    assert toy_fit(ToyTask(0.5), toy_config(tmp_path / "parts")).resumed_from == 7
    toy_fit(ToyTask(0.5), toy_config(tmp_path / "whole"))
    assert identical(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_run_that_is_asked_to_end_at_its_end_ends_well(tmp_path: Path) -> None:
    toy_fit(TerminatedTask(), toy_config(tmp_path, max_steps=7))
    assert (tmp_path / "model").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    toy_fit(ToyTask(), toy_config(tmp_path / "alone"))

    class Intruded(ToyTask):
        def begin_step(self, step: int, num_steps: int) -> None:
            super().begin_step(step, num_steps)
            if step == 6:
                with pytest.raises(ValueError, match=r"^output: another run is writing to"):
                    toy_fit(ToyTask(), toy_config(tmp_path / "run"))

    toy_fit(Intruded(), toy_config(tmp_path / "run"))
    assert identical(weights(tmp_path / "alone"), weights(tmp_path / "run"))
    assert metric_lines(tmp_path / "run")[-1]["step"] == 18


def kill_at_checkpoint(number: int) -> None:
    """Makes this process kill itself while the checkpoint with this number is still a temporary folder."""
    published = []
    publish = checkpoint.publish

    def kill(temporary: Path, final: Path) -> None:
        published.append(final)
        if len(published) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(temporary, final)

    checkpoint.publish = kill


def poisonous_row() -> int:
    """A row that the second of two processes has in the first step, in its first micro-batch."""
    return batch_plan([len(row["ids"]) for row in toy_rows()], 8, 0, 0)[0][1]


def poison(task: ToyTask, kind: str) -> None:
    """Makes this row's loss infinite, or has the module complain of its teacher."""
    poisonous = torch.tensor(toy_rows()[poisonous_row()]["ids"])

    def hook(module: nn.Module, inputs: tuple[dict[str, torch.Tensor]], output: StepOutput) -> StepOutput:
        ids = inputs[0]["ids"][:, : len(poisonous)]
        if ids.shape[1] < len(poisonous) or not (ids == poisonous).all(1).any():
            return output
        if kind == "teacher":
            raise NonFinite("the teacher")
        return output._replace(loss_sum=output.loss_sum * torch.inf)

    task.module.register_forward_hook(hook)


class JudgedTask(ToyTask):
    """Gets ever worse by the main process's figures, and ever better by the other's."""

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        return {"score": float(self.state["step"] if os.environ["RANK"] == "1" else -self.state["step"])}


def together(output: Path) -> None:
    """What each of two processes does. They draw other dropout masks than one, so there is none here."""
    for dtype, _, _ in TOLERANCES:
        toy_fit(ToyTask(dtype=dtype), toy_config(output / str(dtype), micro_batch_size=2))
    toy_fit(ToyTask(), toy_config(output / "uneven", micro_batch_size=4, log_every_steps=1), uneven_rows())
    for kind in FAULTS:
        poison(task := ToyTask(), kind)
        try:
            toy_fit(task, toy_config(output / kind, micro_batch_size=2))
        except NonFinite as error:
            Path(f"{output / kind}-{os.environ['RANK']}.txt").write_text(str(error))
    try:
        toy_fit(TerminatedTask() if os.environ["RANK"] == "1" else ToyTask(), toy_config(output / "terminated"))
    except Preempted:
        (output / f"terminated-{os.environ['RANK']}.txt").touch()
    toy_fit(JudgedTask(), toy_config(output / "judged", eval_every_steps=2, select_by="score", patience=2))


def main(output: Path, micro_batch_size: int, kill_at: int | None) -> None:
    if kill_at:
        kill_at_checkpoint(kill_at)
    toy_fit(ToyTask(dropout=0.2), toy_config(output, micro_batch_size=micro_batch_size, num_epochs=20))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        together(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
