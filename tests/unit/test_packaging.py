"""What is installed works wherever it is run, and holds what it should."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("train", "distill", "decode")
RECIPES = sorted(ROOT.glob("configs/**/*.yaml"))

# configs/<stage>/<name>.yaml: the stage's package and subcommand; configs/<name>.yaml has sections for those of distill
STAGES = {
    "train": ["train"],
    **{stage: ["distill", stage] for stage in ("respond", "build", "cache", "estimate", "run")},
    **{stage: ["decode", stage] for stage in ("generate", "evaluate", "bench", "prove", "export")},
}
PROMPT_SETS = ("service", "general")
MAX_SIMILARITY = 0.35


def run(command: list[Any], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", PACKAGES)
def test_console_scripts_ignore_modules_of_the_same_names(package: str, tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('a file of the user, {name}.py')\n")
    # the control: they do get in the way of whatever looks in the working folder first
    assert f"a file of the user, {package}.py" in run([sys.executable, "-c", f"import {package}"], tmp_path).stderr

    script = Path(sys.executable).parent / f"spec-{package}"
    done = run([script, "--help"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: spec-{package} ")


@pytest.mark.parametrize("package", PACKAGES)
def test_python_m(package: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-m", package, "--help"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: spec-{package} ")


def test_every_package_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {file.parent for name in PACKAGES for file in (ROOT / name).rglob("*.py")}
    folders.add(ROOT / "decode" / "prompt_sets")
    assert sorted(declared) == sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: str(recipe.relative_to(ROOT / "configs")))
def test_recipe_parses(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.read_text().startswith("# "), "a recipe's header says hardware, minutes and acceptance"
    if recipe.parent.name == "configs":
        commands = [["distill", "--config", str(recipe), section] for section in yaml.safe_load(recipe.read_text())]
    else:
        commands = [[*STAGES[recipe.parent.name], "--config", str(recipe)]]
    for package, *command in commands:
        main = import_module(f"{package}.cli").main
        assert main([*command, "--print_config"]) == 0, capsys.readouterr().err
        assert isinstance(yaml.safe_load(capsys.readouterr().out), dict)


def test_a_recipe_of_several_commands_does_none_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("respond: {target: t, prompts: p, output: r}\nbuild: {target: t, output: b, layers: 3}\n")
    main = import_module("distill.cli").main
    assert main(["--config", str(recipe)]) == 2
    assert (
        "command: none is given, and the file may have sections for several; add respond or " in capsys.readouterr().err
    )
    assert main(["--config", str(recipe), "build", "--layers", "[0, 4]", "--print_config"]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert (told["output"], told["layers"]) == ("b", [0, 4])
    recipe.write_text("biuld: {target: t, output: b}\n")
    assert main(["--config", str(recipe), "build"]) == 2
    assert capsys.readouterr().err.startswith("spec-distill: error: unknown key biuld")


def test_a_recipe_with_an_unknown_key_does_not_parse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\ndatum: d\n")
    main = import_module("train.cli").main
    assert main(["--config", str(recipe), "--print_config"]) == 2
    assert "unknown key datum" in capsys.readouterr().err


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_prompt_set_is_large_enough_and_well_formed(name: str) -> None:
    prompts = read_prompts(name)
    assert len(prompts) >= 480
    assert sum(prompt["split"] == "heldout" for prompt in prompts) >= 80
    assert {prompt["split"] for prompt in prompts} == {"train", "heldout"}
    assert all(set(prompt) == {"id", "category", "split", "prompt"} for prompt in prompts)
    assert all(prompt["prompt"].strip() == prompt["prompt"] != "" for prompt in prompts)


def test_prompt_ids_and_texts_are_unique() -> None:
    prompts = [prompt for name in PROMPT_SETS for prompt in read_prompts(name)]
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert len({prompt["prompt"].casefold() for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_no_heldout_prompt_resembles_a_training_prompt(name: str) -> None:
    similarity, heldout, train = most_similar(*split(name))
    assert similarity < MAX_SIMILARITY, f"{heldout!r} resembles {train!r}"


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_a_lightly_edited_training_prompt_is_caught(name: str) -> None:
    _, train = split(name)
    for prompt in train[::40]:
        first, *rest = prompt.split()
        edited = " ".join([first.upper(), *rest[:-1], "soon!"])
        assert edited not in train
        similarity, _, original = most_similar([edited], train)
        assert (original, similarity >= MAX_SIMILARITY) == (prompt, True)


def read_prompts(name: str) -> list[dict[str, str]]:
    text = files("decode").joinpath("prompt_sets", f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def split(name: str) -> tuple[list[str], list[str]]:
    """The held-out and the training prompts."""
    prompts = read_prompts(name)
    heldout, train = ([p["prompt"] for p in prompts if p["split"] == part] for part in ("heldout", "train"))
    return heldout, train


def most_similar(some: list[str], others: list[str]) -> tuple[float, str, str]:
    """The pair whose sets of three-word phrases have the largest Jaccard similarity, which comes first."""
    phrases = [(text, three_word_phrases(text)) for text in others]
    return max(
        (len(one & two) / len(one | two), text, other)
        for text, one in ((text, three_word_phrases(text)) for text in some)
        for other, two in phrases
    )


def three_word_phrases(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 3]) for i in range(max(len(words) - 2, 1))}
