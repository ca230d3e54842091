"""The whole decoder, models and caches included, says what the target would say.

Every rule, proposer, kind of sampling and shape of batch. The reference is exact enumeration with transformers' own
processors: the joint distribution of several tokens of many texts is held against it by chi-square at fixed seeds.
Greedy texts must be the enumerated one, seeded texts also those of plain decoding. Decoders that are wrong on purpose
must fail the very same checks.
"""

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decode import sampler, trace
from decode.cache import KVCache
from decode.head import reduce_output_vocabulary
from decode.lookup import CascadeProposer, LookupProposer
from decode.model import CachedModel
from decode.native_round import Unwarped
from decode.noise import RowNoise
from decode.params import SamplingParams, SpeculationParams
from decode.penalties import Penalties
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer, Proposal, Proposer
from decode.sampler import BatchSampler
from decode.sampling import Distribution
from decode.self_draft import SelfDraft, new_adapter
from decode.self_proposer import self_draft_proposer
from decode.speculative import SpeculativeEngine
from decode.trace import Trace
from decode.verify import verify_block, verify_tokenwise

Build = Callable[..., LlamaForCausalLM]
Outcome = tuple[Tensor, Distribution]

VOCAB, NUM_COMPARED, NUM_NEW = 7, 5, 6
# of different lengths, so that rows are ragged from the start; lookup has a match after two of them
PROMPTS = [[3, 1, 4, 3, 1], [2, 5, 5, 1, 6, 2, 5, 5], [6]]
NUM_ROWS = 1200
JOINTS = ([0, 1, 2], [0, 1], [1, 2], [2, 3], [3, 4])
PENALTIES = dict(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={2: 1.5, 0: -1.0},
    min_new_tokens=2,
    stop_token_ids=(5,),
)
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": dict(temperature=0.8),
    "top-k": dict(temperature=1.0, top_k=4),
    "top-p": dict(temperature=1.0, top_p=0.85),
    "min-p": dict(temperature=1.0, min_p=0.1),
    "penalties": dict(temperature=1.0, **PENALTIES),
    "everything": dict(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05, **PENALTIES),
}
GREEDY: dict[str, dict[str, Any]] = {"greedy": {}, "greedy with penalties": PENALTIES}
SETTINGS = SAMPLED | GREEDY
RULES = ("tokenwise", "block", "seeded")
PROPOSERS = ("draft", "reduced draft", "lookup", "cascade", "skip", "exit", "exit, layer", "low rank")
DRAFT_VOCAB = torch.tensor([0, 2, 3, 5])
# of some thousand honest p-values the smallest is about 1e-4, if no cell is so small that it has a tail of its own
HONEST, WRONG, MIN_EXPECTED = 1e-5, 1e-6, 10


@dataclass(frozen=True)
class Models:
    """In float64, so that passes over one token and over several agree wherever it matters."""

    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    reduced: LlamaForCausalLM
    reference: tuple[int, ...]

    def proposer(self, name: str) -> Proposer:
        draft = DraftModelProposer(self.draft, VOCAB)
        if name == "draft":
            return draft
        if name == "reduced draft":
            return DraftModelProposer(self.reduced, VOCAB, DRAFT_VOCAB)
        if name == "skip":
            spec = SelfDraft(skipped_attention=(0,), skipped_mlp=(1,))
            return self_draft_proposer(self.target, spec)
        if name == "exit":
            return self_draft_proposer(self.target, SelfDraft(num_layers=1))
        if name == "4 bits, skip":  # torchao rounds no float64: among the ways that are native
            return self_draft_proposer(self.target, SelfDraft(bits=4, skipped_mlp=(1,)))
        if name == "low rank":
            return self_draft_proposer(self.target, SelfDraft(low_rank=True), tensors=halved(self.target))
        if name == "exit, layer":
            spec = SelfDraft(num_layers=1, adapter="layer")
            # which would be the target's own last layer
            generator = torch.Generator().manual_seed(0)
            adapter = {
                key: weight + 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                for key, weight in new_adapter(self.target, "layer").items()
            }
            return self_draft_proposer(self.target, spec, tensors=adapter)
        if name == "lookup":
            return LookupProposer(self.reference)
        # of so short a reference that some rows of a round have a match and others do not
        return CascadeProposer(LookupProposer(self.reference[:15]), draft)

    def engine(self, proposer: str | Proposer = "draft", **speculation: Any) -> SpeculativeEngine:
        proposer = self.proposer(proposer) if isinstance(proposer, str) else proposer
        defaults: dict[str, Any] = dict(num_draft_tokens=2, never_slower=False)
        return SpeculativeEngine(self.target, proposer, SpeculationParams(**defaults | speculation))


def halved(target: LlamaForCausalLM) -> dict[str, Tensor]:
    """Factors of the MLPs' matrices, of half their rank."""
    factors: dict[str, Tensor] = {}
    for name in (f"model.layers.{layer}.mlp.down_proj" for layer in range(target.config.num_hidden_layers)):
        up, scales, down = torch.linalg.svd(target.get_submodule(name).weight.float(), full_matrices=False)
        rank = len(scales) // 2
        factors |= {f"{name}.up": up[:, :rank] * scales[:rank], f"{name}.down": down[:rank]}
    return factors


@pytest.fixture(scope="module")
def models(tiny_llama: Build) -> Models:
    shape: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    # of which so short texts take notice
    shape["rope_parameters"] = dict(rope_type="default", rope_theta=10.0)
    target, draft = tiny_llama(seed=4, **shape).double(), tiny_llama(seed=5, num_layers=1, **shape).double()
    reduced = copy.deepcopy(draft)
    reduce_output_vocabulary(reduced, DRAFT_VOCAB)
    params = SamplingParams(temperature=1.0, max_new_tokens=80, seed=0)
    (text,) = PlainDecoder(target, frozenset()).generate_ids([[1]], params)
    return Models(target, draft, reduced, tuple(text.ids))


class RoundedHead(torch.nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).bfloat16()


@pytest.fixture(scope="module")
def rounded(models: Models) -> Models:
    """The same with logits in bfloat16, which C++ turns into distributions and tokens, on machines that can."""
    rounding = copy.deepcopy(models)
    for model in (rounding.target, rounding.draft, rounding.reduced):
        model.get_output_embeddings().__class__ = RoundedHead
    return rounding


@pytest.fixture(scope="module")
def native(tiny_llama: Build) -> Models:
    """In bfloat16, with passes, drafts and verdicts of C++, whose passes over one token and over several agree."""
    shape: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    shape["initializer_range"] = 0.15  # wider, they would say too few tokens
    shape["rope_parameters"] = dict(rope_type="default", rope_theta=10.0)
    target, draft = tiny_llama(seed=4, **shape).bfloat16(), tiny_llama(seed=5, num_layers=1, **shape).bfloat16()
    if not CachedModel(target, 1, 8).can_draft:
        pytest.skip("needs a compiler and a CPU with bf16 matrix units")
    reduced = copy.deepcopy(draft)
    reduce_output_vocabulary(reduced, DRAFT_VOCAB)
    return Models(target, draft, reduced, ())


# the reference


class RepeatsInAnswer(LogitsProcessor):
    """The two penalties that transformers lacks, as vLLM documents them."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.nn.functional.one_hot(input_ids[:, self.prompt_length :], VOCAB).sum(dim=1)
        return scores - self.frequency * counts - self.presence * (counts > 0)


def processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    steps: list[LogitsProcessor] = []
    if params.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(RepeatsInAnswer(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.min_new_tokens:
        stops = list(params.stop_token_ids)
        steps.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, stops))
    if params.temperature:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return LogitsProcessorList(steps)


@cache
def exact(target: LlamaForCausalLM, setting: str, prompt: tuple[int, ...]) -> Tensor:
    """Joint distribution of the first tokens after a prompt, fp64 [vocab] * NUM_COMPARED.

    What follows a stop token counts as token 0.
    """
    params = SamplingParams(**SETTINGS[setting])
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=NUM_COMPARED - 1)))
    inputs = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], dim=1)
    with torch.inference_mode():
        if target.dtype == torch.bfloat16:  # C++ rounds where it does
            logits = CachedModel(target, *inputs.shape).forward(inputs)
        else:
            logits = target(input_ids=inputs, use_cache=False).logits
    logits = logits[:, len(prompt) - 1 :].float()
    stops = torch.tensor(params.stop_token_ids, dtype=torch.long)
    nothing = torch.nn.functional.one_hot(torch.tensor(0), VOCAB).float()
    process = processors(params, len(prompt))
    joint = torch.ones((), dtype=torch.float64)
    for place in range(NUM_COMPARED):
        scores = process(inputs[:, : len(prompt) + place], logits[:, place])
        if params.temperature:
            p = scores.softmax(dim=-1)
        else:
            p = torch.nn.functional.one_hot(scores.argmax(dim=-1), VOCAB).float()
        p = torch.where(torch.isin(texts[:, :place], stops).any(dim=1, keepdim=True), nothing, p)
        # p follows the tokens before this place, whatever the others
        p = p.reshape([VOCAB] * NUM_COMPARED)[(..., *[0] * (NUM_COMPARED - 1 - place), slice(None))]
        joint = joint.unsqueeze(-1) * p
    return joint


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Pearson's chi-square test; rare cells are put together, with others as rare, until they expect enough."""
    if (counts[expected == 0] > 0).any():
        return 0.0
    expected, order = expected.double().sort()
    bins = ((expected.cumsum(dim=0) - expected) / MIN_EXPECTED).long()
    _, bins = bins.unique_consecutive(return_inverse=True)
    nothing = torch.zeros(int(bins.max()) + 1, dtype=torch.float64)
    observed = nothing.scatter_add(0, bins, counts[order].double())
    expected = nothing.scatter_add(0, bins, expected)
    assert len(expected) > 3
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2).item()


def compared(texts: Sequence[list[int]]) -> Tensor:
    """[rows, NUM_COMPARED], with token 0 behind the end of a text."""
    return torch.tensor([(ids + [0] * NUM_COMPARED)[:NUM_COMPARED] for ids in texts])


def p_values(target: LlamaForCausalLM, setting: str, texts: Sequence[list[int]]) -> list[float]:
    """Of joints of tokens after each prompt; row i continues prompt i modulo 3."""
    values = []
    for which, prompt in enumerate(PROMPTS):
        tokens = compared(texts[which :: len(PROMPTS)])
        joint = exact(target, setting, tuple(prompt))
        for columns in JOINTS:
            marginal = joint.sum(dim=tuple(set(range(NUM_COMPARED)) - set(columns)))
            places = tokens[:, columns] @ (VOCAB ** torch.arange(marginal.ndim).flip(0))
            counts = torch.bincount(places, minlength=marginal.numel())
            values.append(p_value(counts, marginal.flatten() * len(tokens)))
    return values


def assert_follows_target(models: Models, setting: str, texts: Sequence[list[int]]) -> None:
    if setting in GREEDY:
        for which, prompt in enumerate(PROMPTS):
            joint = exact(models.target, setting, tuple(prompt))
            assert (compared(texts[which :: len(PROMPTS)]) == (joint == 1).nonzero()).all()
        return
    values = p_values(models.target, setting, texts)
    assert min(values) > HONEST, values


# the decoders


def own_params(setting: str, num_rows: int = NUM_ROWS, **more: Any) -> list[SamplingParams]:
    """One for each row, with seeds of their own."""
    num_rows = 12 if setting in GREEDY else num_rows
    params = SamplingParams(**dict(max_new_tokens=NUM_NEW) | SETTINGS[setting] | more)
    return [replace(params, seed=10_000 + row) for row in range(num_rows)]


def decoded(engine: SpeculativeEngine, params: list[SamplingParams]) -> tuple[list[list[int]], Trace]:
    completions, traces = engine.generate_ids(PROMPTS * (len(params) // len(PROMPTS)), params)
    total = Trace([each for trace in traces for each in trace.rounds])
    return [completion.ids for completion in completions], total


@cache
def matrix(models: Models, rule: str, proposer: str, setting: str) -> tuple[list[list[int]], Trace]:
    return decoded(models.engine(proposer, verification=rule), own_params(setting))


@cache
def plain(models: Models, setting: str) -> list[list[int]]:
    params = own_params(setting)
    completions = PlainDecoder(models.target, frozenset()).generate_ids(PROMPTS * (len(params) // 3), params)
    return [completion.ids for completion in completions]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("rule", RULES)
def test_texts_follow_the_target(models: Models, rule: str, proposer: str, setting: str) -> None:
    texts, total = matrix(models, rule, proposer, setting)
    assert_follows_target(models, setting, texts)
    if setting in SAMPLED:  # acceptance and rejection were both exercised
        assert 0.05 < total.num_accepted / total.num_verified < 0.95
        assert total.num_verified > NUM_ROWS / 2
    if rule == "seeded":
        assert texts == plain(models, setting)


@pytest.mark.parametrize("setting", SETTINGS)
def test_plain_decoding_follows_the_target(models: Models, setting: str) -> None:
    assert_follows_target(models, setting, plain(models, setting))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("proposer", ["draft", "reduced draft", "cascade"])
@pytest.mark.parametrize("rule", RULES)
def test_texts_follow_a_target_with_rounded_logits(rounded: Models, rule: str, proposer: str, setting: str) -> None:
    texts, total = matrix(rounded, rule, proposer, setting)
    assert_follows_target(rounded, setting, texts)
    if setting in SAMPLED:
        assert 0.05 < total.num_accepted / total.num_verified < 0.95
    if rule == "seeded":
        assert texts == plain(rounded, setting)
        assert_follows_target(rounded, setting, plain(rounded, setting))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("proposer", ["draft", "reduced draft", "skip", "4 bits, skip"])
@pytest.mark.parametrize("rule", RULES)
def test_texts_follow_a_target_whose_rounds_are_in_cpp(
    native: Models, rule: str, proposer: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = []
    judge = sampler.judge
    monkeypatch.setattr(sampler, "judge", lambda *arguments: verdicts.append(judge(*arguments)) or verdicts[-1])  # type: ignore[func-returns-value]
    texts, total = decoded(native.engine(proposer, verification=rule), own_params(setting))
    assert bool(verdicts) == ("penalties" not in setting and setting != "everything")
    assert_follows_target(native, setting, texts)
    if setting in SAMPLED:
        assert 0.05 < total.num_accepted / total.num_verified < 0.95
    if rule == "seeded":
        assert texts == plain(native, setting)


def test_a_verdict_by_another_rule_fails_the_same_check_in_cpp(native: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = sampler.judge

    def without_coins(p: Unwarped, q: Unwarped, *others: Any) -> tuple[Tensor, Tensor]:
        drafted, num_drafted, rules, coins, *keys = others
        return judge(p, q, drafted, num_drafted, rules, coins / 2, *keys)

    monkeypatch.setattr(sampler, "judge", without_coins)
    assert min(wrong_values(native, "temperature", verification="block")) < WRONG


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("rule", RULES)
def test_a_row_alone_or_among_others_has_the_same_text(models: Models, rule: str, proposer: str) -> None:
    """What holds for the batches above so holds for one prompt, and for a batch in which every row wants its own."""
    engine = models.engine(proposer, verification=rule)
    rows = [(setting, row) for setting in SETTINGS for row in range(12)]
    random.Random(0).shuffle(rows)
    params = {setting: own_params(setting) for setting in SETTINGS}
    expected = [matrix(models, rule, proposer, setting)[0][row] for setting, row in rows]
    mixed, _ = engine.generate_ids([PROMPTS[row % 3] for _, row in rows], [params[name][row] for name, row in rows])
    assert [completion.ids for completion in mixed] == expected
    for (setting, row), ids in zip(rows[::5], expected[::5], strict=True):
        (alone,), _ = engine.generate_ids([PROMPTS[row % 3]], [params[setting][row]])
        assert alone.ids == ids


def test_the_cascade_mixes_its_two_proposers(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = []
    row_by_row = CascadeProposer._row_by_row

    def counted(self: CascadeProposer, matched: Tensor, found: Proposal, drafted: Proposal) -> Proposal:
        mixed.append(matched.float().mean().item())
        return row_by_row(self, matched, found, drafted)

    monkeypatch.setattr(CascadeProposer, "_row_by_row", counted)
    decoded(models.engine("cascade"), own_params("temperature"))
    assert len(mixed) > 2
    assert 0.1 < sum(mixed) / len(mixed) < 0.9


@pytest.mark.parametrize("setting", SAMPLED)
def test_the_settings_are_at_work(models: Models, setting: str) -> None:
    for prompt in PROMPTS:
        joint = exact(models.target, setting, tuple(prompt))
        assert joint.sum().item() == pytest.approx(1, abs=1e-5)
        assert (joint.sum(dim=(1, 2, 3, 4)) > 0.05).sum() > 1
        for other in set(SAMPLED) - {setting}:
            assert (exact(models.target, other, tuple(prompt)) - joint).abs().sum() > 0.1


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_any_number_of_drafted_tokens(models: Models, rule: str, num_draft_tokens: int) -> None:
    engine = models.engine("cascade", verification=rule, num_draft_tokens=num_draft_tokens)
    # long enough for rounds of full length to reach the fifth token
    texts, total = decoded(engine, own_params("everything", max_new_tokens=NUM_COMPARED + num_draft_tokens))
    assert_follows_target(models, "everything", texts)
    assert max(each.num_drafted for each in total.rounds) == num_draft_tokens


@pytest.mark.parametrize(("rule", "seed"), [("tokenwise", 7), ("block", 7), ("seeded", 7), ("auto", None)])
def test_rows_that_share_params_draw_independently(models: Models, rule: str, seed: int | None) -> None:
    params = SamplingParams(**SETTINGS["temperature"], max_new_tokens=NUM_NEW, seed=seed)
    prompts = PROMPTS * (NUM_ROWS // len(PROMPTS))
    torch.manual_seed(0)
    completions, _ = models.engine(verification=rule).generate_ids(prompts, params)
    assert_follows_target(models, "temperature", [completion.ids for completion in completions])
    if rule == "seeded":
        expected = PlainDecoder(models.target, frozenset()).generate_ids(prompts, params)
        assert [completion.ids for completion in completions] == [completion.ids for completion in expected]


@pytest.mark.parametrize("setting", ["temperature", "everything"])
@pytest.mark.parametrize("rule", RULES)
def test_a_bound_on_the_drafts_entropy(models: Models, rule: str, setting: str) -> None:
    engine = models.engine(verification=rule, num_draft_tokens=4, entropy_bound=1.65)
    texts, total = decoded(engine, own_params(setting))
    assert_follows_target(models, setting, texts)
    drafted = [each.num_drafted for each in total.rounds]
    assert all(drafted.count(number) > NUM_ROWS / 20 for number in range(1, 5)), Counter(drafted)


@pytest.mark.parametrize("draft_temperature", [0.0, 1.6])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_temperature_of_its_own(models: Models, rule: str, draft_temperature: float) -> None:
    engine = models.engine(verification=rule, draft_temperature=draft_temperature)
    texts, total = decoded(engine, own_params("top-p"))
    assert_follows_target(models, "top-p", texts)
    assert total.num_accepted > NUM_ROWS / 2
    if rule == "seeded":
        assert texts == plain(models, "top-p")


@pytest.mark.parametrize("draft_temperature", [0.0, 1.6])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_temperature_of_its_own_in_cpp(native: Models, rule: str, draft_temperature: float) -> None:
    engine = native.engine(verification=rule, draft_temperature=draft_temperature)
    assert_follows_target(native, "temperature", decoded(engine, own_params("temperature"))[0])


@pytest.mark.parametrize("drafts", ["as they are", "cheap", "dear"])
@pytest.mark.parametrize("rule", RULES)
def test_drafting_as_many_tokens_as_pay(
    models: Models, rule: str, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many are drafted hangs on the clock and on what was accepted so far; the distribution of texts does not."""
    if drafts != "as they are":
        chance = random.Random(3)
        # from round to round, drafting, verifying, the rest: an erratic clock, the same in every run
        scales = itertools.cycle((1, 0.3 if drafts == "cheap" else 3, 1, 0.1))
        times = itertools.accumulate(scale * chance.lognormvariate(0, 1) for scale in scales)
        monkeypatch.setattr(trace, "perf_counter", lambda: next(times))
    engine = models.engine(verification=rule, num_draft_tokens=None, never_slower=True, max_draft_tokens=5)
    total, texts = Trace(), []
    params = own_params("temperature", max_new_tokens=10)
    for start in range(0, NUM_ROWS, 60):  # the pacer learns from earlier texts
        completions, traces = engine.generate_ids(PROMPTS * 20, params[start : start + 60])
        texts += [completion.ids for completion in completions]
        total = sum(traces, total)
    assert_follows_target(models, "temperature", texts)
    drafted = Counter(each.num_drafted for each in total.rounds)
    if drafts == "cheap":
        assert set(drafted) >= set(range(5)), drafted
    if drafts == "dear":
        assert total.num_paused > 0
    assert 0 < drafted[0] < len(total.rounds)


# decoders that are wrong on purpose


def wrong_values(models: Models, setting: str, proposer: str | Proposer = "draft", **speculation: Any) -> list[float]:
    engine = models.engine(proposer, **dict(num_draft_tokens=4) | speculation)
    texts, _ = decoded(engine, own_params(setting, 3 * NUM_ROWS))
    return p_values(models.target, setting, texts)


def residual(p: Distribution, q: Distribution, num_accepted: Tensor) -> Distribution:
    """(p - q)+ after the accepted tokens."""
    rows = torch.arange(len(num_accepted))
    q_next = torch.nn.functional.pad(q.dense(VOCAB), (0, 0, 0, 1))[rows, num_accepted]
    p_next = p.dense(VOCAB)[rows, num_accepted]
    weights = (p_next - q_next).clamp_min(0)
    return Distribution(torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, p_next))


def flatter(q: Distribution) -> Distribution:
    roots = q.probabilities.sqrt()
    return Distribution(roots / roots.sum(dim=-1, keepdim=True).clamp_min(1e-9), q.token_ids)


class Wrong:
    """Each takes the place of a rule of `verify`; `rule` is the right one."""

    @staticmethod
    def next_token_from_p(rule: Callable[..., Outcome], p: Distribution, q: Distribution, *rest: Tensor) -> Outcome:
        num_accepted, _ = rule(p, q, *rest)
        return num_accepted, p[torch.arange(len(num_accepted)), num_accepted]

    @staticmethod
    def q_is_ignored(rule: Callable[..., Outcome], p: Distribution, q: Distribution, *rest: Tensor) -> Outcome:
        return rule(p, Distribution(torch.ones_like(q.probabilities), q.token_ids), *rest)

    @staticmethod
    def q_of_another_temperature(
        rule: Callable[..., Outcome], p: Distribution, q: Distribution, *rest: Tensor
    ) -> Outcome:
        return rule(p, flatter(q), *rest)

    @staticmethod
    def one_coin_for_all(rule: Callable[..., Outcome], p: Distribution, q: Distribution, *rest: Tensor) -> Outcome:
        *drafted, coins = rest
        return rule(p, q, *drafted, coins[:, :1].expand_as(coins))

    @staticmethod
    def everything_is_accepted(
        rule: Callable[..., Outcome], p: Distribution, q: Distribution, *rest: Tensor
    ) -> Outcome:
        *drafted, coins = rest
        return rule(p, q, *drafted, torch.zeros_like(coins))


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *itertools.product(
            ("tokenwise", "block"),
            ("next_token_from_p", "q_of_another_temperature", "everything_is_accepted"),
        ),
        # too small a mistake under the block rule to be seen in some thousand texts
        ("tokenwise", "q_is_ignored"),
        ("tokenwise", "one_coin_for_all"),
    ],
)
def test_a_wrong_rule_fails_the_same_check(
    models: Models, rule: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = getattr(Wrong, name)
    for right in (verify_tokenwise, verify_block):
        monkeypatch.setattr(sampler, right.__name__, lambda *args, right=right: wrong(right, *args))
    values = wrong_values(models, "temperature", verification=rule)
    assert min(values) < WRONG, values


def test_a_residual_of_unprocessed_p_fails_the_same_check(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    raw: list[Distribution] = []
    honest = BatchSampler.distribution

    def kept(self: BatchSampler, logits: Tensor, drafted: Tensor) -> Distribution:
        raw[:] = [Distribution(logits.float().softmax(dim=-1))]
        return honest(self, logits, drafted)

    def wrong(p: Distribution, q: Distribution, *rest: Tensor) -> Outcome:
        num_accepted, _ = verify_tokenwise(p, q, *rest)
        return num_accepted, residual(raw[0], q, num_accepted)

    monkeypatch.setattr(BatchSampler, "distribution", kept)
    monkeypatch.setattr(sampler, "verify_tokenwise", wrong)
    values = wrong_values(models, "top-k", verification="tokenwise")
    assert min(values) < WRONG, values


class SaysAnotherQ(DraftModelProposer):
    """Draws at the temperature asked for, but reports the q of another."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        assert proposal.q is not None
        return replace(proposal, q=flatter(proposal.q))


class FlattersItself(LookupProposer):
    """Reports that what it copied was drawn by lot."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        assert proposal.q is not None
        return replace(proposal, q=Distribution(proposal.q.probabilities / 3, proposal.q.token_ids))


@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_a_q_that_is_not_what_was_drawn_from_fails_the_same_check(models: Models, rule: str) -> None:
    for proposer in (SaysAnotherQ(models.draft, VOCAB), FlattersItself(models.reference)):
        values = wrong_values(models, "temperature", proposer, verification=rule)
        assert min(values) < WRONG, values


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("tokenwise", "draft and next share"),
        ("tokenwise", "one for all steps"),
        ("block", "by step alone"),
        ("seeded", "one for all places"),
    ],
)
def test_noise_used_twice_fails_the_same_check(
    models: Models, rule: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RowNoise.keys

    def wrong(self: RowNoise, purposes: str | list[str], start: np.ndarray, *steps: np.ndarray) -> np.ndarray:
        drafts = np.array(purposes) == "draft"
        if name == "draft and next share" and purposes != "token":
            purposes = ["draft" if purpose == "next" else purpose for purpose in purposes]
        if name == "one for all steps":
            steps = tuple(np.where(drafts, 0, step) for step in steps)
        if name == "by step alone":
            start = np.where(drafts, 0, start)
        if name == "one for all places":
            start = 0 * start
        return keys(self, purposes, start, *steps)

    monkeypatch.setattr(RowNoise, "keys", wrong)
    values = wrong_values(models, "temperature", verification=rule)
    assert min(values) < WRONG, values


def test_seeded_noise_by_round_is_not_that_of_plain_decoding(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows the target all the same: the comparison of texts is a check of its own."""
    begin_round = BatchSampler.begin_round

    def by_round(self: BatchSampler, num_drafted: int) -> None:
        begin_round(self, num_drafted)
        starts = np.array([[len(row.ids)] for row in self.completions])
        self.token_keys = self.noise.keys("token", starts, np.arange(num_drafted + 1)[None])

    monkeypatch.setattr(BatchSampler, "begin_round", by_round)
    texts, _ = decoded(models.engine(verification="seeded"), own_params("temperature"))
    assert_follows_target(models, "temperature", texts)
    assert texts != plain(models, "temperature")


@pytest.mark.parametrize("sees", [1, -1])
def test_a_mask_off_by_one_fails_the_same_check(models: Models, sees: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(self: KVCache) -> Tensor:
        last = (self.positions + sees).clamp_min(0).unsqueeze(-1)
        return (torch.arange(self.extent) <= last).unsqueeze(1)

    monkeypatch.setattr(KVCache, "attention_mask", shifted)
    values = wrong_values(models, "temperature")
    assert min(values) < WRONG, values


def test_positions_off_by_one_fail_the_same_check(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at = KVCache.write_at

    def shifted(self: KVCache, num_tokens: int) -> Tensor:
        positions = write_at(self, num_tokens)
        return positions + torch.arange(num_tokens).clamp_max(1)

    monkeypatch.setattr(KVCache, "write_at", shifted)
    values = wrong_values(models, "temperature")
    assert min(values) < WRONG, values


@pytest.mark.parametrize("rule", RULES)
def test_penalties_blind_to_drafted_tokens_fail_the_same_check(
    models: Models, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    penalise = Penalties.__call__

    def blind(self: Penalties, logits: Tensor, drafted: Tensor, columns: Tensor | None = None) -> Tensor:
        positions = [logits[:, place : place + 1] for place in range(logits.shape[1])]
        return torch.cat([penalise(self, each, drafted[:, :0], columns) for each in positions], dim=1)

    monkeypatch.setattr(Penalties, "__call__", blind)
    values = wrong_values(models, "penalties", verification=rule)
    assert min(values) < WRONG, values


@pytest.mark.parametrize("lossy", [dict(lossy_lenience=0.4), dict(lossy_typical=0.2)], ids=str)
def test_lossy_rules_fail_the_same_check_and_say_so(models: Models, lossy: dict[str, float]) -> None:
    assert SpeculationParams(**lossy).lossy is not None
    assert SpeculationParams().lossy is None
    values = wrong_values(models, "temperature", **lossy)
    assert min(values) < WRONG, values
    texts, _ = decoded(models.engine(**lossy), own_params("greedy"))  # of greedy text nothing is lost
    assert_follows_target(models, "greedy", texts)


def test_texts_of_another_setting_or_order_fail_the_same_check(models: Models) -> None:
    texts = plain(models, "temperature")
    assert min(p_values(models.target, "temperature", texts)) > HONEST
    assert min(p_values(models.target, "top-p", texts)) < WRONG
    swapped = [[ids[1], ids[0], *ids[2:]] for ids in texts]
    assert min(p_values(models.target, "temperature", swapped)) < WRONG
