"""Kills a training run at random moments, begins it again, and compares what it ends with to the run left alone.

    python scripts/kill_test.py --kills 100 --output runs/kill-test -- --config configs/run/smollm2-demo.yaml \
        --train.max_steps 20 --train.batch_size 4 --train.micro_batch_size 4 --train.checkpoint_every_steps 1 \
        --train.eval_every_steps 5 --compile false --parity_prompts 0

What stands after -- is for `spec-distill run`. SIGKILL comes after a random part of the time that the undisturbed run
took; a run that gets to its end before is compared, and another is begun, until there were so many kills. Exits with 1
if weights differ in a bit, or if a temporary file is left.
"""

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import Progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs/kill-test"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("arguments", nargs="+", help="of `spec-distill run`, after --")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"--output: {options.output} exists; delete it or give another")
    whole, killed = options.output / "whole", options.output / "killed"
    started = time.monotonic()
    if start(options.arguments, whole).wait():
        return 1
    seconds = time.monotonic() - started
    expected, draw = weights(whole), random.Random(options.seed)
    num_kills = num_runs = 0
    with Progress() as progress:
        task = progress.add_task("kills", total=options.kills)
        while num_kills < options.kills or killed.exists() or not num_runs:
            run = start(options.arguments, killed)
            try:
                returncode = run.wait(draw.uniform(0, seconds) if num_kills < options.kills else None)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
                num_kills += 1
                progress.advance(task)
                continue
            if fault := found(returncode, killed, expected):
                print(f"after {num_kills} kills: {fault}", file=sys.stderr)
                return 1
            num_runs += 1
            shutil.rmtree(killed)
    print(
        f"{num_kills} kills, {num_runs} runs: their weights are those of the run left alone, bit for bit; nothing left"
    )
    return 0


def start(arguments: list[str], output: Path) -> subprocess.Popen[bytes]:
    """`spec-distill run`, speaking into a log beside its folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "distill", "run", *arguments, "--train.output", str(output)]
        return subprocess.Popen(command, stdout=log, stderr=log)


def weights(output: Path) -> dict[str, str]:
    """Hashes of what a run made, by file."""
    files = (output / "pair").rglob("*.safetensors")
    return {str(file.relative_to(output)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def found(returncode: int, output: Path, expected: dict[str, str]) -> str | None:
    """What is wrong with a run that came to its end; None when nothing is."""
    if returncode:
        return f"the run ended with {returncode}; see {output.with_suffix('.log')}"
    if weights(output) != expected:
        return f"{output} has other weights than the run left alone"
    if left := [str(path) for path in output.rglob("*") if path.name.endswith(".tmp")]:
        return f"left: {', '.join(left)}"
    return None


if __name__ == "__main__":
    raise SystemExit(main())
