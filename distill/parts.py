"""Folders of datasets that are made part after part: a kill loses one part, and no reader sees half of a folder.

Beside the splits stands a record, JSON, of the settings that made them.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from decode.params import SamplingParams
from train.checkpoint import publish, remove_folder, write_text

logger = logging.getLogger(__name__)


def partial(output: Path) -> Path:
    """Where the parts of a folder are until all of them are there."""
    return output.parent / f".{output.name}.partial"


def is_complete(output: Path, record_name: str, settings: dict[str, Any]) -> bool:
    """Whether a folder made of parts is there already, and these settings made it; they are in its record.

    Raises:
        ValueError: the folder is something else, or was made or begun with other settings.
    """
    parts = partial(output)
    if output.exists():
        _refuse_other_settings(output, record_name, settings)
        remove_folder(parts)
        logger.info("%s is complete already; nothing to do", output)
        return True
    if (parts / record_name).is_file():
        _refuse_other_settings(parts, record_name, settings)
    return False


def begin(output: Path, record_name: str, record: dict[str, Any]) -> None:
    """Make the folder of the parts, with the record in it; or see that what is there began with such a record.

    Raises:
        ValueError: it began with the same settings, but names in them stood for something else.
    """
    folder = partial(output)
    if not (folder / record_name).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / record_name, json.dumps(record, indent=2))
    begun = read_record(str(folder), record_name)
    if any(begun.get(key, value) != value for key, value in record.items() if key not in ("settings", "provenance")):
        raise ValueError(f"output {output}: was begun with another target of the same name; delete {folder}")


def part_path(folder: Path, split: str, number: int, total: int) -> Path:
    """Where a part of a split is, as `datasets` names them."""
    return folder / split / f"data-{number:05d}-of-{total:05d}.arrow"


def save_part(rows: list[dict[str, Any]], features: datasets.Features, path: Path) -> None:
    """One file of a split, as `datasets` writes them: complete, or not under its name."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    schema = features.arrow_schema
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    publish(temporary, path)


def finish(output: Path, paths: list[Path], features: datasets.Features, record_name: str) -> None:
    """Let the output appear: a `datasets.DatasetDict` of the parts where they lie; a copy would need the disk twice.

    `datasets` reads a split from the files that its state.json names, by the features in its dataset_info.json.

    Args:
        paths: of all parts, in order.
        record_name: of the record; what it says tells `datasets` which rows a derived file is of.
    """
    folder = partial(output)
    splits: dict[str, list[str]] = {}
    for path in paths:
        splits.setdefault(path.parent.name, []).append(path.name)
    for path in [path for path in folder.glob("*/") if path.name not in splits] + list(folder.glob("*/*/")):
        remove_folder(path)  # parts of an older release, which nobody reads
    for split, names in splits.items():
        datasets.DatasetInfo(features=features).write_to_directory(str(folder / split))
        fingerprint = hashlib.sha256(f"{split} {(folder / record_name).read_text()}".encode()).hexdigest()[:16]
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        write_text(folder / split / "state.json", json.dumps(state, indent=2))
    write_text(folder / "dataset_dict.json", json.dumps({"splits": list(splits)}))
    publish(folder, output)


def refuse_full_disk(output: Path, num_bytes: int, remedy: str) -> None:
    """Raises ValueError where the disk has not as much as is still to be written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if num_bytes > (free := shutil.disk_usage(output.parent).free):
        raise ValueError(
            f"output {output}: needs {num_bytes / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB free; "
            f"free some, name a folder on another disk, or {remedy}"
        )


def read_record(folder: str, name: str) -> dict[str, Any]:
    """What is written beside responses: how they, or what goes with them, were made.

    Raises:
        ValueError: there is no such record, or no sense in it.
    """
    try:
        record: dict[str, Any] = json.loads((Path(folder) / name).read_text())
        record["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"responses {folder}: {name} is missing or damaged; make them anew") from error
    return record


def _refuse_other_settings(folder: Path, record_name: str, settings: dict[str, Any]) -> None:
    """What is there may be reused only if the same configuration made it."""
    if not (folder / record_name).is_file():
        raise ValueError(f"output {folder}: exists and holds no {record_name}; give another folder")
    recorded = read_record(str(folder), record_name)["settings"]
    wanted = json.loads(json.dumps(settings))
    if "responses_sha256" in wanted and "responses_sha256" not in recorded:
        raise ValueError(f"output {folder}: holds responses with states kept by `respond`; give another folder")
    if "sampling" in wanted:
        # a release that did not know a field wrote what its default gives
        unrecorded = json.loads(json.dumps(asdict(SamplingParams(seed=0))))
        recorded["sampling"] = {**unrecorded, **recorded.get("sampling", wanted["sampling"])}
        recorded.setdefault("keep_states", False)
    for key, value in wanted.items():
        if recorded.get(key, value) != value:  # what is not recorded cannot be compared
            raise ValueError(
                f"{key}: {value!r} differs from {recorded.get(key)!r}, with which {folder} was begun; "
                "restore it, give another output, or delete the folder"
            )
