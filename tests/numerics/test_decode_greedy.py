"""Greedy fp32: the tokens of plain decoding, whatever the draft, the number drafted and the neighbours in the batch.

And the bookkeeping of it: where a text ends, where each token came from, what was counted.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from decode.model import CachedModel, reduce_output_vocabulary
from decode.params import Completion, SamplingParams
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer
from decode.speculative import SpeculativeEngine, Trace

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


def speculative(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    num_draft_tokens: int,
    prompts: list[list[int]],
    stop_ids: frozenset[int] = NO_STOP,
    **params: int,
) -> tuple[list[Completion], list[Trace]]:
    engine = SpeculativeEngine(target, DraftModelProposer(draft, VOCAB), num_draft_tokens, stop_ids)
    return engine.generate_ids(prompts, SamplingParams(**params))


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
    share_accepted = sum(total.accepted) / sum(total.reached)
    # the draft is what its name says, so acceptance and rejection were both exercised
    low, high = {"identical": (1, 1), "good": (0.5, 0.95), "useless": (0, 0.1)}[name]
    assert low <= share_accepted <= high


def test_each_row_of_a_batch_is_as_if_alone(target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM]) -> None:
    together = plain(target, PROMPTS, max_new_tokens=24)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        assert plain(target, [prompt], max_new_tokens=24)[0].ids == completion.ids
        (alone,), _ = speculative(target, drafts["good"], 3, [prompt], max_new_tokens=24)
        assert alone.ids == completion.ids
    with torch.inference_mode():  # and it is what the model itself says, without any cache of ours
        ids = list(PROMPTS[0])
        for _ in range(24):
            ids.append(int(target(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert ids[len(PROMPTS[0]) :] == together[0].ids


def test_a_target_that_forgets_nothing_is_noticed(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: rejected tokens left in the cache change the text."""
    expected = [completion.ids for completion in plain(target, PROMPTS, max_new_tokens=20)]
    honest = CachedModel.rollback

    def one_too_few(self: CachedModel, lengths: list[int]) -> None:
        honest(self, [min(new + 1, old) for new, old in zip(lengths, self.lengths, strict=True)])

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
    engine = SpeculativeEngine(target, proposer, 4, NO_STOP)
    completions, traces = engine.generate_ids(PROMPTS, SamplingParams(max_new_tokens=1))
    assert proposer.cached.num_passes == 1  # the prompts; nothing was drafted
    assert [completion.provenance for completion in completions] == [["bonus"]] * 3
    assert traces == [Trace(num_target_passes=1, num_committed=1)] * 3


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
        assert trace == Trace(
            num_target_passes=rounds,
            reached=[rounds] * num_draft_tokens,
            accepted=[rounds] * num_draft_tokens,
            num_drafted=rounds * num_draft_tokens,
            num_committed=rounds * (num_draft_tokens + 1),
        )
        assert trace.block_efficiency == num_draft_tokens + 1
        assert trace.betas == [1.0] * num_draft_tokens


def assert_adds_up(completion: Completion, trace: Trace) -> None:
    assert len(completion.provenance) == len(completion.ids) == trace.num_committed
    accepted = completion.provenance.count("accepted")
    from_target = completion.provenance.count("corrected") + completion.provenance.count("bonus")
    assert accepted == sum(trace.accepted)
    # the last round may end the text before its correction or bonus
    assert from_target in (trace.num_target_passes, trace.num_target_passes - 1)
    assert accepted + from_target == trace.num_committed
    assert trace.reached == sorted(trace.reached, reverse=True)
    assert trace.accepted == sorted(trace.accepted, reverse=True)
    assert all(accepted <= reached for accepted, reached in zip(trace.accepted, trace.reached, strict=True))
    # a position is judged when the one before it was accepted, unless the text or the block ends there
    for here, before in zip(trace.reached[1:], trace.accepted, strict=False):
        assert before - 1 <= here <= before
    assert sum(trace.reached) <= trace.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_provenance_and_trace_add_up(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], temperature: float, num_draft_tokens: int
) -> None:
    stop_ids = frozenset(range(2, 30))  # some rows end early, others do not
    prompts = [[1, 50 + row] for row in range(24)]
    for draft in drafts.values():
        engine = SpeculativeEngine(target, DraftModelProposer(draft, VOCAB), num_draft_tokens, stop_ids)
        completions, traces = engine.generate_ids(prompts, SamplingParams(temperature=temperature, max_new_tokens=15))
        assert {completion.finish_reason for completion in completions} == {"stop", "length"}
        for completion, trace in zip(completions, traces, strict=True):
            assert_adds_up(completion, trace)


def test_a_draft_of_fewer_tokens_proposes_only_those(target: LlamaForCausalLM) -> None:
    expected = plain(target, PROMPTS, max_new_tokens=20)
    kept = torch.tensor(sorted({token for completion in expected for token in completion.ids[::2]}))
    reduced = copy.deepcopy(target)
    reduce_output_vocabulary(reduced, kept)
    engine = SpeculativeEngine(target, DraftModelProposer(reduced, VOCAB, kept), 4, NO_STOP)
    completions, _ = engine.generate_ids(PROMPTS, SamplingParams(max_new_tokens=20))
    for completion, reference in zip(completions, expected, strict=True):
        assert completion.ids == reference.ids
        # the target's choice is drafted, and accepted, exactly where the draft has that token
        for token, origin in zip(completion.ids, completion.provenance, strict=True):
            if origin == "accepted":
                assert token in kept
            elif origin == "corrected":
                assert token not in kept
        assert "accepted" in completion.provenance


@pytest.mark.parametrize("draft_vocab", [VOCAB - 3, VOCAB + 5])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_vocabularies_padded_differently_just_work(
    tiny_llama: Build, target: LlamaForCausalLM, draft_vocab: int, temperature: float
) -> None:
    """The draft is the target with fewer or more rows of padding in its embeddings and head."""
    draft = tiny_llama(seed=0, vocab_size=draft_vocab)
    weights, same = target.state_dict(), min(draft_vocab, VOCAB)
    for name, weight in draft.state_dict().items():
        weight[: min(len(weight), same)] = weights[name][: min(len(weight), same)]
    params = SamplingParams(temperature=temperature, max_new_tokens=20, seed=3)
    prompts = [*PROMPTS, [1, VOCAB - 1]]  # the last token means nothing to the smaller draft
    engine = SpeculativeEngine(target, DraftModelProposer(draft, VOCAB), 3, NO_STOP)
    completions, traces = engine.generate_ids(prompts, params)
    total = sum(traces, Trace())
    assert all(0 <= token < VOCAB for completion in completions for token in completion.ids)
    if temperature == 0:
        expected = PlainDecoder(target, NO_STOP).generate_ids(prompts, params)
        assert [completion.ids for completion in completions] == [completion.ids for completion in expected]
    assert total.betas[0] > 0.5
