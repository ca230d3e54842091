"""The console script `spec-decode`."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from .config import BenchConfig, EvaluateConfig, GenerateConfig
from .console import Parser, run

PROGRAM = "spec-decode"


def _generate(config: GenerateConfig) -> None:
    from .generate import generate

    generate(config)


def _evaluate(config: EvaluateConfig) -> None:
    from rich import print

    from .evaluate import evaluate
    from .tables import evaluation_table

    print(evaluation_table(evaluate(config)))


def _bench(config: BenchConfig) -> None:
    from rich import print

    from .bench import bench
    from .tables import bench_table

    print(bench_table(bench(config)))


COMMANDS: dict[str, tuple[type, Callable[[Any], None], str]] = {
    "generate": (GenerateConfig, _generate, "answer prompts"),
    "evaluate": (EvaluateConfig, _evaluate, "measure how often the target accepts the draft"),
    "bench": (BenchConfig, _bench, "time plain against speculative decoding"),
}


def main(argv: list[str] | None = None) -> int:
    """Uses a pair; `spec-decode --help` lists what can be done."""
    return run(PROGRAM, lambda: _main(argv))


def _main(argv: list[str] | None) -> None:
    parser = Parser(prog=PROGRAM, description="Generate with a target and its draft, and measure the two.")
    subcommands = parser.add_subcommands(dest="command")
    for name, (config_class, _, help_text) in COMMANDS.items():
        description = (config_class.__doc__ or "").split("\n")[0]
        subparser = Parser(prog=f"{PROGRAM} {name}", description=description)
        subparser.add_argument("--config", action="config", help="YAML file; options after it override its values")
        subparser.add_class_arguments(config_class)
        subcommands.add_subcommand(name, subparser, help=help_text)
    options = parser.instantiate(parser.parse_args(argv))
    config_class, command, _ = COMMANDS[options.command]
    chosen = options[options.command]
    command(config_class(**{field.name: chosen[field.name] for field in fields(config_class)}))
