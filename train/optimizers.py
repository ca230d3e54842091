"""Parameter groups, optimisers and the learning rate as a function of the step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .config import TrainConfig
from .engine import has_bf16_products

ADAMW_BETAS = (0.9, 0.95)


class _InFloat32(TorchFunctionMode):
    """What asks for a bfloat16 copy of a tensor gets one in its own type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].clone() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


class Muon(torch.optim.Muon):
    """torch's, which orthogonalises in bfloat16 whatever the machine; in float32 where that is three times as fast."""

    def step(self, closure: Any = None) -> Any:
        """Take one."""
        if has_bf16_products():
            return super().step(closure)  # type: ignore[no-untyped-call]
        with _InFloat32():
            return super().step(closure)  # type: ignore[no-untyped-call]


def build_optimizers(module: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW over the trainable parameters, preceded by Muon over the hidden matrices when asked for.

    Weight decay applies to matrices that are not embeddings. Muon takes those of them that are 2-D and not
    the output head of a transformers model inside `module`.

    Raises:
        ValueError: nothing is trainable.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    output_heads = _output_heads(module)
    matrices, heads, others = [], [], []
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or id(parameter) in embeddings:
            others.append(parameter)
        elif parameter.ndim == 2 and id(parameter) not in output_heads:
            matrices.append(parameter)
        else:
            heads.append(parameter)
    if not matrices and not heads and not others:
        raise ValueError("model: no parameter is trainable; unfreeze some")

    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon" and matrices:
        # match_rms_adamw gives updates of AdamW's size, so both learning rates are on one scale.
        muon = Muon(
            matrices,
            lr=config.muon_learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append(muon)
        matrices = []
    decays = ((matrices + heads, config.weight_decay), (others, 0.0))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    if groups:
        # Fused: one pass over the weights, several times faster on a CPU than the default.
        adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=ADAMW_BETAS, fused=True)
        optimizers.append(adamw)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def learning_rate_factor(step: int, num_steps: int, config: TrainConfig) -> float:
    """Share of the peak learning rate that step `step` (the first is 0) of `num_steps` uses.

    Rises linearly to 1 over the warm-up, and ends at the final fraction with the last step: along a half cosine,
    or by "wsd" (warm-up, stable, decay; Hu et al. 2024, MiniCPM, arXiv:2404.06395) from 1 along a straight line over
    the last steps, where MiniCPM falls exponentially.
    """
    warmup_steps = round(config.warmup_fraction * num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    final = config.final_learning_rate_fraction
    if config.schedule == "wsd":
        # both are rounded, so together they may exceed the run by a step
        decay_steps = min(round(config.decay_fraction * num_steps), num_steps - warmup_steps)
        steps_decayed = max(0, step + 1 - (num_steps - decay_steps))
        return 1 - (1 - final) * steps_decayed / max(1, decay_steps)
    progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Sets every group's learning rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]


def _output_heads(module: nn.Module) -> set[int]:
    """Ids of the weights that map hidden states to the vocabulary."""
    getters = [getattr(m, "get_output_embeddings", None) for m in module.modules()]
    heads = [getter() for getter in getters if getter is not None]
    return {id(head.weight) for head in heads if head is not None}
