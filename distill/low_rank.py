"""Matrices of a target as products of two of low rank, which lose little of what its own text makes of them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.low_rank import group_of
from decode.progress import ProgressBar
from decode.shadow import places_of

from .layers import Calibration

logger = logging.getLogger(__name__)

# what ranks are multiples of, as matrix units want them
RANK_STEP = 32
# of the mean diagonal of an input's second moments, added to it: directions that calibration has hardly seen
DAMPING = 1e-3


@dataclass(frozen=True)
class Factorised:
    """The best factors of a matrix, of any rank: the first columns and rows of these.

    Attributes:
        up: [outputs, full rank].
        down: [full rank, inputs].
        losses: what is lost of the mean square of the outputs by leaving out each, as a share of it, descending.
    """

    up: Tensor
    down: Tensor
    losses: Tensor


def factorise(target: PreTrainedModel, calibration: Calibration, share: float) -> dict[str, Tensor]:
    """Factors of all matrices within layers, of ranks that lose least while they hold this share of the weights.

    Of each matrix W with inputs x, the rank is cut after the change of variables that makes x white (as Yuan et al.
    2023, ASVD, and Wang et al. 2024, SVD-LLM, algorithm 1): there the square of a singular value is what it is worth.

    Args:
        target: in eval mode; unchanged.
        calibration: its text.
        share: of the weights of those matrices, for all factors together.

    Returns:
        as `decode.low_rank.low_rank_linears` takes them; a matrix that two factors would not make smaller is left out.

    Raises:
        ValueError: that goes for all.
    """
    prefix = places_of(target).layers
    linears = {
        name: module
        for name, module in target.named_modules()
        if name.startswith(f"{prefix}.") and type(module) is nn.Linear
    }
    groups = list(dict.fromkeys(tuple(group_of(name, linears)) for name in linears))
    moments = _second_moments(calibration, {group[0]: linears[group[0]] for group in groups})
    found: dict[tuple[str, ...], Factorised] = {}
    with ProgressBar("factorising", len(groups)) as bar:
        for group in groups:
            weight = torch.cat([linears[name].weight.detach().float().cpu() for name in group])
            found[group] = _factorised(weight, moments[group[0]])
            bar.advance(1)
    ranks = choose_ranks({group: each.losses for group, each in found.items()}, _sizes(found), share)
    factors = {}
    for group, rank in ranks.items():
        up, down = found[group].up, found[group].down
        if rank * (len(up) + down.shape[1]) >= len(up) * down.shape[1]:
            continue
        dtype = linears[group[0]].weight.dtype
        factors[f"{group[0]}.down"] = down[:rank].to(dtype)
        parts = torch.split(up[:, :rank].to(dtype), [linears[name].out_features for name in group])
        factors |= {f"{name}.up": part.clone() for name, part in zip(group, parts, strict=True)}
    if not factors:
        raise ValueError("kind: two factors make no matrix of this target smaller; give another kind than low_rank")
    chosen = sorted(down.shape[0] for name, down in factors.items() if name.endswith(".down"))
    logger.info("%d of %d inputs have factors, of rank %d to %d", len(chosen), len(groups), chosen[0], chosen[-1])
    return factors


def choose_ranks(
    losses: dict[tuple[str, ...], Tensor], sizes: dict[tuple[str, ...], tuple[int, int]], share: float
) -> dict[tuple[str, ...], int]:
    """Ranks within a budget: step by step where a weight more saves most of what is lost.

    Args:
        losses: of each matrix, by component, descending.
        sizes: outputs and inputs of each.
        share: of all their weights.
    """
    ranks = dict.fromkeys(losses, RANK_STEP)
    budget = share * sum(outputs * inputs for outputs, inputs in sizes.values())
    budget -= sum(RANK_STEP * sum(size) for size in sizes.values())
    steps = []
    for key, of_key in losses.items():
        of_steps = torch.nn.functional.pad(of_key, (0, -len(of_key) % RANK_STEP)).view(-1, RANK_STEP).sum(dim=1)
        num_weights = RANK_STEP * sum(sizes[key])
        steps += [(float(saved) / num_weights, num_weights, key) for saved in of_steps[1:]]
    for _, num_weights, key in sorted(steps, key=lambda step: -step[0]):
        if num_weights <= budget:
            ranks[key] += RANK_STEP
            budget -= num_weights
    return ranks


def _sizes(found: dict[tuple[str, ...], Factorised]) -> dict[tuple[str, ...], tuple[int, int]]:
    return {group: (len(each.up), each.down.shape[1]) for group, each in found.items()}


def _factorised(weight: Tensor, moments: Tensor) -> Factorised:
    """Of [outputs, inputs], fp32, whose inputs have these second moments [inputs, inputs]."""
    damping = DAMPING * moments.diagonal().mean() + torch.finfo(torch.float32).eps
    root = torch.linalg.cholesky(moments + damping * torch.eye(len(moments)))  # x = root z, where z is white
    up, values, white = torch.linalg.svd(weight @ root, full_matrices=False)
    down = torch.linalg.solve_triangular(root, white, upper=False, left=False)
    square = values.square()
    return Factorised(up * values, down, square / square.sum())


def _second_moments(calibration: Calibration, linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """Mean of x x^T over the inputs of each layer, fp32 [inputs, inputs]."""
    moments = {name: torch.zeros(linear.in_features, linear.in_features) for name, linear in linears.items()}
    with _seen(linears, moments):
        calibration.pass_through()
    return moments


@contextmanager
def _seen(linears: dict[str, nn.Linear], moments: dict[str, Tensor]) -> Iterator[None]:
    """While it lasts, what enters a layer is added to its moments."""

    def add(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().flatten(0, -2).float()
            moments[name] += (x.T @ x).cpu()

        return hook

    hooks = [linear.register_forward_pre_hook(add(name)) for name, linear in linears.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
