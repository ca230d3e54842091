"""Layers of a target: which are kept, what is left of the target without the others, and the copy of it."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
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

from decode.params import SamplingParams
from distill import layers as layers_module
from distill.config import RespondConfig
from distill.layers import (
    Calibration,
    choose_layers,
    draft_from_layers,
    eliminate_layers,
    evenly_spaced,
    only_layers,
)
from distill.responses import load_responses, respond
from distill.teacher import final_hidden_states

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


def test_some_layers_are_named_again_where_there_are_fewer() -> None:
    assert evenly_spaced(5, 1) == [0] * 5
    for num_layers, count in itertools.product(range(1, 9), range(9, 20)):
        layers = evenly_spaced(count, num_layers)
        assert layers == sorted(layers)
        assert set(layers) == set(range(num_layers))


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
    target, prefix = family
    every_layer, config, before = target.get_submodule(prefix), target.config.to_dict(), logits(target)
    draft = draft_from_layers(target, layers)
    with only_layers(target, layers):
        assert torch.equal(logits(target), logits(draft))
        assert not torch.allclose(logits(target), before)
    # as if nothing had been
    assert target.get_submodule(prefix) is every_layer
    assert target.config.to_dict() == config
    assert torch.equal(logits(target), before)


def test_the_target_gets_its_layers_back_after_an_error(family: tuple[PreTrainedModel, str]) -> None:
    target, prefix = family
    every_layer, config = target.get_submodule(prefix), target.config.to_dict()
    with pytest.raises(KeyboardInterrupt), only_layers(target, [1]):
        assert len(target.get_submodule(prefix)) == 1
        raise KeyboardInterrupt
    with pytest.raises(IndexError), only_layers(target, [0, NUM_LAYERS]):
        pass
    assert target.get_submodule(prefix) is every_layer
    assert target.config.to_dict() == config


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


# --- the choice by acceptance -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def responses(tiny_model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of twelve prompts of different lengths, of which ten train."""
    folder = tmp_path_factory.mktemp("responses")
    (folder / "prompts.txt").write_text("".join(f"Say {'so ' * (number % 4)}{number}.\n" for number in range(12)))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=12, seed=0)
    target = tiny_model_folder(num_layers=NUM_LAYERS, hidden_size=16, tie_word_embeddings=True)
    prompts, output = str(folder / "prompts.txt"), str(folder / "responses")
    return str(respond(RespondConfig(target=str(target), prompts=prompts, output=output, sampling=sampling)))


@pytest.fixture(params=["llama", "a sliding window"])
def teacher(request: pytest.FixtureRequest, tiny_llama: Callable[..., LlamaForCausalLM]) -> PreTrainedModel:
    if request.param == "llama":
        return tiny_llama(num_layers=NUM_LAYERS, hidden_size=16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(**GROUPED | {"vocab_size": 259, "initializer_range": 0.3}, **SLIDING)
        return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def distributions(model: PreTrainedModel, rows: list[dict[str, Any]]) -> Tensor:
    """Before each response token, float64 [tokens, vocab]; one text at a time."""
    parts = []
    for row in rows:
        start = row["response_mask"].index(True)
        parts.append(model(input_ids=torch.tensor([row["input_ids"][:-1]])).logits[0, start - 1 :])
    return torch.cat(parts).double().softmax(-1)


def exact_alpha(target: PreTrainedModel, layers: list[int], rows: list[dict[str, Any]]) -> float:
    draft = draft_from_layers(target, layers)
    return float(torch.minimum(distributions(target, rows), distributions(draft, rows)).sum(-1).mean())


def test_each_removal_is_the_one_that_costs_least(teacher: PreTrainedModel, responses: str) -> None:
    rows = list(load_responses(responses, "train"))
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    kept, removals = eliminate_layers(teacher, 1, responses, num_tokens=10**6)
    layers = list(range(NUM_LAYERS))
    for removal in removals:
        alphas = {layer: exact_alpha(teacher, [other for other in layers if other != layer], rows) for layer in layers}
        assert removal.alpha == pytest.approx(alphas[removal.layer], abs=1e-5)
        assert alphas[removal.layer] == max(alphas.values())
        assert max(alphas.values()) - min(alphas.values()) > 0.005, "any layer would have done"
        layers.remove(removal.layer)
    assert layers == kept
    assert len(kept) == 1
    assert teacher.config.num_hidden_layers == NUM_LAYERS
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert eliminate_layers(teacher, 2, responses, num_tokens=10**6) == (
        sorted([*kept, removals[-1].layer]),
        removals[:-1],
    )


def test_a_layer_that_does_nothing_goes_first(
    tiny_llama: Callable[..., LlamaForCausalLM], responses: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_llama(num_layers=NUM_LAYERS, hidden_size=16)
    with torch.no_grad():
        target.model.layers[2].self_attn.o_proj.weight.zero_()
        target.model.layers[2].mlp.down_proj.weight.zero_()
    with caplog.at_level(logging.INFO):
        kept, removals = eliminate_layers(target, 2, responses, num_tokens=50)
    assert removals[0].layer == 2
    assert removals[0].alpha == pytest.approx(1, abs=1e-5)
    assert removals[1].alpha < 0.99
    assert "without layer 2: 3 left, alpha 1.000" in caplog.text
    assert f"without layer {removals[1].layer}: 2 left, alpha {removals[1].alpha:.3f}" in caplog.text
    assert len(kept) == 2


def test_as_much_text_is_read_as_asked_for_and_the_teacher_once(
    tiny_llama: Callable[..., LlamaForCausalLM], responses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    def counted(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
        passes.append(int(batch["predicts"].sum()))
        return final_hidden_states(model, batch)

    monkeypatch.setattr(layers_module, "final_hidden_states", counted)
    monkeypatch.setattr(layers_module, "ROWS_PER_PASS", 4)
    monkeypatch.setattr(layers_module, "TOKENS_PER_CHUNK", 7)
    target = tiny_llama(num_layers=3, hidden_size=16)
    rows = list(load_responses(responses, "train"))
    lengths = [sum(row["response_mask"]) for row in rows]
    Calibration(target, responses, 1)
    assert len(passes) == 1
    assert passes[0] in lengths
    passes.clear()
    calibration = Calibration(target, responses, 10**6)
    assert (len(passes), sum(passes)) == (3, sum(lengths))
    assert calibration.alpha() == pytest.approx(1, abs=1e-5)
    passes.clear()
    eliminate_layers(target, 1, responses, 10**6)
    assert len(passes) == 3 * (1 + 3 + 2)
