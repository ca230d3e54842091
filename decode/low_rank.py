"""A linear layer as two factors of low rank."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

# layers of one input, which share the factor next to it
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class LowRankLinear(nn.Linear):
    """x to up(down(x)) + b; its weight is that of `up`, and layers of one input may have one `inner` together.

    Args:
        inner: down, [rank, inputs].
        up: [outputs, rank].
        bias: [outputs], or None.
    """

    inner: nn.Linear
    weight: nn.Parameter

    def __init__(self, inner: nn.Linear, up: Tensor, bias: Tensor | None) -> None:
        super().__init__(up.shape[1], up.shape[0], bias=bias is not None, device="meta")
        self.inner = inner
        self.weight = nn.Parameter(up)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return F.linear(self.inner(input), self.weight, self.bias)


def group_of(name: str, names: Mapping[str, Any]) -> list[str]:
    """Of linear layers by dotted name, those that share their input with one, itself included, in order."""
    parent, _, own = name.rpartition(".")
    for group in GROUPS:
        if own in group:
            return [found for each in group if (found := f"{parent}.{each}") in names]
    return [name]


def low_rank_linears(model: nn.Module, factors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """The layers to put in the place of a model's, by dotted name.

    Args:
        model: the whole one.
        factors: `<layer>.up` [outputs, rank] of each, and `<layer>.down` [rank, inputs] of each, or of the first of
            those that share their input.

    Raises:
        ValueError: they do not fit this model.
    """
    names = {name.removesuffix(".up"): up for name, up in factors.items() if name.endswith(".up")}
    if not names:
        raise ValueError("factors: there are none; build the pair anew")
    found: dict[str, nn.Module] = {}
    inner: dict[str, nn.Linear] = {}
    for name, up in names.items():
        first = group_of(name, names)[0]
        down = factors.get(f"{first}.down")
        try:
            linear: Any = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(f"factors: there is no layer {name} in the target; build the pair anew") from error
        if down is None or (len(up), up.shape[1], down.shape[1]) != (
            linear.out_features,
            len(down),
            linear.in_features,
        ):
            raise ValueError(f"factors: those of {name} are not of its shape; build the pair anew")
        if first not in inner:
            inner[first] = nn.Linear(down.shape[1], len(down), bias=False, device="meta")
            inner[first].weight = nn.Parameter(down.to(linear.weight.device, linear.weight.dtype))
        up = up.to(linear.weight.device, linear.weight.dtype)
        found[name] = LowRankLinear(inner[first], up, linear.bias)
    return found
