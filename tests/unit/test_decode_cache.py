"""Feeding tokens in pieces and forgetting some gives the logits of one pass without a cache, or is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from decode.cache import KVCache
from decode.head import reduce_output_vocabulary
from decode.model import CachedModel

VOCAB = 24
CAPACITY = 40
LENGTHS = (17, 12, 20)
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
BOTH_KINDS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=CAPACITY)
MULTI_HEAD = {**SHAPE, "num_key_value_heads": 4}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPE),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", {**SHAPE, "head_dim": 8}),
    "mistral without a window": ("MistralConfig", {**SHAPE, "sliding_window": None}),
    "mistral, window large enough": ("MistralConfig", {**SHAPE, "sliding_window": CAPACITY}),
    "gpt-neox": ("GPTNeoXConfig", MULTI_HEAD),
    "gpt-2": ("GPT2Config", {**GPT, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt-j": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "gpt-neo, window large enough": (
        "GPTNeoConfig",
        dict(
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=CAPACITY,
            max_position_embeddings=64,
            initializer_range=0.3,
        ),
    ),
    "phi": ("PhiConfig", MULTI_HEAD),
    "phi-3": ("Phi3Config", SHAPE),
    "opt": ("OPTConfig", {**MULTI_HEAD, "ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "falcon": ("FalconConfig", {**MULTI_HEAD, "alibi": False}),
    "gemma": ("GemmaConfig", {**SHAPE, "head_dim": 8}),
    "gemma 2": ("Gemma2Config", {**SHAPE, "head_dim": 8, **BOTH_KINDS}),
    "gemma 3": ("Gemma3TextConfig", {**SHAPE, "head_dim": 8, **BOTH_KINDS}),
    "gpt-oss": (
        "GptOssConfig",
        {**SHAPE, **BOTH_KINDS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "num_local_experts": 4},
    ),
}


def build(config_class: str, arguments: dict[str, Any], **more: Any) -> PreTrainedModel:
    config = getattr(transformers, config_class)(**arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **more)
    return model.eval()


@torch.inference_mode()
def largest_error(model: PreTrainedModel) -> float:
    """Feed three texts in pieces, wrong drafts and ragged counts among them; compare with one uncached pass each."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    expected = [model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    cached = CachedModel(model, len(texts), CAPACITY)
    errors = []

    def feed(*ends: int) -> None:
        starts = list(cached.lengths)
        pieces = [text[start:end] for text, start, end in zip(texts, starts, ends, strict=True)]
        logits = forward(cached, pieces)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            errors.append((logits[row, : end - start] - expected[row][start:end]).abs().max().item())

    cached.read([text[:length] for text, length in zip(texts, (6, 1, 8), strict=True)])
    assert cached.lengths == [5, 0, 7]
    feed(6, 3, 8)
    drafted = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    forward(cached, drafted)
    cached.rollback([6, 3, 9])  # nothing of it, and one token too many in the last row
    cached.rollback([6, 3, 8])
    feed(9, 7, 11)
    feed(11, 8, 16)
    feed(17, 12, 20)
    assert cached.lengths == list(LENGTHS)
    assert expected[0].std() > 0.05  # else small errors would mean nothing
    return max(errors)


def forward(cached: CachedModel, pieces: list[list[int]]) -> Tensor:
    width = max(map(len, pieces))
    tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces])
    return cached.forward(tokens, [len(piece) for piece in pieces])


@pytest.mark.parametrize("name", SERVED)
def test_pieces_equal_the_whole(name: str) -> None:
    assert largest_error(build(*SERVED[name])) < 2e-5


@pytest.mark.parametrize("name", ["llama", "gpt-2", "gemma 3"])
def test_eager_attention_gets_a_mask_it_can_add(name: str) -> None:
    model = build(*SERVED[name], attn_implementation="eager")
    assert largest_error(model) < 2e-5


def test_a_mask_of_bools_is_no_mask_for_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the error is when the mask hides nothing."""
    monkeypatch.setattr(CachedModel, "_attention_mask", lambda self: self.cache.attention_mask())
    assert largest_error(build(*SERVED["gemma 2"])) > 0.1


def test_tokens_that_are_not_forgotten_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a cache that shows new tokens what was rolled back."""

    def everything(self: KVCache) -> Tensor:
        return torch.ones(len(self.lengths), 1, self.positions.shape[1], self.extent, dtype=torch.bool)

    monkeypatch.setattr(KVCache, "attention_mask", everything)
    assert largest_error(build(*SERVED["llama"])) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    for name in ("llama", "gemma 2"):
        assert largest_error(build(*SERVED[name]).to(dtype)) < 0.5


STATE_SPACE = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mistral": ("MistralConfig", {**SHAPE, "sliding_window": 8}, "'mistral' .* sliding window of 8 tokens"),
    "gemma 2": ("Gemma2Config", {**SHAPE, "sliding_window": 16}, "'gemma2' .* window of 16 .*asked for 40"),
    "gemma 3": ("Gemma3TextConfig", {**SHAPE, "sliding_window": 16}, "'gemma3_text' .* sliding window of 16"),
    "qwen2": (
        "Qwen2Config",
        {**SHAPE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "'qwen2' .* sliding window of 8 tokens",
    ),
    "gpt-neo": ("GPTNeoConfig", {**SERVED["gpt-neo, window large enough"][1], "window_size": 4}, "window of 4 tokens"),
    "mamba": ("MambaConfig", STATE_SPACE, "'mamba' has layers of kind linear_attention"),
    "qwen3-next": ("Qwen3NextConfig", {**SHAPE, "head_dim": 8}, "'qwen3_next' has layers of kind linear_attention"),
    "llama 4": ("Llama4TextConfig", {**SHAPE, "head_dim": 8}, "'llama4_text' has layers of kind chunked_attention"),
    "rwkv": ("RwkvConfig", STATE_SPACE, "'rwkv' cannot be told the positions"),
    "bloom": ("BloomConfig", dict(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "'bloom' cannot be told"),
    "mpt": ("MptConfig", dict(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4), "'mpt' cannot be told"),
    "falcon": ("FalconConfig", {**MULTI_HEAD, "alibi": True}, "'falcon' cannot be told the positions"),
    "longrope": (
        "Phi3Config",
        {**SHAPE, "rope_parameters": LONGROPE, "original_max_position_embeddings": 10},
        "'phi3' .* differently beyond 10 tokens",
    ),
    "context": ("LlamaConfig", {**SHAPE, "max_position_embeddings": 39}, "is 40 tokens, longer than the context of 39"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_exactly_is_refused_by_name(name: str) -> None:
    config_class, arguments, message = REFUSED[name]
    model = build(config_class, arguments)
    with pytest.raises(ValueError, match=message):
        CachedModel(model, 1, CAPACITY)


@pytest.mark.parametrize("name", ["mistral", "gemma 2", "gemma 3", "qwen2", "gpt-neo", "longrope"])
def test_they_are_refused_for_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.model.refuse_unsupported_cache", lambda model, capacity: None)
    assert largest_error(build(*REFUSED[name][:2])) > 1e-2


def test_a_window_or_context_of_just_the_capacity_is_enough() -> None:
    for config_class, arguments in (
        ("MistralConfig", {**SHAPE, "sliding_window": CAPACITY}),
        ("LlamaConfig", {**SHAPE, "max_position_embeddings": CAPACITY}),
    ):
        model = build(config_class, arguments)
        CachedModel(model, 1, CAPACITY)
        with pytest.raises(ValueError, match=f" of {CAPACITY} "):
            CachedModel(model, 1, CAPACITY + 1)


def test_attention_without_a_mask_per_row_is_refused(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' takes no mask per row"):
        CachedModel(model, 1, CAPACITY)


@torch.inference_mode()
def test_rows_leave_and_change_places(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama(vocab_size=VOCAB)
    texts = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13]]
    cached = CachedModel(model, 3, CAPACITY)
    forward(cached, texts)
    cached.select_rows([2, 1])
    assert cached.lengths == [5, 2]
    logits = forward(cached, [[14, 15], [16]])
    expected = model(input_ids=torch.tensor([[*texts[2], 14, 15]])).logits[0, -2:]
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=2e-5)
    expected = model(input_ids=torch.tensor([[*texts[1], 16]])).logits[0, -1]
    torch.testing.assert_close(logits[1, 0], expected, rtol=0, atol=2e-5)
    assert cached.lengths == [7, 3]


@torch.inference_mode()
def test_what_texts_begin_with_is_read_once(
    tiny_llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(vocab_size=VOCAB)
    texts = [[3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 7, 8, 9, 10]]
    fed: list[tuple[int, ...]] = []
    feed = CachedModel._feed

    def counted(cached: CachedModel, tokens: Tensor, *arguments: Any, **named: Any) -> Tensor | None:
        fed.append(tuple(tokens.shape))
        return feed(cached, tokens, *arguments, **named)

    monkeypatch.setattr(CachedModel, "_feed", counted)
    cached = CachedModel(model, 3, CAPACITY)
    cached.read(texts)
    assert fed == [(1, 2), (2, 3)]  # what all share, then the rest of each text that is unlike all others
    assert cached.lengths == [3, 3, 5]
    logits = cached.forward(torch.tensor([[text[-1]] for text in texts]))
    for row, text in enumerate(texts):
        expected = model(input_ids=torch.tensor([text])).logits[0, -1]
        torch.testing.assert_close(logits[row, 0], expected, rtol=0, atol=2e-5)
    fed.clear()
    cached.read([[*text, 11, 12] for text in texts])  # later, every row has a past of its own
    assert fed == [(3, 1)]
    fed.clear()
    CachedModel(model, 1, CAPACITY).read(texts[:1])
    assert fed == [(1, 3)]


@torch.inference_mode()
def test_a_cache_that_is_begun_again_is_where_it_says(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """Where C++ writes into it, too."""
    model = tiny_llama(vocab_size=VOCAB, hidden_size=64, num_attention_heads=2, num_key_value_heads=1).bfloat16()
    texts = [[3, 4, 5, 6], [3, 4, 7, 8]]
    cached, fresh = (CachedModel(model, 2, CAPACITY) for _ in range(2))
    cached.read([[9, 9, 8, 7], [9, 9, 1, 2]])
    cached.rollback([0, 0])
    for each in (cached, fresh):
        each.read(texts)
    tokens = torch.tensor([[6], [8]])
    assert torch.equal(cached.forward(tokens), fresh.forward(tokens))
    for mine, theirs in zip(cached.cache.layers, fresh.cache.layers, strict=True):
        assert mine.keys is not None and theirs.keys is not None
        assert torch.equal(mine.keys[:, :, :4], theirs.keys[:, :, :4])


def test_rows_can_leave_before_anything_is_fed(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    cached = CachedModel(tiny_llama(), 3, CAPACITY)
    cached.read([[5], [6], [7]])  # one token each: nothing to feed
    assert cached.lengths == [0, 0, 0]
    cached.select_rows([1])
    assert cached.lengths == [0]
    assert cached.forward(torch.tensor([[6]])).shape == (1, 1, 259)


def test_a_cache_holds_its_capacity_and_no_more(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    cached = CachedModel(tiny_llama(), 2, 8)
    cached.forward(torch.ones(2, 8, dtype=torch.long))
    cached.rollback([8, 3])
    with pytest.raises(AssertionError, match="cache of 8 tokens asked to hold 9"):
        cached.forward(torch.ones(2, 1, dtype=torch.long))
    cached.rollback([7, 3])
    cached.forward(torch.ones(2, 1, dtype=torch.long))
    with pytest.raises(AssertionError):
        cached.rollback([8, 5])  # more than it remembers


def test_a_vocabulary_beyond_the_head_is_refused(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    with pytest.raises(ValueError, match="draft vocabulary: id 259 is beyond the 259 of the draft's head"):
        reduce_output_vocabulary(tiny_llama(), torch.tensor([0, 259]))
