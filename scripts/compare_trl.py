"""draftsmith and TRL on one draft, the same responses and the same minutes; scripts/compare_trl prepares for it.

Each trains in a process of its own, one after the other, and the system says how much memory it took. Ours goes first,
for as many steps as `spec-distill estimate` finds room for in the minutes. TRL then gets the minutes that ours really
took, once for each learning rate, and is judged by the best. The teacher is online for both, unless options after --
say otherwise for ours, such as `--teacher cached --responses runs/…/cache`; what was kept beforehand is then not in the
minutes. Acceptance is measured by `spec-decode evaluate` on held-out prompts. How TRL is used, and why so:
scripts/train_with_trl.py.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

TRL = "trl==1.16.0"
TRL_ENVIRONMENT = Path("runs/compare-trl-venv")
COMMANDS = Path(sys.executable).parent
# Both keep the memory that they have freed, and have it in large pages. Otherwise glibc gives logits of the whole
# vocabulary back to the system and asks for them anew at each step, which would take TRL more than a third of its time.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "THP_MEM_ALLOC_ENABLE": "1"}
# so many that the minutes of an estimate, which it rounds, say precisely what a step takes
ESTIMATED_STEPS = 100_000


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one training took.

    Attributes:
        num_steps: optimiser steps.
        num_tokens: response tokens learnt in them, each as often as it was met.
        seconds: from the first step's begin to the last one's end.
        peak_bytes: the most memory that the process held.
    """

    num_steps: int
    num_tokens: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the comparison: who, what training took, what `spec-decode evaluate` found."""

    name: str
    training: Training
    evaluation: dict[str, Any]


def main() -> None:
    options = parse()
    output = Path(options.output)
    try:
        refuse_other_settings(output / "settings.json", vars(options))
        contenders = compare(options, output)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"compare_trl: error: {error}")
    (output / "comparison.json").write_text(json.dumps([asdict(each) for each in contenders], indent=1))
    Console(highlight=False, width=max(120, Console().width)).print(table(contenders, teacher=signal(output / "ours")))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare_trl", description=__doc__.split("\n")[0])
    parser.add_argument("--pair", required=True, help="untrained pair that both begin with")
    parser.add_argument(
        "--responses", required=True, help="what `spec-distill respond` wrote, or `cache` with a signal"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, for each")
    parser.add_argument("--output", default="runs/compare-trl")
    parser.add_argument("--recipe", default="configs/run/smollm2-demo.yaml", help="of spec-distill run")
    parser.add_argument("--trl-learning-rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3])
    parser.add_argument("--trl-batch-size", type=int, default=16, help="sequences per optimiser step")
    parser.add_argument("--trl-micro-batch-size", type=int, default=8, help="sequences per forward pass")
    parser.add_argument("overrides", nargs="*", help="after --: further options of spec-distill run")
    return parser.parse_args()


def compare(options: argparse.Namespace, output: Path) -> list[Contender]:
    """Train and measure everything that is not there yet.

    Raises:
        ValueError: batches that do not divide.
        OSError: responses without a record.
        CalledProcessError: a command failed; it has said why.
    """
    if options.trl_batch_size % options.trl_micro_batch_size:
        raise ValueError(
            f"trl_micro_batch_size: {options.trl_micro_batch_size} does not divide {options.trl_batch_size}"
        )
    record = json.loads((Path(options.responses) / "respond.json").read_text())["settings"]
    pair = Path(options.pair)
    reduced = (pair / "draft_vocab.safetensors").is_file()
    ours = kept(output / "ours", lambda folder: train_ours(folder, options))
    contenders = [
        Contender(name="draftsmith", training=ours, evaluation=evaluate(output / "ours/pair", options, record))
    ]
    for learning_rate in options.trl_learning_rates:
        folder = output / f"trl-{learning_rate:g}"
        theirs = kept(folder, lambda folder, rate=learning_rate: train_theirs(folder, rate, ours.seconds, options))
        for whole in (False, True) if reduced else (True,):
            made = make_pair(pair, folder, whole)
            name = f"TRL, learning rate {learning_rate:g}" + (", whole vocabulary" if reduced and whole else "")
            contenders.append(Contender(name=name, training=theirs, evaluation=evaluate(made, options, record)))
    return contenders


def refuse_other_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write down what the halves are trained with; learning rates may be added later.

    Raises:
        ValueError: they were begun with something else.
    """
    wanted = {name: value for name, value in settings.items() if name not in ("output", "trl_learning_rates")}
    recorded = json.loads(path.read_text()) if path.is_file() else wanted
    for name, value in wanted.items():
        if recorded.get(name) != value:
            raise ValueError(
                f"{name}: {value!r} differs from {recorded.get(name)!r}, with which {path.parent} was begun; "
                "restore it or give another output"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted, indent=1))


def kept(folder: Path, train: Callable[[Path], Training]) -> Training:
    """What training in a folder took; what was interrupted there is begun anew, so that its minutes are whole."""
    path = folder / "training.json"
    if not path.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        path_of_new = folder.with_name(f".{folder.name}.json")
        path_of_new.write_text(json.dumps(asdict(train(folder)), indent=1))
        path_of_new.replace(path)
    return Training(**json.loads(path.read_text()))


def train_ours(folder: Path, options: argparse.Namespace) -> Training:
    """`spec-distill run`, without the measurements around training that TRL does not make."""
    given = ["--config", options.recipe, "--pair", options.pair, "--responses", options.responses]
    given += ["--teacher", "online", "--measure_speed", "false", "--parity_prompts", "0", *options.overrides]
    given += ["--train.output", str(folder)]
    say(f"draftsmith: how many steps {options.minutes:g} minutes have room for")
    command = [COMMANDS / "spec-distill", "estimate", *given, "--train.max_steps", str(ESTIMATED_STEPS)]
    estimate = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "120"}
    )
    num_steps = steps_within(options.minutes, estimate.stdout)
    say(f"draftsmith: {num_steps} steps")
    peak_bytes = measured([COMMANDS / "spec-distill", "run", *given, "--train.max_steps", str(num_steps)])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return training_of(lines, peak_bytes)


def train_theirs(folder: Path, learning_rate: float, seconds: float, options: argparse.Namespace) -> Training:
    """scripts/train_with_trl.py, in TRL's environment."""
    python = trl_python()
    say(f"TRL: {seconds / 60:.1f} minutes at learning rate {learning_rate:g}")
    pair = json.loads((Path(options.pair) / "pair.json").read_text())
    given = {
        "draft": f"{options.pair}/draft",
        "target": pair["target"]["id"],
        "responses": options.responses,
        "seconds": seconds,
        "learning-rate": learning_rate,
        "batch-size": options.trl_batch_size,
        "micro-batch-size": options.trl_micro_batch_size,
        "output": folder,
    }
    arguments = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    peak_bytes = measured([python, "scripts/train_with_trl.py", *arguments])
    return Training(**json.loads((folder / "took.json").read_text()), peak_bytes=peak_bytes)


def trl_python() -> Path:
    """The interpreter of TRL's own environment, which is made if need be, with the versions that we are tested with."""
    python, stamp = TRL_ENVIRONMENT / "bin/python", TRL_ENVIRONMENT / "installed"
    wanted = TRL + "\n" + Path("constraints.txt").read_text()
    if not stamp.is_file() or stamp.read_text() != wanted:
        say(f"TRL: installing {TRL} into {TRL_ENVIRONMENT}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", TRL_ENVIRONMENT], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--constraint", "constraints.txt", "torch", TRL], check=True)
        stamp.write_text(wanted)
    return python


def measured(command: list[Any]) -> int:
    """Run a command to its end; the most memory it held, in bytes.

    The system counts in what this process held when it began the command: nothing large may be imported here.

    Raises:
        CalledProcessError: it failed.
    """
    process = subprocess.Popen(command, env=os.environ | ALLOCATOR)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # Linux counts in KiB


def steps_within(minutes: float, estimate: str) -> int:
    """Optimiser steps that fit into some minutes, by what `spec-distill estimate` printed for ESTIMATED_STEPS.

    Raises:
        ValueError: it printed something else.
    """
    found = re.search(r"minutes\W+([\d,]+\.\d), of which", estimate)
    if not found:
        raise ValueError(f"estimate: no minutes in what `spec-distill estimate` printed:\n{estimate}")
    return max(1, int(ESTIMATED_STEPS * minutes / float(found[1].replace(",", ""))))


def training_of(lines: list[dict[str, float]], peak_bytes: int) -> Training:
    """What the lines of a metrics.jsonl say of the training; the evaluation after the last step is no part of it."""
    last = [line for line in lines if "seconds" in line][-1]
    return Training(
        num_steps=int(last["step"]), num_tokens=int(last["tokens"]), seconds=last["seconds"], peak_bytes=peak_bytes
    )


def make_pair(untrained: Path, folder: Path, whole: bool) -> Path:
    """A pair of the draft that TRL left in `folder`, with the untrained pair's output vocabulary or the whole one."""
    made = folder / ("pair-whole-vocabulary" if whole else "pair")
    if not made.is_dir():
        temporary = folder / f".{made.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(folder / "draft", temporary / "draft", copy_function=os.link)
        if not whole:
            shutil.copy(untrained / "draft_vocab.safetensors", temporary)
        pair = json.loads((untrained / "pair.json").read_text())
        pair |= {"measured": {}, "provenance": {"trained_with": TRL, "started_from": pair["provenance"]}}
        (temporary / "pair.json").write_text(json.dumps(pair, indent=2))
        temporary.replace(made)
    return made


def evaluate(pair: Path, options: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    """What `spec-decode evaluate` finds for a pair, on the held-out prompts of the responses."""
    path = pair.with_name(f"{pair.name}.evaluation.json")
    if not path.is_file():
        say(f"acceptance of {pair}")
        given = {
            "pair": pair,
            "prompts": record["prompts"],
            "responses": options.responses,
            "sampling": json.dumps(record["sampling"]),
            "output": path,
        }
        command = [COMMANDS / "spec-decode", "evaluate"]
        subprocess.run(command + [word for name, value in given.items() for word in (f"--{name}", value)], check=True)
    return json.loads(path.read_text())


def signal(run: Path) -> str:
    """Where ours had its teacher's signal from: "online" or "cached"."""
    return yaml.safe_load((run / "config.yaml").read_text())["teacher"]


def table(contenders: list[Contender], teacher: str) -> Table:
    """A row for each contender; the best of TRL's is bold, as ours is."""
    ours, *theirs = contenders
    best = max(theirs, key=lambda each: each.evaluation["alpha"])
    drafted = ours.evaluation["num_draft_tokens"]
    result = Table(
        "",
        "alpha (95%)",
        f"E, {drafted} drafted (95%)",
        *("tokens/s", "minutes", "steps", "peak memory"),
        title=f"{ours.evaluation['prompts']}: {ours.evaluation['num_prompts']} held-out prompts",
        caption=f"tokens: of responses; teacher: draftsmith {teacher}, TRL online",
    )
    for each in contenders:
        took = each.training
        result.add_row(
            each.name,
            interval(each.evaluation, "alpha"),
            interval(each.evaluation, "block_efficiency"),
            f"{took.num_tokens / took.seconds:,.0f}",
            f"{took.seconds / 60:.1f}",
            str(took.num_steps),
            f"{took.peak_bytes / 1e9:.2f} GB",
            style="bold" if each in (ours, best) else None,
        )
    return result


def interval(figures: dict[str, Any], name: str) -> str:
    low, high = figures[f"{name}_interval"]
    return f"{figures[name]:.3f} ({low:.3f} to {high:.3f})"


def say(message: str) -> None:
    print(f"\n== {message}", flush=True)


if __name__ == "__main__":
    main()
