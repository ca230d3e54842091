"""Whatever is asked and however it is drafted, the text is that of plain decoding, and so is all that comes with it."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from decode.completion import Completion
from decode.lookup import CascadeProposer, LookupProposer
from decode.params import SamplingParams, SpeculationParams
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer, Proposer
from decode.sampler import BatchSampler
from decode.speculative import SpeculativeEngine

VOCAB = 259
PROPERTY = settings(
    derandomize=True,
    deadline=None,
    max_examples=240,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def build(tiny_llama: Callable[..., LlamaForCausalLM]) -> Callable[[str], LlamaForCausalLM]:
    @cache
    def build(name: str) -> LlamaForCausalLM:
        if name == "target":
            return tiny_llama(seed=0)
        if name == "poor":
            return tiny_llama(seed=1, num_layers=1)
        draft = copy.deepcopy(tiny_llama(seed=0))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in draft.parameters():
                weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
        return draft

    return build


def proposer(kind: str, draft: LlamaForCausalLM, reference: list[int]) -> Proposer:
    if kind == "lookup":
        return LookupProposer(reference)
    model = DraftModelProposer(draft, VOCAB)
    return model if kind == "draft" else CascadeProposer(LookupProposer(reference), model)


TOKENS = st.one_of(st.integers(0, VOCAB - 1), st.sampled_from([40, 41, 42]))  # some repeat, for lookup to find
# of the models' favourites, and a few that are never met; single bytes, so that stop strings are found often
STOPS = st.lists(st.text(alphabet="aeiou .,\n\x01\x02zxXYZ\ufffdé?T<+", min_size=1, max_size=2), max_size=10)


@st.composite
def sampling(draw: st.DrawFn, seed: int) -> SamplingParams:
    greedy = draw(st.booleans())
    values: dict[str, Any] = {
        "temperature": 0.0 if greedy else draw(st.sampled_from([0.3, 0.8, 1.0, 1.7])),
        "seed": None if greedy and draw(st.booleans()) else seed,
        "max_new_tokens": draw(st.integers(1, 24)),
        "stop": draw(STOPS),
        "stop_token_ids": draw(st.lists(st.integers(0, VOCAB - 1), max_size=12)),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
    }
    values["min_new_tokens"] = min(draw(st.sampled_from([0, 0, 3, 9])), values["max_new_tokens"])
    optional: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.integers(1, 40),
        "top_p": st.floats(0.3, 1.0),
        "min_p": st.floats(0.0, 0.3),
        "repetition_penalty": st.floats(0.8, 1.5),
        "presence_penalty": st.floats(-1.0, 1.0),
        "frequency_penalty": st.floats(-1.0, 1.0),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-4, 4), max_size=3),
        "bad_words": st.lists(st.sampled_from(["a", "ab", "é", "the"]), max_size=2),
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)), max_size=4)):
        values[name] = draw(optional[name])
    return SamplingParams(**values)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    num_rows = draw(st.integers(1, 4))
    prompts = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=12), min_size=num_rows, max_size=num_rows))
    shared = draw(st.booleans())
    params = draw(sampling(7)) if shared else [draw(sampling(row)) for row in range(num_rows)]
    speculation = SpeculationParams(
        num_draft_tokens=draw(st.sampled_from([None, 1, 2, 3, 4, 5, 6])),
        max_draft_tokens=draw(st.sampled_from([2, 8])),
        entropy_bound=draw(st.sampled_from([None, None, 1.5, 3.0])),
        never_slower=draw(st.sampled_from([False, False, False, True])),  # pauses hide what they skip
        draft_temperature=draw(st.sampled_from([None, None, 0.0, 0.5])),
    )
    return {
        "prompts": prompts,
        "params": params,
        "speculation": speculation,
        "kind": draw(st.sampled_from(["draft", "lookup", "cascade"])),
        "draft": draw(st.sampled_from(["good", "good", "poor"])),
        "reference": draw(st.lists(TOKENS, max_size=30)),
        "stop_ids": draw(st.frozensets(st.integers(0, VOCAB - 1), max_size=12)),
    }


def facts(row: Completion) -> dict[str, Any]:
    names = ("ids", "text", "pieces", "finish_reason", "stop_reason")
    return {name: getattr(row, name) for name in names}


def both(
    case: dict[str, Any], build: Callable[[str], LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[Completion], list[Completion], SpeculativeEngine]:
    drafts = proposer(case["kind"], build(case["draft"]), case["reference"])
    engine = SpeculativeEngine(build("target"), drafts, case["speculation"], case["stop_ids"], tokenizer)
    plain = PlainDecoder(build("target"), case["stop_ids"], tokenizer)
    # the second time, the pacer and the proposer have a past
    engine.generate_ids(case["prompts"], case["params"])
    found, traces = engine.generate_ids(case["prompts"], case["params"])
    for row, trace in zip(found, traces, strict=True):
        assert trace.num_committed == len(row.ids) == len(row.provenance)
        assert trace.num_accepted == row.provenance.count("accepted")
    return found, plain.generate_ids(case["prompts"], case["params"]), engine


met: dict[str, int] = {"stop string": 0, "stop token": 0, "length": 0, "accepted": 0, "corrected": 0, "rows": 0}


@PROPERTY
@given(case=cases())
def test_speculation_changes_nothing(
    case: dict[str, Any], build: Callable[[str], LlamaForCausalLM], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    found, expected, _ = both(case, build, byte_tokenizer)
    for row, reference in zip(found, expected, strict=True):
        assert facts(row) == facts(reference)
        assert len(row.logprobs) == (0 if row.params.logprobs is None else len(row.ids))
        assert len(row.logprobs) == len(reference.logprobs)
        for one, other in zip(row.logprobs, reference.logprobs, strict=True):
            assert one.chosen == pytest.approx(other.chosen, abs=1e-4)
            assert list(one.top) == list(other.top)
            assert list(one.top.values()) == pytest.approx(list(other.top.values()), abs=1e-4)
        met["rows"] += 1
        met["length"] += row.finish_reason == "length"
        met["stop string"] += isinstance(row.stop_reason, str)
        met["stop token"] += isinstance(row.stop_reason, int)
        for origin in ("accepted", "corrected"):
            met[origin] += row.provenance.count(origin)  # type: ignore[arg-type]


def test_the_property_met_what_it_is_about() -> None:
    if met["rows"] == 0:
        pytest.skip("the property was not run")
    assert met["rows"] > 300
    # 29 stop strings with one thread a process: of each kind, enough to see a fault
    assert min(met["stop string"], met["stop token"], met["length"]) > 20, met
    assert min(met["accepted"], met["corrected"]) > 300, met


@pytest.mark.parametrize("defect", ["noise of other places", "one accepted too many"])
def test_a_defect_is_noticed(
    defect: str,
    build: Callable[[str], LlamaForCausalLM],
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: the same comparison, of an engine that is wrong."""
    if defect == "one accepted too many":
        judge = BatchSampler.judge

        def wrong(self: BatchSampler, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            num_accepted, next_tokens = judge(self, *arguments)
            return torch.minimum(num_accepted + 1, arguments[3]), next_tokens

        monkeypatch.setattr(BatchSampler, "judge", wrong)
    else:
        begin = BatchSampler.begin_round

        def wrong_round(self: BatchSampler, num_drafted: int) -> None:
            begin(self, num_drafted)
            self.token_keys = self.token_keys[:, ::-1].copy()

        monkeypatch.setattr(BatchSampler, "begin_round", wrong_round)
    case = {
        "prompts": [[1, 40, 41], [5, 6, 7, 8]],
        "params": SamplingParams(temperature=1.0, seed=3, max_new_tokens=24),
        "speculation": SpeculationParams(num_draft_tokens=3, never_slower=False),
        "kind": "draft",
        "draft": "poor",
        "reference": [],
        "stop_ids": frozenset(),
    }
    found, expected, _ = both(case, build, byte_tokenizer)
    assert [facts(row) for row in found] != [facts(row) for row in expected]
