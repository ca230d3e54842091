"""`python -m distill` killed at any moment, begun again, and run by two processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from decode.params import SamplingParams
from distill.build import build
from distill.config import BranchesConfig, BuildConfig, ObjectiveConfig, RespondConfig, RunConfig, Stage
from distill.module import DistillModule
from distill.parts import part_path
from distill.responses import SPLITS, load_responses, respond
from distill.run import distill
from train.config import TrainConfig
from train.folder import RunFolder
from train.loop import StepOutput

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 60


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "distill", *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Waits; the exit code must be 0. What it wrote to stderr."""
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stderr


def kill_once_there(path: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    _, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"it was over before it could be killed: {stderr}"


@pytest.fixture(scope="module")
def target(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder(num_layers=3, hidden_size=16, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"Say {number}.\n" for number in range(NUM_PROMPTS)))
    return path


def respond_config(target: Path, prompts: Path, output: Path) -> RespondConfig:
    return RespondConfig(
        target=str(target),
        prompts=str(prompts),
        output=str(output),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=40, seed=0),
        batch_size=2,
    )


@pytest.fixture(scope="module")
def whole(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with responses/ and pair/, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    respond(respond_config(target, prompts, folder / "responses"))
    arguments: dict[str, Any] = {"layers": 2, "vocab_size": 120, "responses": str(folder / "responses")}
    build(BuildConfig(target=str(target), output=str(folder / "pair"), **arguments))
    return folder


def test_killed_responding_it_goes_on(whole: Path, target: Path, prompts: Path, tmp_path: Path) -> None:
    output, parts = tmp_path / "responses", tmp_path / ".responses.partial"
    config = respond_config(target, prompts, output)
    command = ["respond", "--target", target, "--prompts", prompts, "--output", output]
    command += ["--sampling.temperature", 1.0, "--sampling.max_new_tokens", config.sampling.max_new_tokens]
    command += ["--batch_size", config.batch_size]
    first = part_path(parts, "train", 0, NUM_PROMPTS * 9 // 10 // config.batch_size)
    kill_once_there(first.exists, start(*command))
    assert not output.exists()
    done = sorted(parts.rglob("*.arrow"))
    assert 0 < len(done) < NUM_PROMPTS / 2
    made_at = first.stat().st_mtime_ns
    resumed = start(*command)
    while not output.exists() and resumed.poll() is None:
        if first.exists():
            assert first.stat().st_mtime_ns == made_at  # not made again
        time.sleep(0.01)
    finish(resumed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["responses"]
    for split in SPLITS:
        ours, theirs = (list(load_responses(str(folder), split)) for folder in (output, whole / "responses"))
        assert ours == theirs


STAGES = (
    Stage(losses={"forward_kl": 1.0}, share=0.2),
    Stage(losses={"lk": 1.0, "cross_entropy": 0.1}, plateau_evals=1),
    Stage(losses={"tv": 1.0}),
)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "forward KL": {"objective": ObjectiveConfig(stages=(Stage(losses={"forward_kl": 1.0}),))},
    "stages and branches": {
        "objective": ObjectiveConfig(stages=STAGES),
        "branches": BranchesConfig(share=0.5, per_text=4),
    },
}


def run_config(whole: Path, output: Path, objective: str = "forward KL", **train: Any) -> RunConfig:
    values = {"batch_size": 6, "max_steps": 60, "learning_rate": 1e-2, "checkpoint_every_steps": 3, "seed": 3}
    return RunConfig(
        pair=str(whole / "pair"),
        responses=str(whole / "responses"),
        chunk_size=50,
        train_embeddings=True,
        measure_speed=False,
        parity_prompts=0,
        **OBJECTIVES[objective],
        train=TrainConfig(output=str(output), **values | {"log_every_steps": 5, "eval_every_steps": 20} | train),
    )


def write_yaml(config: RunConfig, path: Path) -> Path:
    path.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False))
    return path


def folder_of(config: RunConfig) -> RunFolder:
    return RunFolder(Path(config.train.output), "pair")


def weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(folder_of(config).result / "draft" / "model.safetensors")


def metric_lines(config: RunConfig) -> list[dict[str, float]]:
    timing = ("seconds", "tokens_per_second")
    lines = folder_of(config).read_metrics()
    return [{key: value for key, value in line.items() if key not in timing} for line in lines]


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_killed_training_it_goes_on(objective: str, whole: Path, tmp_path: Path) -> None:
    config, uninterrupted = (run_config(whole, tmp_path / name, objective) for name in ("parts", "whole"))
    file = write_yaml(config, tmp_path / "run.yaml")
    run = folder_of(config)
    kill_once_there((run.checkpoints / "step-000003").exists, start("run", "--config", file))
    assert not run.result.exists()
    assert "resuming from" in finish(start("run", "--config", file))
    torch.set_num_threads(1)
    distill(uninterrupted)
    ours, theirs = weights(config), weights(uninterrupted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metric_lines(config) == metric_lines(uninterrupted)
    assert sorted(path.name for path in run.result.iterdir()) == ["draft", "draft_vocab.safetensors", "pair.json"]
    # the control: the weights move to the end, so that an early stop or another order of the data would show
    distill(other := run_config(whole, tmp_path / "other", objective, seed=4))
    assert not all(torch.equal(weights(other)[name], theirs[name]) for name in ours)


def difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """The largest of the tensors' relative differences, in the Euclidean norm."""
    return max(((one[name] - two[name]).norm() / one[name].norm()).item() for name in one)


def test_compiled_it_trains_the_same_and_goes_on_when_killed(whole: Path, tmp_path: Path) -> None:
    """On texts and branches, in batches of several shapes, with evaluations between."""
    changes = {"max_steps": 12, "eval_every_steps": 6, "log_every_steps": 1}
    branches = BranchesConfig(share=0.5, per_text=4)
    plain, parts, uninterrupted = (
        replace(run_config(whole, tmp_path / name, **changes), branches=branches, compile=name != "plain")
        for name in ("plain", "parts", "whole")
    )
    file = write_yaml(parts, tmp_path / "parts.yaml")
    kill_once_there((folder_of(parts).checkpoints / "step-000003").exists, start("run", "--config", file))
    assert "resuming from" in finish(start("run", "--config", file))
    finish(start("run", "--config", write_yaml(uninterrupted, tmp_path / "whole.yaml")))
    torch.set_num_threads(1)
    distill(plain)
    ours, theirs = weights(parts), weights(uninterrupted)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metric_lines(parts) == metric_lines(uninterrupted)
    assert difference(theirs, weights(plain)) < 1e-3
    for compiled, other in zip(metric_lines(uninterrupted), metric_lines(plain), strict=True):
        assert compiled == pytest.approx(other, rel=1e-3, abs=1e-3)


def test_two_processes_train_what_one_does(whole: Path, tmp_path: Path) -> None:
    """The 54 rows make batches of 7 and a last one of 5; each of two processes takes 3 or 4 of them."""
    changes = {"batch_size": 7, "micro_batch_size": 3, "max_steps": 16, "log_every_steps": 1, "eval_every_steps": 8}
    one, two = (run_config(whole, tmp_path / name, **changes) for name in ("one", "two"))
    # accelerate's --cpu starts one process whatever --num_processes says; --multi_gpu starts two, also here
    options = "--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--dynamo_backend", "no"]
    done = subprocess.run(
        [*launch, "-m", "distill", "run", "--config", str(write_yaml(two, tmp_path / "run.yaml"))],
        env=environment(ACCELERATE_USE_CPU="true"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    torch.set_num_threads(1)
    distill(one)
    processes = [json.loads(folder_of(config).provenance.read_text())["num_processes"] for config in (one, two)]
    assert processes == [1, 2]  # otherwise the rest would compare a thing with itself
    lines = [metric_lines(config) for config in (one, two)]
    losses = [[line["loss"] for line in some if "loss" in line] for some in lines]
    assert losses[0][-1] < losses[0][0] - 0.2
    for a, b in zip(*lines, strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)  # sums in another order
    assert difference(weights(one), weights(two)) < 1e-5
    assert done.stderr.count("step 16/16") == 2, done.stderr  # the last loss, the last evaluation: once each
    # the control: if each micro-batch were normalised by itself, as each process might, it would show
    forward = DistillModule.forward
    with pytest.MonkeyPatch.context() as patch:

        def mean(self: DistillModule, batch: dict[str, torch.Tensor]) -> StepOutput:
            output = forward(self, batch)
            return output._replace(loss_sum=output.loss_sum / output.num_tokens, num_tokens=torch.tensor(1))

        patch.setattr(DistillModule, "forward", mean)
        distill(means := run_config(whole, tmp_path / "means", **changes))
    assert difference(weights(one), weights(means)) > 1e-3
