"""What cannot be meant is refused in one clear line; what can is read alike from Python, JSON and the command line."""

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from decode import cli, console
from decode.config import GenerateConfig
from decode.params import SamplingParams, SpeculationParams

INF, NAN = float("inf"), float("nan")

SAMPLING = [
    ({"temperature": -1.0}, "temperature is -1.0: use 0 for greedy or a number from 1e-6 to 1e6"),
    ({"temperature": INF}, "temperature is inf: use 0 for greedy or a number from 1e-6 to 1e6"),
    ({"temperature": 1e-40}, "temperature is 1e-40: use 0 for greedy or a number from 1e-6 to 1e6"),
    ({"temperature": NAN}, "temperature is nan: give a number"),
    ({"top_k": -1}, "top_k is -1: use 0 to keep all tokens or a positive number"),
    ({"top_p": 0.0}, "top_p is 0.0: use a number above 0 and at most 1 (1 keeps all tokens)"),
    ({"top_p": 1.1}, "top_p is 1.1: use a number above 0 and at most 1 (1 keeps all tokens)"),
    ({"top_p": NAN}, "top_p is nan: give a number"),
    ({"min_p": -0.1}, "min_p is -0.1: use a number from 0 (keeps all tokens) to 1"),
    ({"min_p": 1.5}, "min_p is 1.5: use a number from 0 (keeps all tokens) to 1"),
    ({"min_p": NAN}, "min_p is nan: give a number"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: use a number near 1, which is none"),
    ({"repetition_penalty": INF}, "repetition_penalty is inf: use a number near 1, which is none"),
    ({"repetition_penalty": NAN}, "repetition_penalty is nan: give a number"),
    ({"presence_penalty": 101.0}, "presence_penalty is 101.0: use a number from -100 to 100 (0 is none)"),
    ({"presence_penalty": NAN}, "presence_penalty is nan: give a number"),
    ({"frequency_penalty": -INF}, "frequency_penalty is -inf: use a number from -100 to 100 (0 is none)"),
    ({"logit_bias": {5: INF}}, "logit_bias is inf: use a number from -1e4 to 1e4, or -inf to forbid a token"),
    ({"logit_bias": {5: 1e5}}, "logit_bias is 100000.0: use a number from -1e4 to 1e4, or -inf to forbid a token"),
    ({"temperature": 1e39}, "temperature is 1e+39: use 0 for greedy or a number from 1e-6 to 1e6"),
    ({"top_k": 2**31}, "top_k is 2147483648: use 0 to keep all tokens or a positive number"),
    ({"max_new_tokens": 3.0}, "max_new_tokens is 3.0: give a whole number"),
    ({"seed": 1.5}, "seed is 1.5: give a whole number"),
    ({"logit_bias": {5: NAN}}, "logit_bias is nan: give a number"),
    ({"logit_bias": {"x": 1}}, "logit_bias is {'x': 1}: give numbers by token id, such as {50: -2.5}"),
    ({"logit_bias": {5: "x"}}, "logit_bias is {5: 'x'}: give numbers by token id, such as {50: -2.5}"),
    ({"bad_words": ("a", "")}, "bad_words is ('a', ''): give non-empty texts"),
    ({"stop": ""}, "stop is ('',): give non-empty texts"),
    ({"stop": (5,)}, "stop is (5,): give non-empty texts"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0: use at least 1"),
    ({"max_new_tokens": -5}, "max_new_tokens is -5: use at least 1"),
    (
        {"min_new_tokens": 9, "max_new_tokens": 8},
        "min_new_tokens is 9: use a number from 0 to max_new_tokens, 8",
    ),
    ({"min_new_tokens": -1}, "min_new_tokens is -1: use a number from 0 to max_new_tokens, 128"),
    ({"logprobs": -1}, "logprobs is -1: use a number from 0 to 1000, or null for none"),
    ({"seed": -1}, "seed is -1: use 0 or a positive number"),
]
SPECULATION = [
    ({"num_draft_tokens": 0}, "num_draft_tokens is 0: draft 1 to 64 tokens a round"),
    ({"num_draft_tokens": 65}, "num_draft_tokens is 65: draft 1 to 64 tokens a round"),
    ({"max_draft_tokens": 0}, "max_draft_tokens is 0: draft 1 to 64 tokens a round"),
    ({"entropy_bound": 0.0}, "entropy_bound is 0.0: use a positive number of nats"),
    ({"entropy_bound": NAN}, "entropy_bound is nan: use a positive number of nats"),
    ({"reference": "x.txt"}, "reference: only lookup reads it; use proposer lookup or cascade"),
    ({"draft_temperature": -1.0}, "draft_temperature is -1.0: use 0 or a number from 1e-6 to 1e6"),
    ({"draft_temperature": NAN}, "draft_temperature is nan: use 0 or a number from 1e-6 to 1e6"),
    ({"lossy_lenience": 1.0}, "lossy_lenience is 1.0: use a number between 0 and 1"),
    ({"lossy_typical": NAN}, "lossy_typical is nan: use a number between 0 and 1"),
    (
        {"lossy_lenience": 0.5, "lossy_typical": 0.3},
        "lossy_lenience: given together with lossy_typical; give one of them",
    ),
    (
        {"lossy_lenience": 0.5, "verification": "block"},
        "verification is block: a lossy rule takes its place; leave it at auto",
    ),
]


@pytest.mark.parametrize(("values", "message"), SAMPLING, ids=str)
def test_sampling_that_cannot_be_meant_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**values)


@pytest.mark.parametrize(("values", "message"), SPECULATION, ids=str)
def test_speculation_that_cannot_be_meant_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SpeculationParams(**values)


def test_the_extremes_are_possible() -> None:
    SamplingParams(temperature=1e-6, top_k=0, top_p=1, min_p=1, presence_penalty=-100, frequency_penalty=100)
    SamplingParams(logit_bias={3: -INF}, min_new_tokens=8, max_new_tokens=8, logprobs=0, seed=0)
    SpeculationParams(num_draft_tokens=64, max_draft_tokens=1, draft_temperature=0, lossy_typical=1e-9)


def test_one_text_is_a_list_of_one() -> None:
    for name in ("stop", "bad_words"):
        params = [SamplingParams(**{name: value}) for value in ("END", ["END"], ("END",))]
        assert params[0] == params[1] == params[2]
        assert getattr(params[0], name) == ("END",)
        assert getattr(SamplingParams(**{name: None}), name) == ()
    assert SamplingParams(stop_token_ids=[5]).stop_token_ids == (5,)
    assert SamplingParams(stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


def test_sampling_survives_json() -> None:
    params = SamplingParams(
        logit_bias={50: 2, 7: -INF}, stop=("a", "b"), stop_token_ids=(4,), bad_words="x", logprobs=2
    )
    again = SamplingParams(**json.loads(json.dumps(asdict(params))))
    assert again == params
    assert again.logit_bias == {50: 2.0, 7: -INF}  # though JSON's keys are texts
    assert hash(again) == hash(params)


def test_what_changes_logits_is_known() -> None:
    assert not SamplingParams(temperature=1.0, top_k=3, min_p=0.1, stop="x", logprobs=1).has_penalties
    for values in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {1: 1.0}},
        {"bad_words": "x"},
        {"min_new_tokens": 1},
    ):
        params = SamplingParams(**values)
        assert params.has_penalties
        assert params.penalises_repeats == any("penalty" in name for name in values)


def test_a_lossy_rule_says_its_name() -> None:
    assert SpeculationParams().lossy is None
    assert SpeculationParams(lossy_lenience=0.5).lossy == "lenience 0.5"
    assert SpeculationParams(lossy_typical=0.09).lossy == "typical 0.09"


# --- the command line -------------------------------------------------------------------------------------

GIVEN: dict[str, tuple[str, Any]] = {
    "sampling.temperature": ("0.7", 0.7),
    "sampling.top_k": ("40", 40),
    "sampling.top_p": ("0.9", 0.9),
    "sampling.min_p": ("0.05", 0.05),
    "sampling.repetition_penalty": ("1.1", 1.1),
    "sampling.presence_penalty": ("0.2", 0.2),
    "sampling.frequency_penalty": ("-0.3", -0.3),
    "sampling.logit_bias": ('{"50": -2.5, "7": 3}', {50: -2.5, 7: 3.0}),
    "sampling.bad_words": ('["a b", "c"]', ("a b", "c")),
    "sampling.min_new_tokens": ("2", 2),
    "sampling.max_new_tokens": ("32", 32),
    "sampling.stop": ('["END", "\\n\\n"]', ("END", "\n\n")),
    "sampling.stop_token_ids": ("[5, 6]", (5, 6)),
    "sampling.logprobs": ("3", 3),
    "sampling.seed": ("11", 11),
    "speculation.proposer": ("cascade", "cascade"),
    "speculation.reference": ("notes.txt", "notes.txt"),
    "speculation.num_draft_tokens": ("4", 4),
    "speculation.max_draft_tokens": ("6", 6),
    "speculation.entropy_bound": ("1.5", 1.5),
    "speculation.never_slower": ("false", False),
    "speculation.verification": ("tokenwise", "tokenwise"),
    "speculation.draft_temperature": ("0.5", 0.5),
    "speculation.lossy_lenience": ("0.8", 0.8),
    "speculation.lossy_typical": ("0.2", 0.2),
}
NULLS = [
    "sampling.logprobs",
    "sampling.seed",
    "speculation.reference",
    "speculation.num_draft_tokens",
    "speculation.entropy_bound",
    "speculation.draft_temperature",
    "speculation.lossy_lenience",
    "speculation.lossy_typical",
]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Parses a command line of `spec-decode generate`."""
    received: list[GenerateConfig] = []
    config_class, _, text = cli.COMMANDS["generate"]
    monkeypatch.setitem(cli.COMMANDS, "generate", (config_class, received.append, text))
    monkeypatch.setattr(console, "_configure_logging", lambda: None)

    def read(*arguments: str) -> GenerateConfig:
        assert cli.main(["generate", "--pair", "p", "--prompt", "x", *arguments]) == 0, capsys.readouterr().err
        return received.pop()

    return read


def value_of(config: GenerateConfig, name: str) -> Any:
    group, _, field = name.partition(".")
    return getattr(getattr(config, group), field)


def test_every_field_is_tried() -> None:
    named = {f"sampling.{field.name}" for field in fields(SamplingParams)}
    named |= {f"speculation.{field.name}" for field in fields(SpeculationParams)}
    assert set(GIVEN) == named


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("form", ["underscores", "hyphens", "yaml"])
def test_every_field_can_be_given(name: str, form: str, read: Any, tmp_path: Path) -> None:
    text, value = GIVEN[name]
    needs = {"speculation.reference": ["--speculation.proposer", "lookup"], "sampling.logprobs": ["--json"]}
    more = needs.get(name, [])
    if form == "yaml":
        group, _, field = name.partition(".")
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({group: {field: yaml.safe_load(text)}}))
        arguments = ["--config", str(path)]
    else:
        arguments = [f"--{name.replace('_', '-') if form == 'hyphens' else name}", text]
    config = read(*arguments, *more)
    assert value_of(config, name) == value
    assert type(value_of(config, name)) is type(value)
    assert value != value_of(GenerateConfig(pair="p", prompt="x"), name)


@pytest.mark.parametrize("name", NULLS)
def test_what_may_be_nothing_can_be_null(name: str, read: Any) -> None:
    given = [] if name == "speculation.reference" else [f"--{name}", GIVEN[name][0]]
    assert value_of(read(*given, f"--{name}", "null"), name) is None


@pytest.mark.parametrize("text", ["END", "</s>", "a b", "123", "[", "null", "true", "a: b", "#"])
def test_one_stop_string_needs_no_brackets(text: str, read: Any) -> None:
    assert read("--sampling.stop", text).sampling.stop == (text,)
    assert read(f"--sampling.bad_words={text}").sampling.bad_words == (text,)


def test_flags_need_no_value(read: Any) -> None:
    assert read("--speculation.never_slower").speculation.never_slower is True
    assert read("--speculation.never-slower", "false").speculation.never_slower is False
