"""Checkpoints: exact, unpickled, verified, pruned."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from train.checkpoint import (
    discard_after,
    load_best,
    load_checkpoint,
    newest_checkpoint,
    publish,
    save_best,
    save_checkpoint,
)
from train.config import TrainConfig
from train.optimizers import build_optimizers

STATE = {"step": 3, "tokens": 1.0, "window": {"loss": 0.1 + 0.2}}


def trained(seed: int, num_steps: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A small model after some steps of muon and adamw."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    model[2].bias.requires_grad_(False)
    optimizers = build_optimizers(model, TrainConfig(output="unused", optimizer="muon"))
    for _ in range(num_steps):
        model(torch.randn(5, 4)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def save(folder: Path, step: int, keep: int = 9) -> Path:
    return save_checkpoint(folder, step, *trained(step, 2), STATE, keep)


def test_round_trip_is_exact_and_continues_identically(tmp_path: Path) -> None:
    model, optimizers = trained(0, 3)
    path = save_checkpoint(tmp_path, 3, model, optimizers, STATE, keep=1)
    other, other_optimizers = trained(1, 0)
    other[2].bias.data.copy_(model[2].bias)  # frozen: the task brings it, the checkpoint does not
    assert load_checkpoint(path, other, other_optimizers) == STATE
    inputs = torch.randn(5, 4)
    for module, steppers in ((model, optimizers), (other, other_optimizers)):
        module(inputs).square().sum().backward()
        for stepper in steppers:
            stepper.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_without_optimizer_state_the_continuation_differs(tmp_path: Path) -> None:
    """The control of the test above: the optimiser's state does matter."""
    model, optimizers = trained(0, 3)
    fresh, fresh_optimizers = trained(0, 3)
    for stepper in fresh_optimizers:
        stepper.state.clear()
    inputs = torch.randn(5, 4)
    for module, steppers in ((model, optimizers), (fresh, fresh_optimizers)):
        module(inputs).square().sum().backward()
        for stepper in steppers:
            stepper.step()
    assert not torch.equal(model[0].weight, fresh[0].weight)
    assert not torch.equal(model[1].weight, fresh[1].weight)


def test_files_are_safetensors_and_json_and_hold_no_frozen_parameter(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save(tmp_path, 3)
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert set(load_file(path / "model.safetensors")) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "2.weight",
    }
    assert set(json.loads((path / "manifest.json").read_text())["sha256"]) == {
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete file", "delete manifest", "garble manifest"])
def test_a_broken_newest_checkpoint_falls_back(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = save(tmp_path, 5), save(tmp_path, 10)
    assert newest_checkpoint(tmp_path) == bad  # the control: undamaged, the newer one is taken
    weights, manifest = bad / "model.safetensors", bad / "manifest.json"
    if damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif damage == "delete file":
        weights.unlink()
    elif damage == "delete manifest":
        manifest.unlink()
    else:
        manifest.write_text("[1]")
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == good
    assert len(caplog.records) == 1
    assert "step-000010" in caplog.text


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "missing") is None


def test_only_the_newest_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]


def test_leftovers_are_ignored_and_removed(tmp_path: Path) -> None:
    good, broken = save(tmp_path, 5), save(tmp_path, 10)
    (broken / "manifest.json").unlink()
    leftover = tmp_path / ".step-000015.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert newest_checkpoint(tmp_path) == good
    discard_after(tmp_path, good)
    assert list(tmp_path.iterdir()) == [good]


def test_publishing_replaces_and_leaves_no_temporary(tmp_path: Path) -> None:
    final, temporary = tmp_path / "model", tmp_path / ".model.tmp"
    for folder, text in ((final, "old"), (temporary, "new")):
        folder.mkdir()
        (folder / "file").write_text(text)
    publish(temporary, final)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (final / "file").read_text() == "new"


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    other = nn.Linear(4, 6)
    with pytest.raises(ValueError, match="holds other parameters"):
        load_checkpoint(path, other, build_optimizers(other, TrainConfig(output="unused")))


def test_the_average_returns_in_place_and_is_covered_by_the_manifest(tmp_path: Path) -> None:
    model, optimizers = trained(0, 2)
    average = {"0.weight": torch.randn(6, 4), "2.weight": torch.randn(3, 6)}
    older = save_checkpoint(tmp_path, 2, model, optimizers, STATE, 9, average)
    path = save_checkpoint(tmp_path, 3, model, optimizers, STATE, 9, average)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in average.items()}
    load_checkpoint(path, model, optimizers, loaded)
    assert all(torch.equal(loaded[name], average[name]) for name in average)
    data = bytearray((path / "average.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "average.safetensors").write_bytes(data)
    assert newest_checkpoint(tmp_path) == older


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_best_weights_round_trip_and_only_those_stay_that_a_checkpoint_needs(tmp_path: Path) -> None:
    first, _ = trained(1, 1)
    save_best(tmp_path, 2, first)
    save_best(tmp_path, 4, trained(2, 1)[0])
    assert names(tmp_path) == ["best-000004"]
    save(tmp_path, 5, keep=2)
    save_best(tmp_path, 6, trained(3, 1)[0])
    save_best(tmp_path, 7, first)
    assert names(tmp_path) == ["best-000004", "best-000007", "step-000005"]
    save(tmp_path, 8, keep=2)
    save(tmp_path, 9, keep=2)  # now nothing resumes with what was best at step 4
    assert names(tmp_path) == ["best-000007", "step-000008", "step-000009"]
    other, _ = trained(4, 0)
    frozen = other[2].bias.clone()
    load_best(tmp_path, 7, other)
    assert torch.equal(other[0].weight, first[0].weight)
    assert torch.equal(other[2].bias, frozen)


def test_going_back_to_a_checkpoint_forgets_what_was_best_after_it(tmp_path: Path) -> None:
    save_best(tmp_path, 4, trained(0, 1)[0])
    good = save(tmp_path, 5)
    save_best(tmp_path, 6, trained(0, 2)[0])
    discard_after(tmp_path, good)
    assert names(tmp_path) == ["best-000004", "step-000005"]
    discard_after(tmp_path, None)
    assert names(tmp_path) == []


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_broken_best_weights_are_refused(damage: str, tmp_path: Path) -> None:
    model, _ = trained(0, 1)
    weights = save_best(tmp_path, 4, model) / "model.safetensors"
    load_best(tmp_path, 4, model)  # the control
    if damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    else:
        weights.unlink()
    with pytest.raises(ValueError, match=r"^output: .*best-000004.*; train anew"):
        load_best(tmp_path, 4, model)
