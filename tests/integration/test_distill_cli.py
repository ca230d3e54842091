"""`spec-distill` from prompts to a pair that `spec-decode` measures as the training did; and what it refuses."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import decode.cli
from decode.pair import Pair
from distill.cli import main
from train.folder import RunFolder

NUM_LAYERS = 3
SAMPLING = {"temperature": 1.0, "max_new_tokens": 32}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Log lines go where a test looks, as in the program; of bars there are none, as where nobody watches."""
    loggers = [logging.getLogger(name) for name in ("train", "distill", "decode")]
    before = [(logger.handlers, logger.level) for logger in loggers]
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.level = handlers, level


@pytest.fixture(scope="module")
def target(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder(num_layers=NUM_LAYERS, hidden_size=16, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts.jsonl, responses/, cache/, pair/ and run/, made by the four commands in turn."""
    folder = tmp_path_factory.mktemp("distilled")
    rows = [{"prompt": f"Say {n}.", "split": "heldout" if n % 3 == 0 else "train"} for n in range(48)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": str(target),
        "prompts": str(folder / "prompts.jsonl"),
        "output": "overridden",
        "sampling": SAMPLING,
    }
    (folder / "respond.yaml").write_text(yaml.safe_dump(recipe))
    responses = str(folder / "responses")
    assert main(["respond", "--config", str(folder / "respond.yaml"), "--output", responses]) == 0
    cache = ["cache", "--responses", responses, "--output", str(folder / "cache")]
    assert main([*cache, "--kind", "hidden_states"]) == 0
    build = ["build", "--target", str(target), "--output", str(folder / "pair"), "--layers", "[0, 2]"]
    assert main([*build, "--responses", responses, "--vocab_size", "120"]) == 0
    train = {"output": str(folder / "run"), "max_steps": 20, "batch_size": 8, "learning_rate": 1e-2}
    recipe = {"pair": str(folder / "pair"), "responses": str(folder / "cache"), "teacher": "cached", "train": train}
    (folder / "run.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["run", "--config", str(folder / "run.yaml"), "--train.max_steps", "30"]) == 0
    return folder


def trained_pair(made: Path) -> Path:
    return RunFolder(made / "run", "pair").result


def evaluate(made: Path, pair: Path, output: Path) -> dict[str, Any]:
    arguments = ["evaluate", "--pair", str(pair), "--prompts", str(made / "prompts.jsonl"), "--output", str(output)]
    options = [f"--sampling.{name}={value}" for name, value in SAMPLING.items()]
    assert decode.cli.main([*arguments, *options, "--responses", str(made / "responses")]) == 0
    figures: dict[str, Any] = json.loads(output.read_text())
    return figures


def last_metrics(run: Path) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics |= json.loads(line)
    return metrics


def test_respond_build_and_run_leave_a_pair(made: Path, target: Path) -> None:
    assert sorted(path.name for path in made.iterdir()) == [
        "cache",
        "pair",
        "prompts.jsonl",
        "respond.yaml",
        "responses",
        "run",
        "run.yaml",
    ]
    pair = Pair.load(trained_pair(made))
    assert pair.target_id() == str(target)
    assert pair.provenance["resolved_config"]["train"]["max_steps"] == 30
    draft = AutoModelForCausalLM.from_pretrained(trained_pair(made) / "draft")
    assert draft.config.num_hidden_layers == 2
    assert last_metrics(made / "run")["step"] == 30
    # what was measured before the first step, and what was proved after the last
    assert json.loads((made / "run" / "costs.json").read_text())["draft_step"] > 0
    assert set(json.loads((made / "run" / "parity.json").read_text())) == {"sampled", "greedy"}


def test_what_training_predicts_is_what_decoding_finds(made: Path, tmp_path: Path) -> None:
    """Train/serve parity, on the held-out prompts of the same responses."""
    figures = evaluate(made, trained_pair(made), tmp_path / "trained.json")
    predicted = last_metrics(made / "run")["eval/alpha"]
    assert figures["num_tokens"] > 300
    low, high = figures["alpha_interval"]
    assert low < predicted < high
    # closer than the interval asks for: the same texts, distributions computed twice
    assert figures["alpha"] == pytest.approx(predicted, abs=1e-5)
    # counted while drafting, on texts that other noise gave
    low, high = figures["first_position_interval"]
    assert low < predicted < high
    # the control: these intervals are narrow enough to tell the draft from itself untrained
    untrained = evaluate(made, made / "pair", tmp_path / "untrained.json")["alpha"]
    assert untrained < figures["alpha_interval"][0] - 0.05
    assert untrained < low


def test_a_second_time_there_is_nothing_to_do(made: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # all but what evaluation writes into the pairs
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*") if path.is_file()}
    build = ["--target", str(target), "--output", str(made / "pair"), "--layers", "[0, 2]", "--vocab_size", "120"]
    for arguments in (
        ["respond", "--config", str(made / "respond.yaml"), "--output", str(made / "responses")],
        ["cache", "--responses", str(made / "responses"), "--output", str(made / "cache"), "--kind", "hidden_states"],
        ["build", *build, "--responses", str(made / "responses")],
        ["run", "--config", str(made / "run.yaml"), "--train.max_steps", "30"],
    ):
        assert main(arguments) == 0
        assert capsys.readouterr().err.splitlines()[-1].endswith("is complete already; nothing to do")
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*") if path.is_file()} == before


# --- what a user may get wrong: one line, and nothing is written ------------------------------------------


@pytest.fixture
def work(made: Path, target: Path, tmp_path: Path) -> Path:
    """A folder with things that are not as they should be."""
    (tmp_path / "malformed.jsonl").write_text('{"prompt": "Hi."}\n{"prompt": "Hi.\n')
    (tmp_path / "no-prompt.jsonl").write_text('{"prompt": "Hi."}\n\n{"text": "Hi."}\n')
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "long.txt").write_text("Hi.\n" + 500 * "x" + "\n")
    for name, keys in {
        "respond": {"target": "t", "prompts": "p", "output": "o", "sampling": {"temprature": 1.0}},
        "build": {"target": "t", "output": "o", "layer": 2},
        "run": {"pair": "p", "responses": "r", "train": {"output": "o", "learning_rat": 1.0}},
        "type": {"target": "t", "output": "o", "layers": "few"},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(keys))
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.tex").write_text("years of work")
    (tmp_path / "occupied-run" / "checkpoints").mkdir(parents=True)
    # data that teaches nothing, and a pair whose draft has two tokens the other way round
    masked = {"input_ids": [1, 50, 51, 2], "response_mask": [False] * 4}
    (tmp_path / "masked.jsonl").write_text(50 * (json.dumps(masked) + "\n"))
    (tmp_path / "malformed-data.jsonl").write_text('{"text": "Hi."}\n{"txt": "Hi."}\n')
    (tmp_path / "one-row.jsonl").write_text('{"text": "Hi."}\n')
    shutil.copytree(made / "pair", tmp_path / "other-tokenizer")
    file = tmp_path / "other-tokenizer" / "draft" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: {50: 60, 60: 50}.get(index, index) for token, index in vocab.items()}
    file.write_text(json.dumps(tokenizer))
    (tmp_path / "target").symlink_to(target)
    (tmp_path / "made").symlink_to(made)
    return tmp_path


RESPOND = "respond --target {}/target --output {}/out --prompts"
BUILD = "build --target {}/target --output {}/out"
RUN = "run --pair {}/made/pair --responses {}/made/responses --train.output {}/out"
REFUSALS = {
    "respond, no such model": (
        "respond --target {}/nowhere --prompts {}/made/prompts.jsonl --output {}/out",
        "target {}/nowhere: there is no such model folder",
    ),
    "respond, no such hub name": (
        "respond --target nobody/nothing --prompts {}/made/prompts.jsonl --output {}/out",
        "nobody/nothing: there is no such folder, and the hub did not provide it",
    ),
    "respond, a folder without model": (
        "respond --target {}/occupied --prompts {}/made/prompts.jsonl --output {}/out",
        "target {}/occupied: the folder holds no config.json",
    ),
    "respond, no such prompts": (f"{RESPOND} {{}}/nowhere.txt", "prompts {}/nowhere.txt: no such file"),
    "respond, malformed line": (f"{RESPOND} {{}}/malformed.jsonl", "prompts {}/malformed.jsonl, line 2: not JSON"),
    "respond, line without prompt": (
        f"{RESPOND} {{}}/no-prompt.jsonl",
        'no-prompt.jsonl, line 3: needs a non-empty "p',
    ),
    "respond, empty prompts": (f"{RESPOND} {{}}/empty.txt", "prompts {}/empty.txt: holds no prompt"),
    "respond, unknown key in YAML": (
        "respond --config {}/respond.yaml",
        "unknown key sampling.temprature; the nearest known one is sampling.temperature",
    ),
    "respond, unknown option": (
        f"{RESPOND} service --sampling.tmp 1",
        "unknown key sampling.tmp; the nearest known one is sampling.",
    ),
    "respond, impossible value": (f"{RESPOND} service --batch_size 0", "batch_size: 0 is not possible; give 1 or more"),
    "respond, impossible sampling": (f"{RESPOND} service --sampling.top_p 2", "top_p is 2.0: use a number above 0"),
    "respond, occupied output": (
        "respond --target {}/target --prompts service --output {}/occupied",
        "output {}/occupied: exists and holds no respond.json; give another folder",
    ),
    "respond, other settings": (
        "respond --config {}/made/respond.yaml --output {}/made/responses --samples_per_prompt 2",
        "samples_per_prompt: 2 differs from 1, with which {}/made/responses was begun",
    ),
    "build, no such model": ("build --target {}/nowhere --output {}/out", "target {}/nowhere: there is no such model"),
    "build, count out of range": (f"{BUILD} --layers 4", "layers: 4 is not possible; the target has 3 layers"),
    "build, layer out of range": (
        f"{BUILD} --layers [0,3]",
        "layers: [0, 3] is not possible; the target has layers 0 to 2",
    ),
    "build, wrong type": ("build --config {}/type.yaml", "layers: expected one of int, list[int], got few"),
    "build, unknown key in YAML": (
        "build --config {}/build.yaml",
        "unknown key layer; the nearest known one is layers",
    ),
    "build, of two things": (
        f"{BUILD} --layers 2 --draft {{}}/target",
        "draft: a draft is made of one thing, and layers is given; leave out one",
    ),
    "build, fresh of no layers": (
        f"{BUILD} --fresh.num_layers 0 --fresh.hidden_size 8",
        "fresh.num_layers: 0 is not possible; give 1 or more",
    ),
    "cache, no such responses": (
        "cache --responses {}/nowhere --output {}/out",
        "responses {}/nowhere: respond.json is missing or damaged",
    ),
    "cache, impossible value": (
        "cache --responses {}/made/responses --output {}/out --top_k 0",
        "top_k: 0 is not possible; give 1 or more",
    ),
    "cache, wrong type": (
        "cache --responses {}/made/responses --output {}/out --kind logits",
        "kind: expected Literal['top_k', 'hidden_states'], got logits",
    ),
    "cache, other settings": (
        "cache --responses {}/made/responses --output {}/made/cache --kind top_k",
        "kind: 'top_k' differs from 'hidden_states', with which {}/made/cache was begun",
    ),
    "estimate, no such pair": (
        "estimate --pair {}/nowhere --responses {}/made/responses --train.output {}/out",
        "pair {}/nowhere: there is no such folder",
    ),
    "build, unknown option": (f"{BUILD} --lyers 2", "unknown key lyers; the nearest known one is layers"),
    "build, vocab_size without responses": (
        f"{BUILD} --vocab_size 50",
        "responses: a reduced vocab_size is chosen on responses; name their folder",
    ),
    "build, no such responses": (
        f"{BUILD} --layers 2 --vocab_size 50 --responses {{}}/nowhere",
        "responses {}/nowhere: holds no train/; give a folder that `spec-distill respond` finished",
    ),
    "build, occupied output": (
        "build --target {}/target --layers 2 --output {}/occupied",
        "output {}/occupied: exists and holds no pair; give another folder",
    ),
    "build, other settings": (
        "build --target {}/target --layers 2 --output {}/made/pair",
        "target: '{}/target' differs from ",
    ),
    "run, no such pair": (
        "run --pair {}/nowhere --responses {}/made/responses --train.output {}/out",
        "pair {}/nowhere: ",
    ),
    "run, a folder without pair": (
        "run --pair {}/target --responses {}/made/responses --train.output {}/out",
        "pair {}/target: holds no pair.json",
    ),
    "run, no such responses": (
        "run --pair {}/made/pair --responses {}/nowhere --train.output {}/out",
        "data: {}/nowhere does not exist here, and the hub did not provide it: ",
    ),
    "run, no signal": (
        f"{RUN} --teacher cached",
        "teacher: responses {}/made/responses keep no signal; make it with `spec-distill cache`",
    ),
    "run, malformed data": (
        "run --pair {}/made/pair --responses {}/malformed-data.jsonl --train.output {}/out",
        "malformed-data.jsonl, line 2: a row needs ",
    ),
    "run, one row": (
        "run --pair {}/made/pair --responses {}/one-row.jsonl --train.output {}/out",
        "one-row.jsonl: one row cannot be learnt from and held out; give more",
    ),
    "run, branches of a kept signal": (
        f"{RUN} --teacher cached --branches.share 0.5",
        "branches.share: no signal is kept for what the draft will say; use teacher online",
    ),
    "run, packed branches": (
        f"{RUN} --packing_length 64 --branches.share 0.5",
        "packing_length: branches need texts of their own; use null",
    ),
    "run, too short to pack": (f"{RUN} --packing_length 16", "packing_length: 16 is not possible; a text has "),
    "run, no such loss": (
        f'{RUN} --objective.stages [{{"losses":{{"kl":1.0}}}}]',
        "losses: there is no 'kl'; choose from forward_kl, reverse_kl, ",
    ),
    "run, a loss of branches": (
        f'{RUN} --objective.stages [{{"losses":{{"block_efficiency":1.0}}}}]',
        "losses: block_efficiency is of branches; set branches.share to 1, or add another loss",
    ),
    "run, selected without reference": (
        f"{RUN} --objective.selected_fraction 0.5",
        "reference: selected_fraction compares with a draft trained before; name its pair",
    ),
    "run, impossible limit": (
        f"{RUN} --data_limits.min_coverage 2",
        "min_coverage: 2.0 is not possible; give a share from 0 to 1",
    ),
    "run, a folder of something else": (
        "run --pair {}/made/pair --responses {}/made/responses --train.output {}/occupied-run",
        "output: {}/occupied-run holds files of something else; give another folder",
    ),
    "run, no such target": (f"{RUN} --target {{}}/nowhere", "target {}/nowhere: there is no such model folder"),
    "run, another tokenizer": (
        "run --pair {}/other-tokenizer --responses {}/made/responses --train.output {}/out",
        "its tokenizer is not that of target",
    ),
    "run, unknown key in YAML": (
        "run --config {}/run.yaml",
        "unknown key train.learning_rat; the nearest known one is train.learning_rate",
    ),
    "run, unknown option": (f"{RUN} --train.lr 1", "unknown key train.lr; the nearest known one is train."),
    "run, wrong type": (
        f"{RUN} --teacher offline",
        "teacher: expected Literal['online', 'cached'], got offline",
    ),
    "run, impossible value": (f"{RUN} --temperature 0", "temperature: 0.0 is not possible; give a number above 0"),
    "run, no output": ("run --pair {}/made/pair --responses {}/made/responses", "run.train.output"),
    "no such file of options": ("run --config {}/nowhere.yaml", "nowhere.yaml"),
    "no such command": ("distil", "'distil'"),
}


def files(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_a_mistake_is_one_line_and_nothing_is_written(
    case: str, work: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, message = (text.replace("{}", str(work)) for text in REFUSALS[case])
    before = files(work), files(made)
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spec-distill: error: "), err
    assert err.count("\n") == 1, err
    assert message in err
    assert "Traceback" not in err
    assert (files(work), files(made)) == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("respond --target {}/target --prompts {}/long.txt --output {}/out", "prompt {}/long.txt:2: 5"),
        (f"{BUILD} --layers 2 --vocab_size 2 --responses {{}}/made/responses", "vocab_size: 2 has no room for the 3 "),
        (
            "run --pair {}/made/pair --responses {}/masked.jsonl --train.output {}/out --measure_speed false",
            "responses: 48 of 48 rows have no response token to learn, the first is row 1; mind response_mask",
        ),
        (f"{RUN} --measure_speed false --train.trackers [nonesuch]", "trackers: 'nonesuch' is not available"),
    ],
)
def test_what_shows_once_the_models_are_loaded_is_one_more_line(
    command: str, message: str, work: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(work), files(made)
    assert main(command.replace("{}", str(work)).split()) == 2
    *logged, last = capsys.readouterr().err.splitlines()
    assert last.startswith("spec-distill: error: ")
    assert message.replace("{}", str(work)) in last
    assert all(line.startswith(("target ", "draft ", "responses: ")) for line in logged)
    assert (files(work), files(made)) == before


def test_an_unmarked_set_is_measured_on_what_was_held_out(made: Path, target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "unmarked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(100)))
    settings = ["--sampling.temperature", "1", "--sampling.max_new_tokens", "8"]
    responses = str(tmp_path / "responses")
    assert main(["respond", "--target", str(target), "--prompts", str(prompts), "--output", responses, *settings]) == 0
    common = ["--pair", str(trained_pair(made)), "--prompts", str(prompts), "--responses", responses]
    output = tmp_path / "figures.json"
    assert decode.cli.main(["evaluate", *common, *settings, "--output", str(output)]) == 0
    figures = json.loads(output.read_text())
    assert figures["num_prompts"] == 10
    assert figures["counts"]["committed"] <= 10 * 8  # of 100 prompts, 90 taught the draft
    assert decode.cli.main(["bench", *common, "--max_new_tokens", "8", "--output", str(output)]) == 0
    assert [len(timing["ratios"]) for timing in json.loads(output.read_text())["timings"]] == [8, 8]


def test_what_is_left_of_another_target_is_refused(
    made: Path, tiny_model_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text teaches, whoever wrote it; but a teacher's signal is of one teacher, and figures are of its own text."""
    other, responses = tiny_model_folder(num_layers=2, hidden_size=16), str(made / "responses")
    pair = str(tmp_path / "pair")
    build = ["build", "--target", str(other), "--layers", "1", "--output", pair, "--vocab_size", "200"]
    assert main([*build, "--responses", responses]) == 0
    run = ["run", "--pair", pair, "--train.output", str(tmp_path / "run"), "--train.max_steps", "1"]
    assert main([*run, "--responses", str(made / "cache"), "--teacher", "cached"]) == 2
    assert f"teacher's signal in {made / 'cache'}: made for target" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*run, "--responses", responses]) == 0
    assert f"parity is not proved: {responses} is text of another target" in capsys.readouterr().err
    evaluate = ["evaluate", "--pair", pair, "--prompts", str(made / "prompts.jsonl")]
    options = [f"--sampling.{name}={value}" for name, value in SAMPLING.items()]
    assert decode.cli.main([*evaluate, *options, "--responses", responses]) == 2
    assert f"responses {responses}: made for target" in capsys.readouterr().err


def test_an_estimate_is_printed_and_nothing_written(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: at for path, at in files(made).items() if path.is_file()}
    assert main(["estimate", "--config", str(made / "run.yaml"), "--train.max_steps", "2000"]) == 0
    out, _ = capsys.readouterr()
    assert "2,000" in out
    assert "minutes" in out
    assert {path: at for path, at in files(made).items() if path.is_file()} == before


def test_figures_for_another_target_are_not_the_pair_s(
    made: Path, tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    pair = tmp_path / "pair"
    shutil.copytree(trained_pair(made), pair)
    before = (pair / "pair.json").read_bytes()
    other = tiny_model_folder(num_layers=2, hidden_size=16)
    evaluate = ["evaluate", "--pair", str(pair), "--prompts", str(made / "prompts.jsonl"), "--target", str(other)]
    assert decode.cli.main([*evaluate, "--sampling.max_new_tokens", "4", "--num_decoded_prompts", "2"]) == 0
    assert (pair / "pair.json").read_bytes() == before
