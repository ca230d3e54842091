"""A new pair: a draft made of layers, of another model or with random weights, with which vocabulary, as a folder."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from decode import SpeculativeDecoder
from decode.pair import Pair, load_draft_vocab, load_model
from decode.params import SamplingParams
from distill.build import build, fresh_draft
from distill.cli import main
from distill.config import BuildConfig, FreshConfig, RespondConfig
from distill.layers import draft_from_layers
from distill.responses import respond
from distill.vocab import choose_vocab, probability_mass, smallest_vocab

NUM_LAYERS = 4
IDS = torch.arange(3, 43).unsqueeze(0)
TinyLlama = Callable[..., LlamaForCausalLM]


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    output: Tensor = model(input_ids=IDS, use_cache=False).logits
    return output


@pytest.fixture(scope="module")
def target(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder(num_layers=NUM_LAYERS, hidden_size=16, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def responses(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("responses")
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(12)))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=10, seed=0)
    prompts, output = str(folder / "prompts.txt"), str(folder / "responses")
    return respond(RespondConfig(target=str(target), prompts=prompts, output=output, sampling=sampling))


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# --- a fresh model ----------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
SLIDING: dict[str, Any] = {"layer_types": KINDS, "sliding_window": 8}
SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **SLIDING, use_sliding_window=True)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, **SLIDING, attn_logit_softcapping=None)),
    # heads that are together wider than the model
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"num_attention_heads": 12, "num_key_value_heads": 4})),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def shaped(request: pytest.FixtureRequest) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return SHAPES[request.param]().eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "num_kv_heads", "intermediate_size"),
    [(48, 6, 2, 128), (24, 3, 1, 64), (96, 12, 4, 256), (16, 2, 1, 32), (32, 4, 1, 96), (8, 1, 1, 32)],
)
def test_a_fresh_draft_has_the_targets_proportions(
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    shaped: PreTrainedModel,
    tmp_path: Path,
) -> None:
    draft = fresh_draft(shaped, FreshConfig(num_layers=3, hidden_size=hidden_size))
    config = draft.config
    assert type(draft) is type(shaped)
    assert (config.num_hidden_layers, len(draft.model.layers), config.hidden_size) == (3, 3, hidden_size)
    assert (config.num_attention_heads, config.num_key_value_heads) == (num_heads, num_kv_heads)
    assert (draft.model.layers[0].self_attn.head_dim, config.intermediate_size) == (8, intermediate_size)
    kinds = getattr(config, "layer_types", None)
    assert kinds is None or len(kinds) == 3
    assert not draft.training
    assert shaped.config.hidden_size == 48
    draft.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(draft))


def test_kinds_of_layers_are_those_of_the_target_from_first_to_last() -> None:
    target = SHAPES["qwen2"]()
    for num_layers, expected in ((1, "s"), (2, "sf"), (3, "sff"), (6, "ssfssf"), (9, "sssffsssf")):
        draft = fresh_draft(target, FreshConfig(num_layers=num_layers, hidden_size=16))
        assert "".join(kind[0] for kind in draft.config.layer_types) == expected
        assert len(draft.model.layers) == num_layers


def test_embeddings_of_the_same_width_are_the_targets(shaped: PreTrainedModel) -> None:
    for hidden_size in (48, 24):
        draft = fresh_draft(shaped, FreshConfig(num_layers=1, hidden_size=hidden_size))
        for part in ("get_input_embeddings", "get_output_embeddings"):
            ours, theirs = getattr(draft, part)().weight, getattr(shaped, part)().weight
            assert ours is not theirs
            assert torch.equal(ours, theirs) == (hidden_size == 48)
        tied = draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
        assert tied == bool(shaped.config.tie_word_embeddings)
    # the rest is not
    whole = fresh_draft(shaped, FreshConfig(num_layers=6, hidden_size=48))
    for ours, theirs in zip(whole.model.layers, shaped.model.layers, strict=True):
        assert ours.mlp.up_proj.weight.shape == theirs.mlp.up_proj.weight.shape
        assert not torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)


def test_the_seed_says_which_weights(tiny_llama: TinyLlama) -> None:
    target = tiny_llama(hidden_size=16)
    target.generation_config.eos_token_id = [2, 7]
    state = torch.get_rng_state()
    first, again, other = (
        fresh_draft(target, FreshConfig(num_layers=1, hidden_size=8, seed=seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(logits(first), logits(again))
    assert not torch.allclose(logits(first), logits(other))
    assert torch.equal(state, torch.get_rng_state())
    assert first.generation_config.eos_token_id == [2, 7]
    assert fresh_draft(target.bfloat16(), FreshConfig(num_layers=1, hidden_size=8)).dtype == torch.bfloat16


def test_a_width_of_feed_forward_layers_can_be_given(tiny_llama: TinyLlama) -> None:
    draft = fresh_draft(tiny_llama(), FreshConfig(num_layers=1, hidden_size=16, intermediate_size=20))
    assert draft.model.layers[0].mlp.up_proj.out_features == draft.config.intermediate_size == 20


def test_a_model_whose_settings_have_other_names() -> None:
    target = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=128)).eval()
    draft = fresh_draft(target, FreshConfig(num_layers=1, hidden_size=24))
    assert (draft.config.n_layer, draft.config.n_embd, draft.config.n_head) == (1, 24, 3)
    assert logits(draft).shape == (1, 40, 60)
    with pytest.raises(ValueError, match=r"^fresh.intermediate_size: model type 'gpt2' does not set it; leave it out$"):
        fresh_draft(target, FreshConfig(num_layers=1, hidden_size=24, intermediate_size=32))


def test_heads_that_do_not_divide_the_width_are_refused(tiny_llama: TinyLlama) -> None:
    with pytest.raises(
        ValueError, match=r"^fresh.hidden_size: 20 is not possible; give a multiple of the target's head_dim, 8$"
    ):
        fresh_draft(tiny_llama(), FreshConfig(num_layers=1, hidden_size=20))


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


@pytest.fixture(scope="module")
def small_model(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder(seed=5, num_layers=1, hidden_size=8)


@pytest.fixture(
    params=[
        {"layers": [1, 3]},
        {"layers": 2, "choose": "greedy", "calibration_tokens": 40},
        {"draft": "small_model"},
        {"fresh": FreshConfig(num_layers=2, hidden_size=16)},
        {"fresh": FreshConfig(num_layers=1, hidden_size=8)},
    ],
    ids=["layers", "greedy", "draft", "fresh, as wide", "fresh, narrower"],
)
def kind(request: pytest.FixtureRequest, small_model: Path) -> dict[str, Any]:
    changes: dict[str, Any] = {"layers": None} | request.param
    return changes | {"draft": str(small_model)} if "draft" in changes else changes


@pytest.mark.parametrize("vocab", [{}, {"vocab_size": 40}, {"vocab_coverage": 0.6}], ids=str)
def test_every_kind_is_a_stock_folder_that_drafts(
    kind: dict[str, Any], vocab: dict[str, Any], target: Path, responses: Path, tmp_path: Path
) -> None:
    output = build(config_for(target, tmp_path / "pair", responses=str(responses), **kind, **vocab))
    draft = AutoModelForCausalLM.from_pretrained(output / "draft")
    assert draft.get_output_embeddings().out_features == 259
    assert json.loads((output / "draft" / "generation_config.json").read_text())["eos_token_id"] == 2
    assert AutoTokenizer.from_pretrained(output / "draft").chat_template
    assert (load_draft_vocab(output) is not None) == bool(vocab)
    decoder = SpeculativeDecoder.from_pretrained(None, str(output))
    params = SamplingParams(max_new_tokens=8)
    (plain,) = decoder.plain.generate_ids([decoder.encode("Hello")], params)
    (generation,) = decoder.generate("Hello", params)
    assert generation.ids == plain.ids
    assert generation.trace.num_drafted > 0


def test_another_model_is_taken_as_it_is(target: Path, small_model: Path, tmp_path: Path) -> None:
    output = build(config_for(target, tmp_path / "pair", layers=None, draft=str(small_model)))
    ours = AutoModelForCausalLM.from_pretrained(output / "draft").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(small_model).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert Pair.load(output).provenance["resolved_config"]["layers"] is None


def test_a_draft_with_another_tokenizer_is_refused(target: Path, small_model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(small_model, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"^draft {other}: its tokenizer is not that of target {target}: id \d+ is "):
        build(config_for(target, tmp_path / "pair", layers=None, draft=str(other)))
    with pytest.raises(ValueError, match=rf"^draft {tmp_path}/nowhere: there is no such model folder$"):
        build(config_for(target, tmp_path / "pair", layers=None, draft=str(tmp_path / "nowhere")))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize(("of_target", "of_draft"), [(259, 300), (300, 259)])
def test_padding_is_no_part_of_the_vocabulary(
    of_target: int,
    of_draft: int,
    responses: Path,
    tiny_llama: TinyLlama,
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    target = save(tiny_llama(hidden_size=16, vocab_size=of_target), byte_tokenizer, tmp_path / "target")
    draft = save(tiny_llama(hidden_size=8, vocab_size=of_draft), byte_tokenizer, tmp_path / "draft")
    given = {"layers": None, "draft": str(draft), "responses": str(responses)}
    for number, vocab in enumerate(({"vocab_size": 280}, {"vocab_coverage": 1.0})):
        output = build(config_for(target, tmp_path / f"pair-{number}", **given, **vocab))
        token_ids = load_draft_vocab(output)
        assert token_ids is not None
        assert token_ids.tolist() == list(range(259))
        SpeculativeDecoder.from_pretrained(None, str(output)).generate("Hello", SamplingParams(max_new_tokens=4))


def test_a_reduced_vocabulary_is_a_file_beside_a_whole_draft(target: Path, responses: Path, tmp_path: Path) -> None:
    output = build(config_for(target, tmp_path / "pair", vocab_size=40, responses=str(responses)))
    token_ids = load_draft_vocab(output)
    assert token_ids is not None
    mass = probability_mass(str(responses), load_model(str(target)))
    assert token_ids.equal(choose_vocab(mass, 40, {0, 1, 2}))
    assert {0, 1, 2} <= set(token_ids.tolist())
    assert mass[token_ids].sum() > 1.3 * mass[:40].sum()
    assert Pair.load(output).provenance["vocab_share"] == pytest.approx(float(mass[token_ids].sum()))
    assert AutoModelForCausalLM.from_pretrained(output / "draft").get_output_embeddings().out_features == 259


@pytest.mark.parametrize("bf16_is_fast", [True, False])
def test_mass_is_found_in_the_dtype_that_is_fast_and_the_draft_keeps_the_targets(
    bf16_is_fast: bool,
    target: Path,
    responses: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounded = load_model(str(target)).bfloat16()
    folder = save(rounded, byte_tokenizer, tmp_path / "target")
    monkeypatch.setattr("distill.teacher.has_bf16_products", lambda: bf16_is_fast)
    output = build(config_for(folder, tmp_path / "pair", vocab_size=40, responses=str(responses)))
    mass = probability_mass(str(responses), load_model(str(folder), "auto" if bf16_is_fast else "float32"))
    token_ids = load_draft_vocab(output)
    assert token_ids is not None
    assert Pair.load(output).provenance["vocab_share"] == float(mass[token_ids].sum())
    assert load_model(str(output / "draft")).dtype == torch.bfloat16


def test_a_vocabulary_may_be_as_large_as_its_share_asks(
    target: Path, responses: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        output = build(config_for(target, tmp_path / "pair", vocab_coverage=0.7, responses=str(responses)))
    token_ids = load_draft_vocab(output)
    assert token_ids is not None
    mass = probability_mass(str(responses), load_model(str(target)))
    assert token_ids.equal(smallest_vocab(mass, 0.7, {0, 1, 2}))
    share = Pair.load(output).provenance["vocab_share"]
    assert 0.7 <= share < 0.72
    assert f"output vocabulary: {len(token_ids)} tokens, {100 * share:.1f}% of probability mass" in caplog.text


def test_greedy_layers_and_what_each_cost_are_recorded(target: Path, responses: Path, tmp_path: Path) -> None:
    given = {"choose": "greedy", "responses": str(responses), "calibration_tokens": 60}
    output = build(config_for(target, tmp_path / "pair", **given))
    recorded = Pair.load(output).provenance
    assert recorded["resolved_config"]["layers"] == 2
    kept, removed = recorded["layers"], recorded["removed_layers"]
    assert sorted([*kept, *(removal["layer"] for removal in removed)]) == list(range(NUM_LAYERS))
    assert 0 < removed[1]["alpha"] < removed[0]["alpha"] < 1
    expected = draft_from_layers(load_model(str(target)), kept)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(output / "draft")), logits(expected))
    # known without choosing again
    before = (output / "pair.json").read_text()
    assert build(config_for(target, tmp_path / "pair", **given)) == output
    assert (output / "pair.json").read_text() == before
    with pytest.raises(ValueError, match=r"^layers: 3 differs from 2"):
        build(config_for(target, tmp_path / "pair", **given | {"layers": 3}))
    with pytest.raises(ValueError, match=r"^layers: .* differs from 2"):
        build(config_for(target, tmp_path / "pair", responses=str(responses), calibration_tokens=60))


def test_four_layers_are_kept_when_nothing_is_said(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    target = tiny_model_folder(num_layers=7, hidden_size=16)
    output = build(config_for(target, tmp_path / "pair", layers=None))
    assert Pair.load(output).provenance["resolved_config"]["layers"] == [0, 2, 4, 6]


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
        ({"layers": None, "draft": "elsewhere"}, r"^layers: None differs from \[0, 3\]"),
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


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 5},
        {"layers": 5, "choose": "greedy"},
        {"vocab_size": 2},
        {"vocab_size": 2, "choose": "greedy"},
        {"vocab_size": 40, "responses": "nowhere"},
        {"layers": None, "fresh": FreshConfig(num_layers=1, hidden_size=18)},
    ],
)
def test_a_refused_build_writes_nothing(changes: dict[str, Any], target: Path, responses: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^(layers|vocab_size|responses|fresh.hidden_size)[: ]"):
        build(config_for(target, tmp_path / "pair", **{"responses": str(responses)} | changes))
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


def test_what_an_earlier_release_built_is_complete(target: Path, tmp_path: Path) -> None:
    """It recorded none of the fields that came later, and did what their defaults say."""
    output = build(config_for(target, tmp_path / "pair"))
    pair = Pair.load(output)
    known = ("target", "output", "layers", "vocab_size", "responses", "num_draft_tokens")
    pair.provenance["resolved_config"] = {name: pair.provenance["resolved_config"][name] for name in known}
    pair.save(output)
    assert build(config_for(target, tmp_path / "pair")) == output
    with pytest.raises(ValueError, match=r"^calibration_tokens: 7 differs from 1000"):
        build(config_for(target, tmp_path / "pair", calibration_tokens=7))


def test_a_fresh_draft_of_another_seed_is_another(target: Path, tmp_path: Path) -> None:
    fresh = {"num_layers": 1, "hidden_size": 8}
    output = build(config_for(target, tmp_path / "pair", layers=None, fresh=FreshConfig(**fresh)))
    assert build(config_for(target, tmp_path / "pair", layers=None, fresh=FreshConfig(**fresh))) == output
    with pytest.raises(ValueError, match=r"^fresh: .*'seed': 1.* differs from .*'seed': 0"):
        build(config_for(target, tmp_path / "pair", layers=None, fresh=FreshConfig(**fresh, seed=1)))


# --- what a user may get wrong ----------------------------------------------------------------------------

FRESH = FreshConfig(num_layers=1, hidden_size=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2, "draft": "d"}, "draft: a draft is made of one thing, and layers is given; leave out one"),
        ({"layers": [0], "fresh": FRESH}, "fresh: a draft is made of one thing, and layers is given; leave out one"),
        ({"draft": "d", "fresh": FRESH}, "fresh: a draft is made of one thing, and draft is given; leave out one"),
        ({"choose": "greedy"}, "responses: choose greedy measures acceptance on responses; name their folder"),
        ({"vocab_size": 9}, "responses: a reduced vocab_size is chosen on responses; name their folder"),
        ({"vocab_coverage": 0.9}, "responses: vocab_coverage is measured on responses; name their folder"),
        *(
            (
                {"choose": "greedy", "responses": "r"} | other,
                "choose: greedy finds out which layers to keep; give layers as a number and nothing else",
            )
            for other in ({"layers": [0, 1]}, {"draft": "d"}, {"fresh": FRESH})
        ),
        (
            {"vocab_size": 9, "vocab_coverage": 0.9, "responses": "r"},
            "vocab_coverage: says how large the vocabulary is, as vocab_size does; leave out one",
        ),
        *(
            (
                {"vocab_coverage": share, "responses": "r"},
                f"vocab_coverage: {share} is not possible; give a share such as 0.98",
            )
            for share in (0.0, -0.5, 1.01, 98.0, float("nan"))
        ),
        ({"vocab_size": 0, "responses": "r"}, "vocab_size: 0 is not possible; give 1 or more, or null"),
        ({"calibration_tokens": 0}, "calibration_tokens: 0 is not possible; give 1 or more"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: 0 is not possible; give 1 or more"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
        BuildConfig(target="t", output="o", **changes)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "intermediate_size"])
def test_a_size_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^fresh.{name}: 0 is not possible; give 1 or more$"):
        FreshConfig(**{"num_layers": 1, "hidden_size": 8, name: 0})


def test_a_fresh_draft_by_options_and_by_file(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["build", "--target", str(target), "--output"]
    options = ["--fresh.num_layers", "1", "--fresh.hidden-size", "8"]
    assert main([*command, str(tmp_path / "by-options"), *options]) == 0, capsys.readouterr().err
    assert "a draft of 1 random layers of width 8, " in capsys.readouterr().err
    (tmp_path / "build.yaml").write_text("fresh: {num_layers: 1, hidden_size: 8}\n")
    assert main([*command, str(tmp_path / "by-file"), "--config", str(tmp_path / "build.yaml")]) == 0
    capsys.readouterr()
    weights = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "draft").state_dict()
        for name in ("by-options", "by-file")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    refusals = {
        ("--fresh.num_layers", "1"): "hidden_size",
        ("--fresh.num_layers", "1", "--fresh.hidden_size", "18"): "fresh.hidden_size: 18 is not possible; give a mult",
        ("--fresh.num_layers", "0", "--fresh.hidden_size", "8"): "fresh.num_layers: 0 is not possible; give 1 or more",
        (*options, "--layers", "2"): "fresh: a draft is made of one thing, and layers is given; leave out one",
        ("--choose", "cleverly"): "choose: ",
    }
    for arguments, message in refusals.items():
        assert main([*command, str(tmp_path / "refused"), *arguments]) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("spec-distill: error: ")
        assert message in last
    assert not (tmp_path / "refused").exists()
