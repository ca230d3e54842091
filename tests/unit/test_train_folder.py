"""The rules of a run folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from train.folder import RunFolder


def resolved(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "train": {"output": "a", "seed": 0, "trackers": (), "max_steps": None} | changes}


def begun(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.begin(resolved(), {"command": "c"}, step=0)
    folder.checkpoints.mkdir()
    return folder


def test_one_run_at_a_time_and_nothing_is_left_of_the_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with (
        folder.locked(),
        pytest.raises(ValueError, match=f"^output: another run is writing to {folder.path}; wait"),
        RunFolder(tmp_path / "run").locked(),
    ):
        pytest.fail("two at a time")
    with folder.locked():
        assert not [*folder.path.iterdir()]


def test_the_same_configuration_may_go_on_under_another_output(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    folder.check(resolved())
    folder.check(resolved(output="elsewhere"))
    folder.check(resolved(trackers=("tensorboard",), log_every_steps=3))  # they change no weight


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, r"^train\.seed: 1 differs from 0"),
        ({"max_steps": 5}, r"^train\.max_steps: 5 differs from None"),
        ({"extra": 1}, r"^train\.extra: 1 differs from 'absent'"),
        ({"betas": (0.5, 0.9)}, r"^train\.betas: "),
    ],
)
def test_the_first_differing_key_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message + ".*give another output"):
        begun(tmp_path / "run").check(resolved(**changes))


def test_a_key_that_disappeared_is_named(tmp_path: Path) -> None:
    config = resolved()
    del config["model"]
    with pytest.raises(ValueError, match=r"^model: 'absent' differs from 'm'"):
        begun(tmp_path / "run").check(config)


def test_a_run_without_a_checkpoint_may_be_changed(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    folder.checkpoints.rmdir()
    folder.check(resolved(seed=1))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="something else"):
        RunFolder(tmp_path).check(resolved())


def test_begin_writes_the_configuration_and_cuts_the_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    lines = [{"step": step, "loss": 0.1 * step} for step in (1, 2, 3)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    assert folder.read_metrics() == lines
    folder.begin(resolved(), {"command": "c"}, step=2)
    assert folder.read_metrics() == lines[:2]
    assert yaml.safe_load(folder.config.read_text())["train"]["seed"] == 0
    assert json.loads(folder.provenance.read_text()) == {"command": "c"}
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "provenance.json",
    ]
