"""Kinds of models, and pairs whose draft differs from its target in dtype or in the padding of its vocabulary.

Tiny random models in fp32: plain greedy decoding is transformers' own `generate`, speculative decoding is plain
decoding, greedy and seeded, with rows of different lengths in one batch.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from decode.lookup import CascadeProposer, LookupProposer
from decode.params import SamplingParams, SpeculationParams
from decode.plain import PlainDecoder
from decode.proposer import DraftModelProposer, Proposer
from decode.self_draft import SelfDraft, new_adapter
from decode.self_proposer import self_draft_proposer
from decode.speculative import SpeculativeEngine

Build = Callable[..., LlamaForCausalLM]
VOCAB, CONTEXT, WINDOW = 80, 64, 40
PROMPTS = [[1, 40, 41, 42, 43, 44, 45, 46, 47], [9], [7, 7, 20, 3]]
NUM_NEW = 24

SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=CONTEXT,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# tied embeddings would make so small a model repeat its input
GEMMA = dict(sliding_window=WINDOW, query_pre_attn_scalar=8, tie_word_embeddings=False)
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, tied, llama3 positions": LlamaConfig(
        **SHAPE | dict(max_position_embeddings=128),
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=100.0,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama, biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=4.0),
    "gemma3": Gemma3TextConfig(**SHAPE, **GEMMA, layer_types=["sliding_attention", "full_attention"]),
    "gpt-neox": GPTNeoXConfig(**SHAPE),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "phi": PhiConfig(**SHAPE | dict(num_key_value_heads=4), partial_rotary_factor=0.5),
    "phi3": Phi3Config(**SHAPE, sliding_window=None),
}
WINDOWED = ("mistral, window", "gemma2", "gemma3")


@cache
def build(name: str, attention: str | None = None) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=attention)
    model.generation_config.pad_token_id = 0
    with torch.no_grad():  # norms and biases that are not all ones and zeros
        generator = torch.Generator().manual_seed(1)
        for weight in model.parameters():
            if weight.ndim == 1:
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return model.float().eval()


def perturbed(model: Any, size: float) -> Any:
    """The model with noise on its weights, `size` of their spread."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in other.parameters():
            weight += size * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


def assert_speculates_exactly(
    target: Any, proposer: Proposer, share_accepted: tuple[float, float] = (0.15, 0.99), **speculation: Any
) -> None:
    """Greedy and seeded texts of a ragged batch are those of plain decoding, with a draft that is partly right."""
    engine = SpeculativeEngine(
        target, proposer, SpeculationParams(**dict(num_draft_tokens=3, never_slower=False) | speculation)
    )
    num_vocab = target.get_output_embeddings().out_features
    for params in (
        SamplingParams(max_new_tokens=NUM_NEW),
        SamplingParams(max_new_tokens=NUM_NEW, temperature=0.8, seed=4),
        SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, top_p=0.9, seed=5, repetition_penalty=1.1),
        [SamplingParams(max_new_tokens=NUM_NEW - 7 * row, temperature=0.9 * row, seed=row) for row in range(3)],
    ):
        expected = PlainDecoder(target, frozenset()).generate_ids(PROMPTS, params)
        completions, traces = engine.generate_ids(PROMPTS, params)
        assert [completion.ids for completion in completions] == [completion.ids for completion in expected]
        accepted = sum(trace.num_accepted for trace in traces) / sum(trace.num_verified for trace in traces)
        assert share_accepted[0] < accepted < share_accepted[1]
        assert all(0 <= token < num_vocab for completion in completions for token in completion.ids)


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_greedy_text_is_that_of_transformers(name: str) -> None:
    model = build(name)
    params = SamplingParams(max_new_tokens=NUM_NEW)
    stop_ids = frozenset({2})
    together = PlainDecoder(model, stop_ids).generate_ids(PROMPTS, params)
    assert any(len(set(completion.ids)) > 3 for completion in together)
    for prompt, completion in zip(PROMPTS, together, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=2
        )
        assert expected[0, len(prompt) :].tolist() == completion.ids


@pytest.mark.parametrize("name", CONFIGS)
def test_speculative_text_is_that_of_plain_decoding(name: str) -> None:
    target = build(name)
    draft = DraftModelProposer(perturbed(target, 0.1), VOCAB)
    assert_speculates_exactly(target, draft)
    assert_speculates_exactly(target, CascadeProposer(LookupProposer(range(VOCAB)), draft), (0.05, 0.99))


@pytest.mark.parametrize("kind", ["skipped attention", "skipped MLP", "exit", "adapter"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_target_drafts_for_itself(name: str, kind: str) -> None:
    target = build(name)
    before = {key: weight.clone() for key, weight in target.state_dict().items()}
    config = target.config.to_dict()
    tensors = None
    if kind == "exit":
        spec = SelfDraft(num_layers=1)
    elif kind == "adapter":
        spec, generator = SelfDraft(num_layers=1, adapter="layer"), torch.Generator().manual_seed(3)
        # which would be the target's own last layer
        tensors = {
            name: weight + 0.1 * torch.randn(weight.shape, generator=generator)
            for name, weight in new_adapter(target, "layer").items()
        }
    else:
        spec = SelfDraft(skipped_attention=(1,)) if kind == "skipped attention" else SelfDraft(skipped_mlp=(0,))
    assert_speculates_exactly(target, self_draft_proposer(target, spec, tensors=tensors), (-1, 0.95))
    assert target.config.to_dict() == config
    assert all(torch.equal(weight, before[key]) for key, weight in target.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_eager_attention(name: str) -> None:
    """The only one that gemma2 has, for its soft-capping."""
    target = build(name, "eager")
    params = SamplingParams(max_new_tokens=NUM_NEW)
    for prompt, completion in zip(
        PROMPTS, PlainDecoder(target, frozenset()).generate_ids(PROMPTS, params), strict=True
    ):
        ids = torch.tensor([prompt])
        expected = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None
        )
        assert expected[0, len(prompt) :].tolist() == completion.ids
    assert_speculates_exactly(target, DraftModelProposer(perturbed(target, 0.1), VOCAB))


@pytest.mark.parametrize("name", WINDOWED)
def test_a_text_beyond_the_sliding_window_is_refused(name: str) -> None:
    target, draft = build(name), DraftModelProposer(build("llama"), VOCAB)
    prompt = list(range(3, 23))
    for params, fits in ((SamplingParams(max_new_tokens=20), True), (SamplingParams(max_new_tokens=21), False)):
        for proposer in (None, draft):
            engine = SpeculativeEngine(target, proposer, SpeculationParams(num_draft_tokens=8, never_slower=False))
            if fits:
                engine.generate_ids([prompt], params)
            else:
                with pytest.raises(ValueError, match=r"sliding window of 40 tokens.*keep prompt \+ new tokens at or"):
                    engine.generate_ids([prompt], params)
    # nor may the draft be one
    engine = SpeculativeEngine(build("llama"), DraftModelProposer(target, VOCAB))
    with pytest.raises(ValueError, match="sliding window of 40 tokens"):
        engine.generate_ids([prompt], SamplingParams(max_new_tokens=21))


@pytest.mark.parametrize(("target_name", "draft_name"), [("llama", "gpt2"), ("gpt2", "qwen3"), ("gemma3", "phi")])
def test_a_draft_of_another_architecture(target_name: str, draft_name: str) -> None:
    assert_speculates_exactly(build(target_name), DraftModelProposer(build(draft_name), VOCAB), (-1, 0.5))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_a_draft_of_another_dtype(name: str) -> None:
    """The target decides what is said, in its own dtype."""
    target = build(name)
    draft = DraftModelProposer(perturbed(target, 0.05).bfloat16(), VOCAB)
    for verification in ("auto", "block", "tokenwise"):
        if verification == "auto":
            assert_speculates_exactly(target, draft)
            continue
        engine = SpeculativeEngine(
            target,
            draft,
            SpeculationParams(num_draft_tokens=3, never_slower=False, verification=verification),  # type: ignore[arg-type]
        )
        params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.8, seed=1)
        completions, traces = engine.generate_ids(PROMPTS, params)
        assert [len(completion.ids) for completion in completions] == [NUM_NEW] * 3
        assert sum(trace.num_accepted for trace in traces) > 10


def repadded(model: LlamaForCausalLM, build: Build, vocab_size: int) -> LlamaForCausalLM:
    """The model with fewer or more rows of padding in its embeddings and head."""
    other = build(seed=0, vocab_size=vocab_size)
    weights = model.state_dict()
    for name, weight in other.state_dict().items():
        same = min(len(weight), len(weights[name]))
        weight[:same] = weights[name][:same]
    return other


@pytest.mark.parametrize("verification", ["auto", "block", "tokenwise"])
@pytest.mark.parametrize(("draft_vocab", "target_vocab"), [(259, 264), (264, 259)])
def test_vocabularies_padded_differently_just_work(
    tiny_llama: Build, draft_vocab: int, target_vocab: int, verification: str
) -> None:
    target = tiny_llama(seed=0, vocab_size=target_vocab)
    draft = perturbed(repadded(target, tiny_llama, draft_vocab), 0.03)
    model = DraftModelProposer(draft, target_vocab)
    # the last token means nothing to a smaller draft; the target's own padding may be drawn as any other token
    prompts = [*PROMPTS, [1, target_vocab - 1]]
    params = [
        SamplingParams(max_new_tokens=NUM_NEW),
        SamplingParams(max_new_tokens=NUM_NEW, temperature=1.2, seed=1),
        SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, top_k=20, seed=2, frequency_penalty=0.3),
        SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, top_p=0.9, seed=3, logit_bias={target_vocab - 1: 7.0}),
    ]
    for proposer in (model, CascadeProposer(LookupProposer(), model)):
        engine = SpeculativeEngine(
            target,
            proposer,
            SpeculationParams(num_draft_tokens=3, never_slower=False, verification=verification),  # type: ignore[arg-type]
        )
        expected = [c.ids for c in PlainDecoder(target, frozenset()).generate_ids(prompts, params)]
        completions, traces = engine.generate_ids(prompts, params)
        texts = [completion.ids for completion in completions]
        assert texts == expected if verification == "auto" else texts[0] == expected[0]
        assert all(0 <= token < target_vocab for ids in texts for token in ids)
        assert target_vocab - 1 in texts[3]
        assert sum(trace.accepted[0] for trace in traces) > 0.4 * sum(trace.reached[0] for trace in traces)
        for prompt, each, ids in zip(prompts, params, texts, strict=True):
            (alone,), _ = engine.generate_ids([prompt], [each])
            assert alone.ids == ids
