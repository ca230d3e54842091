"""The real target, SmolLM2-135M-Instruct: what everything marked `real` takes for granted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.real

FOLDER = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BRIEF = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def real_target_folder() -> Path:
    if not (FOLDER / "model.safetensors").is_file():
        pytest.fail(f"{FOLDER} is missing: run python scripts/fetch_smollm2.py", pytrace=False)
    return FOLDER


@pytest.fixture(scope="module")
def tokenizer(real_target_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(real_target_folder)


@pytest.fixture(scope="module")
def model(real_target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(real_target_folder)


def test_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 49152
    assert (tokenizer.unk_token, tokenizer.unk_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    for index in range(17):
        token = tokenizer.convert_ids_to_tokens(index)
        assert tokenizer.tokenize(f"a{token}b") == ["a", token, "b"]


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        (QUESTION, f"{SYSTEM}<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"),
        (BRIEF, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"),
    ],
    ids=["default system message", "own system message"],
)
def test_chat_template(tokenizer: Any, messages: list[dict[str, str]], prompt: str) -> None:
    assert tokenizer.apply_chat_template(messages, tokenize=False) == prompt
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert asked == prompt + "<|im_start|>assistant\n"


def test_token_ids_are_the_original_ones(tokenizer: Any) -> None:
    ids = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
    ]
    assert tokenizer(SYSTEM).input_ids == [*ids, 2, 198]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2024", ["2", "0", "2", "4"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("\n\n2024", ["ĊĊ", "2", "0", "2", "4"]),  # a plain ByteLevel pre-tokenizer gives Ċ Ċ
        ("x   1", ["x", "ĠĠĠ", "1"]),
    ],
)
def test_digits_are_split_off_one_by_one(tokenizer: Any, text: str, tokens: list[str]) -> None:
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.parametrize("text", ["naïve 東京, ½ 🙂", "def f(x):\n\treturn x**2  # 2024\n\n\n", "  don't !"])
def test_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_architecture(model: Any) -> None:
    config = model.config
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (8192, 1e-5)
    assert config.rope_parameters["rope_theta"] == 100_000
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_greedy_text(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=32)
    reply = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(reply)
    assert reply[-1] == tokenizer.eos_token_id
