"""What a run will take, told before it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distill.config import BranchesConfig, ObjectiveConfig, RunConfig, Stage
from distill.estimate import MEASURED_STEPS, WARM_UP_STEPS, estimate
from distill.run import distill, prepare
from distill.size import disk_bytes

Configure = Callable[..., RunConfig]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_epochs": 2.0},
        {"num_epochs": 0.7},
        {"max_steps": 7, "batch_size": 5, "eval_every_steps": 2, "checkpoint_every_steps": 2},
        {"num_epochs": 1.5, "responses": "hidden_states", "teacher": "cached", "packing_length": 160},
    ],
)
def test_it_tells_what_the_run_then_does(
    changes: dict[str, Any], distill_folders: dict[str, Path], configure_run: Configure
) -> None:
    if "responses" in changes:
        changes = changes | {"responses": distill_folders[changes["responses"]]}
    config = configure_run(**changes)
    told = estimate(config)
    result = distill(config)
    assert told.num_steps == result.num_steps
    assert told.num_tokens == result.metrics["tokens"]
    assert told.disk_bytes == disk_bytes(prepare(replace(config, parity_prompts=0)).task.module, config.train)
    assert 0 < told.evaluation_minutes < told.minutes < 5
    # the machine may be busy at one time and idle at the other
    assert 0.1 < (told.minutes * 60 + 1) / (result.metrics["seconds"] + 1) < 10
    assert told.tokens_per_second > 50
    assert 50e6 < told.memory_bytes < 100e9


def test_it_prints_a_table_and_leaves_nothing_behind(
    configure_run: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure_run(num_epochs=100.0, output=str(tmp_path / "runs" / "new"), parity_prompts=4)
    told = estimate(config)
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr().out
    for words in (
        "What this run will take here",
        "optimiser steps",
        "500",
        f"{told.num_tokens:,}",
        "tokens per second",
        "minutes",
        "evaluations",
        "disk, at most",
        "memory, peak",
        "GB",
    ):
        assert words in printed
    assert told.num_steps == 100 * 5


def test_a_run_that_is_there_already_is_left_as_it_is(configure_run: Configure, tmp_path: Path) -> None:
    config = configure_run(max_steps=1)
    distill(config)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    estimate(replace(config, train=replace(config.train, max_steps=50)))
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_stages_branches_selection_and_patience_are_no_obstacle(configure_run: Configure) -> None:
    stages = (Stage(losses={"forward_kl": 1.0}, plateau_evals=1), Stage(losses={"tv": 1.0}))
    config = configure_run(
        objective=ObjectiveConfig(stages=stages),
        branches=BranchesConfig(share=0.5, per_text=2),
        max_steps=30,
        select_by="predicted_speedup",
        patience=2,
        eval_every_steps=10,
        measure_speed=True,
        ema_decay=0.9,
    )
    assert estimate(config).num_steps == 30
    assert WARM_UP_STEPS + MEASURED_STEPS < 30  # the control: it did not take them all


def test_what_could_not_begin_is_refused_here_too(configure_run: Configure, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^pair .*nowhere: there is no such folder"):
        estimate(configure_run(pair=tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []
