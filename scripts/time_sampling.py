"""What choosing tokens costs in one round, beside transformers on the same logits.

Processors: from logits to distributions at 5 positions; transformers' one position at a time, as its assisted
generation calls them, and the softmax after them. Round: that, the verification of 4 drafted tokens (ours by block,
theirs token by token) and the token after them. Turn by turn in one process, on logits that have just been written, as
a model's head would have; medians.

    python scripts/time_sampling.py --vocab-size 150000 --top-k 50 --top-p 0.95
"""

import argparse
from statistics import median
from time import perf_counter

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.utils import _speculative_sampling

from decode.completion import Completion
from decode.params import SamplingParams, SpeculationParams
from decode.proposer import stack
from decode.sampler import BatchSampler
from decode.sampling import Distribution

REPETITIONS, WARM_UP = 44, 3
CPU = torch.device("cpu")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the model's logits")
    options = parser.parse_args()
    gamma = options.num_draft_tokens
    torch.manual_seed(0)
    logits = 3 * torch.randn(1, gamma + 1, options.vocab_size)
    draft_logits = logits[:, :gamma] + 0.5 * torch.randn(1, gamma, options.vocab_size)
    logits, draft_logits = (each.to(getattr(torch, options.dtype)) for each in (logits, draft_logits))

    params = SamplingParams(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    sampler = BatchSampler([Completion([0], params)], [0], [0], SpeculationParams(), CPU, options.vocab_size)
    sampler.begin_round(gamma)
    drafted = torch.zeros(1, 0, dtype=torch.long)
    qs = []
    for step in range(gamma):
        token, q = sampler.draft(draft_logits[:, step], drafted)
        drafted, qs = torch.cat([drafted, token.unsqueeze(1)], dim=1), [*qs, q]

    def our_processors(logits: torch.Tensor) -> Distribution:
        return sampler.distribution(logits, drafted)

    def our_round(logits: torch.Tensor) -> None:
        sampler.begin_round(gamma)
        sampler.judge(logits, stack(qs), drafted, torch.tensor([gamma]))

    warpers: list = [TemperatureLogitsWarper(options.temperature)]
    warpers += [TopKLogitsWarper(options.top_k)] if options.top_k else []
    warpers += [TopPLogitsWarper(options.top_p)] if options.top_p < 1 else []
    processors = LogitsProcessorList(warpers)

    their_q = processors(drafted, draft_logits[0].float()).unsqueeze(0)

    def their_scores(logits: torch.Tensor) -> torch.Tensor:
        scores = logits.to(torch.float32, copy=True)
        for position in range(gamma + 1):
            scores[:, position] = processors(drafted, scores[:, position])
        return scores

    def their_processors(logits: torch.Tensor) -> None:
        their_scores(logits).softmax(dim=-1)

    def their_round(logits: torch.Tensor) -> None:
        _speculative_sampling(drafted, their_q, gamma, their_scores(logits))

    for name, turns in (("processors", (our_processors, their_processors)), ("round", (our_round, their_round))):
        seconds: list[list[float]] = [[], []]
        for _ in range(REPETITIONS):
            for work, taken in zip(turns, seconds, strict=True):
                fresh = logits.clone()
                started = perf_counter()
                work(fresh)
                taken.append(perf_counter() - started)
        mine, theirs = (1000 * median(taken[WARM_UP:]) for taken in seconds)
        print(f"{name}: ours {mine:.2f} ms, transformers {theirs:.2f} ms, {theirs / mine:.1f} times less")


if __name__ == "__main__":
    main()
