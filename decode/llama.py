"""A forward pass of Llama-like models made for decoding: fewer and larger operations, weights packed once.

A pass over a few tokens is bounded by reading the weights, and the time it takes beyond that goes into starting
operations. So projections of the same input are fused, rotary tables are computed once, norms and residuals are one
operation each, and on CPUs with bf16 matrix units the weights are stored in the layout that those want.
"""

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from .cache import KVCache

logger = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
# packed weights stand beside the model's own
MAX_PACKED_BYTES = 4 * 2**30

Project = Callable[[Tensor], Tensor]

_built: "WeakKeyDictionary[PreTrainedModel, tuple[int, LlamaForward | None]]" = WeakKeyDictionary()


def llama_forward(model: PreTrainedModel) -> "LlamaForward | None":
    """The fast pass of this model, built once; None where transformers' own has to do, with the reason logged."""
    version = _version(model)
    if model not in _built or _built[model][0] != version:
        reason = _reason_against(model)
        if reason:
            logger.info("decoding with transformers' own forward pass: %s", reason)
        _built[model] = (version, None if reason else LlamaForward(model))
    return _built[model][1]


def _reason_against(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES:
        return f"ours is made for {', '.join(MODEL_TYPES)}, and this is {config.model_type}"
    if config._attn_implementation != "sdpa":
        return f"ours has attention 'sdpa', and this was loaded with {config._attn_implementation!r}"
    if (kind := (config.rope_parameters or {}).get("rope_type")) not in STATIC_ROTARY:
        return f"its rotary tables ({kind}) depend on the length of the text"
    if config.hidden_act != "silu":
        return f"ours has the activation silu, and this {config.hidden_act}"
    others = {type(module).__name__ for module in model.get_decoder().layers.modules() if _has_own_forward(module)}
    return f"it has modules of kind {', '.join(sorted(others))}" if others else None


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a module does something that the weights alone do not tell: an adapter, a quantised layer."""
    known = isinstance(module, nn.ModuleList | nn.SiLU | ACT2CLS["silu"]) or type(module) is nn.Linear
    return not known and not type(module).__module__.startswith("transformers.models.")


def _version(model: PreTrainedModel) -> int:
    """Changes when weights are written to."""
    return sum(0 if weight.is_inference() else weight._version for weight in model.parameters())


def _can_pack(model: PreTrainedModel) -> bool:
    """Whether this machine has bf16 matrix products with weights in a layout of their own, and room for both."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    size = sum(weight.nbytes for weight in model.parameters())
    if size > MAX_PACKED_BYTES:
        logger.info("weights of %.1f GiB are not packed: they would be in memory twice", size / 2**30)
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class LlamaForward:
    """The pass; weights are read when it is built.

    Args:
        model: one that `llama_forward` has no reason against.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        backbone: Any = model.get_decoder()
        self.embed = backbone.embed_tokens
        self.head = model.get_output_embeddings()
        self.packed = _can_pack(model)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rotary = backbone.rotary_emb
        self.dtype = model.dtype
        self.cos = self.sin = torch.empty(0, self.head_dim, dtype=model.dtype, device=model.device)
        self.layers = [_Layer(layer, self.packed) for layer in backbone.layers]
        self.norm, self.norm_eps = backbone.norm.weight, backbone.norm.variance_epsilon
        self.project_head = _projection([self.head], self.packed)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: KVCache, with_logits: bool) -> Tensor | None:
        """Logits after tokens, int64 [rows, n] to [rows, n, vocab]; None when nobody wants them.

        Args:
            tokens, positions: int64 [rows, n].
            cache: has made room for the tokens.
            with_logits: False only fills the cache.
        """
        hidden = self.embed(tokens)
        cos, sin = self._rotary_tables(positions, cache.capacity)
        bias = None
        if tokens.shape[1] > 1 or cache.common_start is None:
            mask = cache.attention_mask()
            bias = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, -torch.inf)
        shape = (*tokens.shape, -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        for index, layer in enumerate(self.layers):
            states = layer.qkv(F.rms_norm(hidden, layer.norm_shape, layer.input_norm, layer.input_eps)).view(shape)
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
            hidden = layer.output(attended.transpose(1, 2).flatten(2), hidden)
            gate, up = layer.gate_up(F.rms_norm(hidden, layer.norm_shape, layer.post_norm, layer.post_eps)).chunk(
                2, dim=-1
            )
            hidden = layer.down(F.silu(gate).mul_(up), hidden)
        if not with_logits:
            return None
        hidden = F.rms_norm(hidden, (hidden.shape[-1],), self.norm, self.norm_eps)
        for hook in self.head._forward_pre_hooks.values():
            hook(self.head, (hidden,))
        return self.project_head(hidden)

    def _rotary_tables(self, positions: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and sin at these positions, [rows, n, 1, head_dim]; sin carries the sign of the half it multiplies."""
        if len(self.cos) < capacity:
            places = torch.arange(capacity, device=positions.device).unsqueeze(0)
            cos, sin = self.rotary(self.cos, places)
            half = self.head_dim // 2
            self.cos, self.sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)


class _Layer:
    """The weights of one layer."""

    def __init__(self, layer: Any, packed: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _projection([attention.q_proj, attention.k_proj, attention.v_proj], packed)
        self.output = _projection_onto(attention.o_proj, packed)
        self.gate_up = _projection([mlp.gate_proj, mlp.up_proj], packed)
        self.down = _projection_onto(mlp.down_proj, packed)
        self.input_norm, self.input_eps = layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon
        post = layer.post_attention_layernorm
        self.post_norm, self.post_eps = post.weight, post.variance_epsilon
        self.norm_shape = tuple(self.input_norm.shape)
        self.q_norm = self.k_norm = None
        if hasattr(attention, "q_norm"):
            self.q_norm, self.k_norm = attention.q_norm.weight, attention.k_norm.weight
            self.qk_eps = attention.q_norm.variance_epsilon


def _projection(linears: list[nn.Linear], packed: bool) -> Project:
    """x to x W + b, for the outputs of several linear layers side by side."""
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
