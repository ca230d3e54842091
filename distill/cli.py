"""The console script `spec-distill`."""

from collections.abc import Callable
from typing import Any

from train.console import RESUMES, run_commands

from .config import BuildConfig, CacheConfig, RespondConfig, RunConfig

PROGRAM = "spec-distill"


def _respond(config: RespondConfig) -> None:
    from .responses import respond

    respond(config)


def _cache(config: CacheConfig) -> None:
    from .cache import cache

    cache(config)


def _build(config: BuildConfig) -> None:
    from .build import build

    build(config)


def _estimate(config: RunConfig) -> None:
    from .estimate import estimate

    estimate(config)


def _run(config: RunConfig) -> None:
    from .run import distill

    distill(config)


COMMANDS: dict[str, tuple[type, Callable[[Any], None], str]] = {
    "respond": (
        RespondConfig,
        _respond,
        "let the target answer the prompts: the text to learn from and be judged on",
    ),
    "cache": (CacheConfig, _cache, "keep what the target says of the responses on disk, to train without it"),
    "build": (BuildConfig, _build, "make a draft: of layers of the target, of another model, or a fresh one"),
    "estimate": (RunConfig, _estimate, "print what a run will take, after a few of its steps"),
    "run": (RunConfig, _run, "train the draft on the target's token distributions"),
}


def main(argv: list[str] | None = None) -> int:
    """Makes a draft; `spec-distill --help` lists the stages."""
    return run_commands(PROGRAM, "Distil a draft for a target model, stage by stage.", COMMANDS, argv, RESUMES)
