"""The C++ pass says what the others say, in bfloat16, and steps aside where it must."""

import copy
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import decode.native
import decode.native_library
from decode.llama import LlamaForward
from decode.model import CachedModel
from decode.native import NativeForward, native_forward
from decode.native_library import Unavailable, native_library
from decode.native_sampling import native_available

Build = Callable[..., LlamaForCausalLM]
SHAPE: dict[str, Any] = dict(
    vocab_size=150,  # no multiple of anything
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,
)


needs_native = pytest.mark.skipif(not native_available(), reason="needs a compiler and a CPU with AVX-512")


def build(name: str, tiny_llama: Build) -> PreTrainedModel:
    """A bfloat16 model whose norms and biases are not ones and zeros, which would hide that they were forgotten."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "llama":
            llama = {key: value for key, value in SHAPE.items() if key not in ("num_hidden_layers", "vocab_size")}
            llama |= dict(head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
            model: PreTrainedModel = tiny_llama(num_layers=3, **llama)
        elif name == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE | dict(num_attention_heads=3, num_key_value_heads=3)))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=64))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:
                    weight += 0.3 * torch.randn(weight.shape)
    return model.bfloat16().eval()


def with_and_without(model: PreTrainedModel, num_rows: int, capacity: int) -> tuple[CachedModel, CachedModel]:
    native, plain = (CachedModel(model, num_rows, capacity, keep_hidden_states=True) for _ in range(2))
    assert native.fast is not None and native.fast.native is not None
    plain.fast = None
    return native, plain


# of bf16, whose numbers are 0.4% apart, after three layers
ROUNDING = dict(atol=0.03, rtol=0.03)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float() - truth).square().mean().sqrt())


@needs_native
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_it_is_as_near_to_the_truth_as_transformers(name: str, tiny_llama: Build) -> None:
    model = build(name, tiny_llama)
    precise = copy.deepcopy(model).float()
    texts = torch.arange(3 * 60).reshape(3, 60) % 140
    native, plain = with_and_without(model, 3, 60)
    start = 0
    # less than a tile of sixteen, one, and more
    for width in (1, 2, 3, 4, 5, 16, 29):
        tokens = texts[:, start : start + width]
        start += width
        truth = precise(input_ids=texts[:, :start]).logits[:, -width:]
        errors = [error(cached.forward(tokens), truth) for cached in (native, plain)]
        assert 0 < errors[0] < 1.2 * errors[1], width
        # a mistake would be of the size of the logits themselves
        assert errors[0] < 0.1 * float(truth.std())
    for mine, theirs in zip(native.cache.layers, plain.cache.layers, strict=True):
        assert error(mine.keys, theirs.keys.float()) < 0.05 * float(theirs.keys.float().std())
        assert error(mine.values, theirs.values.float()) < 0.05 * float(theirs.values.float().std())


@needs_native
@torch.inference_mode()
def test_without_matrix_units_it_says_the_same(tiny_llama: Build) -> None:
    """Where a CPU has some, they are left unused."""
    model = build("llama", tiny_llama)
    with_units, without = (CachedModel(model, 3, 60) for _ in range(2))
    assert isinstance(without.fast, LlamaForward)
    without.fast = copy.copy(without.fast)
    without.fast.native = NativeForward(model, native_library(with_units=False))
    texts = torch.arange(3 * 60).reshape(3, 60) % 140
    for width in (1, 2, 3, 4, 5, 16, 29):
        tokens, texts = texts.split([width, texts.shape[1] - width], dim=1)
        found, expected = without.forward(tokens), with_units.forward(tokens)
        assert error(found, expected.float()) < 0.01 * float(expected.std())


@needs_native
@torch.inference_mode()
def test_many_tokens_are_read_piece_by_piece(tiny_llama: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build("llama", tiny_llama), torch.arange(3 * 40).reshape(3, 40) % 140
    at_once, _ = with_and_without(model, 3, 60)
    expected = at_once.forward(tokens)
    monkeypatch.setattr(decode.native, "MOST_TOKENS", 16)  # of three rows, five each
    sizes = []
    forward = NativeForward._pass
    monkeypatch.setattr(
        NativeForward, "_pass", lambda self, part, *rest: sizes.append(part.shape) or forward(self, part, *rest)
    )
    in_pieces, _ = with_and_without(model, 3, 60)
    found = in_pieces.forward(tokens)
    assert set(sizes) == {(3, 5)} and len(sizes) == 8
    assert error(found, expected.float()) < 0.01 * float(expected.std())
    for mine, theirs in zip(in_pieces.cache.layers, at_once.cache.layers, strict=True):
        assert error(mine.keys, theirs.keys.float()) < 0.01 * float(theirs.keys.float().std())


@needs_native
@torch.inference_mode()
def test_rows_of_different_lengths_do_not_see_each_other(tiny_llama: Build) -> None:
    model = build("llama", tiny_llama)
    texts = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]
    together, _ = with_and_without(model, 3, 40)
    together.read(texts)
    tokens = torch.tensor([[20, 21], [22, 23], [24, 25]])
    found = together.forward(tokens)
    together.rollback([len(text) for text in texts])  # all but the last token of each
    again = together.forward(tokens[:, 1:])
    for row, text in enumerate(texts):
        alone, _ = with_and_without(model, 1, 40)
        alone.read([text])
        expected = alone.forward(tokens[row : row + 1])
        torch.testing.assert_close(found[row], expected[0], **ROUNDING)
        torch.testing.assert_close(again[row], expected[0, 1:], **ROUNDING)
    together.select_rows([2, 1])
    kept = together.forward(torch.tensor([[26], [27]]))
    alone.forward(torch.tensor([[26]]))  # of the last row, which is the first now
    alone.rollback([len(texts[2]) + 1])
    torch.testing.assert_close(kept[0], alone.forward(torch.tensor([[26]]))[0], **ROUNDING)


@needs_native
@torch.inference_mode()
def test_a_long_input_at_once_and_in_pieces(tiny_llama: Build) -> None:
    model = build("qwen2", tiny_llama)
    text = torch.arange(150).remainder(140).unsqueeze(0)
    truth = copy.deepcopy(model).float()(input_ids=text).logits[:, -3:]
    for size in (147, 50):
        native, plain = with_and_without(model, 1, 150)
        for start in range(0, 147, size):
            native.forward(text[:, start : min(start + size, 147)])
        plain.forward(text[:, :147])
        assert error(native.forward(text[:, 147:]), truth) < 1.3 * error(plain.forward(text[:, 147:]), truth)


@needs_native
@torch.inference_mode()
def test_threads_share_the_work(tiny_llama: Build) -> None:
    model = build("qwen3", tiny_llama)
    native, _ = with_and_without(model, 2, 40)
    tokens = torch.arange(14).reshape(2, 7)
    alone = native.forward(tokens)
    native.rollback([0, 0])
    torch.set_num_threads(2)
    assert torch.equal(native.forward(tokens), alone)


@needs_native
@torch.inference_mode()
def test_what_entered_the_head_is_kept(tiny_llama: Build) -> None:
    model = build("llama", tiny_llama)
    for cached in with_and_without(model, 1, 8):
        logits = cached.forward(torch.tensor([[5, 6, 7]]))
        assert cached.hidden_states is not None
        torch.testing.assert_close(model.get_output_embeddings()(cached.hidden_states), logits, atol=0.02, rtol=0.02)


@needs_native
def test_odd_sizes_and_other_types_do_without(tiny_llama: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reasons = []
    for model in (
        tiny_llama(hidden_size=64),
        tiny_llama(hidden_size=48).bfloat16(),
        tiny_llama(hidden_size=64, num_attention_heads=4).bfloat16(),
        tiny_llama(hidden_size=64, num_attention_heads=2, intermediate_size=100).bfloat16(),
    ):
        assert native_forward(model) is None
        reasons.append(caplog.messages[-1].removeprefix("decoding without the C++ pass: "))
    assert reasons == [
        "it is made for bfloat16 on CPUs, and this is torch.float32 on cpu",
        "hidden_size 48 is no multiple of 32",
        "head_dim 16 is no multiple of 32",
        "intermediate_size 100 is no multiple of 32",
    ]


def narrow_a_layer(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = nn.Parameter(linear.weight[:64].clone())
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, :64].clone())


def narrow_all_layers(model: Any) -> None:
    for layer in model.model.layers:
        mlp = layer.mlp
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight, linear.out_features = nn.Parameter(linear.weight[:64].clone()), 64
        mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, :64].clone())


def change_an_epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 10.0


def change_one_kind_of_epsilon(model: Any) -> None:
    for layer in model.model.layers:
        layer.post_attention_layernorm.variance_epsilon = 10.0


def change_the_last_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 10.0


CHANGES = [narrow_a_layer, narrow_all_layers, change_an_epsilon, change_one_kind_of_epsilon, change_the_last_epsilon]


@needs_native
@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_weights_that_are_not_as_the_config_says_do_without(change: Callable[[Any], None], tiny_llama: Build) -> None:
    model, tokens = build("qwen2", tiny_llama), torch.tensor([[5, 6, 7]])
    change(model)
    cached = CachedModel(model, 1, 8)
    assert cached.fast is not None and cached.fast.native is None
    expected = model(input_ids=tokens).logits.float()
    assert error(cached.forward(tokens), expected) < 0.05 * float(expected.std())


@needs_native
@torch.inference_mode()
def test_a_token_that_is_none_of_the_models(tiny_llama: Build) -> None:
    native, _ = with_and_without(build("llama", tiny_llama), 1, 8)
    for token in (-1, 259, 10**9):
        with pytest.raises(IndexError, match="a token is none of the model's 259"):
            native.forward(torch.tensor([[5, token]]))


@needs_native
@torch.inference_mode()
def test_not_a_number_is_not_hidden(tiny_llama: Build) -> None:
    model = build("llama", tiny_llama)
    model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    native, plain = with_and_without(model, 1, 8)
    tokens = torch.tensor([[5, 6, 7]])
    assert native.forward(tokens).isnan().all() and plain.forward(tokens).isnan().all()


@needs_native
def test_fewer_threads_than_asked_for() -> None:
    code = (
        "import torch; from transformers import LlamaConfig, LlamaForCausalLM; from decode.model import CachedModel\n"
        "config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,"
        " num_attention_heads=2, num_key_value_heads=2)\n"
        "cached = CachedModel(LlamaForCausalLM(config).bfloat16().eval(), 1, 8); assert cached.fast.native\n"
        "torch.set_num_threads(2); print(cached.forward(torch.tensor([[1, 2]])).shape)"
    )
    variables = os.environ | {"OMP_THREAD_LIMIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["torch.Size([1,", "2,", "64])"], done.stderr


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "there is no C.. compiler no-such-compiler"),
        ({"CXX": "no-such-compiler -m64"}, "there is no C.. compiler no-such-compiler"),
        ({"CXX": "false"}, "compiling it failed: .*false"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "compiling it failed: .*/dev/null"),
    ],
)
@needs_native
@torch.inference_mode()
def test_without_a_compiler_or_a_folder_torch_does_it(
    variables: dict[str, str],
    reason: str,
    tiny_llama: Build,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")  # or what was compiled before is found
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(decode.native, "native_library", decode.native_library.native_library.__wrapped__)
    model, tokens = build("llama", tiny_llama), torch.tensor([[5, 6, 7]])
    cached = CachedModel(model, 1, 8)
    assert isinstance(cached.fast, LlamaForward) and cached.fast.native is None
    (message,) = [message for message in caplog.messages if "C++ pass" in message]
    assert re.search(reason, message)
    expected = model(input_ids=tokens).logits.float()
    assert error(cached.forward(tokens), expected) < 0.05 * float(expected.std())


@needs_native
@pytest.mark.parametrize("why", ["compiler", "system"])
def test_where_matrix_units_are_of_no_use_it_does_without(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that does not know them, or a system that does not grant them."""
    caplog.set_level(logging.INFO)
    has = torch.cpu.get_capabilities()
    units = dict.fromkeys(("avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"), True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has | units)
    load = decode.native_library._load

    def without(command: list[str]) -> Any:
        if "-mamx-tile" not in command:
            return load(command)
        if why == "compiler":
            raise Unavailable("compiling it failed: unrecognized command-line option")
        return SimpleNamespace(request_units=lambda: 1)

    monkeypatch.setattr(decode.native_library, "_load", without)
    assert decode.native_library.native_library.__wrapped__().forward.argtypes
    (message,) = [message for message in caplog.messages if "matrix units" in message]
    assert message.startswith("C++ without matrix units: ")


@needs_native
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decode.native_library.native_library.__wrapped__()
    (made,) = (tmp_path / "draftsmith").iterdir()  # and nothing half-made beside it
    with monkeypatch.context() as context:
        context.setattr(decode.native_library.subprocess, "run", None)  # would be called in vain
        decode.native_library.native_library.__wrapped__()
    broken = tmp_path / "other" / "draftsmith" / made.name  # as a crash may leave it
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    decode.native_library.native_library.__wrapped__()
    assert made.suffix == ".so" and broken.stat().st_size == made.stat().st_size


@needs_native
def test_a_head_with_fewer_rows_than_a_block(tiny_llama: Build) -> None:
    model = build("llama", tiny_llama)
    model.set_output_embeddings(nn.Linear(96, 7, bias=False).bfloat16())
    with torch.inference_mode():
        logits = with_and_without(model, 1, 8)[0].forward(torch.tensor([[5]]))
        torch.testing.assert_close(logits, model(input_ids=torch.tensor([[5]])).logits, **ROUNDING)
