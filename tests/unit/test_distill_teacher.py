"""Texts to batches, models to hidden states, and heads: whole distributions from final hidden states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from decode.params import SamplingParams
from decode.plain import PlainDecoder
from distill.teacher import Head, TeacherHead, collate, compile_layers, final_hidden_states, hidden_states

VOCAB = 60
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SHAPE = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "phi, with a bias": lambda: PhiForCausalLM(PhiConfig(**SHAPE | {"num_key_value_heads": 2})),
    # a cap this low bends these small logits
    "gemma2, soft-capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, final_logit_softcapping=2.0, attn_logit_softcapping=None, query_pre_attn_scalar=8)
    ),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)),
    "cohere, multiplied": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SHAPE)),
}
PROMPTS = [[1, 5, 6], [1, 7, 8, 9, 10, 11, 12], [1, 30]]
SOME_IDS = torch.tensor([2, 5, 17, 31, 59])


def build(name: str) -> PreTrainedModel:
    """With weights large enough that the distributions are neither flat nor one-hot, and biases that matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
        model.tie_weights()
    return model


@pytest.fixture(scope="module", params=["llama", *MODELS])
def model(request: pytest.FixtureRequest, tiny_llama: Callable[..., LlamaForCausalLM]) -> PreTrainedModel:
    if request.param == "llama":
        return tiny_llama(vocab_size=VOCAB, hidden_size=16)
    return build(request.param)


def generate(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Responses of different lengths, as `spec-distill respond` keeps them."""
    decoder = PlainDecoder(model, frozenset([2, 3, 4, 5]))
    completions = decoder.generate_ids(PROMPTS, SamplingParams(temperature=1.0, max_new_tokens=9, seed=3))
    return [
        {
            "input_ids": prompt + completion.ids,
            "response_mask": [False] * len(prompt) + [True] * len(completion.ids),
        }
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]


@torch.no_grad()
def true_log_p(model: PreTrainedModel, temperature: float, rows: list[dict[str, Any]]) -> Tensor:
    """From the model's own logits, row by row without padding, in float64."""
    parts = []
    for row in rows:
        start = row["response_mask"].index(True)
        logits = model(input_ids=torch.tensor([row["input_ids"][:-1]]), use_cache=False).logits[0, start - 1 :]
        parts.append((logits.double() / temperature).log_softmax(-1))
    return torch.cat(parts)


# --- batches ----------------------------------------------------------------------------------------------


def test_collate_pads_and_marks_what_predicts_a_response_token() -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "response_mask": [False, False, True, True]},
        {"input_ids": [9, 10, 11, 12, 13, 14], "response_mask": [False, True, False, False, True, True]},
        {"input_ids": [15, 16], "response_mask": [True, True]},  # nothing precedes its first token
    ]
    batch = collate(rows, padding_id=3)
    assert set(batch) == {"input_ids", "predicts"}
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 3, 3], [9, 10, 11, 12, 13, 14], [15, 16, 3, 3, 3, 3]]
    assert batch["predicts"].int().tolist() == [[0, 1, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
    assert (batch["input_ids"].dtype, batch["predicts"].dtype) == (torch.int64, torch.bool)


def test_a_batch_without_response_tokens_is_empty_and_no_error(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    batch = collate([{"input_ids": [1, 2, 3], "response_mask": [False] * 3}], 0)
    assert final_hidden_states(tiny_llama(), batch).shape == (0, 32)


@torch.no_grad()
def test_hidden_states_of_a_padded_batch_are_those_of_each_row(model: PreTrainedModel) -> None:
    rows = generate(model)
    together = final_hidden_states(model, collate(rows, 0))
    alone = torch.cat([final_hidden_states(model, collate([row], 0)) for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    # the control: in another order they are others
    other = torch.cat([final_hidden_states(model, collate([row], 0)) for row in reversed(rows)])
    assert (together - other).abs().max() > 0.1


@torch.no_grad()
def test_packed_texts_have_the_hidden_states_of_single_ones(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    """What a batch brings along, such as the position ids of packed texts, reaches the model."""
    model, one, two = tiny_llama(), torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]])
    packed = {"input_ids": torch.cat([one, two], 1), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    alone = torch.cat([hidden_states(model, {"input_ids": ids}) for ids in (one, two)], dim=1)
    torch.testing.assert_close(hidden_states(model, packed), alone, rtol=1e-4, atol=1e-5)
    del packed["position_ids"]
    assert (hidden_states(model, packed) - alone)[:, 3:].abs().max() > 0.1  # the control


# --- log-probabilities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_ids", [None, SOME_IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_hidden_states_give_the_targets_own_distribution(
    temperature: float, token_ids: Tensor | None, model: PreTrainedModel
) -> None:
    rows = generate(model)
    expected = true_log_p(model, temperature, rows)
    columns = torch.arange(VOCAB) if token_ids is None else token_ids
    head = TeacherHead(model, token_ids, temperature)
    hidden = final_hidden_states(model, collate(rows, 0))
    normalizers = head.log_normalizers(hidden)
    for log_p in (head.log_probabilities(hidden), head.log_probabilities(hidden, normalizers)):
        assert (log_p.dtype, log_p.shape) == (torch.float32, (len(expected), len(columns)))
        torch.testing.assert_close(log_p.double(), expected[:, columns], rtol=1e-5, atol=5e-5)
    # the control: distributions of this family differ from row to row and with the temperature by far more
    assert (expected - true_log_p(model, 0.8, rows))[:, columns].abs().max() > 0.05
    assert (expected - expected.roll(1, 0))[:, columns].abs().max() > 0.5


@torch.no_grad()
def test_normalizers_kept_in_bfloat16_are_those_of_a_head_in_float32(
    tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    """On a CPU that multiplies float32 sooner; its logits are rounded as those were that the normalisers are of."""
    model = tiny_llama().bfloat16()
    hidden = 40 * torch.randn(50, 32).bfloat16()  # logits of a peaked distribution, where bf16 is coarse
    normalizers = TeacherHead(model).log_normalizers(hidden)
    head = TeacherHead(model.float())
    assert head.log_probabilities(hidden, normalizers).logsumexp(dim=-1).abs().max() < 0.01
    exact = (hidden.float() @ model.lm_head.weight.T).logsumexp(dim=-1)
    assert (exact - normalizers).abs().max() > 0.03  # the control


@torch.no_grad()
def test_kept_normalizers_are_of_the_logits_made_where_passes_run_in_bfloat16(
    tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    model = tiny_llama()
    hidden = 40 * torch.randn(50, 32)
    head = TeacherHead(model)
    normalizers = head.log_normalizers(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert head.log_probabilities(hidden, normalizers).logsumexp(dim=-1).abs().max() < 1e-4
        rounded = (hidden @ model.lm_head.weight.T).float().logsumexp(dim=-1)
    assert (rounded - normalizers).abs().max() > 0.01  # the control


def test_kept_normalizers_are_used_at_temperature_one_only(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    hidden, wrong = torch.randn(5, 32), torch.zeros(5)
    at_one, at_half = TeacherHead(model), TeacherHead(model, temperature=0.5)
    assert torch.equal(at_half.log_probabilities(hidden, wrong), at_half.log_probabilities(hidden))
    assert not torch.allclose(at_one.log_probabilities(hidden, wrong), at_one.log_probabilities(hidden))


@pytest.mark.parametrize("token_ids", [None, SOME_IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_the_drafts_distribution_is_what_its_logits_say(
    temperature: float, token_ids: Tensor | None, model: PreTrainedModel
) -> None:
    """The draft here is the target: its logits on the wanted columns, softmaxed over these."""
    rows = generate(model)
    hidden = final_hidden_states(model, collate(rows, 0))
    columns = torch.arange(VOCAB) if token_ids is None else token_ids
    head = Head(model, token_ids, "draft")
    products = hidden @ model.get_output_embeddings().weight[columns].T
    log_q = (head.finish(products) / temperature).log_softmax(-1)
    expected = true_log_p(model, temperature, rows)[:, columns].log_softmax(-1)
    torch.testing.assert_close(log_q.double(), expected, rtol=1e-5, atol=5e-5)


def test_the_head_is_shared_and_takes_no_gradient(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama().requires_grad_(True)
    head = TeacherHead(model)
    assert head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert not head.log_probabilities(torch.randn(2, 32)).requires_grad


class Squaring(LlamaForCausalLM):
    """A model that does to its logits what nobody has heard of."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.square()
        return output


def test_logits_made_in_an_unknown_way_are_refused(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama()
    TeacherHead(model)
    model.__class__ = Squaring
    with pytest.raises(ValueError, match=r"^target: model type 'llama' makes its logits .* use another target"):
        TeacherHead(model)
    with pytest.raises(ValueError, match=r"^draft: model type 'llama' makes its logits .* use another draft"):
        Head(model, role="draft")


# 2026-11: torch 2.13 warns of itself while it compiles
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@torch.no_grad()
def test_layers_are_compiled_whatever_a_model_calls_them() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4)).eval()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = model(ids).logits
    compile_layers(model)
    assert all(layer._compiled_call_impl is not None for layer in model.get_decoder().h)
    torch.testing.assert_close(model(ids).logits, expected)
