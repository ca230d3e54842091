"""The files of a run folder: configuration, metrics, the finished model."""

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from .checkpoint import write_text

logger = logging.getLogger(__name__)

# May differ: "output", so that a run folder can be moved or be given by another path, and what changes no weight.
FREE_KEYS = {"output", "log_every_steps", "trackers", "parity_prompts"}


class RunFolder:
    """Names and rules of one run folder.

    Attributes:
        config, provenance, metrics: files. checkpoints, and result (named by the task): folders.
    """

    def __init__(self, path: Path, result_name: str = "model") -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.provenance = path / "provenance.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.result = path / result_name

    def check(self, resolved_config: Mapping[str, Any]) -> None:
        """Makes sure that what is here came from the same configuration.

        Raises:
            ValueError: it came from another one (the first differing key is named), or from nowhere known.
        """
        if not self.result.exists() and not self.checkpoints.exists():
            return
        if not self.config.exists():
            raise ValueError(f"output: {self.path} holds files of something else; give another folder")
        recorded = _flat(yaml.safe_load(self.config.read_text(encoding="utf-8")))
        wanted = _flat(json.loads(json.dumps(resolved_config)))
        for key in [*wanted, *recorded]:
            was, now = recorded.get(key, "absent"), wanted.get(key, "absent")
            if was != now and key.rpartition(".")[2] not in FREE_KEYS:
                raise ValueError(
                    f"{key}: {now!r} differs from {was!r}, with which {self.path} was begun; "
                    f"restore it or give another output"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs out of the folder, which is made if missing, until this process leaves it or dies.

        Raises:
            ValueError: another run is in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)  # the folder itself: no file is left behind
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(f"output: another run is writing to {self.path}; wait for it or give another") from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s); see to it that no other run writes there", self.path, error)
        try:
            yield
        finally:
            os.close(descriptor)

    def begin(self, resolved_config: Mapping[str, Any], provenance: Mapping[str, Any], step: int) -> None:
        """Writes config.yaml and provenance.json, and cuts metrics.jsonl back to the lines up to `step`."""
        self.path.mkdir(parents=True, exist_ok=True)
        plain = json.loads(json.dumps(resolved_config))
        write_text(self.config, yaml.safe_dump(plain, sort_keys=False))
        write_text(self.provenance, json.dumps(provenance, indent=1))
        lines = [line for line in self.read_metrics() if line["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))

    def num_processes(self) -> int | None:
        """How many worked on it last; None where nobody noted it."""
        noted = json.loads(self.provenance.read_text(encoding="utf-8")) if self.provenance.exists() else {}
        return noted.get("num_processes")

    def read_metrics(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl, without a last one that a kill left incomplete."""
        lines: list[dict[str, float]] = []
        if self.metrics.exists():
            for text in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(text))
                except ValueError:
                    break
        return lines


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and leaf values of a nested mapping."""
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat
