"""What choosing tokens costs in one round, beside transformers' logits processors on the same logits.

Ours: distributions at 5 positions, block verification of 4 drafted tokens, the token after them. Transformers': its
cast to fp32, its processors, position by position as its assisted generation calls them, and the softmax after them,
without its verification. Turn by turn in one process; medians.

    python scripts/time_sampling.py --vocab-size 150000 --top-k 50 --top-p 0.95
"""

import argparse
from statistics import median
from time import perf_counter

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decode.completion import Completion
from decode.params import SamplingParams, SpeculationParams
from decode.proposer import stack
from decode.sampler import BatchSampler

REPETITIONS = 31
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

    def ours() -> None:
        sampler.begin_round(gamma)
        p = sampler.distribution(logits, drafted)
        sampler.judge(p, stack(qs), drafted, torch.tensor([gamma]))

    warpers: list = [TemperatureLogitsWarper(options.temperature)]
    warpers += [TopKLogitsWarper(options.top_k)] if options.top_k else []
    warpers += [TopPLogitsWarper(options.top_p)] if options.top_p < 1 else []
    processors = LogitsProcessorList(warpers)

    def transformers() -> None:
        scores = logits.to(torch.float32, copy=True)
        for position in range(gamma + 1):
            processors(drafted, scores[:, position]).softmax(dim=-1)

    seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
    for repetition in range(REPETITIONS + 3):
        for name, work in (("ours", ours), ("transformers", transformers)):
            started = perf_counter()
            work()
            if repetition >= 3:
                seconds[name].append(perf_counter() - started)
    mine, theirs = (1000 * median(each) for each in seconds.values())
    print(f"ours {mine:.2f} ms, transformers {theirs:.2f} ms a round of {gamma + 1}: {theirs / mine:.1f} times less")


if __name__ == "__main__":
    main()
