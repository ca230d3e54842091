"""A pass of a Llama-like model in one call of C++, on CPUs with AVX-512.

torch starts some three hundred operations for it, each of them on all cores. native.cpp does the same in one parallel
region, over a few tokens at the speed at which the weights are read.
"""

import copy
import ctypes
import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cache import KVCache
from .low_rank import LowRankLinear
from .native_library import Address, Size, Unavailable, native_library

logger = logging.getLogger(__name__)

MOST_TOKENS = 1024  # of a call, whose scratch memory grows with them
BLOCK = 32  # what inputs and outputs must be multiples of
GROUP = 64  # inputs of a quantised matrix that have a scale together; of those they must be a multiple


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, Address) for name in ("packed", "bias", "scales", "inner")),
        *((name, Size) for name in ("num_outputs", "num_inputs", "bits")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Address) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, Address) for name in ("layers", "embedding", "norm")),
        ("head", _Matrix),
        *((name, Size) for name in ("vocab_size", "num_layers", "hidden_size", "intermediate_size")),
        *((name, Size) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_float) for name in ("norm_eps", "query_key_norm_eps")),
    )


def native_forward(model: PreTrainedModel) -> "NativeForward | None":
    """The pass for a Llama-like model; None where it has to do without, with the reason logged."""
    try:
        _refuse(model)
        return NativeForward(model, native_library())
    except Unavailable as reason:
        logger.info("decoding without the C++ pass: %s", reason)
        return None


def _refuse(model: PreTrainedModel) -> None:
    if model.device.type != "cpu" or any(weight.dtype != torch.bfloat16 for weight in model.parameters()):
        raise Unavailable(f"it is made for bfloat16 on CPUs, and this is {model.dtype} on {model.device.type}")
    config: Any = model.config.get_text_config()
    layers: Any = model.get_decoder().layers
    shapes = [{name: weight.shape for name, weight in layer.named_parameters()} for layer in layers]
    if any(each != shapes[0] for each in shapes):
        raise Unavailable("its layers differ in shape")
    of_model, of_heads = _epsilons(model)
    if len(of_model) > 1 or len(of_heads) > 1:
        raise Unavailable("its norms differ in epsilon")
    hidden, middle, head_dim = config.hidden_size, config.intermediate_size, layers[0].self_attn.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    expected = {
        "self_attn": {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)},
        "mlp": {"gate": (middle, hidden), "up": (middle, hidden), "down": (hidden, middle)},
    }
    for block, of_block in expected.items():
        for name, shape in of_block.items():
            if (found := tuple(shapes[0][f"{block}.{name}_proj.weight"])) != shape:
                raise Unavailable(f"{name}_proj has the shape {found}, and its config says {shape}")
    for name, size in {"hidden_size": hidden, "intermediate_size": middle, "head_dim": head_dim}.items():
        if size % BLOCK:
            raise Unavailable(f"{name} {size} is no multiple of {BLOCK}")


def _epsilons(model: PreTrainedModel) -> tuple[set[float], set[float]]:
    """Of the norms of hidden states, and of those of queries and keys, which not all models have."""
    backbone: Any = model.get_decoder()
    of_model, of_heads = {backbone.norm.variance_epsilon}, set()
    for layer in backbone.layers:
        of_model |= {layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon}
        if hasattr(layer.self_attn, "q_norm"):
            of_heads |= {layer.self_attn.q_norm.variance_epsilon, layer.self_attn.k_norm.variance_epsilon}
    return of_model, of_heads


class NativeForward:
    """The pass; weights are read, and packed beside the model's own, when it is built.

    Args:
        model: Llama-like, bfloat16, with sizes that are multiples of BLOCK.
        library: the C++.
    """

    def __init__(self, model: PreTrainedModel, library: ctypes.CDLL) -> None:
        config = model.config.get_text_config()
        backbone: Any = model.get_decoder()
        self.library = library
        self.used_layers: list[int] | None = None  # of a part
        self.addresses: WeakKeyDictionary[KVCache, tuple[object, tuple[Any, Any]]] = WeakKeyDictionary()
        self.kept: list[Tensor] = []  # what C++ knows by address
        self.inner: list[_Matrix] = []
        self.vocab_size = model.get_output_embeddings().out_features
        self.hidden_size, self.num_kv_heads = config.hidden_size, config.num_key_value_heads
        self.head_dim = backbone.layers[0].self_attn.head_dim
        self.layers = (_Layer * len(backbone.layers))(*[self._layer(layer) for layer in backbone.layers])
        (norm_eps,), query_key_norm_eps = _epsilons(model)
        self.model = _Model(
            layers=ctypes.addressof(self.layers),
            embedding=self._address(backbone.embed_tokens.weight),
            norm=self._address(backbone.norm.weight),
            head=self._matrix([model.get_output_embeddings()]),
            vocab_size=len(backbone.embed_tokens.weight),
            num_layers=len(backbone.layers),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=self.head_dim,
            norm_eps=norm_eps,
            query_key_norm_eps=next(iter(query_key_norm_eps), 0.0),
        )

    def part(
        self,
        uses: list[tuple[int, bool, bool]],
        ends: bool,
        head: nn.Linear | None,
        modules: Mapping[int, nn.Module] | None = None,
    ) -> "NativeForward":
        """A pass through some layers, each with its attention, its MLP, or both.

        Args:
            uses: layer, attention, MLP.
            ends: False leaves the final norm out.
            head: instead of the model's.
            modules: with matrices of their own, by layer, instead of the model's.
        """
        part = copy.copy(self)
        part.kept, part.inner, part.addresses = [*self.kept], [*self.inner], WeakKeyDictionary()
        part.used_layers = [layer for layer, _, _ in uses]
        layers = [
            part._layer(modules[layer], attention, mlp) if modules else _Layer.from_buffer_copy(self.layers[layer])
            for layer, attention, mlp in uses
        ]
        for each, (_, attention, mlp) in zip(layers, uses, strict=True):
            each.qkv.packed = each.qkv.packed if attention else None
            each.gate_up.packed = each.gate_up.packed if mlp else None
        part.layers = (_Layer * len(layers))(*layers)
        part.model = _Model.from_buffer_copy(self.model)
        part.model.layers, part.model.num_layers = ctypes.addressof(part.layers), len(layers)
        if not ends:
            part.model.norm = None
        if head is not None:
            part.model.head, part.vocab_size = part._matrix([head]), head.out_features
        return part

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache,
        cos: Tensor,
        sin: Tensor,
        with_logits: bool,
        entering: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What enters the head, [rows, n, hidden], and logits [rows, n, vocab], after tokens, int64 [rows, n].

        Args:
            tokens: for which the cache has made room.
            cache: their keys and values are added to it.
            cos, sin: bf16 [capacity, head_dim] rotary tables; sin carries the sign of the half it multiplies.
            with_logits: False leaves the head out.
            entering: bf16 [rows, n, hidden], instead of the tokens' embeddings.

        Raises:
            IndexError: a token that the model does not have.
        """
        num_rows, width = tokens.shape
        most = max(1, MOST_TOKENS // num_rows)
        if width > most:
            pieces = [slice(start, start + most) for start in range(0, width, most)]
            passed = [
                self._pass(tokens[:, at], cache.positions[:, at], cache, cos, sin, with_logits, _columns(entering, at))
                for at in pieces
            ]
            last, logits = zip(*passed, strict=True)
            return torch.cat(last, dim=1), torch.cat(logits, dim=1) if with_logits else None
        return self._pass(tokens, cache.positions, cache, cos, sin, with_logits, entering)

    def _pass(
        self,
        tokens: Tensor,
        places: Tensor,
        cache: KVCache,
        cos: Tensor,
        sin: Tensor,
        with_logits: bool,
        entering: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Of as many tokens as memory is wanted for; `places` int64, as tokens."""
        tokens, places = tokens.long().contiguous(), places.contiguous()
        entering = None if entering is None else entering.contiguous()
        keys, values = self._buffers(cache)
        last = torch.empty(*tokens.shape, self.hidden_size, dtype=torch.bfloat16)
        logits = torch.empty(*tokens.shape, self.model.head.num_outputs, dtype=torch.bfloat16) if with_logits else None
        tensors = [
            tensor if tensor is None else tensor.data_ptr()
            for tensor in (tokens, entering, places, cos, sin, last, logits)
        ]
        if self.library.forward(
            ctypes.addressof(self.model),
            keys,
            values,
            cache.capacity,
            *tokens.shape,
            *tensors,
            torch.get_num_threads(),
        ):
            raise IndexError(f"a token is none of the model's {self.model.vocab_size}, or a place none of the cache's")
        return last, None if logits is None else logits[..., : self.vocab_size]

    def room_for_logits(self, num_rows: int, num_steps: int) -> Tensor:
        """Where `draft` writes: bf16 [rows, steps, vocab], one step of all rows after another."""
        room = torch.empty(num_steps, num_rows, self.model.head.num_outputs, dtype=torch.bfloat16)
        return room.transpose(0, 1)[..., : self.vocab_size]

    def draft(
        self, rows: int, num_steps: int, keys: np.ndarray, spread: Tensor, cache: KVCache, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, float]:
        """Tokens of `CachedModel.draft`, and the seconds that passes took; cos and sin as above."""
        num_rows, places = len(cache.lengths), torch.tensor(cache.lengths)
        spread, noise = spread.contiguous(), np.ascontiguousarray(keys)
        assert spread.dtype == torch.int32 and noise.shape == (num_rows, num_steps) and noise.dtype == np.uint64
        tokens = torch.empty(num_rows, num_steps, dtype=torch.long)
        hidden = torch.empty(num_rows, self.hidden_size, dtype=torch.bfloat16)
        seconds = ctypes.c_double()
        if self.library.draft(
            ctypes.addressof(self.model),
            *self._buffers(cache),
            cache.capacity,
            num_rows,
            num_steps,
            *(tensor.data_ptr() for tensor in (places, cos, sin)),
            rows,
            noise.ctypes.data,
            *(tensor.data_ptr() for tensor in (spread, tokens)),
            self.model.vocab_size - 1,
            hidden.data_ptr(),
            ctypes.addressof(seconds),
            torch.get_num_threads(),
        ):
            raise IndexError(f"a token is none of the model's {self.model.vocab_size}, or a place none of the cache's")
        return tokens, seconds.value

    def _buffers(self, cache: KVCache) -> tuple[Any, Any]:
        """Where the keys of each layer are, and the values; looked up once, since leaving rows do not move them."""
        if cache.addresses is None:
            cache.allocate(self.num_kv_heads, self.head_dim, torch.bfloat16)
            buffers = [[getattr(layer, name).data_ptr() for layer in cache.layers] for name in ("keys", "values")]
            keys, values = ((Address * len(each))(*each) for each in buffers)
            cache.addresses = keys, values
        if self.used_layers is None:
            return cache.addresses
        if cache not in self.addresses or self.addresses[cache][0] is not cache.addresses:
            arrays = [(Address * len(self.used_layers))(*[of[i] for i in self.used_layers]) for of in cache.addresses]
            self.addresses[cache] = cache.addresses, (arrays[0], arrays[1])
        _, of_part = self.addresses[cache]
        return of_part

    def _layer(self, layer: Any, has_attention: bool = True, has_mlp: bool = True) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = {"input_norm": layer.input_layernorm, "post_norm": layer.post_attention_layernorm}
        matrices = {}
        if has_attention:
            matrices["qkv"] = self._matrix([attention.q_proj, attention.k_proj, attention.v_proj])
            matrices["output"] = self._matrix([attention.o_proj])
            if hasattr(attention, "q_norm"):
                norms |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
        if has_mlp:
            matrices["gate_up"] = self._matrix([mlp.gate_proj, mlp.up_proj], interleave=True)
            matrices["down"] = self._matrix([mlp.down_proj])
        return _Layer(**{name: self._address(norm.weight) for name, norm in norms.items()}, **matrices)

    def _matrix(self, linears: list[nn.Linear], interleave: bool = False) -> _Matrix:
        """Linear layers of one input side by side, or their blocks of 16 outputs in turn; outputs padded to BLOCK."""

        def joined(parts: list[Tensor]) -> Tensor:
            if interleave:
                blocks = torch.stack([part.reshape(-1, 16, *part.shape[1:]) for part in parts], dim=1)
                return blocks.flatten(0, 2)
            whole = torch.cat(parts)
            return torch.cat([whole, whole.new_zeros(-len(whole) % BLOCK, *whole.shape[1:])])

        bias = None
        if linears[0].bias is not None:
            bias = self._address(joined([linear.bias.detach().float() for linear in linears]))
        inner = None
        if isinstance(linears[0], LowRankLinear):
            inner = self._matrix([linears[0].inner])
            self.inner.append(inner)
        weights: list[Any] = [linear.weight for linear in linears]
        if not _is_quantised(weights[0]):
            weight = joined([each.detach() for each in weights])
            packed, scales, bits = weight.view(-1, 16, weight.shape[1] // 2, 2).transpose(1, 2), None, 16
        else:
            weight, bits = joined([each.qdata for each in weights]), _bits(weights[0])
            packed = weight.view(-1, 16, weight.shape[1] // 4, 4).transpose(1, 2)
            if bits == 4:
                halves = (packed + 8).to(torch.uint8)
                packed = halves[::2] | (halves[1::2] << 4)
            of_groups = joined([each.scale.to(torch.bfloat16) for each in weights])
            scales = self._address(of_groups.view(-1, 16, of_groups.shape[1]).transpose(1, 2))
        return _Matrix(
            packed=self._address(packed),
            bias=bias,
            scales=scales,
            inner=None if inner is None else ctypes.addressof(inner),
            num_outputs=len(weight),
            num_inputs=weight.shape[1],
            bits=bits,
        )

    def _address(self, tensor: Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self.kept.append(tensor)
        return tensor.data_ptr()


def _columns(tensor: Tensor | None, at: slice) -> Tensor | None:
    return None if tensor is None else tensor[:, at]


def can_multiply(model: PreTrainedModel) -> bool:
    """Whether C++ can multiply with the matrices of this shadow of a model that it knows."""

    def fits(linear: nn.Linear) -> bool:
        weight: Any = linear.weight
        if _is_quantised(weight):
            return linear.in_features % GROUP == 0 and weight.block_size == (1, GROUP)
        return linear.in_features % BLOCK == 0

    return all(fits(module) for module in model.modules() if isinstance(module, nn.Linear))


def _is_quantised(weight: Any) -> bool:
    """By torchao. Such a weight cannot be detached where inference mode has begun since it was made."""
    return hasattr(weight, "qdata")


def _bits(weight: Any) -> int:
    """Of torchao's integers."""
    return 4 if weight.target_dtype == torch.int4 else 8  # type: ignore[attr-defined]
