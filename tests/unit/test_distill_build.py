"""A draft made of the target's layers: which, exactly copied, with which vocabulary, as a stock folder."""

import copy
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from decode.pair import Pair, load_draft_vocab, load_model
from decode.params import SamplingParams
from distill import build as build_module
from distill.build import build, choose_layers, choose_vocab, draft_from_layers, probability_mass
from distill.config import BuildConfig, RespondConfig
from distill.responses import load_responses, respond

NUM_LAYERS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SHAPE | {"num_key_value_heads": 1}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
# name: the model, and where its layers are
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)), "model.layers"),
    "llama, tied": (lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True)), "model.layers"),
    # two layers of full attention, then two with a window
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED, **SLIDING)), "model.layers"),
    "qwen2, tied": (lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED, tie_word_embeddings=True)), "model.layers"),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=NUM_LAYERS, n_head=2, n_positions=128)),
        "transformer.h",
    ),
    "gpt-neox": (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)), "gpt_neox.layers"),
    "gemma2": (
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**GROUPED, head_dim=8, sliding_window=8, attn_logit_softcapping=None, query_pre_attn_scalar=8)
        ),
        "model.layers",
    ),
    # every fourth layer without rotary embeddings
    "smollm3": (lambda: SmolLM3ForCausalLM(SmolLM3Config(**GROUPED)), "model.layers"),
}
IDS = torch.arange(3, 43).unsqueeze(0)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, str]:
    make, prefix = FAMILIES[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model, prefix


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    output: Tensor = model(input_ids=IDS, use_cache=False).logits
    return output


# --- which layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([5], [5]),
        ([3, 0, 3], [3, 0, 3]),
        (1, [0]),
        (2, [0, 29]),
        (4, [0, 10, 19, 29]),
        (30, list(range(30))),
    ],
)
def test_choose_layers(wanted: int | list[int], expected: list[int]) -> None:
    assert choose_layers(wanted, 30) == expected


def test_a_count_gives_distinct_layers_from_first_to_last() -> None:
    for num_layers, count in itertools.product(range(2, 81), range(2, 81)):
        if count <= num_layers:
            layers = choose_layers(count, num_layers)
            assert len(set(layers)) == count
            assert layers == sorted(layers)
            assert (layers[0], layers[-1]) == (0, num_layers - 1)


@pytest.mark.parametrize("wanted", [0, 5, -1, [], [4], [0, -1]])
def test_layers_that_are_not_there_are_refused(wanted: int | list[int]) -> None:
    with pytest.raises(ValueError, match=r"^layers: .* is not possible; the target has (4 layers|layers 0 to 3)$"):
        choose_layers(wanted, 4)


# --- the copy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [[0, 3], [2, 1], [1], [0, 0, 2, 3, 3]], ids=str)
def test_exactly_these_layers_are_copied(layers: list[int], family: tuple[PreTrainedModel, str]) -> None:
    target, prefix = family
    draft = draft_from_layers(target, layers)
    assert draft.config.num_hidden_layers == len(draft.get_submodule(prefix)) == len(layers)
    theirs, ours = target.state_dict(), draft.state_dict()
    expected = {name: tensor for name, tensor in theirs.items() if not name.startswith(f"{prefix}.")}
    for place, layer in enumerate(layers):
        for name, tensor in target.get_submodule(f"{prefix}.{layer}").state_dict().items():
            expected[f"{prefix}.{place}.{name}"] = tensor
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    assert not draft.training
    assert target.config.num_hidden_layers == NUM_LAYERS


def test_the_target_keeps_its_own_weights(family: tuple[PreTrainedModel, str]) -> None:
    target, _ = family
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    draft = draft_from_layers(target, [0, 1])
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_tied_embeddings_stay_tied_and_others_apart(family: tuple[PreTrainedModel, str]) -> None:
    target, _ = family
    tied = target.get_output_embeddings().weight is target.get_input_embeddings().weight
    assert tied == bool(target.config.tie_word_embeddings)
    draft = draft_from_layers(target, [0])
    assert (draft.get_output_embeddings().weight is draft.get_input_embeddings().weight) == tied


def test_all_layers_give_the_targets_logits(family: tuple[PreTrainedModel, str]) -> None:
    target, _ = family
    assert torch.equal(logits(draft_from_layers(target, list(range(NUM_LAYERS)))), logits(target))
    # the control
    assert not torch.allclose(logits(draft_from_layers(target, [0, 1, 3, 2])), logits(target))


@pytest.mark.parametrize("layers", [[0, 3], [2, 1], [3]], ids=str)
def test_a_kept_layer_does_what_it_did_in_the_target(layers: list[int], family: tuple[PreTrainedModel, str]) -> None:
    """Windows and rotary embeddings go with the layer: the same as leaving the others out of the target."""
    target, prefix = copy.deepcopy(family[0]), family[1]
    draft = draft_from_layers(target, layers)
    parent, _, name = prefix.rpartition(".")
    kept = nn.ModuleList(target.get_submodule(prefix)[layer] for layer in layers)
    setattr(target.get_submodule(parent), name, kept)
    types = getattr(target.config, "layer_types", None)
    # the only thing that a model asks its configuration for while it runs
    target.config.layer_types = types and [types[layer] for layer in layers]
    target.config.num_hidden_layers = len(layers)
    assert torch.equal(logits(draft), logits(target))


def test_a_saved_draft_is_the_same_when_loaded(family: tuple[PreTrainedModel, str], tmp_path: Path) -> None:
    draft = draft_from_layers(family[0], [1, 2])
    draft.save_pretrained(tmp_path / "draft")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "draft")), logits(draft))


def test_a_model_without_a_list_of_layers_is_refused(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    model.config.num_hidden_layers = 7
    with pytest.raises(ValueError, match=r"^target: model type 'llama' has no list of 7 decoder layers"):
        draft_from_layers(model, [0])


def test_the_draft_ends_its_texts_as_the_target_does(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Chat models name more tokens that end a text in their generation config than in their config."""
    target = tiny_llama()
    target.generation_config.eos_token_id = [2, 7]
    draft = draft_from_layers(target, [1])
    assert draft.generation_config.eos_token_id == [2, 7]
    assert draft.generation_config is not target.generation_config


def test_the_draft_is_in_the_targets_dtype(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    draft = draft_from_layers(tiny_llama().bfloat16(), [1])
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.bfloat16}


# --- the vocabulary ---------------------------------------------------------------------------------------


def test_choose_vocab_takes_the_largest_masses_and_what_must_be_kept() -> None:
    mass = torch.tensor([0.0, 0.1, 0.3, 0.05, 0.2, 0.15, 0.2])
    chosen = choose_vocab(mass, 4, {0})
    assert chosen.tolist() == [0, 2, 4, 6]
    assert chosen.dtype == torch.int64
    assert choose_vocab(mass, 3, set()).tolist() == [2, 4, 6]
    assert choose_vocab(mass, 2, {0, 3}).tolist() == [0, 3]
    assert choose_vocab(mass, 100, {0}).tolist() == list(range(7))
    assert mass[0] == 0
    with pytest.raises(ValueError, match="vocab_size: 1 has no room for the 2 special tokens"):
        choose_vocab(mass, 1, {0, 3})


@pytest.fixture(scope="module")
def target(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder(num_layers=NUM_LAYERS, hidden_size=16, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def responses(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Of the same twelve prompts, without hidden states and with them."""
    folder = tmp_path_factory.mktemp("responses")
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(12)))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=10, seed=0)
    return {
        kept: respond(
            RespondConfig(
                target=str(target),
                prompts=str(folder / "prompts.txt"),
                output=str(folder / f"kept-{kept}"),
                sampling=sampling,
                keep_hidden_states=kept,
            )
        )
        for kept in (False, True)
    }


@torch.no_grad()
def true_p(model: PreTrainedModel, rows: list[dict[str, Any]]) -> Tensor:
    """The target's distribution before each response token, float64 [tokens, vocab]."""
    parts = []
    for row in rows:
        start = row["response_mask"].index(True)
        parts.append(model(input_ids=torch.tensor([row["input_ids"][:-1]])).logits[0, start - 1 :])
    return torch.cat(parts).double().softmax(-1)


@pytest.mark.parametrize("kept", [False, True], ids=["a pass", "kept states"])
def test_probability_mass_is_the_mean_of_p_on_training_responses(
    kept: bool, target: Path, responses: dict[bool, Path]
) -> None:
    before = sorted(path.name for path in responses[kept].rglob("*"))
    model = load_model(str(target))
    mass = probability_mass(str(responses[kept]), model)
    p = true_p(model, list(load_responses(str(responses[kept]), "train")))
    assert len(p) > 50
    torch.testing.assert_close(mass.double(), p.mean(0), rtol=1e-4, atol=1e-7)
    assert mass.sum() == pytest.approx(1, abs=1e-5)
    # the control: the held-out responses have another mean
    heldout = true_p(model, list(load_responses(str(responses[kept]), "heldout")))
    assert (heldout.mean(0) - p.mean(0)).abs().max() > 0.01
    # somebody else's folder is only read
    assert sorted(path.name for path in responses[kept].rglob("*")) == before


def test_probability_mass_stops_after_enough_tokens(
    target: Path, responses: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "VOCAB_SAMPLE_TOKENS", 1)
    model = load_model(str(target))
    mass = probability_mass(str(responses[False]), model)
    means = [true_p(model, [row]).mean(0) for row in load_responses(str(responses[False]), "train")]
    assert sum(torch.allclose(mass.double(), mean, rtol=1e-4, atol=1e-7) for mean in means) == 1


# --- the pair ---------------------------------------------------------------------------------------------


def config_for(target: Path, output: Path, **changes: Any) -> BuildConfig:
    return BuildConfig(**({"target": str(target), "output": str(output), "layers": 2} | changes))


def test_a_pair_is_a_stock_folder_and_its_description(target: Path, tmp_path: Path) -> None:
    output = build(config_for(target, tmp_path / "new" / "pair", num_draft_tokens=5))
    assert output == tmp_path / "new" / "pair"
    assert sorted(path.name for path in output.iterdir()) == ["draft", "pair.json"]
    draft = AutoModelForCausalLM.from_pretrained(output / "draft")
    expected = draft_from_layers(load_model(str(target)), [0, 3])
    assert torch.equal(logits(draft), logits(expected))
    assert draft.generation_config.eos_token_id == 2
    tokenizer, original = AutoTokenizer.from_pretrained(output / "draft"), AutoTokenizer.from_pretrained(target)
    assert tokenizer.get_vocab() == original.get_vocab()
    assert tokenizer.chat_template == original.chat_template
    pair = Pair.load(output)
    assert (pair.target_id(), pair.num_draft_tokens, pair.draft_kind) == (str(target), 5, "model")
    assert None not in (pair.target["config_sha256"], pair.target["tokenizer_sha256"])
    assert pair.provenance["resolved_config"]["layers"] == [0, 3]
    assert load_draft_vocab(output) is None
    assert sorted(path.name for path in output.parent.iterdir()) == ["pair"]


def test_a_reduced_vocabulary_is_a_file_beside_a_whole_draft(
    target: Path, responses: dict[bool, Path], tmp_path: Path
) -> None:
    output = build(config_for(target, tmp_path / "pair", vocab_size=40, responses=str(responses[False])))
    token_ids = load_draft_vocab(output)
    assert token_ids is not None
    mass = probability_mass(str(responses[False]), load_model(str(target)))
    assert token_ids.equal(choose_vocab(mass, 40, {0, 1, 2}))
    assert {0, 1, 2} <= set(token_ids.tolist())
    assert mass[token_ids].sum() > 1.3 * mass[:40].sum()
    assert AutoModelForCausalLM.from_pretrained(output / "draft").get_output_embeddings().out_features == 259


def test_a_finished_pair_is_left_alone(target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = build(config_for(target, tmp_path / "pair"))
    # as `spec-decode evaluate` does
    pair = Pair.load(output)
    pair.num_draft_tokens, pair.measured = 7, {"alpha": 0.5}
    pair.save(output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    with caplog.at_level(logging.INFO):
        assert build(config_for(target, tmp_path / "pair")) == output
        build(config_for(target, tmp_path / "pair", layers=[0, 3]))  # the same layers, named one by one
    assert caplog.text.count("complete already") == 2
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, r"^layers: \[0, 2, 3\] differs from \[0, 3\]"),
        ({"layers": [0, 2]}, r"^layers: \[0, 2\] differs from \[0, 3\]"),
        ({"num_draft_tokens": 4}, "^num_draft_tokens: 4 differs from 3"),
        ({"responses": "elsewhere", "vocab_size": 9}, "^(responses|vocab_size): .* differs from None"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(
    changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    output = build(config_for(target, tmp_path / "pair"))
    before = (output / "pair.json").read_text()
    with pytest.raises(ValueError, match=message):
        build(config_for(target, tmp_path / "pair", **changes))
    assert (output / "pair.json").read_text() == before


def test_another_target_in_the_same_folder_is_refused(
    target: Path, tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    build(config_for(target, tmp_path / "pair"))
    with pytest.raises(ValueError, match=r"^target: .* differs from "):
        build(config_for(tiny_model_folder(num_layers=NUM_LAYERS, hidden_size=16, seed=1), tmp_path / "pair"))


def test_a_folder_of_something_else_is_left_alone(target: Path, tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"^output .*pair: exists and holds no pair; give another folder"):
        build(config_for(target, tmp_path / "pair"))
    assert [path.name for path in (tmp_path / "pair").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("changes", [{"layers": 5}, {"vocab_size": 2}, {"vocab_size": 40, "responses": "nowhere"}])
def test_a_refused_build_writes_nothing(
    changes: dict[str, Any], target: Path, responses: dict[bool, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^(layers|vocab_size|responses)[: ]"):
        build(config_for(target, tmp_path / "pair", **{"responses": str(responses[False])} | changes))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_build_is_no_pair_and_starts_anew(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pair, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(config_for(target, tmp_path / "pair"))
    assert not (tmp_path / "pair").exists()
    assert list(tmp_path.iterdir()), "the interruption was meant to leave something half-written"
    build(config_for(target, tmp_path / "pair", layers=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair"]
    assert json.loads((tmp_path / "pair" / "draft" / "config.json").read_text())["num_hidden_layers"] == 1
