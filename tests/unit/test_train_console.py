"""What the user sees of an error: one line, exit code 2."""

import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from train import console
from train.console import Parser, run


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Inner.

    Args:
        batch_size: rows
        limit: most
    """

    batch_size: int = 1
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Outer.

    Args:
        model: name
        inner: more
    """

    model: str
    inner: Inner


MISTYPED = "inner.batch_sise; the nearest known one is inner.batch_size"


@pytest.fixture(autouse=True)
def _untouched_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_configure_logging", lambda: None)


def parse(*arguments: str, subcommand: bool = False) -> int:
    parser = Parser(prog="spec-x")
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Outer)
    if subcommand:
        inner, parser = parser, Parser(prog="spec-x")
        parser.add_subcommands().add_subcommand("run", inner)
    return run("spec-x", lambda: parser.parse_args(list(arguments)) and None)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--model", "m", "--inner.batch_sise", "3"],
            "unknown key inner.batch_sise; the nearest known one is inner.batch_size",
        ),
        (["--modle", "m"], "unknown key modle; the nearest known one is model"),
        (["--model", "m", "--inner.batch_size", "x"], "inner.batch_size: expected int, got x"),
        (["--model", "m", "--inner.limit", "x"], "inner.limit: expected int, got x"),
        ([], "the following arguments are required: model"),
        (["--config", "nowhere.yaml"], "config: File does not exist: "),
        (["--model"], "argument --model: expected one argument"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"spec-x: error: {line}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "model: m\ninner:\n  batch_sise: 3\n",
            "unknown key inner.batch_sise; the nearest known one is inner.batch_size",
        ),
        ("modle: m\n", "unknown key modle; the nearest known one is model"),
        ("model: m\ninner:\n  batch_size: x\n", "inner.batch_size: expected int, got x"),
        ("model: [m\n", "Problems parsing config: "),
        ("3\n", "Unexpected config: 3"),
    ],
)
@pytest.mark.parametrize("subcommand", [False, True])
def test_a_mistake_in_the_file_is_one_line(
    text: str, line: str, subcommand: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert parse(*(["run"] if subcommand else []), "--config", str(path), subcommand=subcommand) == 2
    out, err = capsys.readouterr()
    assert out == ""
    # below a subcommand a key may carry the subcommand's name
    assert err.replace("run.", "").startswith(f"spec-x: error: {line}")
    assert err.count("\n") == 1


def test_a_correct_command_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--model", "m", "--inner.limit", "3") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("subcommand", [False, True])
@pytest.mark.parametrize(
    ("arguments", "names", "numbers"),
    [
        (["--names", "a, b", "[c", "--numbers", "0", "-1.5"], ["a, b", "[c"], [0.0, -1.5]),
        (["--names", "x: y", "--numbers", "[2, 3]"], ["x: y"], [2.0, 3.0]),
        (["--names=[a, b]", "--numbers", "2"], ["a", "b"], [2.0]),
        (["--names", "a", "--names", "b"], ["b"], [1.0]),
        (["--names+", "a", "--names+", "b"], ["z", "a", "b"], [1.0]),
    ],
)
def test_a_list_is_what_follows_its_name(
    arguments: list[str], names: list[str], numbers: list[float], subcommand: bool
) -> None:
    parser = inner = Parser(prog="spec-x")
    if subcommand:
        parser, inner = Parser(prog="spec-x"), Parser(prog="spec-x run")
        parser.add_subcommands().add_subcommand("run", inner)
    inner.add_argument("--names", type=list[str], default=["z"])
    inner.add_argument("--numbers", type=list[float], default=[1.0])
    options = parser.parse_args([*(["run"] if subcommand else []), *arguments])
    found = options.run if subcommand else options
    assert (found.names, found.numbers) == (names, numbers)


def test_help_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--help") == 0
    assert "--inner.batch_size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("a\n  b"), 2, "spec-x: error: a b"),
        (
            FileNotFoundError(2, "No such file or directory", "x"),
            2,
            "spec-x: error: x: No such file or directory",
        ),
        (OSError("no\nmodel"), 2, "spec-x: error: no model"),
        (KeyboardInterrupt(), 130, "spec-x: interrupted"),
    ],
)
def test_errors_of_the_user_become_a_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise error

    assert run("spec-x", body) == code
    assert capsys.readouterr().err == line + "\n"


def test_errors_of_ours_keep_their_traceback() -> None:
    def body() -> None:
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        run("spec-x", body)


def test_only_the_main_process_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    logger = logging.getLogger("train")
    before = (logger.handlers, logger.level)
    try:
        for rank, level in (("1", logging.ERROR), ("0", logging.INFO)):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
            run("spec-x", lambda: None)
            assert logger.level == level
            assert len(logger.handlers) == 1
    finally:
        logger.handlers, logger.level = before


REALLOCATION = """
import resource, torch
from train.console import run

def body():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

run("spec-train", body)
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.is_file() or "[madvise]" not in HUGE_PAGES.read_text(), reason="the system gives none, or always"
)
def test_large_tensors_have_huge_pages() -> None:
    def faults(**environment: str) -> int:
        command = [sys.executable, "-c", REALLOCATION]
        unset = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
        return int(subprocess.run(command, env=unset | environment, capture_output=True, text=True, check=True).stdout)

    # of 16,384 pages; who wants none is left alone
    assert faults() < 4096
    assert faults(THP_MEM_ALLOC_ENABLE="0") > 16000
