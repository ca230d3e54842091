"""What a round costs is measured within what the models can hold, and what follows from it is arithmetic."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from decode import SamplingParams, SpeculativeDecoder
from decode.costs import Costs, measure_costs, measure_speedups
from decode.model import CachedModel
from decode.proposer import DraftModelProposer
from decode.speculative import SpeculativeEngine
from decode.trace import Round, Trace

COSTS = Costs(seconds_per_token=1.0, draft_step=0.1, target_pass=[1.0, 1.2, 1.3])


@pytest.mark.parametrize("context", [24, 512])
def test_a_short_context_is_enough(
    context: int, tiny_llama: Callable[..., LlamaForCausalLM], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    target, draft = tiny_llama(), tiny_llama(seed=1, num_layers=1, max_position_embeddings=context)
    decoder = SpeculativeDecoder(target, byte_tokenizer, DraftModelProposer(draft, 259))
    costs = measure_costs(decoder, SamplingParams(min_new_tokens=3), max_draft_tokens=2, repetitions=1)
    assert len(costs.target_pass) == 3
    assert costs.target_pass[0] == 1
    assert costs.draft_step > 0


def test_rounds_of_various_lengths_are_priced_one_by_one() -> None:
    trace = Trace([Round(0, 0, 1), Round(2, 2, 3), Round(1, 0, 1)])
    assert COSTS.predicted_speedup_of(trace) == pytest.approx(5 / (1.0 + (0.2 + 1.3) + (0.1 + 1.2)))
    # where all rounds are alike, it is the formula for a fixed number
    alike = Trace([Round(2, 1, 2)] * 3 + [Round(2, 0, 1)] * 5 + [Round(2, 2, 3)] * 2)
    assert COSTS.predicted_speedup_of(alike) == pytest.approx(COSTS.predicted_speedup(alike.betas, 2))


def test_passes_are_timed_where_they_stand_in_decoding(
    tiny_llama: Callable[..., LlamaForCausalLM],
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = tiny_llama(), tiny_llama(seed=1, num_layers=1)
    passes = []
    forward = CachedModel.forward

    def count(cached: CachedModel, tokens: Tensor, *others: object) -> Tensor:
        passes.append(("target" if cached.model is target else "draft", tokens.shape[1]))
        return forward(cached, tokens, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(CachedModel, "forward", count)
    decoder = SpeculativeDecoder(target, byte_tokenizer, DraftModelProposer(draft, 259))
    measure_costs(decoder, SamplingParams(temperature=0), max_draft_tokens=2, repetitions=1)
    plain, step = ("target", 1), ("draft", 1)
    turn = [plain, plain, step, ("target", 2), step, step, ("target", 3)]
    assert passes == turn * 3


def test_speedups_are_of_texts_decoded_by_turns(
    tiny_llama: Callable[..., LlamaForCausalLM],
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that only passes of the target move, a draft that is the target gains what its rounds hold."""
    now, drafting = 0.0, list[bool]()
    forward, generate_ids = CachedModel.forward, SpeculativeEngine.generate_ids

    def timed(self: CachedModel, *arguments: Any) -> Tensor:
        nonlocal now
        now += self.model is target
        return forward(self, *arguments)

    def noted(self: SpeculativeEngine, *arguments: Any) -> Any:
        drafting.append(self.proposer is not None)
        return generate_ids(self, *arguments)

    target = tiny_llama()
    decoder = SpeculativeDecoder(target, byte_tokenizer, DraftModelProposer(tiny_llama(), 259))
    monkeypatch.setattr(CachedModel, "forward", timed)
    monkeypatch.setattr(SpeculativeEngine, "generate_ids", noted)
    monkeypatch.setattr("decode.costs.perf_counter", lambda: now)
    prompts = [[1, 50, 60], [1, 70], [1, 80]]
    ratios, seconds = measure_speedups(decoder, prompts, SamplingParams(max_new_tokens=17, min_new_tokens=17), 3)
    # sixteen tokens by four passes with three drafted, and the last one by a pass that drafts none
    assert ratios == [pytest.approx(17 / 5)] * 3
    assert min(seconds.draft, seconds.verify, seconds.rest) > 0
    assert drafting == [False, True, *(False, True), *(True, False), *(False, True)]  # the first two to warm up
