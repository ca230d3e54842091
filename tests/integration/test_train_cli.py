"""`spec-train` from the command line to a folder that transformers loads."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from train import cli, console

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _untouched_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_configure_logging", lambda: None)


@pytest.fixture
def model(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder(hidden_size=16, tie_word_embeddings=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} and {i}"}) + "\n" for i in range(20)))
    return path


def command(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--data", str(data), "--train.output", str(output), *more]


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns_and_leaves_a_stock_model(optimizer: str, model: Path, data: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    train = {
        "output": str(tmp_path / "run"),
        "num_epochs": 1,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "muon_learning_rate": 1e-2,
        "log_every_steps": 1,
        "optimizer": optimizer,
    }
    config.write_text(yaml.safe_dump({"model": str(model), "data": str(data), "train": train}))
    arguments = ["--config", str(config), "--eval_data", str(data), "--train.num_epochs", "6"]
    assert cli.main(arguments) == 0
    run = tmp_path / "run"
    losses = [line["loss"] for line in lines(run) if "loss" in line]
    assert len(losses) == 30
    assert losses[0] > 5  # about log 259 or worse: it knew nothing
    assert losses[-1] < 0.75 * losses[0]
    evaluated = lines(run)[-1]
    assert evaluated["eval/loss"] == pytest.approx(losses[-1], rel=0.3)
    trained = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model")("a b").input_ids
    assert not torch.equal(
        trained.get_input_embeddings().weight,
        AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight,
    )
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert (resolved["train"]["num_epochs"], resolved["train"]["seed"]) == (6, 0)
    assert json.loads((run / "provenance.json").read_text())["resolved_config"] == resolved


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.write_text(""), "nothing to learn from"),
        (lambda path: path.write_text('{"text": "a"}\n{"text": \n'), "data.jsonl, line 2: not JSON"),
    ],
)
def test_bad_data_is_one_line_and_nothing_is_written(
    spoil: Any, message: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(data)
    assert cli.main(command(model, data, tmp_path / "run")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spec-train: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "run").exists()


def test_ids_beyond_the_vocabulary_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import datasets

    columns = {"input_ids": [[1, 259]], "response_mask": [[1, 1]]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    assert cli.main(command(model, tmp_path / "saved", tmp_path / "run")) == 2
    assert "token id 259 is beyond the 259 of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_value_of_another_run_is_one_line(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(model, data, tmp_path / "run", "--train.max_steps", "1")
    assert cli.main(arguments) == 0
    assert cli.main(arguments) == 0  # complete: nothing to do
    capsys.readouterr()
    assert cli.main([*arguments, "--train.seed", "1"]) == 2
    # transformers draws its bar where it was imported before the console could ask it not to
    assert capsys.readouterr().err.splitlines()[-1].startswith("spec-train: error: train.seed: 1 differs from 0")


def test_ctrl_c_says_that_it_resumes(
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("train.loop.save_checkpoint", interrupt)
    assert cli.main(command(model, data, tmp_path / "run", "--train.max_steps", "1")) == 130
    assert "goes on from what is saved" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom train.cli import main\ncode = main(['--help'])\n"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)), code)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr
    assert "--train.batch_size" in done.stdout


@pytest.mark.slow
def test_as_a_program_it_logs_plain_lines(model: Path, data: Path, tmp_path: Path) -> None:
    def program(*more: str) -> subprocess.CompletedProcess[str]:
        arguments = command(model, data, tmp_path / "run", "--train.max_steps", "2", *more)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        full = [sys.executable, "-m", "train", *arguments]
        return subprocess.run(full, env=environment, capture_output=True, text=True)

    done = program("--train.log_every_steps", "1")
    assert (done.returncode, done.stdout) == (0, "")
    about_data, logged = done.stderr.splitlines()[:2], done.stderr.splitlines()[2:]
    assert [line.split(": ")[0] for line in about_data] == ["data", "data"], done.stderr
    assert [line.split("  ")[0] for line in logged] == ["step 1/2", "step 2/2"], done.stderr
    assert all("tokens/s" in line and "ETA" in line for line in logged)
    refused = program("--train.seed", "2")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[2].startswith("spec-train: error: train.seed: 2 differs from 0")
    assert refused.stderr.count("\n") == 3
