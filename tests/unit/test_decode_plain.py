"""The plain decoder: rows that do not disturb each other, and what it says of its passes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from decode.completion import Completion
from decode.params import SamplingParams, SpeculationParams, Verification
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer
from decode.speculative import SpeculativeEngine

Build = Callable[..., LlamaForCausalLM]
PROMPTS = [[1, 40, 41, 42, 43, 44], [1, 99], [7, 7, 200, 3], [5]]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=12, seed=5)


@pytest.fixture(scope="module")
def target(tiny_llama: Build) -> LlamaForCausalLM:
    return tiny_llama(seed=0)


THREE = SpeculationParams(num_draft_tokens=3, never_slower=False)


def facts(completion: Completion) -> tuple[object, ...]:
    return completion.ids, completion.provenance, completion.finish_reason, completion.stop_reason


def test_a_sampled_row_does_not_depend_on_its_neighbours(target: LlamaForCausalLM) -> None:
    decoder = PlainDecoder(target, frozenset(range(2, 20)))  # rows end, and leave the batch, at different times
    together = list(map(facts, decoder.generate_ids(PROMPTS, SAMPLED)))
    assert len({len(ids) for ids, *_ in together}) > 1  # type: ignore[arg-type]
    for row, prompt in enumerate(PROMPTS):
        (alone,) = decoder.generate_ids([prompt], SAMPLED, streams=[row])
        assert facts(alone) == together[row]
    reordered = decoder.generate_ids(PROMPTS[::-1], SAMPLED, streams=[3, 2, 1, 0])
    assert list(map(facts, reordered)) == together[::-1]
    (other_stream,) = decoder.generate_ids(PROMPTS[:1], SAMPLED, streams=[1])
    assert other_stream.ids != together[0][0]


def test_rows_with_seeds_of_their_own_do_not_care_where_they_stand(target: LlamaForCausalLM) -> None:
    decoder = PlainDecoder(target, frozenset(range(2, 20)))
    each = [replace(SAMPLED, seed=seed, temperature=1 + seed / 10) for seed in range(len(PROMPTS))]
    together = decoder.generate_ids(PROMPTS, each)
    for prompt, params, completion in zip(PROMPTS, each, together, strict=True):
        assert facts(decoder.generate_ids([prompt], [params])[0]) == facts(completion)
    with pytest.raises(ValueError, match=r"^params: 3 for 4 prompts; give one for all, or one for each$"):
        decoder.generate_ids(PROMPTS, each[:3])


@pytest.mark.parametrize("verification", ["seeded", "block", "tokenwise"])
def test_a_speculative_row_hears_of_its_neighbours_only_at_its_end(
    target: LlamaForCausalLM, tiny_llama: Build, verification: Verification
) -> None:
    """How many tokens are drafted in the last rounds depends on the longest row; until then nothing does."""
    speculation = replace(THREE, verification=verification)
    engine = SpeculativeEngine(target, DraftModelProposer(tiny_llama(seed=1), 259), speculation)
    (alone,), _ = engine.generate_ids(PROMPTS[:1], SAMPLED)
    together, _ = engine.generate_ids(PROMPTS, SAMPLED)
    shared = SAMPLED.max_new_tokens - (0 if verification == "seeded" else 4)
    assert alone.ids[:shared] == together[0].ids[:shared]


@pytest.mark.parametrize("decoder_class", ["plain", "seeded", "block"])
def test_the_seed_decides(target: LlamaForCausalLM, tiny_llama: Build, decoder_class: str) -> None:
    def texts(seed: int | None) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, max_new_tokens=8, seed=seed)
        if decoder_class == "plain":
            completions = PlainDecoder(target, frozenset()).generate_ids(PROMPTS, params)
        else:
            speculation = replace(THREE, verification=decoder_class)  # type: ignore[arg-type]
            engine = SpeculativeEngine(target, DraftModelProposer(tiny_llama(seed=1), 259), speculation)
            completions, _ = engine.generate_ids(PROMPTS, params)
        return [completion.ids for completion in completions]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)
    assert texts(None) != texts(None)  # a fresh one each


def test_it_says_how_many_rows_each_pass_served(target: LlamaForCausalLM) -> None:
    served: list[int] = []
    completions = PlainDecoder(target, frozenset(range(2, 20))).generate_ids(PROMPTS, SAMPLED, on_token=served.append)
    assert served == sorted(served, reverse=True)
    assert sum(served) == sum(len(completion.ids) for completion in completions)


def test_it_shows_the_logits_of_each_pass_and_what_they_came_from(target: LlamaForCausalLM) -> None:
    chosen: list[list[int]] = [[] for _ in PROMPTS]

    def look(rows: list[int], hidden: Tensor, logits: Tensor) -> None:
        torch.testing.assert_close(target.lm_head(hidden), logits)
        for row, token in zip(rows, logits[:, -1].argmax(dim=-1).tolist(), strict=True):
            chosen[row].append(token)

    decoder = PlainDecoder(target, frozenset(range(2, 20)))
    completions = decoder.generate_ids(PROMPTS, SamplingParams(temperature=0, max_new_tokens=12), on_pass=look)
    assert chosen == [completion.ids for completion in completions]
