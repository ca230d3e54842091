"""Packed documents: nothing lost, nothing predicted across them, and none sees another."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from train.data import Row
from train.packing import collate_packed, pack, refuse_unpackable

VOCAB_SIZE = 64
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.3,
)
SMALL: dict[str, Any] = dict(vocab_size=VOCAB_SIZE, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
BUILD: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    # documents longer than the window, which one of its two layers has
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SMALL)),
    "bloom": lambda: BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, **SMALL)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, **SMALL)),
}

MakeModel = Callable[[str], PreTrainedModel]


@pytest.fixture
def make_model(tiny_llama: Callable[..., LlamaForCausalLM]) -> MakeModel:
    """Builds a tiny model of the kind, with random weights, fp32, in eval mode."""

    def make(kind: str) -> PreTrainedModel:
        if kind == "llama":
            return tiny_llama(vocab_size=VOCAB_SIZE)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return BUILD[kind]().float().eval()

    return make


def documents(*sizes: int) -> list[Row]:
    """Rows of random ids; the first two tokens of each are a prompt."""
    generator = np.random.default_rng(0)
    return [
        {
            "input_ids": generator.integers(0, VOCAB_SIZE, size, np.int32),
            "response_mask": np.arange(size) >= 2,
            "truncated": False,
        }
        for size in sizes
    ]


def split_up(packed: Row) -> list[Row]:
    """The documents of a packed row, by its position ids."""
    starts = np.flatnonzero(packed["position_ids"] == 0)
    parts = {key: np.split(packed[key], starts[1:]) for key in ("input_ids", "response_mask", "position_ids")}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def as_lists(rows: list[Row]) -> list[tuple[list[int], list[bool]]]:
    return sorted((row["input_ids"].tolist(), row["response_mask"].tolist()) for row in rows)


# --- packing ----------------------------------------------------------------------------------------------


def test_documents_go_where_they_fit_best() -> None:
    rows = documents(4, 3, 6, 2, 7, 8)
    packed = pack(rows, 10)
    # 8 and 2, 7 and 3, 6 and 4: in each, the one that was given first comes first
    assert [[len(part["input_ids"]) for part in split_up(row)] for row in packed] == [[2, 8], [3, 7], [4, 6]]
    assert [len(row["input_ids"]) for row in packed] == [10, 10, 10]
    assert as_lists([part for row in packed for part in split_up(row)]) == as_lists(rows)
    assert [row["places"] for row in packed] == [[3, 5], [1, 4], [0, 2]]
    assert packed[0]["position_ids"].tolist() == [0, 1, *range(8)]
    assert [packed[0][key].dtype for key in ("input_ids", "response_mask", "position_ids")] == [
        "int32",
        "bool",
        "int32",
    ]


def test_much_is_packed_well_and_the_same_every_time() -> None:
    generator = random.Random(0)
    rows = documents(*[generator.randint(1, 100) for _ in range(500)])
    packed = pack(rows, 128)
    assert as_lists([part for row in packed for part in split_up(row)]) == as_lists(rows)
    sizes = [len(row["input_ids"]) for row in packed]
    assert max(sizes) <= 128
    assert sum(sizes) > 0.97 * 128 * len(packed)
    again = pack(rows, 128)
    assert [row["input_ids"].tolist() for row in packed] == [row["input_ids"].tolist() for row in again]


def test_a_document_loses_only_what_could_never_be_predicted() -> None:
    rows = [{"input_ids": [5, 6, 7], "response_mask": [True] * 3}, {"input_ids": [8], "response_mask": [True]}]
    (packed,) = pack(rows, 4)
    assert packed["input_ids"].tolist() == [5, 6, 7, 8]
    assert packed["response_mask"].tolist() == [False, True, True, False]
    assert rows[0]["response_mask"] == [True] * 3


def test_a_document_that_fits_exactly_is_packed_and_a_longer_one_refused() -> None:
    assert [len(row["input_ids"]) for row in pack(documents(3, 5), 5)] == [5, 3]
    with pytest.raises(ValueError, match=r"^packing: row 2 has 5 tokens, more than 4; "):
        pack(documents(3, 5), 4)
    assert pack([], 4) == []


# --- batches ----------------------------------------------------------------------------------------------


def test_padding_is_a_document_of_its_own_and_predictions_stay_within_documents() -> None:
    long, short = pack([*documents(3, 2), documents(3, 2, 3)[2]], 5)
    batch = collate_packed([long, short], padding_id=9)
    assert batch["input_ids"].tolist() == [long["input_ids"].tolist(), [*short["input_ids"].tolist(), 9, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
    # the mask is true on the third token of a document, which the second one predicts
    assert batch["predicts"].tolist() == [[False, True, False, False, False]] * 2
    assert [batch[key].dtype for key in batch] == [torch.int64, torch.int64, torch.bool]


def test_predictions_are_as_many_as_response_tokens() -> None:
    rows = documents(*range(1, 20))
    batch = collate_packed(pack(rows, 32), padding_id=0)
    assert batch["predicts"].sum() == sum(row["response_mask"].sum() for row in rows) == 17 * 18 // 2
    assert not batch["predicts"][:, :-1][batch["position_ids"][:, 1:] == 0].any()
    assert not batch["predicts"][:, -1].any()


# --- models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gpt2"])
def test_logits_of_packed_documents_are_those_of_each_alone(kind: str, make_model: MakeModel) -> None:
    model = make_model(kind)
    packed = pack(documents(7, 9, 12, 5, 11, 3), 20)
    batch = collate_packed(packed, padding_id=0)
    assert len(packed) > 1
    assert batch["input_ids"].shape[1] > min(len(row["input_ids"]) for row in packed)  # some is padding
    with torch.no_grad():
        apart = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        mixed = model(input_ids=batch["input_ids"], use_cache=False).logits
        num_later = 0
        for place, row in enumerate(packed):
            start = 0
            for part in split_up(row):
                alone = model(torch.as_tensor(part["input_ids"]).long().unsqueeze(0), use_cache=False).logits[0]
                end = start + len(alone)
                torch.testing.assert_close(apart[place, start:end], alone, rtol=1e-5, atol=1e-4)
                if start:  # the control: without position ids a document sees those before it
                    assert (mixed[place, start:end] - alone).abs().max() > 0.1
                    num_later += 1
                start = end
    assert num_later >= 3


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_keep_documents_apart_are_taken(kind: str, dtype: torch.dtype, make_model: MakeModel) -> None:
    model = make_model(kind).to(dtype).train()
    refuse_unpackable(model)
    assert model.training


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_do_not_are_refused(kind: str, dtype: torch.dtype, make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=f"^packing_length: is not possible, for model type '{kind}' "):
        refuse_unpackable(make_model(kind).to(dtype))
