"""What is measured of a pair: counted, computed, and the same by another road."""

import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from decode.agreement import sums_on_text
from decode.config import EvaluateConfig
from decode.costs import Costs, block_efficiency, measure_costs
from decode.decoder import SpeculativeDecoder
from decode.evaluate import evaluate
from decode.figures import Evaluation
from decode.heldout import Text
from decode.pair import Pair, save_draft_vocab
from decode.params import SamplingParams, SpeculationParams
from decode.plain import PlainDecoder
from decode.tables import evaluation_tables, name_of
from distill.judge import betas, expected_rounds
from distill.judge import block_efficiency as block_efficiency_of

ModelFolder = Callable[..., Path]
NUM_PROMPTS = 24
CATEGORIES = ("even", "odd")
# what the clock has a say in
TIMED = (
    *("costs", "predicted_speedup", "predicted_speedup_intervals", "best_num_draft_tokens"),
    *("measured_speedups", "measured_speedup", "measured_seconds"),
)


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


@pytest.fixture(autouse=True)
def _timed_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round costs matters to none of these tests."""
    monkeypatch.setattr("decode.evaluate.measure_costs", partial(measure_costs, repetitions=1, context_length=16))


@pytest.fixture(scope="module")
def target_folder(tiny_model_folder: ModelFolder) -> Path:
    return tiny_model_folder(seed=0)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": f"Item {n}" + "!" * (n % 5)} for n in range(NUM_PROMPTS)]
    for number, row in enumerate(rows[:-1]):  # one has no category
        row["category"] = CATEGORIES[number % 2]
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
    more = {"batch_size": 5, "num_timed_prompts": 0, **more}
    return EvaluateConfig(pair=str(pair), prompts=str(prompts), sampling=sampling, **more)


def evaluated(config: EvaluateConfig) -> Evaluation:
    """At the one setting that the config has."""
    (result,) = evaluate(config)
    return result


@dataclass
class Exact:
    """Of the target's texts, in fp64, token by token, without any of evaluate's code.

    Attributes:
        alpha, kl, p_beyond_q, top1_agreement: means over the tokens, as `decode.agreement.agreement` has them.
        passing: of each text, the probability of each of its tokens to be accepted if drafted.
        agrees: of each text, whether the draft finds each of its tokens likeliest.
        ids: of each text.
    """

    alpha: float
    kl: float
    p_beyond_q: float
    top1_agreement: float
    passing: list[list[float]]
    agrees: list[list[bool]]
    ids: list[list[int]]


def exact(config: EvaluateConfig, target_folder: Path, draft_vocab: torch.Tensor | None = None) -> Exact:
    decoder = SpeculativeDecoder.from_pretrained(None, config.pair)
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    draft = AutoModelForCausalLM.from_pretrained(Path(config.pair) / "draft")
    tokens, found = [], Exact(0, 0, 0, 0, [], [], [])
    for row in range(NUM_PROMPTS):
        prompt = decoder.encode(json.loads(Path(config.prompts).read_text().splitlines()[row])["prompt"])
        plain = PlainDecoder(target, frozenset({2}))
        (completion,) = plain.generate_ids([prompt], config.sampling, streams=[row])
        text = torch.tensor([prompt + completion.ids[:-1]])
        with torch.inference_mode():
            p_logits, q_logits = (model(text).logits[0, len(prompt) - 1 :].double() for model in (target, draft))
        if draft_vocab is not None:
            hidden = torch.ones(259, dtype=torch.bool).index_fill(0, draft_vocab, False)
            q_logits = q_logits.masked_fill(hidden, -torch.inf)
        pairs = [
            (processed(p, config.sampling), processed(q, config.sampling))
            for p, q in zip(p_logits, q_logits, strict=True)
        ]
        for p, q in pairs:
            both = list(zip(p, q, strict=True))
            alpha, beyond = sum(min(a, b) for a, b in both), sum(a for a, b in both if b == 0)
            kl = sum(a * math.log(a / b) for a, b in both if a > 0 and b > 0)
            tokens.append((alpha, kl, beyond, float(p.index(max(p)) == q.index(max(q)))))
        found.ids.append(completion.ids)
        found.passing.append([min(1, q[x] / p[x]) for (p, q), x in zip(pairs, completion.ids, strict=True)])
        found.agrees.append([q.index(max(q)) == x for (_, q), x in zip(pairs, completion.ids, strict=True)])
    found.alpha, found.kl, found.p_beyond_q, found.top1_agreement = np.mean(tokens, axis=0).tolist()
    return found


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
    result = evaluated(config)
    truth = exact(config, target_folder)
    for name in ("alpha", "kl", "p_beyond_q", "top1_agreement"):
        value, (low, high) = getattr(result, name), getattr(result, f"{name}_interval")
        assert value == pytest.approx(getattr(truth, name), abs=1e-4), name
        assert low < value < high or low == value == high, name
    assert (result.p_beyond_q > 0.01) == (sampling.top_k > 0 or sampling.temperature == 0)
    assert (result.tv, *result.tv_interval) == tuple(1 - x for x in (result.alpha, *result.alpha_interval[::-1]))
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
    sampled = evaluated(config_for(good_pair, prompt_file, SamplingParams(temperature=3.0, max_new_tokens=10, seed=0)))
    greedy = evaluated(config_for(good_pair, prompt_file, SamplingParams(max_new_tokens=10)))
    assert sampled.first_position_interval[0] > greedy.alpha_interval[1]


def test_a_reduced_vocabulary_overlaps_on_its_own_tokens_only(
    good_pair: Path, prompt_file: Path, target_folder: Path
) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=6, seed=0)
    full = evaluated(config_for(good_pair, prompt_file, sampling))
    ids = torch.arange(2, 259, 3)
    save_draft_vocab(good_pair, ids)
    config = config_for(good_pair, prompt_file, sampling)
    reduced = evaluated(config)
    truth = exact(config, target_folder, ids)
    for name in ("alpha", "kl", "p_beyond_q", "top1_agreement"):
        assert getattr(reduced, name) == pytest.approx(getattr(truth, name), abs=1e-4), name
    assert reduced.alpha < full.alpha
    assert reduced.top1_agreement < full.top1_agreement
    assert full.p_beyond_q == 0
    assert reduced.p_beyond_q > 0.5


def test_what_is_found_is_recorded(good_pair: Path, prompt_file: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, seed=0)
    output = tmp_path / "new" / "figures.json"
    config = config_for(good_pair, prompt_file, sampling, output=str(output), num_timed_prompts=5)
    result = evaluated(config)
    assert [path.name for path in output.parent.iterdir()] == ["figures.json"]
    assert len(result.measured_speedups) == 5
    assert min(result.measured_speedups) <= (result.measured_speedup or 0) <= max(result.measured_speedups)
    figures = json.loads((tmp_path / "new" / "figures.json").read_text(), parse_constant=pytest.fail)  # no NaN
    assert figures["alpha"] == result.alpha
    assert SamplingParams(**figures["sampling"]) == sampling
    pair = Pair.load(good_pair)
    assert len(figures["samples"]) == 3
    assert pair.measured == figures | {"samples": []}  # of texts, a pair that is handed on holds none
    assert (figures["dtype"], figures["num_threads"]) == ("float32", 1)
    assert figures["provenance"]["hardware"]["cores"]
    assert json.loads(json.dumps(Evaluation.from_json(figures).as_json())) == json.loads(json.dumps(result.as_json()))
    for speedup, (low, high) in zip(result.predicted_speedup, result.predicted_speedup_intervals, strict=True):
        assert low <= speedup <= high
    seconds = figures["measured_seconds"]
    assert min(seconds["draft"], seconds["verify"], seconds["rest"]) > 0
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
    result = evaluated(config_for(good_pair, prompt_file, sampling, responses=str(folder), num_decoded_prompts=3))
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
    one = evaluated(config_for(good_pair, prompt_file, sampling, batch_size=1))
    many = evaluated(config_for(good_pair, prompt_file, sampling, batch_size=24))
    assert one.alpha == pytest.approx(many.alpha, abs=1e-5)
    assert one.num_tokens == many.num_tokens


def test_what_is_counted_in_greedy_decoding_is_where_the_draft_leaves_the_text(
    good_pair: Path, prompt_file: Path, target_folder: Path
) -> None:
    """Rounds are known beforehand: a draft is accepted up to the first token that it would not have said."""
    config = config_for(good_pair, prompt_file, SamplingParams(max_new_tokens=10), num_draft_tokens=3)
    result = evaluated(config)
    truth = exact(config, target_folder)
    counts = {"target_passes": 0, "drafted": 0, "verified": 0, "accepted": 0, "committed": 0}
    lengths, reached = [0] * 4, [0] * 4
    for ids, agrees in zip(truth.ids, truth.agrees, strict=True):
        place = 0
        while place < len(ids):
            drafted = min(3, 10 - place - 1)
            right = next((n for n in range(drafted) if place + n >= len(ids) or not agrees[place + n]), drafted)
            committed = min(right + 1, len(ids) - place)
            verified = min(right + 1, drafted, committed)
            found = (1, drafted, verified, min(right, verified), committed)
            counts = {name: count + more for (name, count), more in zip(counts.items(), found, strict=True)}
            lengths[min(right, verified)] += 1
            for position in range(verified):
                reached[position] += 1
            place += committed
    assert result.counts == counts
    assert result.accepted_lengths == lengths
    assert sum(lengths[1:]) > 10  # or there would be nothing to see
    assert result.betas == [sum(lengths[k + 1 :]) / reached[k] for k in range(3)]
    assert result.block_efficiency == counts["committed"] / counts["target_passes"]
    assert result.accepted_length_shares == pytest.approx([each / sum(lengths) for each in lengths])
    for name, (low, high) in result.counts_intervals.items():
        assert low <= counts[name] <= high


def test_what_is_counted_while_sampling_is_what_p_and_q_let_expect(
    good_pair: Path, prompt_file: Path, target_folder: Path
) -> None:
    config = config_for(good_pair, prompt_file, SamplingParams(temperature=1.0, max_new_tokens=16, seed=0))
    result = evaluated(config)
    passing = [np.array(each) for each in exact(config, target_folder).passing]
    expected = [expected_rounds(each, 4) for each in passing]
    assert result.block_efficiency_interval
    low, high = result.block_efficiency_interval
    assert low < block_efficiency_of(expected) < high
    assert not low < block_efficiency_of([expected_rounds(each, 1) for each in passing]) < high  # the control
    for beta, (low, high) in zip(betas(expected), result.betas_intervals, strict=True):
        assert low < beta < high


@pytest.mark.parametrize("draft_vocab", [None, torch.arange(258, 1, -3)], ids=["whole", "reduced"])
def test_samples_hold_p_and_q_of_each_of_their_tokens(
    draft_vocab: torch.Tensor | None, good_pair: Path, prompt_file: Path, target_folder: Path
) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=60, max_new_tokens=12, seed=1)
    if draft_vocab is not None:
        save_draft_vocab(good_pair, draft_vocab)
    result = evaluated(config_for(good_pair, prompt_file, sampling, num_decoded_prompts=5, num_samples=2))
    places, decoded = (0, 4), (0, 23)  # the first and the last of those decoded
    speculation = SpeculationParams(num_draft_tokens=4, never_slower=False, verification="tokenwise")
    decoder = SpeculativeDecoder.from_pretrained(None, str(good_pair), speculation)
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    draft = AutoModelForCausalLM.from_pretrained(good_pair / "draft")
    hidden = torch.zeros(259, dtype=torch.bool)
    if draft_vocab is not None:
        hidden = ~hidden.index_fill(0, draft_vocab, True)
    rows = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    assert [sample.category for sample in result.samples] == ["even", None]
    for sample, place, row in zip(result.samples, places, decoded, strict=True):
        prompt = decoder.encode(rows[row]["prompt"])
        (completion,), _ = decoder.engine.generate_ids([prompt], sampling, [place])
        assert sample.prompt == f"<|im_start|>user\n{rows[row]['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        assert (sample.pieces, sample.provenance) == (completion.pieces, completion.provenance)
        text = torch.tensor([prompt + completion.ids[:-1]])
        with torch.inference_mode():
            p, q = (model(text).logits[0, len(prompt) - 1 :].double() for model in (target, draft))
        for found, logits in ((sample.p, p), (sample.q, q.masked_fill(hidden, -torch.inf))):
            pairs = zip(logits, completion.ids, strict=True)
            assert found == pytest.approx([processed(each, sampling)[token] for each, token in pairs], abs=1e-5)
    drafted = [each for sample in result.samples for each in zip(sample.provenance, sample.p, sample.q, strict=True)]
    assert {provenance for provenance, _, _ in drafted} >= {"accepted", "corrected"}
    assert all(p > 0 and (q > 0 or provenance != "accepted") for provenance, p, q in drafted)


def test_parts_of_the_texts_have_figures_of_their_own(good_pair: Path, prompt_file: Path, tmp_path: Path) -> None:
    """Those of a category are those of its prompts alone, were they the set; those of positions add up to the whole."""
    sampling = SamplingParams(max_new_tokens=40)
    result = evaluated(config_for(good_pair, prompt_file, sampling))
    assert list(result.by_category) == list(CATEGORIES)
    assert [part.num_prompts for part in result.by_category.values()] == [12, 11]
    alone = tmp_path / "odd.jsonl"
    lines = prompt_file.read_text().splitlines(keepends=True)
    alone.write_text("".join(line for line in lines if '"odd"' in line))
    odd = evaluated(config_for(good_pair, alone, sampling))
    assert vars(result.by_category["odd"]) == {name: getattr(odd, name) for name in vars(result.by_category["odd"])}
    assert result.by_category["even"].alpha != odd.alpha
    assert list(result.by_position) == ["0-15", "16-31", "32-63"]
    parts = result.by_position.values()
    assert sum(part.num_tokens for part in parts) == result.num_tokens
    assert sum(part.alpha * part.num_tokens for part in parts) == pytest.approx(result.alpha * result.num_tokens)
    assert len({part.alpha for part in parts}) == 3


def test_several_settings_are_each_what_they_are_alone(good_pair: Path, prompt_file: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=6, seed=3)
    more = [{"temperature": 0}, {"temperature": 0.7, "top_k": 20}]
    output = tmp_path / "figures.json"
    results = evaluate(config_for(good_pair, prompt_file, sampling, more_sampling=more, output=str(output)))
    assert [result.sampling for result in results] == [
        sampling,
        replace(sampling, temperature=0.0),
        replace(sampling, temperature=0.7, top_k=20),
    ]
    for result in results:
        assert untimed(result) == untimed(evaluated(config_for(good_pair, prompt_file, result.sampling)))
    figures = json.loads(output.read_text())
    settings = figures.pop("settings")
    assert [each["alpha"] for each in settings] == [result.alpha for result in results]
    assert settings[0] == {name: value for name, value in figures.items() if name in settings[0]}
    printed = Console(width=80, file=io.StringIO())
    printed.print(evaluation_tables(results))
    assert isinstance(printed.file, io.StringIO)
    text = printed.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for result in results:
        assert name_of(result.sampling) in text
        assert f"{result.kl:.3f}" in text


def untimed(result: Evaluation) -> dict[str, Any]:
    return {name: value for name, value in vars(result).items() if name not in TIMED}


def test_seeds_are_fixed_where_none_is_given() -> None:
    config = EvaluateConfig(pair="x", sampling=SamplingParams(temperature=1.0), more_sampling=[{"seed": 5}])
    assert [params.seed for params in config.settings] == [0, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temprature": 0}, "^more_sampling: temprature is no sampling parameter"),
        ({"temperature": -1}, "^more_sampling: temperature is -1"),
        ({"temperature": "hot"}, "^more_sampling: "),
        ({"repetition_penalty": 2.0}, "^sampling: alpha is measured without penalties"),
    ],
)
def test_settings_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluateConfig(pair="x", more_sampling=[changes])
    with pytest.raises(ValueError, match=r"^num_timed_prompts: 2 is too few for a median"):
        EvaluateConfig(pair="x", num_timed_prompts=2)


def test_saved_texts_serve_the_settings_that_they_were_sampled_at(
    good_pair: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy ones lie beside them; for other settings the same prompts are answered anew."""
    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=4, seed=0)
    folder = responses(tmp_path / "responses", prompt_file, sampling)
    rows = {"input_ids": [[1, 50, 60, 5], [1, 90, 7]], "response_mask": [[False] * 3 + [True], [False, False, True]]}
    datasets.Dataset.from_dict(rows | {"category": ["a", "b"]}).save_to_disk(str(folder / "heldout_greedy"))
    seen = []

    def record(decoder: SpeculativeDecoder, text: Text, params: SamplingParams) -> list[list[float]]:
        seen.append((params.temperature, text.ids[: text.start], text.ids[text.start :], text.category))
        return sums_on_text(decoder, text, params)

    monkeypatch.setattr("decode.evaluate.sums_on_text", record)
    more = [{"temperature": 0, "top_p": 1.0}, {"temperature": 0.5}]
    config = config_for(good_pair, prompt_file, sampling, responses=str(folder), more_sampling=more)
    assert [result.num_prompts for result in evaluate(config)] == [2, 2, 2]
    assert seen[:4] == [
        (1.0, [1, 50, 60], [70, 80], None),
        (1.0, [1], [90, 91], None),
        (0.0, [1, 50, 60], [5], "a"),
        (0.0, [1, 90], [7], "b"),
    ]
    assert [each[:2] for each in seen[4:]] == [(0.5, [1, 50, 60]), (0.5, [1])]


def test_an_interrupted_evaluation_goes_on_and_finds_the_same(
    good_pair: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=6, seed=0)
    config = config_for(good_pair, prompt_file, sampling, more_sampling=[{"temperature": 0}], batch_size=4)
    uninterrupted = [untimed(result) for result in evaluate(config)]
    config = replace(config, output=str(tmp_path / "figures.json"))
    kept = tmp_path / "figures.json.partial.jsonl"
    calls = []

    def interrupt_at(last: int) -> None:
        calls.clear()

        def count(*arguments: Any) -> list[list[float]]:
            calls.append(arguments)
            if len(calls) == last:
                raise KeyboardInterrupt
            return sums_on_text(*arguments)

        monkeypatch.setattr("decode.evaluate.sums_on_text", count)

    interrupt_at(10)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config)
    with kept.open("a") as file:  # killed while it wrote a line
        file.write('{"stage": "0 alpha", "batch": 9, "found": [[[1.')
    interrupt_at(NUM_PROMPTS)  # in the second setting
    monkeypatch.setattr(PlainDecoder, "generate_ids", greedy_only(PlainDecoder.generate_ids))
    with pytest.raises(KeyboardInterrupt):
        evaluate(config)
    assert len(calls) == NUM_PROMPTS
    interrupt_at(0)
    assert [untimed(result) for result in evaluate(config)] == uninterrupted
    assert len(calls) == NUM_PROMPTS * 2 - 9 - (NUM_PROMPTS - 1)
    assert not kept.exists()


def greedy_only(generate_ids: Callable[..., Any]) -> Callable[..., Any]:
    """Text of the first setting was generated already."""

    def generate(self: PlainDecoder, prompts: list[list[int]], params: SamplingParams, **more: Any) -> Any:
        assert params.temperature == 0
        return generate_ids(self, prompts, params, **more)

    return generate


def test_what_was_kept_of_another_draft_is_dropped(
    good_pair: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=4, seed=0)
    config = config_for(good_pair, prompt_file, sampling, output=str(tmp_path / "figures.json"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("decode.evaluate.measure_costs", interrupted)
        evaluate(config)
    assert (tmp_path / "figures.json.partial.jsonl").exists()
    save_draft_vocab(good_pair, torch.arange(2, 259, 3))
    result = evaluated(config)
    assert untimed(result) == untimed(evaluated(replace(config, output=None)))
    assert result.p_beyond_q > 0.5


def interrupted(*_: Any) -> Costs:
    raise KeyboardInterrupt
