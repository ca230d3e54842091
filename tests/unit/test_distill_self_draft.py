"""A pair without a draft: what of the target drafts, how that is found, and that every command takes it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import SpeculativeDecoder
from decode.costs import Costs
from decode.pair import Pair, load_model, load_tensors
from decode.params import SamplingParams, SpeculationParams
from decode.self_draft import SelfDraft
from distill import self_draft
from distill.build import build
from distill.config import BuildConfig, RespondConfig, RunConfig
from distill.layers import Calibration
from distill.responses import respond
from distill.run import distill
from distill.self_draft import SublayerCosts, Worth
from train.config import TrainConfig

NUM_LAYERS = 4
WHOLE = Costs(seconds_per_token=1.0, draft_step=0.9, target_pass=[1.0] * 9)


@pytest.fixture(scope="module")
def target(tiny_model_folder: Callable[..., Path]) -> Path:
    shape: dict[str, Any] = dict(hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)
    return tiny_model_folder(num_layers=NUM_LAYERS, head_dim=32, tie_word_embeddings=True, **shape)


@pytest.fixture(scope="module")
def responses(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("responses")
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(12)))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=10, seed=0)
    prompts, output = str(folder / "prompts.txt"), str(folder / "responses")
    return respond(RespondConfig(target=str(target), prompts=prompts, output=output, sampling=sampling))


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clock has no say."""
    costs = SublayerCosts(WHOLE, attention=0.1, mlp=0.1, num_layers=NUM_LAYERS)
    monkeypatch.setattr(self_draft, "measure_sublayers", lambda *arguments: costs)
    monkeypatch.setattr(self_draft, "_costs", lambda target, tokenizer, spec, *others: costs.of(spec))


def made(target: Path, output: Path, **options: Any) -> Pair:
    build(BuildConfig(target=str(target), output=str(output), **options))
    return Pair.load(output)


def test_a_pair_that_was_told_what_to_skip(target: Path, tmp_path: Path) -> None:
    pair = made(target, tmp_path / "pair", kind="skip", skipped_attention=[1], skipped_mlp=[2])
    assert pair.draft_kind == "skip"
    assert SelfDraft.of(pair.self_draft) == SelfDraft(skipped_attention=(1,), skipped_mlp=(2,))
    assert sorted(path.name for path in (tmp_path / "pair").iterdir()) == ["pair.json"]


@pytest.mark.parametrize(
    "options",
    [
        dict(kind="skip", skipped_attention=[1, 2]),
        dict(kind="exit", exit_layer=2),
        dict(kind="quantised"),
        dict(kind="exit", exit_layer=1, adapter="mlp"),
        dict(kind="skip", skipped_mlp=[0], bits=4),
    ],
    ids=lambda options: options["kind"],
)
def test_it_decodes_without_special_flags(target: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    made(target, tmp_path / "pair", **options)
    speculation = SpeculationParams(num_draft_tokens=2, never_slower=False)
    decoder = SpeculativeDecoder.from_pretrained(None, str(tmp_path / "pair"), speculation)
    for params in (SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)):
        (answer,) = decoder.generate(["Say 3."], params)
        (plain,) = decoder.plain.generate_ids([decoder.encode("Say 3.")], params)
        assert answer.ids == plain.ids
        assert answer.trace.num_drafted > 0


def test_the_exit_of_largest_predicted_speedup_is_found(
    target: Path, responses: Path, tmp_path: Path, known_costs: None
) -> None:
    pair = made(target, tmp_path / "pair", kind="exit", responses=str(responses), calibration_tokens=50)
    decoder = SpeculativeDecoder.from_pretrained(None, str(tmp_path / "pair"))
    calibration = Calibration(decoder.target, str(responses), 50)
    costs = SublayerCosts(WHOLE, attention=0.1, mlp=0.1, num_layers=NUM_LAYERS)
    worths = {}
    for depth in range(1, NUM_LAYERS):
        spec = SelfDraft(num_layers=depth)
        alpha = calibration.alpha(self_draft.self_draft(decoder.target, spec))
        worths[depth] = Worth.of(alpha, costs.of(spec))
    best = max(worths, key=lambda depth: worths[depth].predicted_speedup)
    assert pair.self_draft["num_layers"] == best
    assert pair.num_draft_tokens == worths[best].num_draft_tokens
    assert pair.provenance["calibration"]["alpha"] == pytest.approx(worths[best].alpha)
    # the further the more is accepted, and the dearer it is
    assert worths[1].alpha < worths[3].alpha
    assert worths[1].draft_step < worths[3].draft_step


def test_an_interrupted_search_measures_nothing_twice(
    target: Path, responses: Path, tmp_path: Path, known_costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = dict(kind="skip", responses=str(responses), calibration_tokens=50)
    expected = made(target, tmp_path / "whole", **options)
    assert expected.self_draft["skipped_attention"] or expected.self_draft["skipped_mlp"]
    measure, calls = Calibration.alpha, []

    def counted(self: Calibration, *arguments: Any) -> float:
        if len(calls) == 13:
            raise KeyboardInterrupt
        calls.append(1)
        return measure(self, *arguments)

    monkeypatch.setattr(Calibration, "alpha", counted)
    with pytest.raises(KeyboardInterrupt):
        made(target, tmp_path / "parts", **options)
    kept = json.loads((tmp_path / ".parts.search.json").read_text())["alphas"]
    assert len(kept) == 13
    monkeypatch.setattr(Calibration, "alpha", lambda self, *rest: calls.append(1) or measure(self, *rest))
    found = made(target, tmp_path / "parts", **options)
    assert found.self_draft == expected.self_draft
    assert not (tmp_path / ".parts.search.json").exists()
    calls.clear()
    made(target, tmp_path / "again", **options)
    num_calls = len(calls)
    assert num_calls > 13
    # other text, other acceptance
    (tmp_path / ".other.search.json").write_text(json.dumps({"of": ["other"], "alphas": kept}))
    calls.clear()
    made(target, tmp_path / "other", **options)
    assert len(calls) == num_calls


def test_what_does_not_pay_is_said(
    target: Path, responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_draft, "_costs", lambda *arguments: Costs(1.0, 5.0, [1.0] * 9))
    made(target, tmp_path / "pair", kind="quantised", responses=str(responses), calibration_tokens=20)
    assert "this does not pay on this machine" in caplog.text


def test_who_says_how_many_tokens_to_draft_is_heard(
    target: Path, responses: Path, tmp_path: Path, known_costs: None
) -> None:
    options: dict[str, Any] = dict(kind="exit", exit_layer=1, responses=str(responses), calibration_tokens=20)
    found = made(target, tmp_path / "found", **options)
    assert found.num_draft_tokens == found.provenance["calibration"]["num_draft_tokens"] != 7
    assert made(target, tmp_path / "told", num_draft_tokens=7, **options).num_draft_tokens == 7


def test_acceptance_is_that_of_the_reduced_vocabulary(target: Path, responses: Path, tmp_path: Path) -> None:
    """Of the whole model what is lost is p's mass beyond those tokens, and no less."""
    model = load_model(str(target), role="target")
    calibration, ids = Calibration(model, str(responses), 50), torch.arange(0, 259, 2)
    (log_p,) = calibration.log_p
    spec = SelfDraft()
    reduced = calibration.alpha(self_draft.self_draft(model, spec, ids), ids)
    p = log_p.exp()
    q = p[:, ids] / p[:, ids].sum(dim=1, keepdim=True)
    assert reduced == pytest.approx(float(torch.minimum(p[:, ids], q).sum(dim=1).mean()), rel=1e-4)
    assert reduced < 0.9 < calibration.alpha(self_draft.self_draft(model, spec))


def test_a_pair_outlives_a_release_of_transformers(target: Path, tmp_path: Path) -> None:
    """Whose config has other defaults, and so another hash."""
    pair = made(target, tmp_path / "pair", kind="skip", skipped_attention=[1])
    pair.target["config_sha256"] = "of another release"
    pair.save(tmp_path / "pair")
    SpeculativeDecoder.from_pretrained(None, str(tmp_path / "pair"))
    pair.target["tokenizer_sha256"] = "of another tokenizer"
    pair.save(tmp_path / "pair")
    with pytest.raises(ValueError, match=r"made for target .*, whose tokenizer is not that of"):
        SpeculativeDecoder.from_pretrained(None, str(tmp_path / "pair"))


def test_hooks_that_would_undo_it_are_refused(target: Path) -> None:
    model = load_model(str(target), role="target")
    layer = model.get_decoder().layers[1]
    layer.forward = layer.forward
    with pytest.raises(ValueError, match=r"its module model.layers.1 has a forward of its own.*load it without hooks"):
        self_draft.self_draft(model, SelfDraft(skipped_attention=(1,)))
    self_draft.self_draft(model, SelfDraft(skipped_attention=(2,)))


def test_costs_add_up() -> None:
    costs = SublayerCosts(WHOLE, attention=0.05, mlp=0.1, num_layers=4)
    assert costs.of(SelfDraft()).draft_step == pytest.approx(0.9)
    assert costs.of(SelfDraft(skipped_attention=(0, 2), skipped_mlp=(1,))).draft_step == pytest.approx(0.7)
    assert costs.of(SelfDraft(num_layers=1)).draft_step == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(bits=8), "bits: is for a target that drafts for itself; give kind too"),
        (
            dict(kind="exit", exit_layer=2, layers=2),
            "layers: is for a draft of its own; leave it out, or give kind model",
        ),
        (
            dict(kind="quantised", exit_layer=2),
            "exit_layer: with kind quantised nothing is left out; give kind skip or",
        ),
        (
            dict(kind="exit", skipped_mlp=[1]),
            "skipped_attention: with kind exit whole layers are left out; give kind sk",
        ),
        (dict(kind="skip", exit_layer=1), "exit_layer: is for kind exit; leave it out"),
        (dict(kind="skip", skipped_mlp=[1], low_rank_share=0.3), "low_rank_share: is for kind low_rank; leave it out"),
        (dict(kind="exit", exit_layer=1, choose="greedy"), "choose: greedy chooses layers for a draft of its own"),
        (dict(kind="exit", exit_layer=1, adapter="mlp", bits=8), "bits: an adapter follows layers as they are"),
        (dict(kind="low_rank", low_rank_share=1.0), "low_rank_share: 1.0 is not possible; give a share such as 0.5"),
        (dict(kind="skip"), "responses: what to skip is chosen on responses; name their folder"),
        (dict(kind="exit"), "responses: where to exit is chosen on responses; name their folder"),
        (dict(kind="skip", skipped_mlp=[9]), "skipped_mlp: there is no layer 9; the target has 0 to 3"),
        (dict(kind="exit", exit_layer=4), "num_layers: 4 is not possible; give 1 to 3 for this target"),
    ],
)
def test_what_cannot_be_meant(target: Path, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(target, tmp_path / "pair", **options)
    assert not (tmp_path / "pair").exists()


def test_pairs_that_are_not_understood(target: Path, tmp_path: Path) -> None:
    made(target, tmp_path / "pair", kind="skip", skipped_attention=[1])
    path = tmp_path / "pair" / "pair.json"
    content = json.loads(path.read_text())
    for changes, said in (
        ({"draft_kind": "magic"}, "draft_kind is 'magic', this release knows model, skip, exit, low_rank, quantised"),
        ({"self_draft": {}}, "self_draft must be an object, empty for draft_kind 'model' alone"),
        ({"self_draft": {"sheets": 3}}, "self_draft: is not understood"),
        ({"self_draft": {"adapter": "mlp", "num_layers": 1, "bits": 8}}, "an adapter follows layers as they are"),
        ({"self_draft": {"bits": 3}}, "self_draft: is not understood: layers are whole numbers, and bits are 8 or 4"),
    ):
        path.write_text(json.dumps(content | changes))
        with pytest.raises(ValueError, match=said):
            SpeculativeDecoder.from_pretrained(None, str(path.parent))


def test_it_has_no_dtype_and_device_of_its_own(target: Path, tmp_path: Path) -> None:
    made(target, tmp_path / "pair", kind="quantised")
    for name, value in (("draft_dtype", "float32"), ("draft_device", "cpu")):
        with pytest.raises(ValueError, match=f"^{name}: the target of pair .* drafts for itself, as it is; leave"):
            SpeculativeDecoder.from_pretrained(None, str(tmp_path / "pair"), **{name: value})


def test_parameters_are_those_they_were(target: Path, tmp_path: Path) -> None:
    made(target, tmp_path / "pair", kind="quantised", bits=4)
    decoder = SpeculativeDecoder.from_pretrained(None, str(tmp_path / "pair"))
    before = {name: weight.clone() for name, weight in decoder.target.state_dict().items()}
    decoder.generate(["Say 3."], SamplingParams(max_new_tokens=8))
    assert all(torch.equal(before[name], weight) for name, weight in decoder.target.state_dict().items())


@pytest.mark.parametrize("kind", ["exit", "low_rank"])
def test_what_is_its_own_learns(target: Path, responses: Path, tmp_path: Path, kind: str) -> None:
    """Nothing else does, and the finished pair decodes as was predicted."""
    options: dict[str, Any] = dict(responses=str(responses), calibration_tokens=50)
    options |= dict(exit_layer=1, adapter="layer") if kind == "exit" else dict(low_rank_share=0.6)
    before = made(target, tmp_path / "untrained", kind=kind, **options)
    train = TrainConfig(
        output=str(tmp_path / "run"),
        max_steps=30,
        batch_size=8,
        micro_batch_size=8,
        learning_rate=3e-3,
        log_every_steps=5,
    )
    config = RunConfig(
        pair=str(tmp_path / "untrained"), responses=str(responses), train=train, measure_speed=False, parity_prompts=0
    )
    with pytest.raises(ValueError, match="train_embeddings: those of a target that drafts for itself stay as they are"):
        distill(replace(config, train_embeddings=True))
    distill(config)
    folder = tmp_path / "run" / "pair"
    pair = Pair.load(folder)
    assert (pair.draft_kind, pair.self_draft) == (kind, before.self_draft)
    old, new = load_tensors(tmp_path / "untrained"), load_tensors(folder)
    assert old.keys() == new.keys()
    assert all(not torch.equal(old[name], new[name]) for name in old if "norm" not in name)
    decoder = SpeculativeDecoder.from_pretrained(None, str(folder))
    calibration, spec = Calibration(decoder.target, str(responses), 50), SelfDraft.of(pair.self_draft)
    untrained, trained = (
        calibration.alpha(self_draft.self_draft(decoder.target, spec, tensors=tensors)) for tensors in (old, new)
    )
    assert trained > untrained + 0.01
    (answer,) = decoder.generate(["Say 3."], SamplingParams(max_new_tokens=8))
    (plain,) = decoder.plain.generate_ids([decoder.encode("Say 3.")], SamplingParams(max_new_tokens=8))
    assert answer.ids == plain.ids


def test_there_must_be_something_to_train(target: Path, responses: Path, tmp_path: Path) -> None:
    made(target, tmp_path / "pair", kind="quantised")
    train = TrainConfig(output=str(tmp_path / "run"), max_steps=1)
    with pytest.raises(ValueError, match=r"its target drafts for itself \(quantised\); there is nothing to train"):
        distill(RunConfig(pair=str(tmp_path / "pair"), responses=str(responses), train=train))
