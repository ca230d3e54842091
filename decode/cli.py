"""The console script `spec-decode`."""

from collections.abc import Callable
from typing import Any

from .config import BenchConfig, EvaluateConfig, ExportConfig, GenerateConfig, ProveConfig, ReportConfig
from .console import run_commands

PROGRAM = "spec-decode"


def _generate(config: GenerateConfig) -> None:
    from .generate import generate

    generate(config)


def _evaluate(config: EvaluateConfig) -> None:
    from rich import print

    from .evaluate import evaluate
    from .shared_work import processes
    from .tables import evaluation_tables

    results = evaluate(config)
    if processes().is_main_process:
        print(evaluation_tables(results))


def _bench(config: BenchConfig) -> None:
    from rich import print

    from .bench import bench
    from .tables import bench_tables

    print(bench_tables(bench(config)))


def _report(config: ReportConfig) -> None:
    from .report import report

    report(config)


def _prove(config: ProveConfig) -> None:
    from rich import print

    from .prove import prove
    from .tables import proof_table

    checks = prove(config)
    print(proof_table(checks))
    if not all(check.passed for check in checks):
        raise SystemExit(1)


def _export(config: ExportConfig) -> None:
    import rich

    from .export import export
    from .tables import export_summary

    exported = export(config)
    rich.print(export_summary(exported))
    print(exported.command)  # whole, however long


COMMANDS: dict[str, tuple[type, Callable[[Any], None], str]] = {
    "generate": (GenerateConfig, _generate, "answer prompts"),
    "evaluate": (EvaluateConfig, _evaluate, "measure how often the target accepts the draft"),
    "bench": (BenchConfig, _bench, "time plain against speculative decoding"),
    "report": (ReportConfig, _report, "show what these two found as a page with plots"),
    "prove": (ProveConfig, _prove, "show that its text is the target's"),
    "export": (ExportConfig, _export, "write the draft for another engine"),
}


def main(argv: list[str] | None = None) -> int:
    """Uses a pair; `spec-decode --help` lists what can be done."""
    return run_commands(PROGRAM, "Generate with a target and its draft, and measure the two.", COMMANDS, argv)
