"""The console script `spec-distill`."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from train.console import Parser, run

from .config import BuildConfig, RespondConfig, RunConfig

PROGRAM = "spec-distill"


def _respond(config: RespondConfig) -> None:
    from .responses import respond

    respond(config)


def _build(config: BuildConfig) -> None:
    from .build import build

    build(config)


def _run(config: RunConfig) -> None:
    from .run import distill

    distill(config)


COMMANDS: dict[str, tuple[type, Callable[[Any], None], str]] = {
    "respond": (
        RespondConfig,
        _respond,
        "let the target answer the prompts: the text to learn from and be judged on",
    ),
    "build": (BuildConfig, _build, "make a draft out of layers of the target"),
    "run": (RunConfig, _run, "train the draft on the target's token distributions"),
}


def main(argv: list[str] | None = None) -> int:
    """Makes a draft; `spec-distill --help` lists the stages."""
    return run(PROGRAM, lambda: _main(argv))


def _main(argv: list[str] | None) -> None:
    parser = Parser(prog=PROGRAM, description="Distil a draft for a target model, stage by stage.")
    subcommands = parser.add_subcommands(dest="command")
    for name, (config_class, _, help_text) in COMMANDS.items():
        subparser = Parser(prog=f"{PROGRAM} {name}", description=(config_class.__doc__ or "").split("\n")[0])
        subparser.add_argument("--config", action="config", help="YAML file; options after it override its values")
        subparser.add_class_arguments(config_class)
        subcommands.add_subcommand(name, subparser, help=help_text)
    options = parser.instantiate(parser.parse_args(argv))
    config_class, command, _ = COMMANDS[options.command]
    chosen = options[options.command]
    command(config_class(**{field.name: chosen[field.name] for field in fields(config_class)}))
