"""The target as its own draft: with sublayers left out, its first layers alone, by factors, or in fewer bits."""

import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .head import reduce_output_vocabulary
from .low_rank import LowRankLinear, group_of, low_rank_linears
from .native import GROUP
from .params import AdapterKind
from .shadow import NoAttention, NoMLP, Places, places_of, shadow

ADAPTER = "adapter."


@dataclass(frozen=True, kw_only=True)
class SelfDraft:
    """What of the target drafts, as `pair.json` says it.

    Attributes:
        skipped_attention, skipped_mlp: layers whose attention, whose MLP is left out, ascending.
        num_layers: only so many, the first ones; None for all.
        bits: of copies of the matrices, rounded in groups of inputs; None drafts with the target's own.
        low_rank: some matrices are products of two, which the pair holds.
        adapter: what follows the first layers, whose weights the pair holds: a layer like the target's (layer), or one
            without attention (mlp).
    """

    skipped_attention: tuple[int, ...] = ()
    skipped_mlp: tuple[int, ...] = ()
    num_layers: int | None = None
    bits: Literal[8, 4] | None = None
    low_rank: bool = False
    adapter: AdapterKind | None = None

    @classmethod
    def of(cls, content: dict[str, Any]) -> "SelfDraft":
        """From what `asdict` made of one, and JSON of that.

        Raises:
            ValueError: it is something else.
        """
        try:
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
            }
            spec = cls(**fields)
            layers = [*spec.skipped_attention, *spec.skipped_mlp, spec.num_layers or 0]
            if any(type(layer) is not int for layer in layers) or spec.bits not in (8, 4, None):
                raise TypeError("layers are whole numbers, and bits are 8 or 4")
            if spec.adapter not in (*get_args(AdapterKind), None) or (spec.adapter and not spec.num_layers):
                raise TypeError("adapter is mlp or layer, and follows num_layers layers")
            if spec.adapter and not spec.keeps_early_states:
                raise TypeError("an adapter follows layers as they are")
        except TypeError as error:
            raise ValueError(f"self_draft: is not understood: {error}") from error
        return spec

    @property
    def keeps_early_states(self) -> bool:
        """Whether what leaves the first layers while drafting is the target's own."""
        return self.num_layers is not None and not (
            self.skipped_attention or self.skipped_mlp or self.bits or self.low_rank
        )

    def check(self, places: Places) -> None:
        """Raises ValueError: layers that the target does not have."""
        for name in ("skipped_attention", "skipped_mlp"):
            if strange := [layer for layer in getattr(self, name) if not 0 <= layer < places.num_layers]:
                raise ValueError(f"{name}: there is no layer {strange[0]}; the target has 0 to {places.num_layers - 1}")
        if self.num_layers is not None and not 1 <= self.num_layers < places.num_layers:
            raise ValueError(
                f"num_layers: {self.num_layers} is not possible; give 1 to {places.num_layers - 1} for this target"
            )


def self_draft(
    target: PreTrainedModel,
    spec: SelfDraft,
    draft_vocab: Tensor | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """The shadow of the target that drafts.

    Args:
        target: in eval mode.
        spec: what of it drafts.
        draft_vocab: int64 ids of a reduced output vocabulary.
        tensors: of the pair, by name: factors for low_rank, see `low_rank_linears`; weights of an adapter.

    Raises:
        ValueError: the target has not what is left out, or torchao is not there to round it.
    """
    places = places_of(target)
    spec.check(places)
    replaced: dict[str, nn.Module] = {places.attention_of(layer): NoAttention() for layer in spec.skipped_attention}
    replaced |= {places.mlp_of(layer): NoMLP() for layer in spec.skipped_mlp}
    if spec.low_rank:
        replaced = {**low_rank_linears(target, tensors or {}), **replaced}
    if spec.num_layers is not None:
        layers: Any = target.get_submodule(places.layers)
        kept = [shadow(layers[at], replaced, f"{places.layers}.{at}") for at in range(spec.num_layers)]
        if spec.adapter is not None:
            kept.append(_adapter(target, places, spec.adapter, tensors or {}))
        replaced[places.layers] = nn.ModuleList(kept)
    draft: PreTrainedModel = shadow(target, replaced)
    if draft_vocab is not None:
        reduce_output_vocabulary(draft, draft_vocab)
    return draft if spec.bits is None else _rounded(draft, spec.bits)


def new_adapter(target: PreTrainedModel, kind: AdapterKind) -> dict[str, Tensor]:
    """Weights for an adapter before it has learnt anything: those of the target's last layer."""
    places = places_of(target)
    last = shadow(target.get_submodule(f"{places.layers}.{places.num_layers - 1}"), _without(places, kind))
    return {ADAPTER + name: weight.detach().clone() for name, weight in last.state_dict().items()}


def own_parameters(draft: PreTrainedModel, spec: SelfDraft, target: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What a shadow of the target has of its own, by the names that tensors have in a pair."""
    places = places_of(target)
    found: dict[str, nn.Parameter] = {}
    if spec.adapter is not None:
        adapter = draft.get_submodule(f"{places.layers}.{spec.num_layers}")
        found |= {ADAPTER + name: weight for name, weight in adapter.named_parameters()}
    factors = {name: module for name, module in draft.named_modules() if isinstance(module, LowRankLinear)}
    for name, module in factors.items():
        down: Any = module.inner.weight
        found[f"{name}.up"] = module.weight
        found[f"{group_of(name, factors)[0]}.down"] = down
    return found


def _adapter(target: PreTrainedModel, places: Places, kind: AdapterKind, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A layer of its own weights, whose keys and values stand behind those of the target's layers."""
    layer = copy.deepcopy(target.get_submodule(f"{places.layers}.{places.num_layers - 1}"))
    for name, module in _without(places, kind).items():
        setattr(layer, name, module)
    if kind == "layer":
        getattr(layer, places.attention).layer_idx = places.num_layers
    weights = {name.removeprefix(ADAPTER): tensor for name, tensor in tensors.items() if name.startswith(ADAPTER)}
    try:
        layer.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).split("\n")[1].strip()
        raise ValueError(f"adapter: its weights do not fit this target: {reason}; build the pair anew") from error
    return layer


def _without(places: Places, kind: AdapterKind) -> dict[str, nn.Module]:
    return {places.attention: NoAttention()} if kind == "mlp" else {}


def _rounded(model: PreTrainedModel, bits: Literal[8, 4]) -> PreTrainedModel:
    """A shadow with copies of the matrices in so many bits, symmetrically, with a scale for each group of inputs."""
    try:
        with _without_warnings():
            from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
    except ImportError as error:
        raise ValueError(f"bits: {bits} needs torchao; pip install 'draftsmith[quantised]'") from error
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if len(linears) < 2:
        raise ValueError(f"bits: the matrices of model type {model.config.model_type!r} are of a kind of their own")
    copies = nn.ModuleList(shadow(linear, {}) for linear in linears.values())
    group = math.gcd(GROUP, *(linear.in_features for linear in linears.values()))
    dtype = torch.int8 if bits == 8 else torch.int4  # type: ignore[attr-defined]
    quantize_(copies, IntxWeightOnlyConfig(weight_dtype=dtype, granularity=PerGroup(group)))
    rounded: PreTrainedModel = shadow(model, dict(zip(linears, copies, strict=True)))
    return rounded


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torchao tells everyone which of its programs for GPUs could not be loaded."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
