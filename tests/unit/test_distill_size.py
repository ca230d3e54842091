"""What a run needs on the disk."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from distill.config import RunConfig
from distill.run import distill, prepare
from distill.size import disk_bytes, refuse_full_disk
from train.config import TrainConfig

Configure = Callable[..., RunConfig]


def module() -> nn.Module:
    """Of 12 weights that are trained and 8 that are not."""
    parts = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(4, 2, bias=False)])
    parts[1].requires_grad_(False)
    return parts


def config(output: Path, **changes: object) -> TrainConfig:
    return TrainConfig(output=str(output), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # weights and two moments, of three checkpoints; the result, and the same being written
        ({}, 3 * 3 * 12 + 2 * 20),
        ({"keep_checkpoints": 5}, 6 * 3 * 12 + 2 * 20),
        ({"ema_decay": 0.9}, 3 * 4 * 12 + 2 * 20),
        ({"select_by": "alpha", "eval_every_steps": 5}, 3 * 3 * 12 + 2 * 12 + 2 * 20),
    ],
)
def test_it_is_what_is_there_at_most(changes: dict[str, object], expected: int, tmp_path: Path) -> None:
    assert disk_bytes(module(), config(tmp_path, **changes)) == 4 * expected


def test_a_run_stays_below_it(configure_run: Configure) -> None:
    """But not by much: otherwise runs would be refused that fit."""
    settings = configure_run(
        max_steps=6,
        checkpoint_every_steps=1,
        train_embeddings=True,
        ema_decay=0.9,
        select_by="alpha",
        eval_every_steps=2,
    )
    bound = disk_bytes(prepare(settings).task.module, settings.train)
    output = Path(settings.train.output)
    distill(settings)
    used = sum(path.stat().st_size for path in output.rglob("*.safetensors"))
    assert 0.4 * bound < used < bound


def full(free: int) -> Callable[[Path], SimpleNamespace]:
    return lambda _: SimpleNamespace(free=free)


def test_a_disk_too_full_is_refused_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path / "not" / "there" / "yet")
    needed = disk_bytes(module(), settings)
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or full(needed - 1)(folder))
    with pytest.raises(ValueError, match=r"^output .*yet: the run needs up to 0.00 GB of disk and 0.00 GB are free; "):
        refuse_full_disk(module(), settings)
    assert asked == [tmp_path]
    monkeypatch.setattr(shutil, "disk_usage", full(needed))
    refuse_full_disk(module(), settings)
    # what a run wrote before it was interrupted need not be written again
    Path(settings.output).mkdir(parents=True)
    (Path(settings.output) / "checkpoint").write_bytes(b"x" * 100)
    monkeypatch.setattr(shutil, "disk_usage", full(needed - 100))
    refuse_full_disk(module(), settings)
    monkeypatch.setattr(shutil, "disk_usage", full(needed - 101))
    with pytest.raises(ValueError, match=r"^output "):
        refuse_full_disk(module(), settings)


def test_a_run_asks_before_it_begins(configure_run: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = configure_run(max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", full(1000))
        with pytest.raises(ValueError, match=r"make room, lower train.keep_checkpoints, or give another output$"):
            distill(settings)
    assert not Path(settings.train.output).exists()
    distill(settings)
