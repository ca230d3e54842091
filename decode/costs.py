"""What a draft step and a target pass cost here, and the speedup that follows from them."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch

from .completion import Completion
from .decoder import SpeculativeDecoder
from .model import CachedModel, longest_text
from .params import SamplingParams
from .proposer import Proposal
from .sampler import BatchSampler
from .speculative import SpeculativeEngine
from .trace import Seconds, Trace

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Costs:
    """Measured at batch 1, sampling included.

    Attributes:
        seconds_per_token: of plain decoding: one target pass over one token.
        draft_step: c, one drafted token, in units of that.
        target_pass: v(n), one target pass over n tokens, in units of that; target_pass[n - 1].
    """

    seconds_per_token: float
    draft_step: float
    target_pass: list[float]

    def predicted_speedup(self, betas: list[float], num_draft_tokens: int) -> float:
        """E / (gamma c + v(gamma + 1)), with the last measured beta standing for those beyond it."""
        cost = num_draft_tokens * self.draft_step + self.target_pass[num_draft_tokens]
        return block_efficiency(betas, num_draft_tokens) / cost

    def predicted_speedup_of(self, trace: Trace) -> float:
        """The same for rounds that drafted various numbers of tokens: tokens committed over the cost of the rounds."""
        cost = sum(each.num_drafted * self.draft_step + self.target_pass[each.num_drafted] for each in trace.rounds)
        return trace.num_committed / cost

    def best_num_draft_tokens(self, betas: list[float]) -> int:
        """The gamma of largest predicted speedup."""
        return max(range(1, len(self.target_pass)), key=lambda gamma: self.predicted_speedup(betas, gamma))


def block_efficiency(betas: list[float], num_draft_tokens: int) -> float:
    """E = 1 + sum_k prod_{j<=k} beta_j: tokens committed per target pass, the bonus token included.

    The last beta stands for those beyond it; without any, nothing is accepted.
    """
    reached, total = 1.0, 1.0
    for position in range(num_draft_tokens):
        reached *= betas[min(position, len(betas) - 1)] if betas else 0.0
        total += reached
    return total


@torch.inference_mode()
def measure_costs(
    decoder: SpeculativeDecoder,
    params: SamplingParams,
    *,
    max_draft_tokens: int = 8,
    context_length: int = 128,
    repetitions: int = 11,
) -> Costs:
    """Time rounds of 0, 1, 2, … drafted tokens by turns, so that a slow moment of the machine touches all; medians.

    A pass that comes after another model's finds less of its weights in the processor's caches, so each is timed where
    it stands in decoding: the target's after a draft of as many tokens, and a plain one after a plain one.

    Args:
        decoder: whose target and proposer are timed.
        params: sampling parameters; processing the logits is part of the cost.
        max_draft_tokens: v(n) is measured up to n = max_draft_tokens + 1.
        context_length: tokens in the cache.
        repetitions: of each kind of round; two more are made first and discarded.
    """
    target_model = decoder.target
    proposer = decoder.engine.proposer
    assert proposer is not None
    # as much as both models can hold, at most what was asked for
    for model in (target_model, *([decoder.draft.model] if decoder.draft else [])):
        context_length = min(context_length, longest_text(model) - max_draft_tokens - 1)
    prompt = decoder.encode("Measure me.")
    prompt = (prompt * math.ceil(context_length / len(prompt)))[:context_length]
    params = replace(params, max_new_tokens=max_draft_tokens + 1, min_new_tokens=0)
    row = Completion(prompt, params, tokenizer=decoder.tokenizer)
    target = CachedModel(target_model, 1, context_length + max_draft_tokens + 1, max_draft_tokens)
    sampler = BatchSampler([row], [0], [0], decoder.engine.speculation, target_model.device, target.vocab_size)
    target.read([prompt])
    proposer.start([prompt], target)

    def draft(num_drafted: int) -> Proposal:
        sampler.begin_round(num_drafted)
        proposal = proposer.propose([prompt], [num_drafted], sampler)
        proposal.tokens.tolist()
        return proposal

    def plain_pass() -> None:
        sampler.begin_round(0)
        sampler.choose(target.forward(torch.tensor([prompt[-1:]], device=target_model.device))).tolist()
        target.rollback([context_length - 1])

    def target_pass(proposal: Proposal, num_drafted: int) -> None:
        """What was not proposed, by a lookup, is passed over but not judged."""
        width = proposal.tokens.shape[1]
        tokens = torch.tensor([[prompt[-1]] * (num_drafted + 1)], device=target_model.device)
        tokens[:, 1 : width + 1] = proposal.tokens
        score = proposal.score if width == num_drafted else None
        logits = (score or target.forward)(tokens)
        if width:
            logits = logits[:, : width + 1]
            torch.cat(sampler.judge(logits, proposal.q, proposal.tokens, proposal.num_drafted)).tolist()
        else:
            sampler.choose(logits[:, :1]).tolist()
        target.rollback([context_length - 1])

    lengths = range(1, max_draft_tokens + 1)
    plain: list[float] = []
    drafting: dict[int, list[float]] = {length: [] for length in lengths}
    passing: dict[int, list[float]] = {length: [] for length in lengths}
    widths: dict[int, int] = {}  # of drafts, which an entropy bound may end
    for repetition in range(repetitions + 2):
        plain_pass()
        times = [perf_counter()]
        plain_pass()
        times.append(perf_counter())
        for length in lengths:
            proposal = draft(length)
            times.append(perf_counter())
            target_pass(proposal, length)
            times.append(perf_counter())
            widths[length] = max(1, proposal.tokens.shape[1])
        if repetition >= 2:
            first, *rest = (after - before for before, after in pairwise(times))
            plain.append(first)
            for length in lengths:
                drafting[length].append(rest[2 * length - 2] / widths[length])
                passing[length].append(rest[2 * length - 1])
    unit = median(plain)
    return Costs(
        seconds_per_token=unit,
        draft_step=median(median(drafting[length]) for length in lengths) / unit,
        target_pass=[1.0, *(median(passing[length]) / unit for length in lengths)],
    )


def measure_speedups(
    decoder: SpeculativeDecoder, prompts: list[list[int]], params: SamplingParams, num_draft_tokens: int
) -> tuple[list[float], Seconds]:
    """Tokens per second of speculative over plain decoding, of each prompt by itself; the two take turns.

    And what the time of the speculative rounds went to.

    Args:
        decoder: whose target and proposer are timed.
        prompts: token ids.
        params: sampling parameters.
        num_draft_tokens: proposed a round, and never fewer, as a prediction has it.
    """
    plain = decoder.plain.engine
    speculation = replace(decoder.engine.speculation, num_draft_tokens=num_draft_tokens, never_slower=False)
    proposer, stop_ids = decoder.engine.proposer, decoder.engine.stop_ids
    speculative = SpeculativeEngine(decoder.target, proposer, speculation, stop_ids, decoder.tokenizer)

    def timed(engine: SpeculativeEngine, prompt: list[int], params: SamplingParams = params) -> tuple[float, Seconds]:
        started = perf_counter()
        (completion,), (trace,) = engine.generate_ids([prompt], params)
        return len(completion.ids) / (perf_counter() - started), trace.seconds

    for engine in (plain, speculative):
        timed(engine, prompts[0], replace(params, max_new_tokens=WARM_UP_TOKENS, min_new_tokens=0))
    ratios, seconds = [], Seconds()
    for number, prompt in enumerate(prompts):
        turns = [plain, speculative][:: -1 if number % 2 else 1]  # neither always finds what the other left in caches
        found = {id(engine): timed(engine, prompt) for engine in turns}
        tokens_per_second, spent = found[id(speculative)]
        ratios.append(tokens_per_second / found[id(plain)][0])
        seconds += spent
    return ratios, seconds
