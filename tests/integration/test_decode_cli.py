"""`spec-decode` from the command line: text, figures, and one line for whatever a user gets wrong."""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from decode import SamplingParams, SpeculativeDecoder, cli, console
from decode.pair import Pair
from decode.progress import ProgressBar

ModelFolder = Callable[..., Path]
Capture = pytest.CaptureFixture[str]
SHORT = ("--sampling.max_new_tokens", "12")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Log lines stay with pytest, so that stderr holds errors only."""
    monkeypatch.setattr(console, "_configure_logging", lambda: None)
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def target(tiny_model_folder: ModelFolder) -> Path:
    return tiny_model_folder(seed=0)


@pytest.fixture
def pair(target: Path, tiny_model_folder: ModelFolder, tmp_path: Path) -> Path:
    shutil.copytree(tiny_model_folder(seed=1, num_layers=1), tmp_path / "pair" / "draft")
    Pair(target={"id": str(target)}, num_draft_tokens=2).save(tmp_path / "pair")
    return tmp_path / "pair"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Item {n}", "id": f"item-{n}"}) + "\n" for n in range(6)))
    return path


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def answer(pair: Path, prompt: str, max_new_tokens: int = 12, **sampling: Any) -> str:
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair))
    (generation,) = decoder.generate(prompt, SamplingParams(max_new_tokens=max_new_tokens, **sampling))
    return generation.text


@pytest.mark.parametrize("options", [[], ["--stream"], ["--stream", "true"], ["--stream", "false"]])
def test_the_answer_and_nothing_else_goes_to_stdout(pair: Path, options: list[str], capsys: Capture) -> None:
    assert cli.main(["generate", "--pair", str(pair), "--prompt", "Hi", *SHORT, *options]) == 0
    assert capsys.readouterr() == (answer(pair, "Hi") + "\n", "")


def test_json_carries_all_that_is_known(pair: Path, prompts: Path, capsys: Capture) -> None:
    sampled = ("--sampling.temperature", "1", "--sampling.seed", "3", "--sampling.logprobs", "2")
    assert cli.main(["generate", "--pair", str(pair), "--prompts", str(prompts), *SHORT, *sampled, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == [f"item-{number}" for number in range(6)]
    for number, row in enumerate(rows):
        assert row["text"] == answer(pair, f"Item {number}", temperature=1.0, seed=3 + number)
        assert len(row["ids"]) == len(row["logprobs"]) == len(row["provenance"]) == row["trace"]["committed"]
        for token, each in zip(row["ids"], row["logprobs"], strict=True):
            top = dict(map(tuple, each["top"]))
            assert len(top) == 2
            assert each["chosen"] <= max(top.values()) < 0
            assert top.get(token, each["chosen"]) == pytest.approx(each["chosen"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json", "--stream"], "json: is printed when a text is finished"),
        (["--sampling.logprobs", "2"], "sampling.logprobs: only --json shows them"),
    ],
)
def test_what_goes_with_json(options: list[str], message: str, pair: Path, tmp_path: Path, capsys: Capture) -> None:
    assert refused(["generate", "--pair", str(pair), "--prompt", "Hi", *options], tmp_path, capsys).startswith(message)


def test_the_text_is_not_touched(pair: Path, capsys: Capture) -> None:
    """Tabs, carriage returns and control characters arrive as they were generated."""
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair))
    for seed in range(50):
        (generation,) = decoder.generate("Hi", SamplingParams(max_new_tokens=300, temperature=10.0, seed=seed))
        if {"\t", "\r", "\x0b", "\x07"} <= set(generation.text):
            break
    else:
        pytest.fail("no seed gives such a text")
    options = ["--sampling.temperature", "10", "--sampling.seed", str(seed), "--sampling.max_new_tokens", "300"]
    assert cli.main(["generate", "--pair", str(pair), "--prompt", "Hi", *options]) == 0
    assert capsys.readouterr().out == generation.text + "\n"


def test_each_prompt_of_a_file_is_answered(pair: Path, prompts: Path, capsys: Capture) -> None:
    assert cli.main(["generate", "--pair", str(pair), "--prompts", str(prompts), *SHORT]) == 0
    out = capsys.readouterr().out
    assert out == "\n".join(f"# item-{n}\n{answer(pair, f'Item {n}')}\n" for n in range(6))


def test_stdin_is_one_prompt_or_one_a_line(pair: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "two\nlines\n")
    assert cli.main(["generate", "--pair", str(pair), *SHORT]) == 0
    assert capsys.readouterr().out == answer(pair, "two\nlines") + "\n"
    type_in(monkeypatch, "two\nlines\n")
    assert cli.main(["generate", "--pair", str(pair), "--prompts", "-", *SHORT]) == 0
    out = capsys.readouterr().out
    assert out == f"# stdin:1\n{answer(pair, 'two')}\n\n# stdin:2\n{answer(pair, 'lines')}\n"


def test_accepted_tokens_can_be_shown(pair: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = ["generate", "--target", str(pair / "draft"), "--pair", str(pair), "--prompt", "Hi", *SHORT]
    assert cli.main([*command, "--show_accepted"]) == 0
    legend, text = capsys.readouterr().out.split("\n\n", 1)
    assert "drafted and accepted" in legend
    assert "\x1b[32m" in text  # the draft is its own target: all green and cyan
    assert "\x1b[36m" in text
    assert "\x1b[31m" not in text
    assert cli.main(command) == 0
    assert "\x1b" not in capsys.readouterr().out.replace(answer(pair, "Hi"), "")


def test_a_file_configures_and_options_override_it(pair: Path, tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"pair": str(pair), "prompt": "Hi", "sampling": {"max_new_tokens": 40}}))
    assert cli.main(["generate", "--config", str(config), *SHORT]) == 0
    assert capsys.readouterr().out == answer(pair, "Hi") + "\n"


def test_any_draft_will_do_with_a_target(target: Path, pair: Path, capsys: Capture) -> None:
    command = ["generate", "--target", str(target), "--pair", str(pair / "draft"), "--prompt", "Hi", *SHORT]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == answer(pair, "Hi") + "\n"


def test_evaluate_prints_a_table_and_writes_figures(pair: Path, prompts: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "figures.json"
    command = ["evaluate", "--pair", str(pair), "--prompts", str(prompts), *SHORT, "--output", str(output)]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert err == ""
    figures = json.loads(output.read_text())
    assert f"{figures['alpha']:.3f}" in out
    assert f"{figures['block_efficiency']:.2f}" in out
    assert "T=1" in out
    assert Pair.load(pair).measured == figures | {"samples": []}
    assert SamplingParams(**figures["sampling"]) == SamplingParams(temperature=1.0, max_new_tokens=12, seed=0)


@pytest.mark.parametrize("where", ["command line", "file"])
def test_evaluate_takes_further_settings(
    where: str, pair: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "figures.json"
    command = ["evaluate", "--pair", str(pair), "--prompts", str(prompts), *SHORT, "--output", str(output)]
    if where == "file":
        command += ["--config", write(tmp_path / "more.yaml", "more_sampling:\n- temperature: 0\n- top_k: 5\n")]
    else:
        command += ["--more-sampling", "[{temperature: 0}, {top_k: 5}]"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "T=1, top-k 5: 6 prompts" in out
    assert "greedy: 6 prompts" in out
    sampling = SamplingParams(temperature=1.0, max_new_tokens=12, seed=0)
    expected = [sampling, replace(sampling, temperature=0.0), replace(sampling, top_k=5)]
    figures = json.loads(output.read_text())
    assert [SamplingParams(**each["sampling"]) for each in figures.pop("settings")] == expected
    assert Pair.load(pair).measured == figures | {"samples": []}


def test_bench_prints_a_table_and_writes_figures(pair: Path, prompts: Path, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "figures.json"
    options = ["--prompts", str(prompts), "--num_prompts", "5", "--max_new_tokens", "6", "--output", str(output)]
    assert cli.main(["bench", "--pair", str(pair), *options, "--temperatures", "[0, 0.5]"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "greedy" in out
    assert "T=0.5" in out
    figures = json.loads(output.read_text())
    assert (figures["dtype"], figures["device"], figures["num_threads"]) == ("float32", "cpu", 1)
    assert {"resolved_config", "versions", "hardware"} <= figures["provenance"].keys()
    greedy, sampled = figures["timings"]
    assert (greedy["sampling"]["temperature"], sampled["sampling"]["temperature"]) == (0, 0.5)
    for timing in (greedy, sampled):
        assert len(timing["ratios"]) == 5
        assert timing["ratio"] == sorted(timing["ratios"])[2]
        assert timing["trace"]["committed"] == sum(run["num_tokens"] for run in timing["runs"]["speculative"])
        assert 0 < timing["share_outside_models"] < 1
        assert timing["runs"].keys() == timing["latency"].keys() == {"plain", "speculative"}
        for run in timing["runs"]["plain"]:
            assert 0 < run["first_token_seconds"] < run["seconds"]


def test_bench_times_transformers_when_asked(
    pair: Path, prompts: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[ProgressBar] = []

    class Bar(ProgressBar):
        def __exit__(self, *exception: Any) -> None:
            super().__exit__(*exception)
            bars.append(self)

    monkeypatch.setattr("decode.bench.ProgressBar", Bar)
    monkeypatch.setenv("COLUMNS", "120")  # tiny models have many tokens a second
    monkeypatch.setattr("rich._console", None)  # another test may have made it, with a width of its own
    output = tmp_path / "figures.json"
    options = ["--prompts", str(prompts), "--num_prompts", "5", "--max_new_tokens", "6", "--output", str(output)]
    sampling = ["--temperatures", "[0, 0.5]", "--top_p", "0.9"]
    assert cli.main(["bench", "--pair", str(pair), "--transformers", *options, *sampling]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "transformers assisted, its default" in out
    assert "T=0.5, top-p 0.9" in out
    greedy, sampled = json.loads(output.read_text())["timings"]
    for timing in (greedy, sampled):
        assert len(timing["runs"]) == 5
        assert all(len(runs) == 5 for runs in timing["runs"].values())
        assert list(timing["sweep"]) == ["1", "2", "3", "4", "5"]
        assert all(latency["first_token_seconds"]["lowest"] > 0 for latency in timing["latency"].values())
        best = timing["best_assistance"]
        assert timing["sweep"][best] == max(timing["sweep"].values())
        assert f"transformers assisted, best: {best} drafted" in out
    # the same text from all of them
    assert len({tuple(run["num_tokens"] for run in runs) for runs in greedy["runs"].values()}) == 1
    assert [bar.done for bar in bars] == [bar.total for bar in bars] == [2 * (5 * 5 + 5)]


def test_transformers_needs_prompts_that_are_not_timed(
    pair: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    arguments = ["bench", "--pair", str(pair), "--prompts", str(prompts), "--max_new_tokens", "4", "--transformers"]
    assert refused([*arguments, "--num_prompts", "6"], tmp_path, capsys).startswith("num_prompts: all 6 held-out")


def test_a_draft_that_is_no_pair_can_be_timed(target: Path, pair: Path, prompts: Path, capsys: Capture) -> None:
    options = ["--prompts", str(prompts), "--num_prompts", "5", "--max_new_tokens", "4", "--temperatures", "[0]"]
    command = ["bench", "--target", str(target), "--pair", str(pair / "draft"), "--transformers", *options]
    assert cli.main(command) == 0
    assert "greedy" in capsys.readouterr().out


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(arguments: list[str], folder: Path, capsys: Capture) -> str:
    """Run a command that must be refused in one line, leave every file alone, and print nothing else."""
    before = tree(folder)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spec-decode: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert tree(folder) == before
    return err.removeprefix("spec-decode: error: ").rstrip("\n")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("command", ["generate", "evaluate", "bench"])
def test_models_and_pairs_that_are_not_there(
    command: str, pair: Path, target: Path, tmp_path: Path, capsys: Capture
) -> None:
    def said(*arguments: str) -> str:
        return refused([command, *arguments, *(["--prompt", "Hi"] if command == "generate" else [])], tmp_path, capsys)

    nowhere = str(tmp_path / "nowhere")
    if command != "bench":
        assert said("--pair", nowhere).startswith(f"pair {nowhere}: there is no such folder; give the one that")
    assert said("--pair", str(pair), "--target", nowhere) == f"target {nowhere}: there is no such model folder"
    assert said("--pair", str(pair / "draft")).startswith(f"pair {pair / 'draft'}: holds no pair.json; give the folder")
    (pair / "draft" / "model.safetensors").unlink()
    assert f"draft {pair / 'draft'}: cannot be loaded: Error no file named model.safetensors" in said(
        "--pair", str(pair)
    )
    write(pair / "pair.json", '{"format_version": 1, "target": {}}')
    assert said("--pair", str(pair)) == "pair.json names no target: give one with --target"
    write(pair / "pair.json", "{")
    assert said("--pair", str(pair)).startswith(f"{pair / 'pair.json'}: not a pair description: ")


@pytest.mark.parametrize("command", ["generate", "evaluate", "bench"])
def test_a_draft_with_another_tokenizer(
    command: str, pair: Path, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: Capture
) -> None:
    path = pair / "draft" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["z"] = vocabulary["z"], vocabulary["a"]
    path.write_text(json.dumps(content))
    arguments = [command, "--pair", str(pair), *(["--prompt", "Hi"] if command == "generate" else [])]
    said = refused(arguments, tmp_path, capsys)
    first = byte_tokenizer.convert_tokens_to_ids("a")
    assert said.startswith(f"draft {pair / 'draft'}: its tokenizer is not that of target ")
    assert f"id {first} is 'z' in the draft and 'a' in the target; use a draft made for this target" in said


@pytest.mark.parametrize("command", ["generate", "evaluate", "bench"])
def test_prompts_that_cannot_be_read(command: str, pair: Path, tmp_path: Path, capsys: Capture) -> None:
    def said(source: str) -> str:
        return refused([command, "--pair", str(pair), "--prompts", source], tmp_path, capsys)

    malformed = write(tmp_path / "malformed.jsonl", '{"prompt": "fine"}\n{"prompt": \n')
    assert said(malformed) == f"prompts {malformed}, line 2: not JSON: Expecting value at column 12"
    empty = write(tmp_path / "empty.jsonl", "\n")
    assert said(empty) == f"prompts {empty}: holds no prompt"
    assert "no such file; give a file, or one of the embedded sets service, general" in said("servce")
    long = write(tmp_path / "long.jsonl", "".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (1, 1, 600, 1, 1, 1)))
    assert said(long).startswith(f"prompt {long}:3: prompt + max_new_tokens is ")
    assert said(long).endswith("longer than the context of 512 of model 'llama': shorten one of the two")


def test_no_prompt_at_all(pair: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["generate", "--pair", str(pair)]
    type_in(monkeypatch, "\n")
    assert refused(command, tmp_path, capsys) == "prompt: stdin is empty; write a prompt to it, or use --prompt"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert refused(command, tmp_path, capsys).startswith("prompt: none given; use --prompt, --prompts, or ")
    assert refused([*command, "--prompt", " "], tmp_path, capsys) == "prompt: is empty; give some text"
    both = [*command, "--prompt", "x", "--prompts", "service"]
    assert refused(both, tmp_path, capsys) == "prompt: given together with prompts; give one of them"


SAMPLING = {
    "temperature": ("-1", "temperature is -1.0: use 0 for greedy or a number from 1e-6 to 1e6"),
    "top_p": ("0", "top_p is 0.0: use a number above 0 and at most 1 (1 keeps all tokens)"),
    "top_k": ("-2", "top_k is -2: use 0 to keep all tokens or a positive number"),
    "max_new_tokens": ("-5", "max_new_tokens is -5: use at least 1"),
    "seed": ("-1", "seed is -1: use 0 or a positive number"),
}


@pytest.mark.parametrize("command", ["generate", "evaluate"])
@pytest.mark.parametrize("field", SAMPLING)
def test_sampling_that_cannot_be_meant(command: str, field: str, pair: Path, tmp_path: Path, capsys: Capture) -> None:
    value, message = SAMPLING[field]
    arguments = [command, "--pair", str(pair)]
    assert refused([*arguments, f"--sampling.{field}", value], tmp_path, capsys) == message
    config = write(tmp_path / "config.yaml", f"pair: {pair}\nsampling:\n  {field}: {value}\n")
    assert refused([command, "--config", config], tmp_path, capsys) == message


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperatures", "[0, -1]", "temperature is -1.0: use 0"),
        ("temperatures", "[]", "temperatures: is empty; give some"),
        ("top_p", "0", "top_p is 0.0: use a number above 0"),
        ("max_new_tokens", "-1", "max_new_tokens is -1: use at least 1"),
        ("num_prompts", "4", "num_prompts: 4 is too few for a median; give 5 or more"),
        ("speculation.num_draft_tokens", "0", "num_draft_tokens is 0: draft 1 to 64 tokens a round"),
    ],
)
def test_timings_that_cannot_be_meant(
    option: str, value: str, message: str, pair: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.bench._time", lambda *arguments: pytest.fail("timed something first"))
    assert refused(["bench", "--pair", str(pair), f"--{option}", value], tmp_path, capsys).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--speculation.num_draft_tokens", "0"], "num_draft_tokens is 0: draft 1 to 64 tokens a round"),
        (["generate", "--speculation.num-draft-tokens", "99"], "num_draft_tokens is 99: draft 1 to 64 tokens a round"),
        (["evaluate", "--num_draft_tokens", "0"], "num_draft_tokens is 0: draft 1 to 64 tokens a round"),
        (["evaluate", "--sampling.repetition_penalty", "1.1"], "sampling: alpha is measured without penalties"),
        (["evaluate", "--batch_size", "0"], "batch_size: 0 is not possible; give 1 or more"),
        (["evaluate", "--num_timed_prompts", "1"], "num_timed_prompts: 1 is too few for a median; give 5 or more"),
        (["evaluate", "--more_sampling", "[{top: 1}]"], "more_sampling: top is no sampling parameter"),
        (["evaluate", "--num_decoded_prompts", "0"], "num_decoded_prompts: 0 is not possible; give 1 or more"),
        (["evaluate", "--sampling.max_new_tokens", "1"], "sampling.max_new_tokens: 1 leaves nothing to draft"),
        (["evaluate", "--responses", "nowhere"], "responses nowhere: not there; give a folder that"),
        (
            ["generate", "--dtype", "int3"],
            "dtype: expected Literal['auto', 'float32', 'bfloat16', 'float16'], got int3",
        ),
        (
            ["generate", "--speculation.num_draft_tokens", "x"],
            "speculation.num_draft_tokens: expected int, got x",
        ),
        (
            ["generate", "--speculation.proposer", "lokup"],
            "speculation.proposer: expected Literal['draft', 'lookup', 'cascade'], got lokup",
        ),
        (["generate", "--speculation.reference", "x.txt"], "reference: only lookup reads it; use proposer lookup"),
        (
            ["generate", "--prompt", "x", "--speculation.proposer", "lookup", "--speculation.reference", "nowhere.txt"],
            "reference nowhere.txt: cannot be read as UTF-8 text: ",
        ),
        (["generate", "--sampling.logit_bias", "5"], "sampling.logit_bias: expected "),
        (["generate", "--prompt", "x", "--sampling.logit_bias", "{900: 1}"], "logit_bias: there is no token 900; ids"),
        (["generate", "--prompt", "x", "--sampling.stop_token_ids", "[900]"], "stop_token_ids: there is no token 900"),
        (["generate", "--sampling.stop", '["a", ""]'], "stop is ('a', ''): give non-empty texts"),
        (
            ["generate", "--sampling.min_new_tokens", "200"],
            "min_new_tokens is 200: use a number from 0 to max_new_toke",
        ),
        (["generate", "--speculation.lossy_lenience", "2"], "lossy_lenience is 2.0: use a number between 0 and 1"),
        (
            ["generate", "--speculation.lossy_typical", "0.2", "--speculation.verification", "block"],
            "verification is block: a lossy rule takes its place; leave it at auto",
        ),
        (["generate", "--speculation.lenience", "0.5"], "unknown key speculation.lenience; the nearest known one is "),
    ],
)
def test_other_values_that_cannot_be_meant(
    arguments: list[str], message: str, pair: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert refused([*arguments, "--pair", str(pair)], tmp_path, capsys).startswith(message)


@pytest.mark.parametrize("command", ["generate", "evaluate", "bench"])
def test_an_unknown_key_is_answered_with_the_nearest(command: str, pair: Path, tmp_path: Path, capsys: Capture) -> None:
    keys = {"dtpe": "dtype", "targt": "target"}
    if command == "evaluate":
        keys["num_draft_token"] = "num_draft_tokens"
    else:
        keys["speculation.num_draft_token"] = keys["num_draft_tokens"] = "speculation.num_draft_tokens"
    if command != "bench":
        keys["sampling.temprature"] = "sampling.temperature"
    for key, nearest in keys.items():
        said = refused([command, "--pair", str(pair), f"--{key}", "1"], tmp_path, capsys)
        assert said == f"unknown key {key}; the nearest known one is {nearest}"
        outer, _, inner = key.rpartition(".")
        content = {outer: {inner: 1}} if outer else {inner: 1}
        config = write(tmp_path / "config.yaml", yaml.safe_dump({"pair": str(pair), **content}))
        assert refused([command, "--config", config], tmp_path, capsys) == said


def test_a_config_that_cannot_be_read(tmp_path: Path, capsys: Capture) -> None:
    assert "nowhere.yaml" in refused(["generate", "--config", str(tmp_path / "nowhere.yaml")], tmp_path, capsys)
    broken = write(tmp_path / "broken.yaml", "pair: [x\n")
    assert refused(["generate", "--config", broken], tmp_path, capsys).startswith("Problems parsing config: ")
    assert refused(["evaluate"], tmp_path, capsys).startswith("the following arguments are required: ")


def test_a_model_that_cannot_be_rolled_back(
    tiny_llama: Callable[..., LlamaForCausalLM], pair: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = tiny_llama().config.to_dict()
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    write(pair / "draft" / "config.json", json.dumps(config | {"num_hidden_layers": 1}))
    said = refused(["generate", "--pair", str(pair), "--prompt", "Hi"], tmp_path, capsys)
    assert said.startswith("prompt 1: model 'mistral' attends through a sliding window of 16 tokens, which cannot be")


def test_half_precision_is_asked_for_by_name(pair: Path, capsys: Capture) -> None:
    assert cli.main(["generate", "--pair", str(pair), "--prompt", "Hi", *SHORT, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.endswith("\n")
    assert SpeculativeDecoder.from_pretrained(None, str(pair), dtype="bfloat16").target.dtype == torch.bfloat16


def test_lookup_needs_a_target_and_no_pair(target: Path, pair: Path, tmp_path: Path, capsys: Capture) -> None:
    lookup = ["--speculation.proposer", "lookup"]
    command = ["generate", "--target", str(target), "--prompt", "Hi", *SHORT]
    assert cli.main([*command, *lookup]) == 0
    assert capsys.readouterr() == (answer(pair, "Hi") + "\n", "")
    reference = write(tmp_path / "reference.txt", answer(pair, "Hi"))
    fixed = ["--speculation.num-draft-tokens", "4", "--speculation.never_slower", "false"]
    assert cli.main([*command, *lookup, *fixed, "--speculation.reference", reference]) == 0
    assert capsys.readouterr() == (answer(pair, "Hi") + "\n", "")
    said = refused(command, tmp_path, capsys)
    assert said.startswith("pair: none given, and the proposer draft needs one; use --pair, or --speculation.proposer")
    said = refused(["generate", "--prompt", "Hi", *lookup], tmp_path, capsys)
    assert said == "pair: none given; use --pair, or --target with --speculation.proposer lookup"


@pytest.mark.parametrize("options", [[], ["--speculation.num_draft_tokens", "5"], ["--speculation.proposer=cascade"]])
def test_stop_strings_end_streamed_and_whole_texts_alike(
    options: list[str], pair: Path, prompts: Path, capsys: Capture
) -> None:
    sampling = dict(temperature=1.5, seed=3, max_new_tokens=60, stop=tuple("aeiou"))
    given = ["--sampling.temperature=1.5", "--sampling.seed=3", "--sampling.max_new_tokens=60"]
    given += ["--sampling.stop", json.dumps(sampling["stop"])]
    command = ["generate", "--pair", str(pair), "--prompts", str(prompts), *given, *options]
    outputs = []
    for stream in ([], ["--stream"]):
        assert cli.main([*command, *stream]) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair))
    texts = [f"Item {number}" for number in range(6)]
    params = [SamplingParams(**{**sampling, "seed": 3 + number}) for number in range(6)]
    generations = decoder.generate(texts, params)
    expected = [f"# item-{number}\n{generation.text}\n" for number, generation in enumerate(generations)]
    assert outputs[0].out == "\n".join(expected)
    assert set("aeiou") & {generation.stop_reason for generation in generations}
    for generation in generations:
        assert not set(generation.text) & set("aeiou")


def test_one_stop_string_needs_no_list(pair: Path, capsys: Capture) -> None:
    whole = answer(pair, "Hi", 40)
    stop = whole[10:13]
    command = ["generate", "--pair", str(pair), "--prompt", "Hi", "--sampling.max_new_tokens", "40"]
    assert cli.main([*command, f"--sampling.stop={stop}"]) == 0
    assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"


def test_raw_continues_the_prompt_as_it_stands(pair: Path, prompts: Path, tmp_path: Path, capsys: Capture) -> None:
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair))
    (generation,) = decoder.generate("Item 3", SamplingParams(max_new_tokens=12), raw=True)
    assert generation.text != answer(pair, "Item 3")
    assert cli.main(["generate", "--pair", str(pair), "--prompt", "Item 3", "--raw", *SHORT]) == 0
    assert capsys.readouterr() == (generation.text + "\n", "")
    assert cli.main(["generate", "--pair", str(pair), "--prompts", str(prompts), "--raw", *SHORT]) == 0
    assert f"# item-3\n{generation.text}\n" in capsys.readouterr().out
    code = write(
        tmp_path / "code.jsonl", json.dumps({"task_id": "t/0", "prompt": "Item 3", "entry_point": "item"}) + "\n"
    )
    assert cli.main(["generate", "--pair", str(pair), "--prompts", code, "--raw", *SHORT]) == 0
    assert capsys.readouterr() == (generation.text + "\n", "")


def test_raw_continues_text_not_chats(pair: Path, tmp_path: Path, capsys: Capture) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    source = write(tmp_path / "chat.jsonl", json.dumps({"messages": chat, "id": "chat-1"}) + "\n")
    said = refused(["generate", "--pair", str(pair), "--prompts", source, "--raw"], tmp_path, capsys)
    assert said == "prompt chat-1: raw continues text; this one is a conversation: leave raw out, or give its text"


def test_a_lossy_text_says_so(
    pair: Path, capsys: Capture, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "--pair", str(pair), "--prompt", "Hi", *SHORT, "--speculation.lossy_lenience", "0.5"]
    with caplog.at_level("INFO"):
        assert cli.main([*command, "--sampling.temperature", "1"]) == 0
    assert "lossy (lenience 0.5): the text does not follow the target's distribution" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        assert cli.main(command) == 0  # greedy: exact all the same
    assert "lossy (" not in caplog.text


def test_help_names_every_option(capsys: Capture) -> None:
    assert cli.main(["generate", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--pair", "--raw", "--sampling.stop", "--speculation.proposer", "--speculation.num_draft_tokens"):
        assert option in out
