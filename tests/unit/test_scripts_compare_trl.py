"""scripts/compare_trl.py and scripts/train_with_trl.py: their parts that need neither TRL nor training."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from decode.pair import Pair, load_draft_vocab
from distill.estimate import Estimate, _print
from distill.teacher import collate

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("compare_trl")


@pytest.fixture(scope="module")
def half() -> ModuleType:
    return load("train_with_trl")


def training(script: ModuleType, **fields: Any) -> Any:
    return script.Training(**{"num_steps": 30, "num_tokens": 6000, "seconds": 120.0, "peak_bytes": 2 * 10**9} | fields)


def contender(script: ModuleType, name: str, alpha: float) -> Any:
    evaluation = {
        "prompts": "service",
        "num_prompts": 8,
        "num_draft_tokens": 4,
        "alpha": alpha,
        "alpha_interval": [alpha - 0.01, alpha + 0.01],
        "block_efficiency": 1.5,
        "block_efficiency_interval": [1.4, 1.6],
    }
    return script.Contender(name=name, training=training(script), evaluation=evaluation)


# --- ours ---------------------------------------------------------------------------------------------------------


def test_steps_follow_from_what_an_estimate_prints(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    _print(
        Estimate(
            num_steps=script.ESTIMATED_STEPS,
            num_tokens=10**8,
            tokens_per_second=1000.0,
            minutes=2500.0,
            evaluation_minutes=3.0,
            disk_bytes=10**9,
            memory_bytes=10**9,
        )
    )
    assert script.steps_within(10.0, capsys.readouterr().out) == 10 * script.ESTIMATED_STEPS // 2500


def test_an_estimate_without_minutes_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="no minutes"):
        script.steps_within(10.0, "something else")


def test_training_ends_before_the_last_evaluation(script: ModuleType) -> None:
    lines = [
        {"step": 10, "tokens": 1000.0, "seconds": 9.0},
        {"step": 20, "tokens": 2100.0, "seconds": 17.5},
        {"step": 20, "eval/alpha": 0.4},
    ]
    assert script.training_of(lines, 7) == script.Training(num_steps=20, num_tokens=2100, seconds=17.5, peak_bytes=7)


# --- resuming -----------------------------------------------------------------------------------------------------


def test_what_finished_is_kept_and_what_did_not_is_begun_anew(script: ModuleType, tmp_path: Path) -> None:
    folder, calls = tmp_path / "trl-0.001", []

    def train(folder: Path) -> Any:
        calls.append(folder.exists())
        folder.mkdir()
        (folder / "weights").touch()
        if len(calls) == 1:
            raise KeyboardInterrupt
        return training(script, num_steps=len(calls))

    with pytest.raises(KeyboardInterrupt):
        script.kept(folder, train)
    assert script.kept(folder, train).num_steps == 2
    assert script.kept(folder, train).num_steps == 2
    assert calls == [False, False]
    assert (folder / "weights").exists()


def test_an_output_begun_otherwise_is_refused(script: ModuleType, tmp_path: Path) -> None:
    path, settings = tmp_path / "new" / "settings.json", {"minutes": 10.0, "output": "a", "trl_learning_rates": [1e-3]}
    script.refuse_other_settings(path, settings)
    script.refuse_other_settings(path, settings | {"output": "b", "trl_learning_rates": [1e-3, 3e-3]})
    with pytest.raises(ValueError, match=r"minutes: 5\.0 differs from 10\.0"):
        script.refuse_other_settings(path, settings | {"minutes": 5.0})


# --- measuring ----------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_command() -> None:
    # in a process of its own: the system counts in what the one that begins a command holds, and this one holds torch
    program = """import sys; import compare_trl as script
for size in (1, 300_000_000):
    print(script.measured([sys.executable, "-c", f"b'x' * {size}"]))
"""
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, cwd=SCRIPTS, check=True, capture_output=True, text=True).stdout
    small, large = map(int, printed.split())
    assert 280e6 < large - small < 320e6


def test_a_command_that_fails_stops_the_comparison(script: ModuleType) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        script.measured([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize("whole", [False, True])
def test_a_pair_of_trls_draft_has_the_vocabulary_it_is_to_be_judged_with(
    script: ModuleType, tmp_path: Path, whole: bool
) -> None:
    untrained, folder = tmp_path / "untrained", tmp_path / "trl"
    untrained.mkdir()
    Pair(target={"id": "models/some"}, num_draft_tokens=2, measured={"alpha": 0.1}).save(untrained)
    save_file({"token_ids": torch.tensor([3, 5])}, untrained / "draft_vocab.safetensors")
    (folder / "draft").mkdir(parents=True)
    (folder / "draft" / "config.json").write_text("{}")
    made = script.make_pair(untrained, folder, whole)
    assert script.make_pair(untrained, folder, whole) == made
    pair, token_ids = Pair.load(made), load_draft_vocab(made)
    assert (pair.target_id(), pair.num_draft_tokens, pair.measured) == ("models/some", 2, {})
    assert pair.provenance["trained_with"] == script.TRL
    assert token_ids is None if whole else token_ids is not None and token_ids.tolist() == [3, 5]
    assert json.loads((made / "draft" / "config.json").read_text()) == {}


def test_the_table_sets_ours_against_the_best_of_theirs(script: ModuleType) -> None:
    contenders = [contender(script, *row) for row in (("draftsmith", 0.4), ("TRL a", 0.31), ("TRL b", 0.32))]
    table = script.table(contenders, teacher="cached")
    assert [row.style for row in table.rows] == ["bold", None, "bold"]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    printed = captured.get()
    assert "0.320 (0.310 to 0.330)" in printed
    assert "2.00 GB" in printed
    assert " 50 " in printed  # 6000 tokens in 120 seconds


# --- TRL's half ---------------------------------------------------------------------------------------------------


def test_trl_learns_the_tokens_that_we_learn(half: ModuleType) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 2], "response_mask": [False, False, True, True, True]},
        {"input_ids": [5, 9, 2], "response_mask": [False, True, True]},
    ]
    ours = collate(rows, padding_id=0)
    for place, row in enumerate(rows):
        theirs = half.with_labels(row)
        length = len(row["input_ids"])
        assert theirs["input_ids"] == ours["input_ids"][place, :length].tolist()
        # a label belongs to its own token, `predicts` to the one before
        learnt = [label != half.IGNORED for label in theirs["labels"]]
        assert learnt[1:] == ours["predicts"][place, : length - 1].tolist()
        assert all(
            label in (half.IGNORED, token) for label, token in zip(theirs["labels"], row["input_ids"], strict=True)
        )


def test_the_learning_rate_follows_the_clock_and_training_ends_with_it(half: ModuleType) -> None:
    time = 100.0
    clock, control = half.Clock(seconds=200.0, now=lambda: time), SimpleNamespace(should_training_stop=False)
    assert clock.learning_rate_factor(0) == 0.0
    time = 150.0  # loading
    clock.on_train_begin(None, None, control)
    factors = []
    for passed in (0.0, 5.0, 10.0, 105.0, 199.0):
        time = 150.0 + passed
        factors.append(clock.learning_rate_factor(7))
        clock.on_step_end(None, None, control)
        assert not control.should_training_stop
    assert factors == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0], abs=1e-3)
    time = 150.0 + 203.0
    clock.on_step_end(None, None, control)
    assert control.should_training_stop
    assert clock.seconds == 203.0
    assert clock.learning_rate_factor(8) == 0.0
