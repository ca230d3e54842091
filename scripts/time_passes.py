"""Seconds of a target's pass over 1, 2, ... tokens in each of our ways, beside the speed at which memory is read.

By turns in one process, batch 1, bf16; medians. The model is a folder, or one of random weights in the shape of
Qwen2.5-0.5B. A pass over one token reads every weight once, which no pass can do faster than memory gives them.

    python scripts/time_passes.py                                     # the shape of Qwen2.5-0.5B
    python scripts/time_passes.py models/SmolLM2-135M-Instruct --context-length 1000
"""

import argparse
import copy
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from decode.llama import LlamaForward, leave_to_transformers
from decode.model import CachedModel
from decode.roofline import measure_roofline

QWEN2_HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
NUMS_TOKENS = (1, 2, 4, 8, 16)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder; without it, random weights in the shape of Qwen2.5-0.5B")
    parser.add_argument("--context-length", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = load(options.model)
    roofline = measure_roofline(model, None)
    passes = ways(model, options.context_length)
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.repetitions + 1):
        for name, cached in passes.items():
            # as in decoding, the last pass was its own too
            cached.forward(torch.randint(model.config.vocab_size, (1, 1)))
            cached.rollback([options.context_length])
            for num_tokens in NUMS_TOKENS:
                tokens = torch.randint(model.config.vocab_size, (1, num_tokens))
                started = perf_counter()
                cached.forward(tokens)
                seconds.setdefault((name, num_tokens), []).append(perf_counter() - started)
                cached.rollback([options.context_length])
    limit = roofline.target_bytes / roofline.read_bytes_per_second
    memory = f"{roofline.target_bytes / 1e6:.0f} MB at {roofline.read_bytes_per_second / 1e9:.1f} GB/s"
    table = Table(
        "pass",
        *[f"{number}" for number in NUMS_TOKENS],
        "of the limit",
        title=f"ms a pass by tokens, {options.context_length} in the cache, {torch.get_num_threads()} threads; "
        f"{memory}: {1e3 * limit:.1f} ms",
    )
    for name in passes:
        taken = [median(seconds[name, number][1:]) for number in NUMS_TOKENS]
        table.add_row(name, *[f"{1e3 * each:.1f}" for each in taken], f"{limit / taken[0]:.0%}")
    Console(highlight=False, width=140).print(table)


def load(folder: str | None) -> PreTrainedModel:
    """In bf16, ready to decode with."""
    if folder is None:
        config = AutoConfig.for_model("qwen2", **QWEN2_HALF_BILLION)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def ways(model: PreTrainedModel, context_length: int) -> dict[str, CachedModel]:
    """A cached model for each way of passing through the same weights, with so many tokens in its cache."""
    own = copy.copy(model)
    leave_to_transformers(own)
    capacity = context_length + max(NUMS_TOKENS)
    found = {"transformers": CachedModel(own, 1, capacity)}
    ours = CachedModel(model, 1, capacity)
    if ours.fast is not None:
        with patch("decode.llama.native_forward", lambda model: None):
            found["torch, fused and packed"] = CachedModel(model, 1, capacity)
            found["torch, fused and packed"].fast = LlamaForward(model)
        if ours.fast.native is not None:
            found["C++"] = ours
    for cached in found.values():
        cached.read([torch.randint(model.config.vocab_size, (context_length + 1,)).tolist()])
    return found


if __name__ == "__main__":
    main()
