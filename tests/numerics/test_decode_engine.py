"""The whole engine, models and caches included, says what the target would say.

Sampled: the joint distribution of several tokens of some thousand rows against exact enumeration, by chi-square at a
fixed seed, each with verifiers and drafts that are wrong and must fail. Greedy: the tokens of plain decoding.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from decode.model import reduce_output_vocabulary
from decode.params import Completion, SamplingParams
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer, ProcessLogits, Proposal
from decode.sampling import next_token_distribution, sample
from decode.speculative import SpeculativeEngine, Verifier
from decode.verify import verify_tokenwise

Build = Callable[..., LlamaForCausalLM]
NO_STOP: frozenset[int] = frozenset()

VOCAB = 7
# rows of two prompts of different lengths, by turns: none is served by itself, and lengths are ragged from the start
PROMPTS = [[3, 1], [2, 5, 5, 1, 6]]
NUM_ROWS = 2400
SETTINGS = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.0, top_k=4),
    "top-p": SamplingParams(temperature=1.0, top_p=0.85),
    "all": SamplingParams(temperature=1.3, top_k=5, top_p=0.9),
}
DRAFT_VOCAB = torch.tensor([0, 2, 3, 5])


@dataclass(frozen=True)
class Pair:
    target: LlamaForCausalLM
    draft: LlamaForCausalLM
    reduced: LlamaForCausalLM

    def proposer(self, reduced: bool = False) -> DraftModelProposer:
        if reduced:
            return DraftModelProposer(self.reduced, VOCAB, DRAFT_VOCAB)
        return DraftModelProposer(self.draft, VOCAB)


@pytest.fixture(scope="module")
def pair(tiny_llama: Build) -> Pair:
    shape = dict(vocab_size=VOCAB, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    target, draft = tiny_llama(seed=4, **shape), tiny_llama(seed=5, num_layers=1, **shape)
    reduced = copy.deepcopy(draft)
    reduce_output_vocabulary(reduced, DRAFT_VOCAB)
    return Pair(target, draft, reduced)


@cache
def exact(target: LlamaForCausalLM, prompt: tuple[int, ...], params: SamplingParams, num_tokens: int) -> Tensor:
    """Joint distribution of the first tokens after a prompt, fp64 [vocab] * num_tokens: every text in one pass."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=num_tokens)))
    prompts = torch.tensor(prompt).expand(len(texts), -1)
    with torch.inference_mode():
        logits = target(input_ids=torch.cat([prompts, texts], dim=1), use_cache=False).logits[:, len(prompt) - 1 : -1]
    p = next_token_distribution(logits, params.temperature, params.top_k, params.top_p)
    probabilities = p.gather(2, texts.unsqueeze(2)).squeeze(2).double().prod(dim=1)
    return probabilities.reshape([VOCAB] * num_tokens)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Pearson's chi-square test; cells that expect fewer than five are one cell."""
    rare = expected < 5
    if (counts[expected == 0] > 0).any():
        return 0.0
    observed = torch.cat([counts[~rare], counts[rare].sum().reshape(1)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum().reshape(1)]).double()
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert len(expected) > 5
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2).item()


def p_values(completions: list[Completion], target: LlamaForCausalLM, params: SamplingParams) -> list[float]:
    """Of the joint of tokens 1 to 3, and of tokens 4 and 5, after either prompt."""
    values = []
    for which, prompt in enumerate(PROMPTS):
        texts = torch.tensor([completion.ids[:5] for completion in completions[which :: len(PROMPTS)]])
        joint = exact(target, tuple(prompt), params, 5)
        for columns, marginal in ((slice(0, 3), joint.sum(dim=(3, 4))), (slice(3, 5), joint.sum(dim=(0, 1, 2)))):
            places = texts[:, columns] @ (VOCAB ** torch.arange(marginal.ndim).flip(0))
            counts = torch.bincount(places, minlength=marginal.numel())
            values.append(p_value(counts, marginal.flatten() * len(texts)))
    return values


def sampling(params: SamplingParams, num_draft_tokens: int) -> SamplingParams:
    # long enough for rounds of full length to reach the fifth token
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=11,
        max_new_tokens=6 + num_draft_tokens,
    )


def check(
    pair: Pair, params: SamplingParams, num_draft_tokens: int, proposer: DraftModelProposer, **more: Verifier
) -> list[float]:
    engine = SpeculativeEngine(pair.target, proposer, num_draft_tokens, NO_STOP, **more)
    completions, _ = engine.generate_ids(PROMPTS * (NUM_ROWS // len(PROMPTS)), sampling(params, num_draft_tokens))
    return p_values(completions, pair.target, sampling(params, num_draft_tokens))


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_texts_follow_the_target(pair: Pair, name: str, num_draft_tokens: int) -> None:
    values = check(pair, SETTINGS[name], num_draft_tokens, pair.proposer())
    assert min(values) > 1e-3, values


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_a_draft_of_fewer_tokens_changes_nothing(pair: Pair, name: str) -> None:
    values = check(pair, SETTINGS[name], 2, pair.proposer(reduced=True))
    assert min(values) > 1e-3, values


@pytest.mark.parametrize("name", SETTINGS)
def test_plain_decoding_follows_the_target(pair: Pair, name: str) -> None:
    params = sampling(SETTINGS[name], 1)
    completions = PlainDecoder(pair.target, NO_STOP).generate_ids(PROMPTS * (NUM_ROWS // len(PROMPTS)), params)
    values = p_values(completions, pair.target, params)
    assert min(values) > 1e-3, values


@pytest.mark.parametrize("name", ["top-k", "top-p", "all"])
def test_the_settings_are_at_work(pair: Pair, name: str) -> None:
    for prompt in PROMPTS:
        joint = exact(pair.target, tuple(prompt), sampling(SETTINGS[name], 1), 5)
        assert joint.sum().item() == pytest.approx(1, abs=1e-5)
        assert (joint == 0).double().mean() > 0.5
        assert (joint.sum(dim=(1, 2, 3, 4)) > 0.05).sum() > 1


def residual_from_p(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    num_accepted, _ = verify_tokenwise(p, q, tokens, accept, follow)
    return num_accepted, sample(p[torch.arange(len(p)), num_accepted], follow)


def accepted_without_q(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    return verify_tokenwise(p, torch.ones_like(q), tokens, accept, follow)


def q_of_another_temperature(
    p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor
) -> tuple[Tensor, Tensor]:
    return verify_tokenwise(p, q.sqrt() / q.sqrt().sum(dim=-1, keepdim=True), tokens, accept, follow)


def one_coin(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    return verify_tokenwise(p, q, tokens, accept[:, :1].expand_as(accept), follow)


def coin_used_twice(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    return verify_tokenwise(p, q, tokens, accept, accept[:, 0].contiguous() if accept.shape[1] else follow)


def always_accepted(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, follow: Tensor) -> tuple[Tensor, Tensor]:
    return verify_tokenwise(p, q, tokens, torch.zeros_like(accept), follow)


class SaysAnotherQ(DraftModelProposer):
    """Draws at the temperature asked for, but reports the q of another."""

    def propose(self, sequences: list[list[int]], process: ProcessLogits, uniforms: Tensor) -> Proposal:
        proposal = super().propose(sequences, process, uniforms)
        flatter = proposal.probabilities.sqrt()
        return Proposal(proposal.tokens, flatter / flatter.sum(dim=-1, keepdim=True))


class DrawsWithTheVerifiersCoin(DraftModelProposer):
    """Leaves its own uniforms alone and draws all tokens with the first."""

    def propose(self, sequences: list[list[int]], process: ProcessLogits, uniforms: Tensor) -> Proposal:
        return super().propose(sequences, process, uniforms[:, :1].expand_as(uniforms))


@pytest.mark.parametrize(
    "verify",
    [residual_from_p, accepted_without_q, q_of_another_temperature, one_coin, coin_used_twice, always_accepted],
)
def test_a_wrong_verifier_fails_the_same_test(pair: Pair, verify: Verifier) -> None:
    values = check(pair, SETTINGS["temperature"], 2, pair.proposer(), verify=verify)
    assert min(values) < 1e-6, values


@pytest.mark.parametrize("proposer_class", [SaysAnotherQ, DrawsWithTheVerifiersCoin])
def test_a_dishonest_draft_fails_the_same_test(pair: Pair, proposer_class: type[DraftModelProposer]) -> None:
    values = check(pair, SETTINGS["temperature"], 2, proposer_class(pair.draft, VOCAB))
    assert min(values) < 1e-6, values


def test_positions_off_by_one_fail_the_same_test(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = pair.target.forward

    def shifted(position_ids: Tensor | None = None, **more: object) -> object:
        if position_ids is not None:  # a pass through the cache
            position_ids = position_ids + (position_ids > 4).long()
        return forward(position_ids=position_ids, **more)

    monkeypatch.setattr(pair.target, "forward", shifted)
    values = check(pair, SETTINGS["temperature"], 2, pair.proposer())
    assert min(values) < 1e-6, values
