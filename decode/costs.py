"""What a draft step and a target pass cost here, and the speedup that follows from them."""

import math
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from .completion import Completion
from .decoder import SpeculativeDecoder
from .model import CachedModel, longest_text
from .params import SamplingParams
from .proposer import Proposal
from .sampler import BatchSampler
from .trace import Trace


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
    """Time single passes, turn by turn so that a slow moment of the machine touches all alike; medians.

    Args:
        decoder: whose target and proposer are timed.
        params: sampling parameters; processing the logits is part of the cost.
        max_draft_tokens: v(n) is measured up to n = max_draft_tokens + 1.
        context_length: tokens in the cache.
        repetitions: of each kind of pass; two more are made first and discarded.
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

    proposals: list[Proposal] = []

    def target_pass(num_tokens: int) -> None:
        """A round without its draft; what was not proposed, by a lookup, is passed over but not judged."""
        tokens = torch.tensor([[prompt[-1]] * num_tokens], device=target_model.device)
        proposal = proposals[-1]
        width = min(num_tokens - 1, proposal.tokens.shape[1])
        drafted = proposal.tokens[:, :width]
        tokens[:, 1 : width + 1] = drafted
        sampler.begin_round(width)
        logits = target.forward(tokens)
        if width:
            p = sampler.distribution(logits[:, : width + 1], drafted)
            q = proposal.q and proposal.q[:, :width]
            torch.cat(sampler.judge(p, q, drafted, proposal.num_drafted.clamp_max(width))).tolist()
        else:
            sampler.choose(logits[:, :1]).tolist()
        target.rollback([context_length - 1])

    def draft() -> None:
        sampler.begin_round(max_draft_tokens)
        proposals[:] = [proposer.propose([prompt], [max_draft_tokens], sampler)]
        proposals[-1].tokens.tolist()

    kinds = {"draft": draft}
    for num_tokens in range(1, max_draft_tokens + 2):
        kinds[f"target {num_tokens}"] = lambda num_tokens=num_tokens: target_pass(num_tokens)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repetition in range(repetitions + 2):
        for kind, action in kinds.items():
            started = perf_counter()
            action()
            if repetition >= 2:
                seconds[kind].append(perf_counter() - started)
    unit = median(seconds["target 1"])
    return Costs(
        seconds_per_token=unit,
        draft_step=median(seconds["draft"]) / max_draft_tokens / unit,
        target_pass=[median(seconds[f"target {n}"]) / unit for n in range(1, max_draft_tokens + 2)],
    )
