"""The plain decoder: rows that do not disturb each other, and what it keeps of its passes."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from decode.params import Completion, SamplingParams
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer
from decode.speculative import SpeculativeEngine

Build = Callable[..., LlamaForCausalLM]
PROMPTS = [[1, 40, 41, 42, 43, 44], [1, 99], [7, 7, 200, 3], [5]]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=12, seed=5)


@pytest.fixture(scope="module")
def target(tiny_llama: Build) -> LlamaForCausalLM:
    return tiny_llama(seed=0)


def test_a_sampled_row_does_not_depend_on_its_neighbours(target: LlamaForCausalLM) -> None:
    decoder = PlainDecoder(target, frozenset(range(2, 20)))  # rows end, and leave the batch, at different times
    together = decoder.generate_ids(PROMPTS, SAMPLED)
    assert len({len(completion.ids) for completion in together}) > 1
    for row, prompt in enumerate(PROMPTS):
        (alone,) = decoder.generate_ids([prompt], SAMPLED, streams=[row])
        assert alone == together[row]
    reordered = decoder.generate_ids(PROMPTS[::-1], SAMPLED, streams=[3, 2, 1, 0])
    assert reordered == together[::-1]
    (other_stream,) = decoder.generate_ids(PROMPTS[:1], SAMPLED, streams=[1])
    assert other_stream.ids != together[0].ids


def test_a_speculative_row_hears_of_its_neighbours_only_at_its_end(target: LlamaForCausalLM, tiny_llama: Build) -> None:
    """How many tokens are drafted in the last rounds depends on the longest row; until then nothing does."""
    engine = SpeculativeEngine(target, DraftModelProposer(tiny_llama(seed=1), 259), 3, frozenset())
    (alone,), _ = engine.generate_ids(PROMPTS[:1], SAMPLED)
    together, _ = engine.generate_ids(PROMPTS, SAMPLED)
    shared = SAMPLED.max_new_tokens - engine.num_draft_tokens - 1
    assert alone.ids[:shared] == together[0].ids[:shared]


@pytest.mark.parametrize("decoder_class", ["plain", "speculative"])
def test_the_seed_decides(target: LlamaForCausalLM, tiny_llama: Build, decoder_class: str) -> None:
    def texts(seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, max_new_tokens=8, seed=seed)
        if decoder_class == "plain":
            completions = PlainDecoder(target, frozenset()).generate_ids(PROMPTS, params)
        else:
            proposer = DraftModelProposer(tiny_llama(seed=1), 259)
            completions, _ = SpeculativeEngine(target, proposer, 2, frozenset()).generate_ids(PROMPTS, params)
        return [completion.ids for completion in completions]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}, {"temperature": 2.0}])
def test_the_hidden_states_kept_are_what_the_head_read(target: LlamaForCausalLM, setting: dict[str, float]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 12, **setting})
    decoder = PlainDecoder(target, frozenset(range(2, 20)))
    completions = decoder.generate_ids(PROMPTS, params, keep_hidden_states=True)
    without = decoder.generate_ids(PROMPTS, params)
    assert [completion.ids for completion in completions] == [completion.ids for completion in without]
    assert without[0].hidden_states is None
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + completion.ids[:-1]])
            logits = target(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        assert completion.hidden_states is not None
        assert completion.log_normalizers is not None
        torch.testing.assert_close(
            completion.hidden_states @ target.lm_head.weight.detach().T, logits, rtol=0, atol=1e-4
        )
        torch.testing.assert_close(completion.log_normalizers, logits.logsumexp(dim=-1), rtol=0, atol=1e-4)


def test_it_says_how_many_rows_each_pass_served(target: LlamaForCausalLM) -> None:
    served: list[int] = []
    completions = PlainDecoder(target, frozenset(range(2, 20))).generate_ids(PROMPTS, SAMPLED, on_token=served.append)
    assert served == sorted(served, reverse=True)
    assert sum(served) == sum(len(completion.ids) for completion in completions)


@pytest.mark.parametrize("stop_ids", [frozenset({9}), frozenset()])
def test_a_block_is_kept_up_to_the_end_of_the_text(stop_ids: frozenset[int]) -> None:
    completion = Completion()
    assert completion.extend([4, 5], ["accepted", "bonus"], stop_ids, 5) == 2
    assert completion.finish_reason is None
    block = [6, 9, 7, 8]
    kept = completion.extend(block, ["accepted", "accepted", "accepted", "corrected"], stop_ids, 5)
    assert kept == (2 if stop_ids else 3)
    assert completion.ids == [4, 5, *block[:kept]]
    assert completion.provenance == ["accepted", "bonus", *["accepted"] * kept]
    assert completion.finish_reason == ("stop" if stop_ids else "length")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-40),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("max_new_tokens", 0),
        ("max_new_tokens", -5),
        ("seed", -1),
    ],
)
def test_sampling_that_cannot_be_meant_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is {value}: use "):
        SamplingParams(**{field: value})


def test_an_engine_drafts_at_least_one_token(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens is 0: draft at least 1"):
        SpeculativeEngine(target, DraftModelProposer(target, 259), 0, frozenset())
