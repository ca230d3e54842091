"""The fast pass of Llama-like models says what transformers' own says, layer by layer, and is used where it may be."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from decode.head import reduce_output_vocabulary
from decode.llama import LlamaForward, llama_forward
from decode.model import CachedModel

Build = Callable[..., LlamaForCausalLM]
SHAPE: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.3,
)
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]


def with_random_everything(model: PreTrainedModel) -> PreTrainedModel:
    """Norms and biases that begin as ones and zeros would hide that they were forgotten."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape)
    return model.float().eval()


def build(name: str, tiny_llama: Build) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "llama":
            return with_random_everything(tiny_llama(num_layers=3))
        if name == "llama with biases, one key head a query head":
            return with_random_everything(
                tiny_llama(num_layers=2, attention_bias=True, mlp_bias=True, num_key_value_heads=4)
            )
        if name == "llama with stretched positions":
            rotary = dict(rope_type="linear", factor=4.0, rope_theta=10000.0)
            return with_random_everything(tiny_llama(rope_parameters=rotary))
        config_class, model_class = {
            "mistral": (MistralConfig, MistralForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        }[name]
        more = {"head_dim": 12} if name == "qwen3" else {}
        return with_random_everything(model_class(config_class(**SHAPE, **more)))


NAMES = [
    "llama",
    "llama with biases, one key head a query head",
    "llama with stretched positions",
    "mistral",
    "qwen2",
    "qwen3",
]


def pair_of_caches(model: PreTrainedModel) -> tuple[CachedModel, CachedModel]:
    fast, own = (CachedModel(model, len(TEXTS), 40, keep_hidden_states=True) for _ in range(2))
    assert fast.fast is not None
    own.fast = None
    return fast, own


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_ragged_batch_gets_the_logits_and_the_cache_of_transformers(name: str, tiny_llama: Build) -> None:
    fast, own = pair_of_caches(build(name, tiny_llama))
    for cached in (fast, own):
        cached.read(TEXTS)
    for width, kept in ((1, [1, 1, 1]), (4, [2, 4, 1]), (3, [3, 3, 3])):
        tokens = torch.arange(3 * width).reshape(3, width) + 20
        lengths = list(fast.lengths)
        found, expected = fast.forward(tokens), own.forward(tokens)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(fast.hidden_states, own.hidden_states, atol=2e-4, rtol=1e-4)
        for layer, (mine, theirs) in enumerate(zip(fast.cache.layers, own.cache.layers, strict=True)):
            for row, length in enumerate(fast.lengths):
                for name_of, a, b in (("keys", mine.keys, theirs.keys), ("values", mine.values, theirs.values)):
                    torch.testing.assert_close(
                        a[row, :, :length], b[row, :, :length], atol=1e-4, rtol=1e-4, msg=f"{name_of} of layer {layer}"
                    )
        for cached in (fast, own):
            cached.rollback([length + count for length, count in zip(lengths, kept, strict=True)])


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_one_row_alone(name: str, tiny_llama: Build) -> None:
    model = build(name, tiny_llama)
    fast = CachedModel(model, 1, 40)
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(fast.forward(tokens), model(input_ids=tokens).logits, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_reduced_output_vocabulary(tiny_llama: Build) -> None:
    model = build("llama", tiny_llama)
    tokens, kept = torch.tensor([[5, 6, 7]]), torch.tensor([3, 50, 200])
    whole = CachedModel(model, 1, 8).forward(tokens)
    reduced = copy.deepcopy(model)
    reduce_output_vocabulary(reduced, kept)
    torch.testing.assert_close(CachedModel(reduced, 1, 8).forward(tokens), whole[..., kept])


@torch.inference_mode()
def test_in_bfloat16_it_is_as_near_to_the_truth_as_transformers(tiny_llama: Build) -> None:
    """Packed weights where the machine has them: the same products, rounded elsewhere."""
    precise = build("llama", tiny_llama)
    model = copy.deepcopy(precise).bfloat16()
    tokens = torch.arange(40).reshape(1, 40) + 10
    truth = copy.deepcopy(model).float()(input_ids=tokens).logits
    errors = [
        (logits.float() - truth).square().mean().sqrt()
        for logits in (CachedModel(model, 1, 40).forward(tokens), model(input_ids=tokens).logits)
    ]
    assert 0 < errors[0] < 1.5 * errors[1]


class Adapter(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return -2 * nn.functional.linear(x, self.weight)


class Halved(Tensor):
    """A weight whose products are not those of its numbers."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(Tensor) * 0.5 if function is nn.functional.linear else result


class Mirrored(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, cache: Any = None, **more: Any) -> Any:
        output = super().forward(input_ids=input_ids, position_ids=position_ids, cache=cache, **more)
        output.logits = -output.logits
        return output


def wrap_projection(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj = Adapter(model.model.layers[1].self_attn.o_proj)


def wrap_head(model: Any) -> None:
    model.lm_head = Adapter(model.lm_head)


def steer(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -3 * output)


def turn_what_enters_the_head(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (-args[0],))


def patch(model: Any) -> None:
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: -own(x)


def become_a_subclass(model: Any) -> None:
    model.__class__ = Mirrored


def scale_otherwise(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 3.0


def bias_one_projection(model: Any) -> None:
    linear = model.model.layers[0].self_attn.k_proj
    linear.bias = nn.Parameter(torch.full((linear.out_features,), 3.0))


def quantise_in_a_way_of_its_own(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(Halved(linear.weight.detach()), requires_grad=False)


CHANGES = [
    bias_one_projection,
    quantise_in_a_way_of_its_own,
    wrap_projection,
    wrap_head,
    steer,
    turn_what_enters_the_head,
    patch,
    become_a_subclass,
    scale_otherwise,
]


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_what_a_model_does_beyond_its_weights_is_not_bypassed(
    change: Callable[[Any], None], used_before: bool, tiny_llama: Build, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = tiny_llama(), torch.tensor([[5, 6, 7]])
    before = model(input_ids=tokens).logits
    if used_before:
        assert llama_forward(model) is not None
    change(model)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            found = CachedModel(model, 1, 8).forward(tokens)
    expected = model(input_ids=tokens).logits
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    (message,) = caplog.messages
    assert message.startswith("decoding with transformers' own forward pass: it")


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-2)


def replace_data(model: Any) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = -2 * weight.data


def assign_states(model: Any) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()}, assign=True)


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for place, layer in enumerate(layers):
        layer.self_attn.layer_idx = place


def to_bfloat16(model: Any) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [write_in_place, replace_data, assign_states, swap_layers, to_bfloat16])
def test_other_weights_are_noticed(change: Callable[[Any], None], tiny_llama: Build) -> None:
    model, tokens = tiny_llama(), torch.tensor([[5, 6, 7]])
    first = llama_forward(model)
    assert isinstance(first, LlamaForward)
    assert llama_forward(model) is first
    change(model)
    assert llama_forward(model) is not first
    tolerance = dict(atol=0.3, rtol=0.1) if model.dtype == torch.bfloat16 else dict(atol=2e-4, rtol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(
            CachedModel(model, 1, 8).forward(tokens), model(input_ids=tokens).logits, **tolerance
        )


@torch.inference_mode()
def test_large_weights_are_not_copied(
    tiny_llama: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = build("llama with biases, one key head a query head", tiny_llama), torch.tensor([[5, 6, 7]])
    monkeypatch.setattr("decode.llama.MAX_COPIED_BYTES", 1000)
    monkeypatch.setattr(torch, "cat", refuse_large(torch.cat, 1000))
    with caplog.at_level(logging.INFO):
        found = CachedModel(model, 1, 8).forward(tokens)
    torch.testing.assert_close(found, model(input_ids=tokens).logits, atol=2e-4, rtol=1e-4)
    assert "neither fused nor packed" in caplog.text


def refuse_large(function: Callable[..., Tensor], most: int) -> Callable[..., Tensor]:
    def refusing(*args: Any, **kwargs: Any) -> Tensor:
        result = function(*args, **kwargs)
        assert result.numel() < most
        return result

    return refusing


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)), "rotary tables"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(attn_implementation="eager"), "eager"),
    ],
)
def test_what_it_does_not_know_is_left_to_transformers(
    tiny_llama: Build, caplog: pytest.LogCaptureFixture, config: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert llama_forward(tiny_llama(**config)) is None
    assert reason in caplog.text
