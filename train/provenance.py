"""Where a result came from: configuration, command, versions, code, machine."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "datasets", "accelerate", "draftsmith")


def provenance(resolved_config: Mapping[str, Any], command: str | None = None) -> dict[str, Any]:
    """Everything needed to tell later how a result came to be, as JSON values.

    Args:
        resolved_config: the whole configuration, defaults included.
        command: the command line; this process's own when None.
    """
    return {
        "resolved_config": dict(resolved_config),
        "command": command if command is not None else shlex.join(sys.orig_argv),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "git_sha": _git_sha(),
        "hardware": _hardware(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    """Commit of the working tree this code is in, "-dirty" appended when it has changes; None without one."""
    # An installed copy may lie inside somebody else's repository, which does not track it.
    if not _git("ls-files", Path(__file__).name):
        return None
    return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _hardware() -> dict[str, Any]:
    import torch

    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        accelerators.append("mps")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "accelerators": accelerators,
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):  # not every system answers
        return None


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None
