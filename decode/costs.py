"""What a draft step and a target pass cost here, and the speedup that follows from them."""

import math
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from .decoder import SpeculativeDecoder
from .model import CachedModel
from .noise import RowNoise
from .params import SamplingParams
from .sampling import next_token_distribution, sample


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
    proposer, target_model = decoder.proposer, decoder.target
    prompt = decoder.encode("Measure me.")
    prompt = (prompt * math.ceil(context_length / len(prompt)))[:context_length]
    capacity = context_length + 2 * max_draft_tokens + 2
    target = CachedModel(target_model, 1, capacity)
    target.prefill([prompt])
    proposer.start([prompt], capacity)
    noise = RowNoise(0, [0], target_model.device)

    def process(logits: torch.Tensor) -> torch.Tensor:
        return next_token_distribution(logits, params.temperature, params.top_k, params.top_p)

    def target_pass(num_tokens: int) -> None:
        tokens = torch.tensor([[prompt[-1]] * num_tokens], device=target_model.device)
        p = process(target.forward(tokens))
        sample(p[:, -1], noise.draw(1)[:, 0]).tolist()
        target.rollback([context_length - 1])

    def draft() -> None:
        proposal = proposer.propose([prompt], process, noise.draw(max_draft_tokens))
        proposal.tokens.tolist()

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
