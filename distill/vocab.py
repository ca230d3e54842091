"""Which output tokens a draft keeps: those that carry the target's probability mass on its own text."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .responses import load_responses
from .teacher import TeacherHead, collate, final_hidden_states

# enough for the mass of rare tokens to settle; a pass over more changes few of the chosen ids
VOCAB_SAMPLE_TOKENS = 30_000


@torch.inference_mode()
def probability_mass(responses: str, target: PreTrainedModel) -> Tensor:
    """The target's mean next-token distribution over its training responses, fp32 [vocab].

    The mean of p has less noise than counts of the tokens drawn from it.
    """
    rows = load_responses(responses, "train").shuffle(seed=0, keep_in_memory=True)
    head = TeacherHead(target)
    mass = torch.zeros(len(head.weight), device=target.device)
    num_tokens = 0
    for row in rows.select_columns(["input_ids", "response_mask"]):
        batch = {name: tensor.to(target.device) for name, tensor in collate([row], 0).items()}
        log_p = head.log_probabilities(final_hidden_states(target, batch))
        mass += log_p.exp().sum(dim=0)
        num_tokens += len(log_p)
        if num_tokens >= VOCAB_SAMPLE_TOKENS:
            break
    return mass / num_tokens


def choose_vocab(mass: Tensor, size: int, always: set[int]) -> Tensor:
    """The `size` token ids of largest mass, `always` among them, int64 ascending.

    Raises:
        ValueError: `always` alone is more.
    """
    if size < len(always):
        raise ValueError(f"vocab_size: {size} has no room for the {len(always)} special tokens; give more")
    return _ranked(mass, always)[:size].sort().values.cpu()


def smallest_vocab(mass: Tensor, coverage: float, always: set[int]) -> Tensor:
    """The fewest token ids that hold this share of the mass, `always` among them, int64 ascending."""
    ranked = _ranked(mass, always)
    held = mass[ranked].double().cumsum(dim=0)
    size = 1 + int((held < coverage * held[-1]).sum())
    return ranked[: max(size, len(always))].sort().values.cpu()


def _ranked(mass: Tensor, always: set[int]) -> Tensor:
    """All token ids, `always` first, then by falling mass."""
    mass = mass.clone()
    mass[list(always)] = torch.inf
    return mass.argsort(descending=True, stable=True)
