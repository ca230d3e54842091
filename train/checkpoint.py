"""Checkpoints that survive a kill at any moment: safetensors and JSON, hashed, renamed into place.

A checkpoint holds the trainable parameters, their average if there is one, the optimisers' state and the loop's
counters. It holds no frozen parameter, because the task brings those, and no state of a random generator, because
the loop seeds every step from (seed, step, rank): a resumed process therefore draws what an uninterrupted one would
have drawn, on every rank, though only the main one writes.

Beside the checkpoints, step-000123, lie the best weights so far, best-000120.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT_VERSION = 2


def save_checkpoint(
    folder: Path,
    step: int,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    keep: int,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes `folder`/step-000123, complete or not at all, and removes all but the newest `keep`.

    Args:
        folder: where the checkpoints of the run are; made if missing.
        step: optimiser steps done.
        module: its trainable parameters are written.
        optimizers: their per-parameter state is written; their settings follow from the configuration.
        state: the loop's counters, JSON values.
        keep: how many checkpoints stay.
        average: of the weights, by name of the parameter, if there is one.
    """
    files: dict[str, Mapping[str, torch.Tensor]] = {
        "model": _parameters(module),
        "optimizer": _optimizer_tensors(optimizers),
    }
    if average is not None:
        files["average"] = {name: _plain(tensor) for name, tensor in average.items()}
    final = _write(folder / f"step-{step:06d}", step, files, state)
    for old in _folders(folder, "step")[:-keep]:
        remove_folder(old)
    _remove_superseded(folder)
    return final


def save_best(folder: Path, step: int, module: torch.nn.Module) -> Path:
    """Writes the trainable parameters to `folder`/best-000123, complete or not at all.

    It supersedes the earlier ones, of which only those stay that a checkpoint would resume with.
    """
    final = _write(folder / f"best-{step:06d}", step, {"model": _parameters(module)})
    _remove_superseded(folder)
    return final


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose files match its manifest; logs a line for each that does not."""
    for candidate in reversed(_folders(folder, "step")):
        fault = _fault(candidate)
        if fault is None:
            return candidate
        logger.warning("checkpoint %s is broken (%s); falling back to the one before it", candidate, fault)
    return None


def load_checkpoint(
    checkpoint: Path,
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    average: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Puts a checkpoint's tensors into the module, the optimisers and the average, in place.

    Returns:
        The loop's counters, as given to `save_checkpoint`.

    Raises:
        ValueError: the checkpoint is of other parameters.
    """
    _load_parameters(checkpoint, module)
    if average is not None:
        saved = load_file(checkpoint / "average.safetensors")
        for name, tensor in average.items():
            tensor.copy_(saved[name])
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimizers]
    for key, tensor in load_file(checkpoint / "optimizer.safetensors").items():
        optimizer_index, parameter_index, name = key.split(".", 2)
        states[int(optimizer_index)].setdefault(int(parameter_index), {})[name] = tensor
    for optimizer, tensors in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": tensors, "param_groups": optimizer.state_dict()["param_groups"]})
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    return state


def load_best(folder: Path, step: int, module: torch.nn.Module) -> None:
    """Puts what `save_best` wrote at this step into the module, in place.

    Raises:
        ValueError: it is not there, broken, or of other parameters.
    """
    best = folder / f"best-{step:06d}"
    fault = _fault(best)
    if fault is not None:
        raise ValueError(f"output: the best weights, {best}, are broken ({fault}); train anew in another output")
    _load_parameters(best, module)


def discard_after(folder: Path, checkpoint: Path | None) -> None:
    """Removes leftovers, and what is newer than `checkpoint`, broken or not, and will be written again."""
    for other in (*_folders(folder, "step"), *_folders(folder, "best")):
        if checkpoint is None or _step(other) > _step(checkpoint):
            remove_folder(other)
    for leftover in folder.glob(".*.tmp"):
        remove_folder(leftover)


def publish(temporary: Path, final: Path) -> None:
    """Makes a finished folder appear under its final name at once, after all of it has reached the disk."""
    for path in (*temporary.rglob("*"), temporary):
        _fsync(path)
    remove_folder(final)
    temporary.rename(final)
    _fsync(final.parent)


def remove_folder(folder: Path) -> None:
    """Removes a folder so that a kill midway leaves no half of it under its own name."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name.strip('.')}.removed.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def write_text(path: Path, text: str) -> None:
    """Replaces a file's content in one step, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    _fsync(temporary)
    temporary.replace(path)
    _fsync(path.parent)


def _write(
    final: Path, step: int, files: Mapping[str, Mapping[str, torch.Tensor]], state: dict[str, Any] | None = None
) -> Path:
    """A folder of safetensors files, by name, the state and a manifest of them all; complete or not at all."""
    temporary = final.with_name(f".{final.name}.tmp")
    remove_folder(temporary)
    temporary.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(dict(tensors), temporary / f"{name}.safetensors")
    if state is not None:
        (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
    hashes = {file.name: _sha256(file) for file in sorted(temporary.iterdir())}
    manifest = {"format_version": FORMAT_VERSION, "step": step, "sha256": hashes}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    publish(temporary, final)
    return final


def _remove_superseded(folder: Path) -> None:
    """Keeps the newest of the best weights, and for each checkpoint the newest that are not newer than it."""
    best = _folders(folder, "best")
    ends = [_step(checkpoint) for checkpoint in _folders(folder, "step")]
    needed = {max((path for path in best if _step(path) <= end), key=_step, default=None) for end in ends}
    for path in best[:-1]:
        if path not in needed:
            remove_folder(path)


def _load_parameters(folder: Path, module: torch.nn.Module) -> None:
    saved = load_file(folder / "model.safetensors")
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    shapes = {name: p.shape for name, p in trainable.items()}
    if shapes != {name: tensor.shape for name, tensor in saved.items()}:
        raise ValueError(f"output: {folder} holds other parameters than this model; give another output")
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(saved[name])


def _parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: _plain(p) for name, p in module.named_parameters() if p.requires_grad}


def _optimizer_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """State tensors under "<optimiser>.<parameter>.<name>"."""
    tensors = {}
    for index, optimizer in enumerate(optimizers):
        for parameter, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                assert isinstance(value, torch.Tensor), f"optimiser state {name} is not a tensor"
                tensors[f"{index}.{parameter}.{name}"] = _plain(value)
    return tensors


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def _folders(folder: Path, kind: str) -> list[Path]:
    """Those of one kind, step or best, oldest first."""
    return sorted((p for p in folder.glob(f"{kind}-*") if p.name[len(kind) + 1 :].isdecimal()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files; None when nothing is."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format_version"] != FORMAT_VERSION:
            return f"format version {manifest['format_version']}"
        for name, sha256 in manifest["sha256"].items():
            if _sha256(checkpoint / name) != sha256:
                return f"{name} does not match its hash"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
