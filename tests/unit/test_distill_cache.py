"""The teacher's signal on disk: that it is what the teacher says, as small as announced, and whole or not there."""

import json
import logging
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from decode.pair import load_model, load_tokenizer
from decode.params import SamplingParams
from distill import cache as module
from distill import parts
from distill.cache import cache, top_k_and_tail
from distill.config import CacheConfig, RespondConfig
from distill.responses import load_responses, respond
from distill.signal import SignalRecord, load_record, load_signal, refuse_cache_of_another_target
from distill.teacher import TeacherHead, collate, final_hidden_states
from train.data import read_rows

HIDDEN, VOCAB = 16, 259
Rows = list[dict[str, Any]]
Configure = Callable[..., CacheConfig]


@pytest.fixture(scope="module")
def save_target(
    tiny_llama: Callable[..., LlamaForCausalLM],
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """Saves a target that ends its texts with many tokens, so that they are of many lengths."""

    def save(**arguments: Any) -> Path:
        folder = tmp_path_factory.mktemp("target")
        model = tiny_llama(**{"hidden_size": HIDDEN} | arguments)
        model.generation_config.eos_token_id = [2, *range(20, 30)]
        model.save_pretrained(folder)
        byte_tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def target(save_target: Callable[..., Path]) -> Path:
    return save_target()


@pytest.fixture(scope="module")
def responses(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return respond(respond_config(target, tmp_path_factory.mktemp("responses")))


def respond_config(target: Path, folder: Path) -> RespondConfig:
    prompts = [f"Say {'very ' * (number * 5 % 9)}slowly." for number in range(12)]
    rows = [{"prompt": prompt, "split": "heldout" if n % 4 == 3 else "train"} for n, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RespondConfig(
        target=str(target),
        prompts=str(folder / "prompts.jsonl"),
        output=str(folder / "responses"),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=12, seed=0),
    )


@pytest.fixture
def configure(responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """A pass takes two or three rows, a part one pass, and a chunk a few tokens."""
    monkeypatch.setattr(module, "PASSES_PER_PART", 1)

    def configure(**changes: Any) -> CacheConfig:
        values = {
            "responses": str(responses),
            "output": str(tmp_path / "cache"),
            "top_k": 5,
            "chunk_size": 7,
            "tokens_per_pass": 130,
        }
        return CacheConfig(**values | changes)

    return configure


def splits_of(folder: Path) -> dict[str, Rows]:
    splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
    return {split: load_responses(str(folder), split).to_list() for split in splits}


def rows_of(folder: Path) -> Rows:
    return [row for rows in splits_of(folder).values() for row in rows]


def record_of(folder: Path) -> SignalRecord:
    record = load_record(str(folder))
    assert record is not None
    return record


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def num_response_tokens(row: dict[str, Any]) -> int:
    return sum(row["response_mask"][1:])


@torch.no_grad()
def true_log_p(model: PreTrainedModel, rows: Rows, temperature: float = 1.0) -> Tensor:
    """From the model's own logits, row by row without padding, in float64."""
    parts = []
    for row in rows:
        start = row["response_mask"].index(True)
        logits = model(input_ids=torch.tensor([row["input_ids"][:-1]]), use_cache=False).logits[0, start - 1 :]
        parts.append((logits.double() / temperature).log_softmax(-1))
    return torch.cat(parts)


# --- the k likeliest and the rest -------------------------------------------------------------------------


def some_logits() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    peaked = torch.full((3, 50), -1e4)
    peaked[0, 7] = peaked[1, 49] = peaked[2, 0] = 0.0
    near = torch.randn(4, 50, generator=generator)
    near[:, 11] += 40.0  # in fp32, its p is 1
    tied = torch.zeros(3, 50)
    tied[1, 10:] = -1.0
    tied[2, ::2] = 3.0
    return {
        "usual": 3 * torch.randn(20, 50, generator=generator),
        "all mass on one": peaked,
        "nearly": near,
        "large": 1e4 + 5 * torch.randn(4, 50, generator=generator),
        "ties": tied,
        "ruled out": torch.tensor([[0.0, 1.0] + [-torch.inf] * 48]),
    }


@pytest.mark.parametrize("k", [1, 4, 49, 50])
@pytest.mark.parametrize("name", some_logits())
def test_the_likeliest_and_the_rest_are_those_of_float64(name: str, k: int) -> None:
    logits = some_logits()[name]
    log_p, exact = logits.log_softmax(-1), logits.double().log_softmax(-1)
    ids, top, log_tail = top_k_and_tail(log_p.clone(), k)
    assert (ids.dtype, top.dtype, log_tail.dtype) == (torch.int64, torch.float32, torch.float32)
    assert ids.shape == top.shape == (len(logits), k)
    assert torch.equal(top, log_p.gather(1, ids))
    assert (top[:, 1:] <= top[:, :-1]).all()
    assert all(len(set(row)) == k for row in ids.tolist())
    torch.testing.assert_close(top.double(), exact.gather(1, ids), rtol=1e-6, atol=1e-5)
    rest = exact.scatter(1, ids, -torch.inf)
    assert (rest.amax(1) <= exact.gather(1, ids).amin(1) + 1e-5).all()
    torch.testing.assert_close(log_tail.double(), rest.logsumexp(1), rtol=1e-6, atol=1e-5)
    total = torch.logaddexp(top.double().logsumexp(1), log_tail.double())
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-5)


def test_a_tail_too_small_for_one_minus_the_sum_is_kept() -> None:
    for name in ("all mass on one", "nearly"):
        _, top, log_tail = top_k_and_tail(some_logits()[name].log_softmax(-1), 2)
        assert (1 - top.exp().sum(1)).abs().max() < 1e-6  # what a difference would say
        assert log_tail.isfinite().all()
        assert (log_tail < -30).all()
    none = top_k_and_tail(torch.zeros(1, 50).log_softmax(-1), 50)[2]
    assert none.item() == -torch.inf


# --- what is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["top_k", "hidden_states"])
def test_the_text_stays_as_it_is(kind: str, configure: Configure, responses: Path) -> None:
    output = cache(configure(kind=kind))
    assert names(output.parent) == ["cache"]
    assert (output / "respond.json").read_bytes() == (responses / "respond.json").read_bytes()
    ours, theirs = splits_of(output), splits_of(responses)
    assert list(datasets.load_from_disk(str(output))) == list(ours) == list(theirs)
    columns = list(record_of(output).columns())
    for split, rows in theirs.items():
        assert len(list((output / split).glob("*.arrow"))) > 1
        assert [list(row) for row in ours[split]] == [[*row, *columns] for row in rows]
        assert [{name: row[name] for name in rows[0]} for row in ours[split]] == rows
    read = read_rows(output / "train", tokenizer=None, max_length=1000)
    assert [row["input_ids"].tolist() for row in read] == [row["input_ids"] for row in theirs["train"]]


# 2026-11: torch 2.13 warns of itself while it compiles
COMPILED = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@COMPILED
@pytest.mark.parametrize(("temperature", "compile"), [(1.0, False), (0.6, False), (0.6, True)])
def test_top_k_is_that_of_the_model_and_not_renormalised(
    temperature: float, compile: bool, configure: Configure
) -> None:
    config = configure(temperature=temperature, compile=compile)
    output = cache(config)
    rows, record = rows_of(output), record_of(output)
    assert (record.kind, record.k, record.temperature, record.dtype) == ("top_k", 5, temperature, "float32")
    signal = load_signal(rows, record)
    exact = true_log_p(load_model(record.target["id"] or ""), rows, temperature)
    assert {name: values.dtype for name, values in signal.items()} == {
        "top_ids": torch.int64,
        "top_log_p": torch.float32,
        "log_tail": torch.float32,
        "token_log_p": torch.float32,
    }
    assert signal["top_ids"].shape == signal["top_log_p"].shape == (len(exact), 5)
    assert signal["log_tail"].shape == (len(exact),)
    of_ids = exact.gather(1, signal["top_ids"])
    torch.testing.assert_close(of_ids, exact.topk(5).values, rtol=0, atol=1e-4)
    error = signal["top_log_p"] - of_ids
    assert (error.abs() <= 2**-11 * of_ids.abs() + 1e-4).all()
    assert (signal["top_log_p"].exp() - of_ids.exp()).abs().max() < 2e-4
    tail = exact.scatter(1, signal["top_ids"], -torch.inf).logsumexp(1)
    torch.testing.assert_close(signal["log_tail"].double(), tail, rtol=0, atol=1e-4)
    following = torch.tensor([token for row in rows for token in _learnt(row)])
    own = exact.gather(1, following.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(signal["token_log_p"].double(), own, rtol=0, atol=1e-4)
    # five of these tokens are nowhere near all of the mass, and are not made to be
    assert signal["top_log_p"].exp().sum(1).min() < 0.8


@COMPILED
@pytest.mark.parametrize("compile", [False, True])
def test_hidden_states_become_the_distributions_of_the_model(compile: bool, configure: Configure) -> None:
    output = cache(configure(kind="hidden_states", compile=compile))
    rows, record = rows_of(output), record_of(output)
    assert (record.kind, record.k, record.temperature, record.dtype) == ("hidden_states", None, None, "float32")
    signal = load_signal(rows, record)
    target = load_model(record.target["id"] or "")
    exact = true_log_p(target, rows)
    assert signal["teacher_hidden"].shape == (len(exact), HIDDEN)
    log_p = TeacherHead(target).log_probabilities(signal["teacher_hidden"], signal["log_normalizers"])
    torch.testing.assert_close(log_p.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hidden_states_are_kept_to_the_bit(dtype: str, configure: Configure) -> None:
    output = cache(configure(kind="hidden_states", dtype=dtype, tokens_per_pass=1))  # no row beside another
    record = record_of(output)
    assert record.dtype == dtype
    target = load_model(record.target["id"] or "", dtype)  # type: ignore[arg-type]
    head = TeacherHead(target)
    for row in rows_of(output):
        signal = load_signal([row], record)
        with torch.inference_mode():
            states = final_hidden_states(target, collate([row], 0))
            normalizers = torch.cat([head.log_normalizers(chunk) for chunk in states.split(7)])
        assert signal["teacher_hidden"].dtype == getattr(torch, dtype)
        assert torch.equal(signal["teacher_hidden"], states)
        assert torch.equal(signal["log_normalizers"], normalizers)


def test_rows_are_read_one_by_one_as_together(configure: Configure) -> None:
    for kind in ("top_k", "hidden_states"):
        output = cache(configure(kind=kind, output=str(Path(configure().output) / kind)))
        rows, record = rows_of(output), record_of(output)
        together = load_signal(rows[::-1], record)
        one_by_one = [load_signal([row], record) for row in rows[::-1]]
        for name, values in together.items():
            assert torch.equal(values, torch.cat([signal[name] for signal in one_by_one]))
        nothing = load_signal([dict.fromkeys(record.columns(), b"")], record)
        assert {name: values.shape[1:] for name, values in nothing.items()} == {
            name: values.shape[1:] for name, values in together.items()
        }
        assert all(len(values) == 0 for values in nothing.values())


@pytest.mark.parametrize(("vocab_size", "num_bytes"), [(2**16, 264), (2**16 + 4000, 392)])
def test_ids_of_any_vocabulary(
    vocab_size: int, num_bytes: int, save_target: Callable[..., Path], configure: Configure
) -> None:
    folder = save_target(vocab_size=vocab_size)
    output = cache(configure(target=str(folder), top_k=64))
    rows, record = rows_of(output), record_of(output)
    assert record.bytes_per_token == num_bytes
    signal = load_signal(rows, record)
    exact = true_log_p(load_model(str(folder)), rows)
    torch.testing.assert_close(exact.gather(1, signal["top_ids"]), exact.topk(64).values, rtol=0, atol=1e-4)
    assert signal["top_ids"].max() > vocab_size - 2000
    assert signal["top_ids"].min() >= 0


def test_a_hundred_and_forty_tokens_stay_below_six_hundred_bytes(target: Path) -> None:
    values = {"kind": "top_k", "temperature": 1.0, "dtype": "bfloat16", "hidden_size": 576, "target": {}}
    sizes = {k: SignalRecord(k=k, vocab_size=49152, **values).bytes_per_token for k in (64, 140, 150)}
    assert sizes == {64: 264, 140: 568, 150: 608}
    hidden = SignalRecord(**values | {"kind": "hidden_states", "temperature": None}, k=None, vocab_size=49152)
    assert hidden.bytes_per_token == 2 * 576 + 4


def test_log_probabilities_beyond_fp16_stay_finite() -> None:
    """A p that is zero in any arithmetic must not be kept as a number that zero times it is none."""

    class Head:
        def log_probabilities(self, hidden: Tensor) -> Tensor:
            return torch.tensor([[0.0, -1e5, -2e5], [0.0, -1e4, -torch.inf]])

    values = {"temperature": 1.0, "dtype": "float32", "vocab_size": 3, "hidden_size": 4, "target": {}}
    record = SignalRecord(kind="top_k", k=3, **values)  # type: ignore[arg-type]
    signal = module._signal(torch.zeros(2, 4), torch.tensor([0, 0]), Head(), record)  # type: ignore[arg-type]
    kept = signal["top_log_p"].half()
    assert kept.isfinite().all()
    assert kept.tolist() == [[0.0, -65504.0, -65504.0], [0.0, -10000.0, -65504.0]]
    assert signal["log_tail"].tolist() == [-torch.inf, -torch.inf]


# --- in passes and chunks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_pass", [1, 7, 30, 1000])
def test_a_pass_takes_rows_of_like_length_and_no_more_than_it_may(tokens_per_pass: int) -> None:
    lengths = [3, 9, 9, 1, 4, 30, 2, 9, 12, 5]
    passes = list(module._passes(lengths, tokens_per_pass))
    assert sorted(place for places in passes for place in places) == list(range(len(lengths)))
    for places in passes:
        assert len(places) == 1 or len(places) * max(lengths[place] for place in places) <= tokens_per_pass
    # sorted: no row of one pass is longer than one of a pass before
    widths = [[lengths[place] for place in places] for places in passes]
    assert all(max(later) <= min(earlier) for earlier, later in pairwise(widths))
    assert len(passes) == {1: 10, 7: 9, 30: 4, 1000: 1}[tokens_per_pass]


@pytest.mark.parametrize("kind", ["top_k", "hidden_states"])
def test_no_more_logits_than_a_chunk_exist_and_chunks_and_passes_change_nothing(
    kind: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    for method in ("log_probabilities", "log_normalizers"):
        original = getattr(TeacherHead, method)

        def count(self: TeacherHead, hidden: Tensor, original: Callable[..., Tensor] = original) -> Tensor:
            sizes.append(len(hidden))
            return original(self, hidden)

        monkeypatch.setattr(TeacherHead, method, count)
    small = cache(configure(kind=kind))
    assert max(sizes) == 7
    large = cache(configure(kind=kind, chunk_size=1000, tokens_per_pass=10_000, output=str(tmp_path / "large")))
    assert max(sizes) > 7
    assert len(list(large.rglob("*.arrow"))) == len(splits_of(large)) < len(list(small.rglob("*.arrow")))
    ours, theirs = (load_signal(rows_of(folder), record_of(folder)) for folder in (small, large))
    for name, values in ours.items():
        if name == "top_ids":
            assert (values == theirs[name]).float().mean() > 0.99
        else:
            torch.testing.assert_close(values, theirs[name], rtol=2e-3, atol=1e-4)


def test_parts_hold_no_more_tokens_than_their_passes(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PASSES_PER_PART", 3)
    output = cache(configure(tokens_per_pass=60))
    files = sorted((output / "train").glob("*.arrow"))
    parts = [[len(ids) for ids in datasets.Dataset.from_file(str(path))["input_ids"]] for path in files]
    assert len(parts) > 2
    assert max(map(sum, parts)) <= 3 * 60
    # and no fewer than they may
    assert all(sum(part) + following[0] > 3 * 60 for part, following in pairwise(parts))


# --- its size ---------------------------------------------------------------------------------------------


def announced(log: str) -> tuple[int, int, int, int]:
    (found,) = re.findall(r"(\d+) response tokens of (\d+) bytes each, (\d+) bytes in all, beside (\d+) bytes", log)
    num_tokens, each, signal, text = map(int, found)
    return num_tokens, each, signal, text


@pytest.mark.parametrize("changes", [{}, {"top_k": 64}, {"kind": "hidden_states"}, {"dtype": "bfloat16"}])
def test_the_size_announced_is_the_size_kept(
    changes: dict[str, Any], configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        output = cache(configure(**changes))
    num_tokens, each, signal, text = announced(caplog.text)
    rows, record = rows_of(output), record_of(output)
    assert num_tokens == sum(map(num_response_tokens, rows))
    assert each == record.bytes_per_token
    assert signal == num_tokens * each == sum(len(row[name]) for row in rows for name in record.columns())
    files = sum(path.stat().st_size for path in output.rglob("*.arrow"))
    assert signal + text <= files < signal + text + 4000 * len(list(output.rglob("*.arrow")))


Usage = namedtuple("Usage", "total used free")


def with_free_bytes(patch: pytest.MonkeyPatch, free: int) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, free))


def test_a_disk_too_small_is_refused_before_anything_is_written(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free_bytes(monkeypatch, 1000)
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=r"^output .*cache: needs 0\.00 GB, and the"):
        cache(configure())
    assert names(tmp_path) == []
    needed = sum(announced(caplog.text)[2:])
    with_free_bytes(monkeypatch, needed - 1)
    with pytest.raises(ValueError, match="free some, name a folder on another disk, or keep less with kind top_k"):
        cache(configure())
    assert names(tmp_path) == []
    with_free_bytes(monkeypatch, needed)
    cache(configure())


def test_what_is_there_already_needs_no_room(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at_part(3, configure())
    written = sum(path.stat().st_size for path in (tmp_path / ".cache.partial").rglob("*.arrow"))
    with_free_bytes(monkeypatch, 0)
    caplog.clear()
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=r"^output .*: needs"):
        cache(configure())
    needed = sum(announced(caplog.text)[2:])
    assert 0 < written < needed
    with_free_bytes(monkeypatch, needed - written)
    cache(configure())


# --- begun again ------------------------------------------------------------------------------------------


class StopRunError(Exception):
    """Raised in place of a kill, where the process must live on."""


def interrupt_at_part(number: int, config: CacheConfig) -> None:
    saved: list[Path] = []
    save = module.save_part

    def stop(rows: Rows, features: datasets.Features, path: Path) -> None:
        saved.append(path)
        if len(saved) == number:
            raise StopRunError
        save(rows, features, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save_part", stop)
        with pytest.raises(StopRunError):
            cache(config)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.arrow")}


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", ["top_k", "hidden_states"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_interrupted_between_parts_it_ends_with_the_same_bytes(
    number: int, kind: str, configure: Configure, tmp_path: Path
) -> None:
    whole = cache(configure(kind=kind, output=str(tmp_path / "whole")))
    interrupt_at_part(number, configure(kind=kind))
    assert names(tmp_path) == [".cache.partial", "whole"]
    begun = contents(tmp_path / ".cache.partial")
    kept = {path.name for path in begun if path.suffix == ".arrow"}
    assert len(list((tmp_path / ".cache.partial").rglob("*.arrow"))) == number - 1
    output = cache(configure(kind=kind))
    assert names(tmp_path) == ["cache", "whole"]
    assert files_of(output) == files_of(whole)
    assert len(files_of(output)) > 4
    for path, made_at in begun.items():
        if path.name in kept:  # not made again
            assert (output / path.relative_to(tmp_path / ".cache.partial")).stat().st_mtime_ns == made_at


def test_interrupted_within_a_part_it_makes_that_part_again(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cache(configure(output=str(tmp_path / "whole")))
    publish = parts.publish

    def stop(temporary: Path, final: Path) -> None:
        if len(list((tmp_path / ".cache.partial").rglob("data*.arrow"))) == 2:
            temporary.write_bytes(temporary.read_bytes()[:100])
            raise StopRunError
        publish(temporary, final)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "publish", stop)
        with pytest.raises(StopRunError):
            cache(configure())
    output = cache(configure())
    assert files_of(output) == files_of(whole)
    assert list(output.rglob(".*")) == []


@pytest.mark.parametrize("step", ["write_text", "finish", "publish"])
def test_interrupted_elsewhere_it_goes_on(
    step: str, configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its settings are recorded; before the parts are described; before they get their name."""
    place = module if step == "finish" else parts
    original = getattr(place, step)
    output = tmp_path / "cache"

    def stop(*arguments: Any) -> None:
        if step != "publish" or arguments[1] == output:
            raise StopRunError
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(place, step, stop)
        with pytest.raises(StopRunError):
            cache(configure())
    assert names(tmp_path) == [".cache.partial"]
    assert load_record(str(output)) is None
    cache(configure())
    assert names(tmp_path) == ["cache"]
    assert len(rows_of(output)) > 0


@pytest.mark.parametrize("number", [2, 6])
def test_what_was_interrupted_is_not_taken_for_a_cache(number: int, configure: Configure, tmp_path: Path) -> None:
    interrupt_at_part(number, configure())
    for folder in (tmp_path / "cache", tmp_path / ".cache.partial"):
        for split in ("train", "heldout"):
            with pytest.raises(ValueError, match=rf"^responses .*: holds no {split}/; "):
                load_responses(str(folder), split)


def test_a_finished_cache_is_left_alone(
    configure: Configure, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = cache(configure())
    before = contents(output)
    monkeypatch.setattr(module, "load_model", None)  # not even loaded
    with caplog.at_level(logging.INFO):
        assert cache(configure()) == output
    assert "complete already" in caplog.text
    assert contents(output) == before


OTHER_SETTINGS = {
    "kind": "hidden_states",
    "top_k": 6,
    "temperature": 0.5,
    "dtype": "bfloat16",
    "chunk_size": 8,
    "tokens_per_pass": 131,
}


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_other_settings_in_the_same_folder_are_refused(
    state: str, configure: Configure, target: Path, tmp_path: Path
) -> None:
    if state == "finished":
        cache(configure())
    else:
        interrupt_at_part(3, configure())
    before = contents(tmp_path)
    for name, value in OTHER_SETTINGS.items():
        with pytest.raises(ValueError, match=rf"^{name}: .* differs from .*, with which .*cache.* was begun; "):
            cache(configure(**{name: value}))
    other = respond(replace(respond_config(target, tmp_path), samples_per_prompt=2))
    with pytest.raises(ValueError, match=r"^responses_sha256: .* differs from .*, with which .*cache.* was begun; "):
        cache(configure(responses=str(other)))
    assert {path: made_at for path, made_at in contents(tmp_path).items() if path in before} == before
    cache(configure(target=str(target)))  # the control: the one that wrote the responses, said aloud


def test_states_kept_by_respond_are_not_taken_for_its_own(
    configure: Configure, responses: Path, tmp_path: Path
) -> None:
    settings = json.loads((responses / "respond.json").read_text())["settings"]
    settings |= {"sampling": SamplingParams(**settings["sampling"]), "output": str(tmp_path / "kept")}
    del settings["prompts_sha256"]
    kept = respond(RespondConfig(**settings | {"keep_states": True}))
    with pytest.raises(ValueError, match="holds responses with states kept by `respond`; give another folder"):
        cache(configure(responses=str(kept), output=str(kept)))


def test_a_target_replaced_meanwhile_is_noticed(
    save_target: Callable[..., Path], configure: Configure, tmp_path: Path
) -> None:
    folder = save_target(seed=1)
    config = configure(target=str(folder))
    interrupt_at_part(3, config)
    shutil.copytree(save_target(seed=1, num_layers=3), folder, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"^output .*cache: was begun with another target of the same name; delete "):
        cache(config)


def test_a_folder_of_something_else_is_left_alone(configure: Configure, responses: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.tex").write_text("years of work")
    for folder in (tmp_path / "cache", responses):
        before = contents(folder)
        with pytest.raises(ValueError, match=r"^output .*: exists and holds no cache\.json; give another folder$"):
            cache(configure(output=str(folder)))
        assert contents(folder) == before


# --- whose it is ------------------------------------------------------------------------------------------


def test_a_cache_belongs_to_its_target(save_target: Callable[..., Path], configure: Configure, target: Path) -> None:
    output = str(cache(configure()))
    record = record_of(Path(output))
    tokenizer = load_tokenizer(str(target))
    refuse_cache_of_another_target(output, record, str(target), tokenizer)
    other = save_target(num_layers=3)
    with pytest.raises(ValueError, match=r"^teacher's signal in .*cache: made for target .*, whose config is not that"):
        refuse_cache_of_another_target(output, record, str(other), tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match=r"^teacher's signal in .*cache: made for target .*, whose tokenizer is not"):
        refuse_cache_of_another_target(output, record, str(target), tokenizer)


def test_another_teacher_of_the_same_tokens_may_speak(
    save_target: Callable[..., Path], configure: Configure, target: Path, tmp_path: Path
) -> None:
    other = save_target(num_layers=3)
    output = cache(configure(target=str(other), kind="hidden_states"))
    rows, record = rows_of(output), record_of(output)
    refuse_cache_of_another_target(str(output), record, str(other), load_tokenizer(str(other)))
    with pytest.raises(ValueError, match="whose config is not that of"):
        refuse_cache_of_another_target(str(output), record, str(target), load_tokenizer(str(target)))
    model = load_model(str(other))
    signal = load_signal(rows, record)
    log_p = TeacherHead(model).log_probabilities(signal["teacher_hidden"], signal["log_normalizers"])
    torch.testing.assert_close(log_p.double(), true_log_p(model, rows), rtol=1e-4, atol=1e-4)


def test_a_teacher_of_other_tokens_is_refused(
    save_target: Callable[..., Path], configure: Configure, tmp_path: Path
) -> None:
    other = save_target(vocab_size=300)
    tokenizer = load_tokenizer(str(other))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=r"^responses .*: made for target .*, whose tokenizer is not that of .*; "):
        cache(configure(target=str(other)))
    assert names(tmp_path) == []


def test_a_cache_serves_as_responses_for_another_kind(configure: Configure, tmp_path: Path) -> None:
    first = cache(configure())
    second = cache(configure(responses=str(first), kind="hidden_states", output=str(tmp_path / "second")))
    direct = cache(configure(kind="hidden_states", output=str(tmp_path / "direct")))
    assert files_of(second) == files_of(direct)


@COMPILED
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", ["top_k", "hidden_states"])
def test_of_hidden_states_that_are_kept_no_pass_is_made(
    kind: str,
    compile: bool,
    configure: Configure,
    save_target: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    direct = cache(configure(kind=kind, output=str(tmp_path / "direct")))
    states = str(cache(configure(kind="hidden_states", output=str(tmp_path / "states"))))
    passes = []
    monkeypatch.setattr("distill.cache.final_hidden_states", lambda *of: passes.append(of) or final_hidden_states(*of))
    with caplog.at_level(logging.INFO):
        found = cache(configure(responses=states, kind=kind, compile=compile, output=str(tmp_path / "found")))
    assert not passes
    *_, signal, text = announced(caplog.text)
    files = sum(path.stat().st_size for path in found.rglob("*.arrow"))
    assert signal + text <= files < signal + text + 4000 * len(list(found.rglob("*.arrow")))
    for row, expected in zip(rows_of(found), rows_of(direct), strict=True):
        assert row.keys() == expected.keys()
        for name, values in load_signal([row], record_of(found)).items():
            torch.testing.assert_close(values, load_signal([expected], record_of(direct))[name], atol=2e-3, rtol=2e-3)
    # the control: another teacher of the same tokens and config, or of another dtype
    others = ({"target": str(save_target(seed=1))}, {"dtype": "bfloat16"})
    for number, other in enumerate(others):
        passes.clear()
        cache(configure(responses=states, kind=kind, output=str(tmp_path / f"other-{number}"), **other))
        assert passes, other


# --- refusals ---------------------------------------------------------------------------------------------


def test_responses_without_a_signal_have_no_record(responses: Path, tmp_path: Path) -> None:
    assert load_record(str(responses)) is None
    assert load_record(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("content", ["{", "{}", '{"settings": {}, "kind": "top_k"}', "[]"])
def test_a_damaged_record_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text(content)
    with pytest.raises(ValueError, match=r"^responses .*: cache\.json .*; make them anew$"):
        load_record(str(tmp_path))


def test_a_folder_without_responses_is_refused(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^responses .*nowhere: respond\.json is missing or damaged; "):
        cache(configure(responses=str(tmp_path / "nowhere")))


def test_more_tokens_than_there_are_cannot_be_kept(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^top_k: 260 is not possible; the target has {VOCAB} tokens$"):
        cache(configure(top_k=260))
    assert names(tmp_path) == []
    output = cache(configure(top_k=VOCAB))
    assert load_signal(rows_of(output), record_of(output))["log_tail"].max() == -torch.inf
    with pytest.raises(ValueError, match="give another output"):
        cache(configure(top_k=VOCAB, kind="hidden_states"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "^top_k: 0 is not possible; give 1 or more$"),
        ({"chunk_size": 0}, "^chunk_size: 0 is not possible; give 1 or more$"),
        ({"tokens_per_pass": -1}, "^tokens_per_pass: -1 is not possible; give 1 or more$"),
        ({"temperature": 0.0}, "^temperature: 0.0 is not possible; give a number above 0$"),
        ({"temperature": float("nan")}, "^temperature: nan is not possible; give a number above 0$"),
    ],
)
def test_values_that_cannot_be_meant(changes: dict[str, Any], message: str, configure: Configure) -> None:
    with pytest.raises(ValueError, match=message):
        configure(**changes)


def _learnt(row: dict[str, Any]) -> list[int]:
    pairs = zip(row["input_ids"][1:], row["response_mask"][1:], strict=True)
    return [token for token, learnt in pairs if learnt]
