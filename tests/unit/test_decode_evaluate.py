"""What is measured of a pair: counted, computed, and the same by another road."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from decode.config import EvaluateConfig
from decode.costs import Costs, block_efficiency, measure_costs
from decode.decoder import SpeculativeDecoder
from decode.evaluate import bootstrap_interval, evaluate, spread
from decode.pair import Pair, save_draft_vocab
from decode.params import SamplingParams
from decode.plain import PlainDecoder

ModelFolder = Callable[..., Path]
NUM_PROMPTS = 24


def test_block_efficiency_is_the_sum_of_products() -> None:
    assert block_efficiency([0.5, 0.8], 2) == pytest.approx(1 + 0.5 + 0.5 * 0.8)
    assert block_efficiency([0.5, 0.8], 1) == pytest.approx(1.5)
    assert block_efficiency([0.5, 0.8], 4) == pytest.approx(1 + 0.5 + 0.4 + 0.32 + 0.256)  # the last one goes on
    assert block_efficiency([1.0] * 3, 3) == 4
    assert block_efficiency([], 5) == 1
    alpha = 0.7  # Leviathan et al., equation 1
    assert block_efficiency([alpha], 5) == pytest.approx((1 - alpha**6) / (1 - alpha))


def test_the_speedup_weighs_what_is_won_against_what_it_costs() -> None:
    costs = Costs(seconds_per_token=0.1, draft_step=0.2, target_pass=[1.0, 1.1, 1.2, 2.0])
    assert costs.predicted_speedup([0.5], 2) == pytest.approx((1 + 0.5 + 0.25) / (2 * 0.2 + 1.2))
    assert costs.best_num_draft_tokens([0.9]) == 2  # a third token meets the dear pass
    assert costs.best_num_draft_tokens([0.1]) == 1
    assert costs.predicted_speedup([0.1], 1) < 1  # and even that one is a loss
    free = Costs(seconds_per_token=0.1, draft_step=0.0, target_pass=[1.0] * 9)
    assert free.best_num_draft_tokens([0.9]) == 8


def test_the_bootstrap_covers_the_truth_as_often_as_it_says() -> None:
    """Prompts of different lengths, each with an acceptance of its own; the truth is the ratio of means."""
    generator = np.random.default_rng(0)
    num_trials, num_prompts, truth = 300, 60, 0.6

    def covered(shrink: float) -> float:
        hits = 0
        for trial in range(num_trials):
            lengths = generator.integers(10, 100, size=num_prompts)
            rates = generator.beta(6, 4, size=num_prompts)
            low, high = bootstrap_interval(generator.binomial(lengths, rates), lengths, seed=trial)
            middle, half = (low + high) / 2, shrink * (high - low) / 2
            hits += middle - half <= truth <= middle + half
        return hits / num_trials

    assert 0.91 < covered(1.0) < 0.98
    assert covered(0.5) < 0.8  # the control: half the width covers far less


def test_the_bootstrap_resamples_prompts_not_tokens() -> None:
    lengths = np.full(20, 1000)
    accepted = np.array([0, 1000] * 10)  # one prompt is all or nothing, so 20 prompts say little
    low, high = bootstrap_interval(accepted, lengths)
    assert (low, high) == (pytest.approx(0.3, abs=0.06), pytest.approx(0.7, abs=0.06))
    assert bootstrap_interval(accepted, lengths) == (low, high)
    assert bootstrap_interval(lengths, lengths) == (1, 1)


def test_a_sample_of_a_sorted_list_is_spread_over_it() -> None:
    assert spread(list(range(9)), 3) == [0, 4, 8]
    assert spread(list("abc"), 1) == ["a"]
    assert spread(list("abc"), 3) == spread(list("abc"), 7) == ["a", "b", "c"]
    chosen = spread(list(range(80)), 32)
    assert len(set(chosen)) == 32
    assert max(later - earlier for earlier, later in pairwise(chosen)) == 3


@pytest.fixture(scope="module")
def target_folder(tiny_model_folder: ModelFolder) -> Path:
    return tiny_model_folder(seed=0)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"Item {number}" + "!" * (number % 5)} for number in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def good_pair(
    target_folder: Path,
    tiny_llama: Callable[..., LlamaForCausalLM],
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> Path:
    """A pair whose draft is the target with some noise on its weights."""
    draft = tiny_llama(seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    draft.save_pretrained(tmp_path / "pair" / "draft")
    byte_tokenizer.save_pretrained(tmp_path / "pair" / "draft")
    Pair(target={"id": str(target_folder)}, num_draft_tokens=2).save(tmp_path / "pair")
    return tmp_path / "pair"


def config_for(pair: Path, prompts: Path, sampling: SamplingParams, **more: Any) -> EvaluateConfig:
    return EvaluateConfig(pair=str(pair), prompts=str(prompts), sampling=sampling, **{"batch_size": 5, **more})


def exact_alpha(config: EvaluateConfig, target_folder: Path, draft_vocab: torch.Tensor | None = None) -> float:
    """The mean over response tokens of sum_v min(p, q), in fp64, text by text, without any of evaluate's code."""
    decoder = SpeculativeDecoder.from_pretrained(None, config.pair)
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    draft = AutoModelForCausalLM.from_pretrained(Path(config.pair) / "draft")
    sampling, overlaps = config.sampling, []
    for row in range(NUM_PROMPTS):
        prompt = decoder.encode(json.loads(Path(config.prompts).read_text().splitlines()[row])["prompt"])
        plain = PlainDecoder(target, frozenset({2}))
        (completion,) = plain.generate_ids([prompt], sampling, streams=[row])
        text = torch.tensor([prompt + completion.ids[:-1]])
        with torch.inference_mode():
            p_logits, q_logits = (model(text).logits[0, len(prompt) - 1 :].double() for model in (target, draft))
        if draft_vocab is not None:
            hidden = torch.ones(259, dtype=torch.bool).index_fill(0, draft_vocab, False)
            q_logits = q_logits.masked_fill(hidden, -torch.inf)
        for logits in zip(p_logits, q_logits, strict=True):
            p, q = (processed(row, sampling) for row in logits)
            overlaps.append(sum(min(a, b) for a, b in zip(p, q, strict=True)))
    return sum(overlaps) / len(overlaps)


def processed(logits: torch.Tensor, sampling: SamplingParams) -> list[float]:
    """Temperature, then top-k, then top-p, written out."""
    if sampling.temperature == 0:
        return [float(token == int(logits.argmax())) for token in range(len(logits))]
    p = (logits / sampling.temperature).softmax(dim=0).tolist()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total, mass, kept = sum(p[token] for token in order), 0.0, set()
    for token in order:
        if mass / total >= sampling.top_p:
            break
        kept.add(token)
        mass += p[token]
    return [p[token] / mass if token in kept else 0.0 for token in range(len(p))]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, max_new_tokens=10, seed=0),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=10, seed=0),
        SamplingParams(max_new_tokens=10),
    ],
    ids=["T=1", "all", "greedy"],
)
def test_alpha_is_the_exact_overlap_and_predicts_what_is_counted(
    good_pair: Path, prompt_file: Path, target_folder: Path, sampling: SamplingParams
) -> None:
    config = config_for(good_pair, prompt_file, sampling)
    result = evaluate(config)
    assert result.alpha == pytest.approx(exact_alpha(config, target_folder), abs=1e-4)
    low, high = result.alpha_interval
    assert low < result.alpha < high
    first_low, first_high = result.first_position_interval
    assert first_low <= result.betas[0] <= first_high
    # where rounds begin depends on earlier rejections; still the two agree within their intervals
    assert max(low, first_low) <= min(high, first_high)
    assert result.block_efficiency == pytest.approx(result.counts["committed"] / result.counts["target_passes"])
    assert result.counts["accepted"] <= result.counts["verified"] <= result.counts["drafted"]
    assert (result.num_prompts, result.num_draft_tokens) == (NUM_PROMPTS, 4)


def test_alpha_of_another_temperature_does_not_predict_what_is_counted(good_pair: Path, prompt_file: Path) -> None:
    """The control of the test above: intervals that do not meet."""
    sampled = evaluate(config_for(good_pair, prompt_file, SamplingParams(temperature=3.0, max_new_tokens=10, seed=0)))
    greedy = evaluate(config_for(good_pair, prompt_file, SamplingParams(max_new_tokens=10)))
    assert sampled.first_position_interval[0] > greedy.alpha_interval[1]


def test_a_reduced_vocabulary_overlaps_on_its_own_tokens_only(
    good_pair: Path, prompt_file: Path, target_folder: Path
) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=6, seed=0)
    full = evaluate(config_for(good_pair, prompt_file, sampling))
    ids = torch.arange(2, 259, 3)
    save_draft_vocab(good_pair, ids)
    config = config_for(good_pair, prompt_file, sampling)
    reduced = evaluate(config)
    assert reduced.alpha == pytest.approx(exact_alpha(config, target_folder, ids), abs=1e-4)
    assert reduced.alpha < full.alpha


def test_what_is_found_is_recorded(good_pair: Path, prompt_file: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, seed=0)
    config = config_for(good_pair, prompt_file, sampling, output=str(tmp_path / "new" / "figures.json"))
    result = evaluate(config)
    figures = json.loads((tmp_path / "new" / "figures.json").read_text(), parse_constant=pytest.fail)  # no NaN
    assert figures["alpha"] == result.alpha
    assert SamplingParams(**figures["sampling"]) == sampling
    pair = Pair.load(good_pair)
    assert pair.measured == figures
    assert pair.num_draft_tokens == result.best_num_draft_tokens == figures["best_num_draft_tokens"]
    assert max(result.predicted_speedup) == result.predicted_speedup[result.best_num_draft_tokens - 1]
    evaluate(replace(config, num_draft_tokens=1))  # a number that was asked for is not a finding
    assert Pair.load(good_pair).num_draft_tokens == pair.num_draft_tokens
    assert Pair.load(good_pair).measured["num_draft_tokens"] == 1


def responses(folder: Path, prompts: Path, sampling: SamplingParams) -> Path:
    """What `spec-distill respond` leaves, as far as evaluate reads it."""
    rows = {
        "input_ids": [[1, 50, 60, 70, 80], [1, 90, 91]],
        "response_mask": [[False] * 3 + [True] * 2, [False, True, True]],
    }
    datasets.DatasetDict({"heldout": datasets.Dataset.from_dict(rows)}).save_to_disk(str(folder))
    settings = {"prompts": str(prompts), "sampling": asdict(sampling)}
    (folder / "respond.json").write_text(json.dumps({"settings": settings}))
    return folder


def test_saved_responses_are_what_alpha_is_computed_on(
    good_pair: Path, prompt_file: Path, target_folder: Path, tmp_path: Path
) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, seed=0)
    folder = responses(tmp_path / "responses", prompt_file, sampling)
    result = evaluate(config_for(good_pair, prompt_file, sampling, responses=str(folder), num_decoded_prompts=3))
    assert (result.num_prompts, result.num_tokens) == (2, 4)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (target_folder, good_pair / "draft")]
    overlaps = []
    for ids, start in (([1, 50, 60, 70, 80], 3), ([1, 90, 91], 1)):
        with torch.inference_mode():
            p, q = (model(torch.tensor([ids])).logits[0, start - 1 : -1].softmax(-1) for model in models)
        overlaps += torch.minimum(p, q).sum(dim=-1).tolist()
    assert result.alpha == pytest.approx(np.mean(overlaps), abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.9}, r"^sampling.temperature: 0.9 differs from 1.0, with which .*responses was made"),
        ({"top_k": 5}, "^sampling.top_k: 5 differs from 0"),
        ({"top_p": 0.5}, "^sampling.top_p: 0.5 differs from 1.0"),
        ({"max_new_tokens": 9}, "^sampling.max_new_tokens: 9 differs from 4"),
    ],
)
def test_responses_sampled_otherwise_are_refused(
    change: dict[str, float], message: str, good_pair: Path, prompt_file: Path, tmp_path: Path
) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, seed=0)
    folder = responses(tmp_path / "responses", prompt_file, sampling)
    before = (good_pair / "pair.json").read_text()
    with pytest.raises(ValueError, match=message):
        evaluate(config_for(good_pair, prompt_file, replace(sampling, **change), responses=str(folder)))
    assert (good_pair / "pair.json").read_text() == before


def test_responses_of_other_prompts_or_none_are_refused(good_pair: Path, prompt_file: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, seed=0)
    folder = responses(tmp_path / "responses", Path("other.jsonl"), sampling)
    with pytest.raises(ValueError, match=r"^prompts: .* are not those of .*responses, made for 'other.jsonl'"):
        evaluate(config_for(good_pair, prompt_file, sampling, responses=str(folder)))
    with pytest.raises(ValueError, match=r"^responses .*nowhere: not there; give a folder that"):
        evaluate(config_for(good_pair, prompt_file, sampling, responses=str(tmp_path / "nowhere")))


def test_what_is_no_pair_is_refused_before_anything_is_loaded(
    target_folder: Path, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", lambda *arguments, **more: pytest.fail("loaded"))
    config = config_for(target_folder, prompt_file, SamplingParams(), target=str(target_folder))
    with pytest.raises(ValueError, match=r"holds no pair.json"):
        evaluate(config)


def test_costs_are_in_units_of_a_pass_over_one_token(good_pair: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(None, str(good_pair))
    costs = measure_costs(decoder, SamplingParams(), max_draft_tokens=3, context_length=16, repetitions=3)
    assert len(costs.target_pass) == 4
    assert costs.target_pass[0] == 1
    assert costs.seconds_per_token > 0
    assert costs.draft_step > 0


def test_nothing_drafted_cannot_be_evaluated() -> None:
    with pytest.raises(ValueError, match="max_new_tokens: 1 leaves nothing to draft"):
        EvaluateConfig(pair="x", sampling=SamplingParams(max_new_tokens=1))


def test_alpha_does_not_depend_on_the_batch(good_pair: Path, prompt_file: Path) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=8, seed=0)
    one = evaluate(config_for(good_pair, prompt_file, sampling, batch_size=1))
    many = evaluate(config_for(good_pair, prompt_file, sampling, batch_size=24))
    assert one.alpha == pytest.approx(many.alpha, abs=1e-5)
    assert one.num_tokens == many.num_tokens
