"""Two processes evaluate what one does. Run as a script, this file is one of them:

accelerate launch test_decode_evaluate.py PAIR PROMPTS OUTPUT
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import decode.evaluate
from decode.agreement import sums_on_text
from decode.config import EvaluateConfig
from decode.evaluate import evaluate
from decode.pair import Pair
from decode.params import SamplingParams

ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 9
TIMED = (
    *("costs", "predicted_speedup", "predicted_speedup_intervals", "best_num_draft_tokens"),
    *("measured_speedups", "measured_speedup", "measured_seconds", "provenance"),
)


def evaluate_and_count(pair: str, prompts: str, output: str) -> None:
    """Leaves OUTPUT, and in OUTPUT-RANK.txt on how many texts p and q were compared here."""
    seen = []

    def counted(*arguments: Any) -> list[list[float]]:
        seen.append(arguments)
        return sums_on_text(*arguments)

    decode.evaluate.sums_on_text = counted  # type: ignore[attr-defined]
    results = evaluate(
        EvaluateConfig(
            pair=pair,
            prompts=prompts,
            output=output,
            sampling=SamplingParams(temperature=1.0, max_new_tokens=12, seed=0),
            more_sampling=[{"temperature": 0}],
            batch_size=2,
            num_timed_prompts=0,
        )
    )
    rank = os.environ.get("RANK", "0")
    Path(f"{output}-{rank}.txt").write_text(f"{len(seen)} {results[0].alpha!r} {results[1].costs!r}")


@pytest.mark.slow
def test_two_processes_find_what_one_does(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    target = tiny_model_folder(seed=0)
    shutil.copytree(tiny_model_folder(seed=1, num_layers=1), tmp_path / "pair" / "draft")
    Pair(target={"id": str(target)}, num_draft_tokens=2).save(tmp_path / "pair")
    rows = [{"prompt": "Item" * (1 + n % 3) + str(n), "category": "ab"[n % 2]} for n in range(NUM_PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [str(tmp_path / "pair"), str(tmp_path / "prompts.jsonl")]
    one, two = (tmp_path / f"{name}.json" for name in ("one", "two"))
    # accelerate's --cpu starts one process whatever --num_processes says; --multi_gpu starts two, also here
    options = "--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--dynamo_backend", "no"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launch, __file__, *common, str(two)],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    torch.set_num_threads(1)
    evaluate_and_count(*common, str(one))
    (first, *same), (second, *known) = (Path(f"{two}-{rank}.txt").read_text().split(maxsplit=1) for rank in range(2))
    assert (int(first), int(second)) == (10, 8)  # of nine texts at either setting, five and four
    assert same == known  # what is printed, whoever prints it
    figures, expected = (json.loads(path.read_text()) for path in (two, one))
    for found, alone in zip([figures, *figures["settings"]], [expected, *expected["settings"]], strict=True):
        for each in (found, alone):
            for name in (*TIMED, "settings"):
                each.pop(name, None)
        assert found == alone
    assert sorted(path.name for path in tmp_path.glob("*.json*")) == [
        *("one.json", "one.json-0.txt", "prompts.jsonl", "two.json", "two.json-0.txt", "two.json-1.txt")
    ]


if __name__ == "__main__":
    evaluate_and_count(*sys.argv[1:])
