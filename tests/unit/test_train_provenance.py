"""Provenance says what it knows and null for the rest."""

import json
import platform
from datetime import datetime
from pathlib import Path

import pytest
import torch

from train import provenance as module
from train.provenance import provenance


def test_it_names_versions_machine_and_command() -> None:
    found = provenance({"a": {"b": 1}}, command="spec-train --x")
    assert json.loads(json.dumps(found)) == found
    assert found["resolved_config"] == {"a": {"b": 1}}
    assert found["command"] == "spec-train --x"
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_gib"] > 0.1
    assert datetime.fromisoformat(found["started_at"]).tzinfo is not None


def test_an_absent_package_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no-such-package"))
    versions = provenance({})["versions"]
    assert versions["no-such-package"] is None
    assert versions["torch"] is not None


def test_without_git_or_outside_a_repository_the_sha_is_null(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance({})["git_sha"] is None
    monkeypatch.undo()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "provenance.py"))
    assert provenance({})["git_sha"] is None
