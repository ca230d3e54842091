from collections.abc import Callable

import torch
from transformers import LlamaForCausalLM

from decode.clock import ForwardClock
from decode.model import CachedModel


def test_only_passes_within_the_context_count(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    cached, clock, tokens = CachedModel(tiny_llama(), 1, 8), ForwardClock(), torch.tensor([[5]])
    cached.forward(tokens)
    assert clock.seconds == 0
    with clock:
        cached.forward(tokens)
        first = clock.seconds
        cached.read([[5, 5, 6, 7, 8]])  # a pass too, though without logits
    second = clock.seconds
    assert 0 < first < second
    cached.forward(tokens)
    assert clock.seconds == second
