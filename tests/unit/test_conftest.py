"""The fixtures keep what they promise; other tests build on it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from decode.sampling import Distribution, sample
from decode.verify import verify_tokenwise
from distill.losses import forward_kl

Build = Callable[..., LlamaForCausalLM]
IDS = torch.arange(40).unsqueeze(0)


@torch.no_grad()
def probabilities(model: LlamaForCausalLM) -> torch.Tensor:
    return model(IDS).logits.softmax(-1)


def test_tiny_llama_is_a_function_of_its_arguments(tiny_llama: Build) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = tiny_llama(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config.num_key_value_heads < model.config.num_attention_heads

    torch.manual_seed(6)
    assert torch.equal(probabilities(tiny_llama(seed=3)), probabilities(model))
    assert tiny_llama(num_layers=1, vocab_size=300, tie_word_embeddings=True).config.vocab_size == 300


def test_tiny_llamas_are_neither_flat_nor_one_hot_and_differ(tiny_llama: Build) -> None:
    p, q = probabilities(tiny_llama(seed=0)), probabilities(tiny_llama(seed=1))
    for distribution in (p, q):
        effective_tokens = torch.special.entr(distribution).sum(-1).exp()
        assert 2 < effective_tokens.median() < 130  # of 259
    overlap = torch.minimum(p, q).sum(-1).mean()
    assert 0.02 < overlap < 0.8


@pytest.mark.parametrize("text", ["", " hi", "naïve 東京 🙂", "def f(x):\n\treturn x  # 2024\n\n", "\0"])
def test_byte_tokenizer_round_trip(byte_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = byte_tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert byte_tokenizer.decode(ids) == text


def test_byte_tokenizer_speaks_chatml(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(byte_tokenizer) == 259
    assert byte_tokenizer.convert_tokens_to_ids(["<|pad|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (byte_tokenizer.pad_token_id, byte_tokenizer.eos_token_id) == (0, 2)
    messages = [{"role": "user", "content": "Hi"}]
    ids = byte_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert byte_tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)


def test_tiny_model_folder_holds_the_model_and_is_built_once(
    tiny_model_folder: Callable[..., Path], tiny_llama: Build, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = tiny_model_folder(seed=7)
    assert tiny_model_folder(seed=7) == folder
    assert tiny_model_folder(seed=8) != folder
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(probabilities(loaded), probabilities(tiny_llama(seed=7)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == byte_tokenizer.get_vocab()
    assert tokenizer.chat_template == byte_tokenizer.chat_template
    assert tokenizer("naïve 🙂").input_ids == byte_tokenizer("naïve 🙂").input_ids


def test_shapes_of_the_pure_modules_are_checked() -> None:
    with pytest.raises(TypeError, match="token_ids"):
        Distribution(torch.full((2, 3), 1 / 3), torch.zeros(4).long())
    p, q = Distribution(torch.full((1, 3, 4), 0.25)), Distribution(torch.full((1, 2, 4), 0.25))
    with pytest.raises(TypeError, match="exponentials"):
        sample(p, torch.ones(3, 1, 4).bool())
    with pytest.raises(TypeError, match="coins"):
        verify_tokenwise(p, q, torch.zeros(1, 2).long(), torch.full((1,), 2), torch.zeros(1, 3))
    with pytest.raises(TypeError, match="log_q"):
        forward_kl(torch.zeros(2, 3), torch.zeros(2, 4))
