"""Results on disk: complete, or not there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .provenance import provenance


def refuse_unwritable(output: str | None) -> None:
    """Make the folder of a result before the work that leads to it.

    Raises:
        ValueError: `output` is a folder.
        OSError: its folder cannot be made or written to.
    """
    if output is None:
        return
    path = Path(output)
    if path.is_dir():
        raise ValueError(f"output {output}: is a folder; name a file in it, such as {path / 'result.json'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(13, "cannot be written to", str(path.parent))


def circumstances(model: PreTrainedModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """How a result was found, to stand in it: dtype, device, threads, and the configuration's provenance."""
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "num_threads": torch.get_num_threads(),
        "provenance": provenance(config),
    }


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file as `write_text` does."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step, so that a reader sees the old one or the new one; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
