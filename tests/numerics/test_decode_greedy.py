"""Greedy fp32: the tokens of plain decoding, whatever the draft and the number drafted.

And the bookkeeping of it: where a text ends, where each token came from, what was counted.
"""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from decode import trace as trace_module
from decode.completion import Completion
from decode.head import reduce_output_vocabulary
from decode.lookup import CascadeProposer, LookupProposer
from decode.model import CachedModel
from decode.params import SamplingParams, SpeculationParams
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer, Proposer
from decode.speculative import SpeculativeEngine
from decode.trace import Round, Trace

Build = Callable[..., LlamaForCausalLM]
NO_STOP: frozenset[int] = frozenset()
PROMPTS = [[1, 40, 41, 42, 43, 44, 45, 46, 47], [1, 99], [7, 7, 200, 3]]
VOCAB = 259


def perturbed(model: LlamaForCausalLM, size: float) -> LlamaForCausalLM:
    """The model with noise on its weights, `size` of their spread."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight += size * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


@pytest.fixture(scope="module")
def target(tiny_llama: Build) -> LlamaForCausalLM:
    return tiny_llama(seed=0)


@pytest.fixture(scope="module")
def drafts(target: LlamaForCausalLM, tiny_llama: Build) -> dict[str, LlamaForCausalLM]:
    return {"identical": target, "good": perturbed(target, 0.03), "useless": tiny_llama(seed=1, num_layers=1)}


def plain(
    target: LlamaForCausalLM, prompts: list[list[int]], stop_ids: frozenset[int] = NO_STOP, **params: int
) -> list[Completion]:
    return PlainDecoder(target, stop_ids).generate_ids(prompts, SamplingParams(**params))


def engine(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM | Proposer,
    num_draft_tokens: int | None,
    stop_ids: frozenset[int] = NO_STOP,
    **speculation: Any,
) -> SpeculativeEngine:
    proposer = DraftModelProposer(draft, VOCAB) if isinstance(draft, LlamaForCausalLM) else draft
    defaults = dict(num_draft_tokens=num_draft_tokens, never_slower=False)
    return SpeculativeEngine(target, proposer, SpeculationParams(**defaults | speculation), stop_ids)


def speculative(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM | Proposer,
    num_draft_tokens: int | None,
    prompts: list[list[int]],
    stop_ids: frozenset[int] = NO_STOP,
    **params: int,
) -> tuple[list[Completion], list[Trace]]:
    return engine(target, draft, num_draft_tokens, stop_ids).generate_ids(prompts, SamplingParams(**params))


@pytest.mark.parametrize("name", ["identical", "good", "useless"])
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_greedy_text_is_that_of_plain_decoding(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], name: str, num_draft_tokens: int
) -> None:
    together = plain(target, PROMPTS, max_new_tokens=20)
    completions, traces = speculative(target, drafts[name], num_draft_tokens, PROMPTS, max_new_tokens=20)
    assert [completion.ids for completion in completions] == [completion.ids for completion in together]
    (alone,), (trace_alone,) = speculative(target, drafts[name], num_draft_tokens, PROMPTS[1:2], max_new_tokens=20)
    assert alone.ids == completions[1].ids
    total = sum(traces, trace_alone)
    assert max(each.num_drafted for each in total.rounds) == num_draft_tokens
    share_accepted = total.num_accepted / total.num_verified
    # the draft is what its name says, so acceptance and rejection were both exercised
    low, high = {"identical": (1, 1), "good": (0.5, 0.95), "useless": (0, 0.1)}[name]
    assert low <= share_accepted <= high


@pytest.mark.parametrize("clock", ["real", "erratic"])
@pytest.mark.parametrize("never_slower", [True, False])
@pytest.mark.parametrize("name", ["identical", "good", "useless"])
def test_greedy_text_does_not_depend_on_the_clock(
    target: LlamaForCausalLM,
    drafts: dict[str, LlamaForCausalLM],
    name: str,
    never_slower: bool,
    clock: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if clock == "erratic":
        chance = random.Random(2)
        times = itertools.accumulate(chance.lognormvariate(0, 1) for _ in itertools.count())
        monkeypatch.setattr(trace_module, "perf_counter", lambda: next(times))
    expected = [completion.ids for completion in plain(target, PROMPTS, max_new_tokens=40)]
    paced = engine(target, drafts[name], None, never_slower=never_slower)
    total = Trace()
    for _ in range(3):  # the pacer learns from earlier texts
        completions, traces = paced.generate_ids(PROMPTS, SamplingParams(max_new_tokens=40))
        assert [completion.ids for completion in completions] == expected
        total = sum(traces, total)
    assert total.num_drafted > 0
    assert total.num_drafted == sum(each.num_drafted for each in total.rounds)
    if name == "identical":  # also after rounds without drafts
        assert total.num_accepted == total.num_drafted
    if not never_slower:
        assert total.num_paused == 0


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("name", ["identical", "good", "useless"])
def test_lookup_and_cascade_do_not_change_greedy_text(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], name: str, num_draft_tokens: int
) -> None:
    whole = plain(target, PROMPTS, max_new_tokens=30)
    expected = [completion.ids for completion in whole]
    # what it says after the first prompt, and the same with every fourth token another
    said = whole[0].ids
    reference = [*said, *(token if place % 4 else 5 for place, token in enumerate(whole[1].sequence))]
    for proposer in (
        LookupProposer(reference),
        CascadeProposer(LookupProposer(reference), DraftModelProposer(drafts[name], VOCAB)),
    ):
        completions, traces = speculative(target, proposer, num_draft_tokens, PROMPTS, max_new_tokens=30)
        assert [completion.ids for completion in completions] == expected
        assert sum(traces, Trace()).num_accepted > 0
        for completion, trace in zip(completions, traces, strict=True):
            assert_adds_up(completion, trace)


def test_greedy_text_is_what_the_model_says_without_any_cache(target: LlamaForCausalLM) -> None:
    with torch.inference_mode():
        for prompt, completion in zip(PROMPTS, plain(target, PROMPTS, max_new_tokens=24), strict=True):
            ids = list(prompt)
            for _ in range(24):
                ids.append(int(target(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            assert ids[len(prompt) :] == completion.ids


def test_a_target_that_forgets_nothing_is_noticed(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: rejected tokens left in the cache change the text."""
    expected = [completion.ids for completion in plain(target, PROMPTS, max_new_tokens=20)]
    honest = CachedModel.rollback

    def one_too_few(self: CachedModel, lengths: list[int]) -> None:
        kept = 1 if self.model is target else 0
        honest(self, [min(new + kept, old) for new, old in zip(lengths, self.lengths, strict=True)])

    monkeypatch.setattr(CachedModel, "rollback", one_too_few)
    completions, _ = speculative(target, drafts["good"], 3, PROMPTS, max_new_tokens=20)
    assert [completion.ids for completion in completions] != expected


@pytest.mark.parametrize("name", ["identical", "good", "useless"])
@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_ends_the_text_inside_a_block(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], name: str, place: int
) -> None:
    whole = plain(target, PROMPTS, max_new_tokens=20)
    stop_ids = frozenset({whole[0].ids[place]})
    expected = plain(target, PROMPTS, stop_ids, max_new_tokens=20)
    assert expected[0].finish_reason == "stop"
    assert expected[0].ids == whole[0].ids[: whole[0].ids.index(whole[0].ids[place]) + 1]
    completions, traces = speculative(target, drafts[name], 4, PROMPTS, stop_ids, max_new_tokens=20)
    for completion, reference, trace in zip(completions, expected, traces, strict=True):
        assert (completion.ids, completion.finish_reason) == (reference.ids, reference.finish_reason)
        assert_adds_up(completion, trace)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 6, 13])
def test_texts_end_exactly_at_max_new_tokens(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], max_new_tokens: int
) -> None:
    expected = [completion.ids for completion in plain(target, PROMPTS, max_new_tokens=max_new_tokens)]
    for draft in drafts.values():
        completions, traces = speculative(target, draft, 4, PROMPTS, max_new_tokens=max_new_tokens)
        assert [completion.ids for completion in completions] == expected
        for completion, trace in zip(completions, traces, strict=True):
            assert (len(completion.ids), completion.finish_reason) == (max_new_tokens, "length")
            assert_adds_up(completion, trace)


def test_one_token_needs_no_draft(target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM]) -> None:
    proposer = DraftModelProposer(drafts["good"], VOCAB)
    completions, traces = speculative(target, proposer, 4, PROMPTS, max_new_tokens=1)
    assert proposer.cached.lengths == [0] * 3  # a draft that is never asked reads nothing
    assert [completion.provenance for completion in completions] == [["plain"]] * 3
    assert [trace.rounds for trace in traces] == [[Round(0, 0, 1)]] * 3


def test_a_stop_token_at_the_limit_is_a_stop(target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM]) -> None:
    ids = plain(target, PROMPTS[:1], max_new_tokens=20)[0].ids
    place = next(place for place in range(5, 20) if ids[place] not in ids[:place])
    for draft in drafts.values():
        (completion,), _ = speculative(target, draft, 4, PROMPTS[:1], frozenset({ids[place]}), max_new_tokens=place + 1)
        assert (completion.ids, completion.finish_reason) == (ids[: place + 1], "stop")


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_an_identical_draft_commits_gamma_plus_1_a_pass(target: LlamaForCausalLM, num_draft_tokens: int) -> None:
    rounds = 4
    params = dict(max_new_tokens=rounds * (num_draft_tokens + 1))
    completions, traces = speculative(target, target, num_draft_tokens, PROMPTS, **params)
    for completion, trace in zip(completions, traces, strict=True):
        assert completion.provenance == (["accepted"] * num_draft_tokens + ["bonus"]) * rounds
        assert trace.rounds == [Round(num_draft_tokens, num_draft_tokens, num_draft_tokens + 1)] * rounds
        assert trace.reached == trace.accepted == [rounds] * num_draft_tokens
        assert trace.block_efficiency == num_draft_tokens + 1
        assert trace.betas == [1.0] * num_draft_tokens


def assert_adds_up(completion: Completion, trace: Trace) -> None:
    assert len(completion.provenance) == len(completion.ids) == trace.num_committed
    accepted = completion.provenance.count("accepted")
    from_target = len(completion.ids) - accepted
    assert accepted == trace.num_accepted == sum(trace.accepted)
    # the last round may end the text before its correction or bonus
    assert from_target in (trace.num_target_passes, trace.num_target_passes - 1)
    assert trace.num_verified == sum(trace.reached) <= trace.num_drafted
    for counts in (trace.reached, trace.accepted):
        assert counts == sorted(counts, reverse=True)
    assert all(accepted <= reached for accepted, reached in zip(trace.accepted, trace.reached, strict=True))
    # round by round: the accepted ones, then one of the target's own, which says why
    origins = iter(completion.provenance)
    remaining = completion.params.max_new_tokens
    for each in trace.rounds:
        assert each.num_accepted <= each.num_drafted < remaining
        kept = [next(origins) for _ in range(each.num_committed)]
        remaining -= each.num_committed
        last = "plain" if not each.num_drafted else "bonus" if each.num_accepted == each.num_drafted else "corrected"
        assert kept == [*["accepted"] * each.num_accepted, last][: each.num_committed]
        if each is not trace.rounds[-1]:
            assert each.num_committed == each.num_accepted + 1
    assert next(origins, None) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_provenance_and_trace_add_up(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], temperature: float, num_draft_tokens: int
) -> None:
    stop_ids = frozenset(range(2, 30))  # some rows end early, others do not
    prompts = [[1, 50 + row] for row in range(24)]
    for draft in drafts.values():
        params = SamplingParams(temperature=temperature, max_new_tokens=15)
        torch.manual_seed(0)
        completions, traces = engine(target, draft, num_draft_tokens, stop_ids).generate_ids(prompts, params)
        assert {completion.finish_reason for completion in completions} == {"stop", "length"}
        for completion, trace in zip(completions, traces, strict=True):
            assert_adds_up(completion, trace)


def test_a_draft_of_fewer_tokens_proposes_only_those(target: LlamaForCausalLM) -> None:
    expected = plain(target, PROMPTS, max_new_tokens=20)
    kept = torch.tensor(sorted({token for completion in expected for token in completion.ids[::2]}))
    reduced = copy.deepcopy(target)
    reduce_output_vocabulary(reduced, kept)
    completions, _ = speculative(target, DraftModelProposer(reduced, VOCAB, kept), 4, PROMPTS, max_new_tokens=20)
    for completion, reference in zip(completions, expected, strict=True):
        assert completion.ids == reference.ids
        # the target's choice is drafted, and accepted, exactly where the draft has that token
        for token, origin in zip(completion.ids, completion.provenance, strict=True):
            if origin == "accepted":
                assert token in kept
            elif origin == "corrected":
                assert token not in kept
        assert "accepted" in completion.provenance
