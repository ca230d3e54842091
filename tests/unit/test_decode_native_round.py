"""A round in C++ is the round that sampler.py makes of torch operations: same tokens drafted, same verdict."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import decode.sampler
from decode.completion import Completion
from decode.head import reduce_output_vocabulary
from decode.model import CachedModel
from decode.native_library import native_library
from decode.native_round import Unwarped
from decode.native_sampling import NativeWarper, native_available
from decode.params import SamplingParams, SpeculationParams
from decode.proposer import DraftModelProposer
from decode.sampler import BatchSampler
from decode.sampling import Distribution

pytestmark = pytest.mark.skipif(not native_available(), reason="needs a compiler and a CPU with AVX-512")

Build = Callable[..., LlamaForCausalLM]
CPU = torch.device("cpu")
VOCAB, DRAFTED = 150, 4
SHAPE: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.0},
]


def sampler_for(params: list[SamplingParams], rule: str = "auto", **speculation: Any) -> BatchSampler:
    rows = [Completion([5], each, frozenset(), None) for each in params]
    how = SpeculationParams(verification=rule, **speculation)  # type: ignore[arg-type]
    sampler = BatchSampler(rows, list(range(len(rows))), [0] * len(rows), how, CPU, VOCAB)
    sampler.begin_round(DRAFTED)
    return sampler


def logits_of(rows: int, positions: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, positions, columns, generator=generator)).bfloat16()


def drawn(q: Distribution, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = q.probabilities.flatten(0, 1).multinomial(1, generator=generator).view(q.probabilities.shape[:2])
    return q.tokens(columns)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Calls something that must do without C++'s verdicts and drafts."""

    def call(action: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(decode.sampler, "judge", lambda *arguments: pytest.fail("judged in C++"))
            patch.setattr(BatchSampler, "_can_judge", lambda *arguments: False)
            patch.setattr(BatchSampler, "can_draft_at_once", lambda *arguments: False)
            return action()

    return call


@pytest.mark.parametrize("columns", ["all", "reduced", "wider", "few"])
@pytest.mark.parametrize("rule", ["tokenwise", "block", "seeded", "auto"])
@pytest.mark.parametrize("more", SETTINGS, ids=str)
def test_the_verdict_is_that_of_verify(
    more: dict[str, Any], rule: str, columns: str, by_torch: Callable[[Callable[[], Any]], Any]
) -> None:
    token_ids = {"reduced": torch.arange(10, 138, 2), "few": torch.tensor([3, 77, 149])}.get(columns)
    width = {"all": VOCAB, "wider": VOCAB + 20}.get(columns, 0) or len(token_ids)  # type: ignore[arg-type]
    # rows with seeds and without, which have rules of their own where the rule is "auto"
    params = [SamplingParams(seed=seed, **more) for seed in (None, 3, None)]
    num_drafted = torch.tensor([DRAFTED, 2, 0])
    accepted = set()
    for seed in range(25):
        sampler = sampler_for(params, rule)
        # a draft that is like the target, so that all numbers of tokens are accepted
        logits = logits_of(3, DRAFTED + 1, VOCAB, seed)
        of_draft = torch.nn.functional.pad(logits, (0, 20), value=-1.0)[:, :-1]
        of_draft = (of_draft if token_ids is None else logits[:, :-1, token_ids])[..., :width]
        of_draft = (of_draft + logits_of(3, DRAFTED, width, seed + 100) / 4).contiguous()
        q = Unwarped(of_draft, sampler.draft_warper, token_ids)
        distribution = q.distribution()
        drafted = drawn(distribution, seed).clamp_max(VOCAB - 1)
        for row in range(3):
            for place in range(DRAFTED):
                _truncate(q, row, place)
        found = sampler.judge(logits, q, drafted, num_drafted)
        expected = by_torch(lambda: sampler.judge(logits, distribution, drafted, num_drafted))  # noqa: B023
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        accepted |= set(found[0].tolist())
    # drafted tokens that do not follow the seed, or few of all that there are, are seldom the target's
    assert len(accepted) >= (4 if columns in ("all", "wider") and rule in ("tokenwise", "block") else 1)


def _truncate(q: Unwarped, row: int, place: int) -> None:
    """What `draft` leaves behind, which is what is left of the logits."""
    parameters = [each[row : row + 1].contiguous() for each in q.warper.arguments]
    logits = q.logits[row, place]
    kept = q.kept[row, place]
    native_library().bound_rows(
        logits.data_ptr(), 1, len(logits), len(logits), *(each.data_ptr() for each in parameters), kept.data_ptr(), 1
    )


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("more", SETTINGS, ids=str)
def test_a_model_drafts_the_same_at_once(
    more: dict[str, Any],
    seed: int | None,
    reduced: bool,
    tiny_llama: Build,
    by_torch: Callable[[Callable[[], Any]], Any],
) -> None:
    target, draft = (tiny_llama(seed=place, **SHAPE).bfloat16() for place in range(2))
    token_ids = torch.arange(3, 131) if reduced else None
    if token_ids is not None:
        reduce_output_vocabulary(draft, token_ids)
    params = [SamplingParams(seed=seed, **more), SamplingParams(seed=seed, temperature=1.1)]
    texts = [[5, 6, 7], [9, 8]]

    def once() -> tuple[Tensor, Tensor, list[int]]:
        proposer, cached = DraftModelProposer(draft, VOCAB, token_ids), CachedModel(target, 2, 32, 4)
        proposer.start(texts, cached)
        proposal = proposer.propose(texts, [DRAFTED, 2], sampler_for(params))
        assert (proposal.q is None) == (seed is not None)
        q = torch.empty(0) if proposal.q is None else proposal.q.dense(VOCAB)
        assert isinstance(proposal.q, Unwarped) == at_once or seed is not None
        return proposal.tokens, q, proposer.cached.lengths

    at_once = True
    found = once()
    at_once = False
    expected = by_torch(once)
    assert found[2] == expected[2] == [3 + DRAFTED - 1, 2 + DRAFTED - 1]
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-5)


def test_what_it_cannot_do_is_left_alone(tiny_llama: Build) -> None:
    logits = logits_of(1, DRAFTED + 1, VOCAB, 0)
    params = SamplingParams(temperature=0.8)
    q = Unwarped(logits[:, :-1].contiguous(), NativeWarper([0.8], [0], [1.0], [0.0], CPU))
    assert sampler_for([params])._can_judge(logits, q)
    assert not sampler_for([params])._can_judge(logits, q.distribution())
    assert not sampler_for([params])._can_judge(logits.float(), q)
    assert not sampler_for([params], lossy_lenience=0.5)._can_judge(logits, q)
    assert not sampler_for([SamplingParams(temperature=0.8, repetition_penalty=1.2)])._can_judge(logits, q)
    assert sampler_for([params]).can_draft_at_once(logits[:, 0])
    assert not sampler_for([params], entropy_bound=1.0).can_draft_at_once(logits[:, 0])
    # greedy rows need no q, whatever they were drafted from
    assert sampler_for([SamplingParams(temperature=0)])._can_judge(logits, None)
    assert not CachedModel(tiny_llama(**SHAPE), 1, 8).can_draft
    assert CachedModel(tiny_llama(**SHAPE).bfloat16(), 1, 8).can_draft


def test_rows_without_numbers_do_not_reach_beyond_the_vocabulary() -> None:
    sampler = sampler_for([SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_p=0.9)])
    logits = torch.full((2, DRAFTED + 1, VOCAB), torch.nan, dtype=torch.bfloat16)
    q = Unwarped(logits_of(2, DRAFTED, VOCAB, 0), sampler.draft_warper)
    for row in range(2):
        for place in range(DRAFTED):
            _truncate(q, row, place)
    drafted = torch.full((2, DRAFTED), VOCAB - 1)
    num_accepted, tokens = sampler.judge(logits, q, drafted, torch.tensor([DRAFTED, DRAFTED]))
    assert ((num_accepted >= 0) & (num_accepted <= DRAFTED)).all()
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_a_draft_without_numbers_is_never_accepted(rule: str) -> None:
    sampler = sampler_for([SamplingParams(temperature=0.8)], rule)
    logits = torch.full((1, DRAFTED + 1, VOCAB), 1.0, dtype=torch.bfloat16)
    q = Unwarped(torch.full((1, DRAFTED, VOCAB), torch.nan, dtype=torch.bfloat16), sampler.draft_warper)
    for place in range(DRAFTED):
        _truncate(q, 0, place)
    num_accepted, _ = sampler.judge(logits, q, torch.zeros(1, DRAFTED, dtype=torch.long), torch.tensor([DRAFTED]))
    assert num_accepted.tolist() == [0]


def test_keys_of_another_shape_are_refused(tiny_llama: Build) -> None:
    cached = CachedModel(tiny_llama(**SHAPE).bfloat16(), 1, 16)
    q = Unwarped(cached.room_for_logits(2), NativeWarper([0.8], [0], [1.0], [0.0], CPU))
    with pytest.raises(AssertionError):
        cached.draft(q.address, 2, np.zeros((1, 3), dtype=np.uint64), torch.zeros(VOCAB, dtype=torch.int32))
