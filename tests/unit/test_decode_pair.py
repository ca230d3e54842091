"""A pair on disk and what it is loaded from; whatever is wrong with either is said in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.pair import (
    Pair,
    describe_target,
    load_draft_vocab,
    load_model,
    load_tokenizer,
    refuse_other_tokenizer,
    save_draft_vocab,
    stop_token_ids,
)
from decode.prompts import as_messages, encode

ModelFolder = Callable[..., Path]


@pytest.fixture
def folder(tiny_model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A model folder to be spoilt."""
    return Path(shutil.copytree(tiny_model_folder(hidden_size=16, num_layers=1), tmp_path / "model"))


def full_pair() -> Pair:
    return Pair(
        target={"id": "/models/target", "revision": None, "config_sha256": "a", "tokenizer_sha256": "b"},
        num_draft_tokens=5,
        sampling={"temperature": 1.0},
        measured={"alpha": 0.7, "betas": [0.7, 0.6]},
        provenance={"command": "spec-distill build", "resolved_config": {"layers": [0, 3]}},
    )


def test_a_pair_survives_the_disk(tmp_path: Path) -> None:
    full_pair().save(tmp_path)
    assert Pair.load(tmp_path) == full_pair()
    assert full_pair().target_id() == "/models/target"
    assert [path.name for path in tmp_path.iterdir()] == ["pair.json"]
    written = json.loads((tmp_path / "pair.json").read_text())
    assert written["format_version"] == 1
    full_pair().save(tmp_path)  # an older one is replaced
    Pair(target={"id": "other"}).save(tmp_path)
    assert Pair.load(tmp_path).num_draft_tokens == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("[1]", "it is no JSON object"),
        ("null", "it is no JSON object"),
        ("{}", "format_version is None, this release reads 1"),
        ('{"format_version": 2, "target": {}, "novelty": 1}', "format_version is 2, this release reads 1"),
        ('{"format_version": 1}', "missing 1 required positional argument: 'target'"),
        ('{"format_version": 1, "target": {}, "novelty": 1}', "unexpected keyword argument 'novelty'"),
        ('{"format_version": 1, "target": "x"}', "target must be an object"),
        ('{"format_version": 1, "target": {}, "num_draft_tokens": "3"}', "num_draft_tokens a whole number"),
        ('{"format_version": 1, "target": {}, "num_draft_tokens": 0}', "of at least 1"),
        ('{"format_version": 1, "target": {}, "measured": []}', "measured must be an object"),
        ('{"format_version": 1, "target": {}, "measured": {"betas": ["x"]}}', "and its betas numbers"),
        ("\udcff", "codec can't decode byte 0xff"),
    ],
)
def test_what_is_no_pair_description_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pair.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/pair.json: not a pair description: .*{reason}") as raised:
        Pair.load(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_pair_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^pair {tmp_path}: holds no pair.json; give .*--target$"):
        Pair.load(tmp_path)
    with pytest.raises(ValueError, match=rf"^pair {tmp_path}/nowhere: there is no such folder; give "):
        Pair.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"^pair.json names no target: give one with --target$"):
        Pair(target={}).target_id()


def test_a_draft_vocabulary_survives_the_disk(tmp_path: Path) -> None:
    assert load_draft_vocab(tmp_path) is None
    ids = torch.tensor([0, 2, 5, 258])
    save_draft_vocab(tmp_path, torch.stack([ids, ids], dim=1)[:, 0])  # not contiguous
    loaded = load_draft_vocab(tmp_path)
    assert loaded is not None
    assert loaded.dtype == torch.int64
    assert torch.equal(loaded, ids)
    (tmp_path / "draft_vocab.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/draft_vocab.safetensors: not a draft's vocabulary: "):
        load_draft_vocab(tmp_path)


def test_a_model_is_loaded_ready_to_serve(folder: Path) -> None:
    model = load_model(str(folder))
    assert not model.training
    assert model.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert load_model(str(folder), "bfloat16").dtype == torch.bfloat16
    tokenizer = load_tokenizer(str(folder))
    assert stop_token_ids(model, tokenizer) == {2}
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [5, 7]
    assert stop_token_ids(model, tokenizer) == {2, 5, 7}
    model.generation_config.eos_token_id = None
    assert stop_token_ids(model, tokenizer) == {2}


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def halve_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def set_in_config(**values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "the folder holds no config.json; give a Hugging Face"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded: .*not a valid JSON file"),
        (drop_weights, "cannot be loaded: .*model.safetensors"),
        (halve_weights, "cannot be loaded: .*incomplete metadata"),
        (set_in_config(model_type="nonsense"), "cannot be loaded: .*nonsense"),
        (set_in_config(model_type="vit"), "cannot be loaded: .*AutoModelForCausalLM"),
        (set_in_config(hidden_size=32), "cannot be loaded: "),
    ],
)
def test_a_folder_that_is_no_model_is_refused(spoil: Callable[[Path], Any], reason: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=rf"^draft {folder}: {reason}") as raised:
        load_model(str(folder), role="draft")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "no/such/folder", "nowhere/"])
def test_a_folder_that_is_missing_is_refused_before_the_hub_is_asked(load: Callable[..., Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^target {name}: there is no such model folder$"):
        load(name, role="target")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_name_that_cannot_be_had_is_refused(load: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"no-such/model: there is no such folder, and the hub did not provide it$"):
        load("no-such/model")


@pytest.mark.parametrize(
    "spoil", [lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], lambda folder: truncate(folder)]
)
def test_a_tokenizer_that_cannot_be_read_is_refused(spoil: Callable[[Path], Any], folder: Path) -> None:
    spoil(folder)
    with pytest.raises(ValueError, match=rf"^tokenizer of target {folder}: cannot be loaded: ") as raised:
        load_tokenizer(str(folder), "target")
    assert "\n" not in str(raised.value)


def truncate(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:100])


def test_a_target_is_named_by_its_absolute_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(folder))
    monkeypatch.chdir(tmp_path)
    described = describe_target("model", tokenizer)
    assert described == describe_target(str(folder), tokenizer)
    assert described["id"] == str(folder.resolve())
    set_in_config(rms_norm_eps=1e-3)(folder)
    changed = describe_target(str(folder), tokenizer)
    assert changed["config_sha256"] != described["config_sha256"]
    assert changed["tokenizer_sha256"] == described["tokenizer_sha256"]
    set_in_config(rms_norm_eps=1e-6, dtype="bfloat16")(folder)  # how it is loaded, not what it is
    assert describe_target(str(folder), tokenizer) == described
    tokenizer.add_tokens(["<new>"])
    assert describe_target(str(folder), tokenizer)["tokenizer_sha256"] != described["tokenizer_sha256"]


def byte_pairs(*merges: tuple[str, str], swapped: tuple[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Bytes, and the pairs "ll" and "lo" whichever of them the merges use."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ll", "lo"]
    if swapped:
        one, other = map(tokens.index, swapped)
        tokens[one], tokens[other] = tokens[other], tokens[one]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def test_the_same_tokenizer_passes(folder: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    refuse_other_tokenizer(load_tokenizer(str(folder)), byte_tokenizer, "t", "d")
    one = byte_pairs(("l", "l"), ("l", "o"))
    refuse_other_tokenizer(one, byte_pairs(("l", "l"), ("l", "o")), "t", "d")


def test_the_first_differing_id_is_named() -> None:
    target, draft = byte_pairs(("l", "l"), ("l", "o")), byte_pairs(("l", "l"), ("l", "o"), swapped=("C", "z"))
    first = target.convert_tokens_to_ids("C")
    assert target.get_vocab()["z"] > first
    with pytest.raises(
        ValueError, match=rf"^draft d: .* not that of target t: id {first} is 'z' in the draft and 'C' in the target; "
    ):
        refuse_other_tokenizer(target, draft, "t", "d")
    longer = byte_pairs(("l", "l"), ("l", "o"))
    longer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="id 258 is '<new>' in the draft and None in the target"):
        refuse_other_tokenizer(target, longer, "t", "d")
    with pytest.raises(ValueError, match="id 258 is None in the draft and '<new>' in the target"):
        refuse_other_tokenizer(longer, target, "t", "d")


def test_the_same_vocabulary_that_splits_differently_is_refused() -> None:
    target, draft = byte_pairs(("l", "l"), ("l", "o")), byte_pairs(("l", "o"), ("l", "l"))
    assert target.get_vocab() == draft.get_vocab()
    assert target.tokenize("Hello") != draft.tokenize("Hello")
    with pytest.raises(ValueError, match=r"draft d: .* vocabulary of target t but splits text differently; copy the"):
        refuse_other_tokenizer(target, draft, "t", "d")


def test_a_model_without_all_its_weights_is_refused(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder(), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"target .*: lacks 1 of its weights, such as model\.layers\.1\.mlp\.up_proj"):
        load_model(str(folder), role="target")


@pytest.mark.parametrize("ids", [[[1, 2]], [], [-1], [0.5]], ids=str)
def test_a_vocabulary_that_is_none_is_refused(ids: list[Any], tmp_path: Path) -> None:
    save_file({"token_ids": torch.tensor(ids)}, tmp_path / "draft_vocab.safetensors")
    with pytest.raises(ValueError, match="not a list of token ids"):
        load_draft_vocab(tmp_path)


def test_a_lone_surrogate_is_refused(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        encode(byte_tokenizer, as_messages("a\ud800b"))
