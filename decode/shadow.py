"""A model over another's parameters, with other modules in some places, which leaves the original as it is."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

ATTENTION_NAMES, MLP_NAMES = ("self_attn", "attention", "attn"), ("mlp",)


@dataclass(frozen=True)
class Places:
    """Where a model has its layers.

    Attributes:
        layers: dotted name of their list.
        attention, mlp: names of the two within a layer.
        num_layers: how many.
    """

    layers: str
    attention: str
    mlp: str
    num_layers: int

    def attention_of(self, layer: int) -> str:
        """Dotted name."""
        return f"{self.layers}.{layer}.{self.attention}"

    def mlp_of(self, layer: int) -> str:
        """Dotted name."""
        return f"{self.layers}.{layer}.{self.mlp}"


def places_of(model: PreTrainedModel, role: str = "target") -> Places:
    """Where this model has its layers, each of which adds an attention and an MLP to what enters it.

    Raises:
        ValueError: it is not made in that way.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            children = [{child for child, _ in layer.named_children()} for layer in module]
            # one that says which place in the cache is its own
            attention = [
                known
                for known in ATTENTION_NAMES
                if all(hasattr(getattr(layer, known, None), "layer_idx") for layer in module)
            ]
            mlp = [known for known in MLP_NAMES if all(known in each for each in children)]
            if len(attention) == len(mlp) == 1:
                return Places(name, attention[0], mlp[0], num_layers)
    raise ValueError(
        f"{role}: model type {model.config.model_type!r} has no list of {num_layers} layers with an attention and an "
        "MLP each; it cannot draft for itself, use a draft of its own"
    )


def shadow(module: Any, replaced: Mapping[str, nn.Module], name: str = "") -> Any:
    """A module like this one over the very same parameters, with other modules in some places.

    Args:
        module: stays as it is.
        replaced: what to have instead, by dotted name.
        name: of `module` among those.

    Raises:
        ValueError: a module around such a place has a forward of its own, bound to what it holds now.
    """
    if name in replaced:
        return replaced[name]
    if "forward" in vars(module) and any(other.startswith(f"{name}.") or not name for other in replaced):
        raise ValueError(
            f"target: its module {name or 'model'} has a forward of its own, which would not notice that parts of it "
            "are replaced; load it without hooks (device_map) to let it draft for itself"
        )
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    twin._modules = {
        child_name: child if child is None else shadow(child, replaced, f"{name}.{child_name}" if name else child_name)
        for child_name, child in module._modules.items()
    }
    return twin


class NoAttention(nn.Module):
    """Adds nothing, and leaves the cache alone."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Zeros, and no weights."""
        return torch.zeros_like(hidden_states), None


class NoMLP(nn.Module):
    """Adds nothing."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Zeros."""
        return torch.zeros_like(hidden_states)


def with_forward(module: Any, forward: Callable[..., Tensor]) -> Any:
    """A module like this one but for what it does."""
    twin = copy.copy(module)
    twin.forward = forward
    return twin


def as_it_is(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """For a layer that nothing happens in."""
    return hidden_states
