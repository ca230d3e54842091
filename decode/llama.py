"""A forward pass of Llama-like models made for decoding: fewer and larger operations, weights packed once.

A pass over a few tokens is bounded by reading the weights, and the time it takes beyond that goes into starting
operations. So projections of the same input are fused, rotary tables are computed once, norms and residuals are one
operation each, and on CPUs with bf16 matrix units the weights are stored in the layout that those want. Where there is
a C++ compiler too, the whole pass is one call of C++ (native.py).
"""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cache import KVCache
from .native import native_forward

logger = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
# fused and packed weights stand beside the model's own
MAX_COPIED_BYTES = 4 * 2**30
# not transformers.integrations, whose linear layers are quantised
KNOWN_PACKAGES = ("transformers.models.", "transformers.activations")
KNOWN_MODULES = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)

Project = Callable[[Tensor], Tensor]
Version = tuple[object, ...]

_left_alone: "WeakSet[PreTrainedModel]" = WeakSet()
_built: "WeakKeyDictionary[PreTrainedModel, tuple[Version, LlamaForward | str]]" = WeakKeyDictionary()


def llama_forward(model: PreTrainedModel) -> "LlamaForward | None":
    """The fast pass of this model, built once; None where transformers' own has to do, with the reason logged.

    It is built anew when weights were written to, replaced or moved, but for writes through `weight.data`, which torch
    does not count.
    """
    reason = _reason_against(model)
    version: Version = (reason,) if reason else _version(model)
    if model not in _built or _built[model][0] != version:
        if reason:
            logger.info("decoding with transformers' own forward pass: %s", reason)
        _built[model] = (version, reason or LlamaForward(model))
    built = _built[model][1]
    return None if isinstance(built, str) else built


def leave_to_transformers(model: PreTrainedModel) -> None:
    """From now on this model has transformers' own pass."""
    _left_alone.add(model)


def _reason_against(model: PreTrainedModel) -> str | None:
    if model in _left_alone:
        return "so it was asked"
    config = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        return f"ours is made for {', '.join(MODEL_TYPES)}, and this is {config.model_type}"
    if config._attn_implementation != "sdpa":
        return f"ours has attention 'sdpa', and this was loaded with {config._attn_implementation!r}"
    if (kind := (config.rope_parameters or {}).get("rope_type")) not in STATIC_ROTARY:
        return f"its rotary tables ({kind}) depend on the length of the text"
    if config.hidden_act != "silu":
        return f"ours has the activation silu, and this {config.hidden_act}"
    for name, module in model.named_modules():
        if not (type(module) in KNOWN_MODULES or type(module).__module__.startswith(KNOWN_PACKAGES)):
            return f"it has a module of its own, {name or 'model'}: {type(module).__name__}"
        if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return f"its module {name or 'model'} has a hook or a forward of its own"
    if any(type(weight) is not nn.Parameter or type(weight.data) is not Tensor for weight in model.parameters()):
        return "its weights are of a kind of their own, quantised perhaps"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        return "it turns a part of each head only"
    layers: Any = model.get_decoder().layers
    if len(layers) != config.num_hidden_layers:
        return f"it has {len(layers)} layers, and its config says {config.num_hidden_layers}"
    if any(layer.self_attn.scaling != layer.self_attn.head_dim**-0.5 for layer in layers):
        return "its attention is not scaled by the root of head_dim"
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for fused in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            if len({linear.bias is None for linear in fused}) > 1:
                return "it has a bias in some projections of one input, and none in others"
    return None


def _version(model: PreTrainedModel) -> Version:
    return tuple(
        (weight.data_ptr(), weight.dtype, weight.device, 0 if weight.is_inference() else weight._version)
        for weight in model.parameters()
    )


def _may_copy(model: PreTrainedModel) -> bool:
    """Whether fused and packed weights may stand beside the model's own."""
    size = sum(weight.nbytes for weight in model.parameters())
    if size > MAX_COPIED_BYTES:
        logger.info("weights of %.1f GiB are neither fused nor packed: they would be in memory twice", size / 2**30)
    return size <= MAX_COPIED_BYTES


def _can_pack(model: PreTrainedModel) -> bool:
    """Whether this machine has bf16 matrix products with weights in a layout of their own."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class Sublayers:
    """What of a layer is passed through."""

    layer: int
    attention: bool = True
    mlp: bool = True


class LlamaForward:
    """The pass; weights are read when it is built.

    Args:
        model: one that `llama_forward` has no reason against.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        backbone: Any = model.get_decoder()
        self.embed = backbone.embed_tokens
        may_copy = _may_copy(model)
        self.native = native_forward(model) if may_copy else None
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rotary = backbone.rotary_emb
        self.tables = (torch.empty(0, self.head_dim, dtype=model.dtype, device=model.device),) * 2
        self.uses = [Sublayers(index) for index in range(len(backbone.layers))]
        self.ends = True
        if self.native is None:
            packed = self.packed = may_copy and _can_pack(model)
            self.layers = [_Layer(layer, may_copy, packed) for layer in backbone.layers]
            self.norm, self.norm_eps = backbone.norm.weight, backbone.norm.variance_epsilon
            self.project_head = _projection([model.get_output_embeddings()], may_copy, packed)

    def part(
        self,
        uses: list[Sublayers],
        *,
        ends: bool = True,
        head: nn.Linear | None = None,
        layers: Mapping[int, nn.Module] | None = None,
    ) -> "LlamaForward":
        """A pass through some of the layers, by the same weights.

        Args:
            uses: which, and what of them, ascending.
            ends: False for what leaves the last of them, without the final norm.
            head: instead of the model's.
            layers: with matrices of their own, by layer, instead of the model's; for C++ only.
        """
        part = copy.copy(self)
        part.uses, part.ends = uses, ends
        if self.native is not None:
            part.native = self.native.part([(use.layer, use.attention, use.mlp) for use in uses], ends, head, layers)
        elif head is not None:
            part.project_head = _projection([head], self.packed, self.packed)
        return part

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, with_logits: bool, entering: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What enters the head after tokens, [rows, n, hidden], and logits [rows, n, vocab]; None if nobody wants them.

        Args:
            tokens, positions: int64 [rows, n].
            cache: has made room for the tokens.
            with_logits: False only fills the cache; but a part that does not end with the head gives what leaves it.
            entering: [rows, n, hidden], what enters the first layer of a part instead of embeddings.
        """
        cos, sin = self._rotary_tables(cache.capacity)
        if self.native:
            hidden, logits = self.native(tokens, cache, cos, sin, with_logits and self.ends, entering)
            return (hidden, logits) if with_logits or not self.ends else (None, None)
        hidden = self.embed(tokens) if entering is None else entering
        cos, sin = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
        bias = None
        if tokens.shape[1] > 1 or cache.common_start is None:
            mask = cache.attention_mask()
            bias = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, -torch.inf)
        for use in self.uses:
            layer = self.layers[use.layer]
            if use.attention:
                hidden = self._attend(layer, use.layer, hidden, cos, sin, bias, cache)
            if use.mlp:
                normed = F.rms_norm(hidden, layer.norm_shape, layer.post_norm, layer.post_eps)
                gate, up = layer.gate_up(normed).chunk(2, dim=-1)
                hidden = layer.down(F.silu(gate).mul_(up), hidden)
        if not self.ends:
            return hidden, None
        if not with_logits:
            return None, None
        hidden = F.rms_norm(hidden, (hidden.shape[-1],), self.norm, self.norm_eps)
        return hidden, self.project_head(hidden)

    @property
    def can_draft(self) -> bool:
        """Whether `draft` is there."""
        return self.native is not None and self.ends

    def draft(
        self, rows: int, num_steps: int, keys: np.ndarray, spread: Tensor, cache: KVCache
    ) -> tuple[Tensor, float]:
        """Tokens of `CachedModel.draft`, and the seconds that passes took."""
        assert self.native is not None
        return self.native.draft(rows, num_steps, keys, spread, cache, *self._rotary_tables(cache.capacity))

    def _attend(
        self, layer: "_Layer", index: int, hidden: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None, cache: KVCache
    ) -> Tensor:
        num_rotated = self.num_heads + self.num_kv_heads
        states = layer.qkv(F.rms_norm(hidden, layer.norm_shape, layer.input_norm, layer.input_eps))
        states = states.view(*hidden.shape[:2], -1, self.head_dim)
        rotated, values = states[:, :, :num_rotated], states[:, :, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = rotated[:, :, : self.num_heads], rotated[:, :, self.num_heads :]
            queries = F.rms_norm(queries, (self.head_dim,), layer.q_norm, layer.qk_eps)
            rotated = torch.cat([queries, F.rms_norm(keys, (self.head_dim,), layer.k_norm, layer.qk_eps)], dim=2)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, dims=-1), sin).transpose(1, 2)
        keys, values = cache.update(rotated[:, self.num_heads :], values.transpose(1, 2), index)
        attended = F.scaled_dot_product_attention(
            rotated[:, : self.num_heads], keys, values, bias, enable_gqa=self.num_heads != self.num_kv_heads
        )
        return layer.output(attended.transpose(1, 2).flatten(2), hidden)

    def _rotary_tables(self, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and sin of all places, [capacity or more, head_dim]; sin carries the sign of the half it multiplies."""
        tables = self.tables  # which another thread may replace
        if len(tables[0]) < capacity:
            places = torch.arange(capacity, device=tables[0].device).unsqueeze(0)
            cos, sin = self.rotary(tables[0], places)
            half = self.head_dim // 2
            tables = self.tables = cos[0].contiguous(), torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return tables


class _Layer:
    """The weights of one layer."""

    def __init__(self, layer: Any, fused: bool, packed: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _projection([attention.q_proj, attention.k_proj, attention.v_proj], fused, packed)
        self.output = _projection_onto(attention.o_proj, packed)
        self.gate_up = _projection([mlp.gate_proj, mlp.up_proj], fused, packed)
        self.down = _projection_onto(mlp.down_proj, packed)
        self.input_norm, self.input_eps = layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon
        post = layer.post_attention_layernorm
        self.post_norm, self.post_eps = post.weight, post.variance_epsilon
        self.norm_shape = tuple(self.input_norm.shape)
        self.q_norm = self.k_norm = None
        if hasattr(attention, "q_norm"):
            self.q_norm, self.k_norm = attention.q_norm.weight, attention.k_norm.weight
            self.qk_eps = attention.q_norm.variance_epsilon


def _projection(linears: list[nn.Linear], fused: bool, packed: bool) -> Project:
    """x to x W + b, for the outputs of several linear layers side by side."""
    if len(linears) > 1 and not fused:
        return lambda x: torch.cat([F.linear(x, linear.weight, linear.bias) for linear in linears], dim=-1)
    weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight
    biases = [linear.bias for linear in linears]
    bias = torch.cat([each.detach() for each in biases]) if biases[0] is not None else None
    if not packed:
        return lambda x: F.linear(x, weight, bias)
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")


def _projection_onto(linear: nn.Linear, packed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """x and a residual to x W + b + residual."""
    weight, bias = linear.weight, linear.bias
    if not packed:
        return lambda x, residual: F.linear(x, weight, bias).add_(residual)
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
    return lambda x, residual: torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed_weight, bias, "add")
