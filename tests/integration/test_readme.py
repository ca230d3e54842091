"""What the README tells people to type works, in the order in which it tells them."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
# the two set-up commands are what runs this test, and the demo
COMMANDS = [code for language, code in BLOCKS if language == "bash" and "scripts/demo" not in code]
PROGRAMS = [code for language, code in BLOCKS if language == "python"]


@pytest.mark.slow
def test_commands_and_program_run(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    assert len(COMMANDS) == 3
    assert len(PROGRAMS) == 1
    shutil.copytree(tiny_model_folder(), tmp_path / "my-model")
    prompts = [{"prompt": f"Where is order {number} of {number % 3} lamps?"} for number in range(100)]
    (tmp_path / "my-prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (tmp_path / "program.py").write_text(PROGRAMS[0])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for script in [*COMMANDS, "python program.py"]:
        done = subprocess.run(
            ["bash", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "tokens per target pass" in done.stdout
    assert (tmp_path / "runs/my/run/pair/draft/model.safetensors").is_file()
    assert (tmp_path / "runs/my/run/costs.json").is_file()
    assert (tmp_path / "runs/my/run/parity.json").is_file()
    assert (tmp_path / "runs/my/report.html").is_file()
    assert (tmp_path / "runs/my/export/draft/model.safetensors").is_file()
    assert (tmp_path / "runs/my/warm/model/model.safetensors").is_file()
    assert not (tmp_path / "runs/my/self/draft").exists()


def test_files_it_names_exist() -> None:
    root = Path(__file__).parents[2]
    named = re.findall(r"\]\(([\w./-]+)\)", README)
    assert named
    assert [name for name in named if not (root / name).exists()] == []
