"""What memory allows, and what passes ask of it."""

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

import decode.roofline
from decode.head import reduce_output_vocabulary
from decode.roofline import Roofline, measure_roofline, weight_bytes


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_pass(tied: bool, tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    table = model.get_input_embeddings().weight
    everything = {id(weight): weight for weight in [*model.parameters(), table]}.values()
    # tied, the table is read as the head; else it is beside the head, and a row of it is read
    assert weight_bytes(model) == sum(weight.nbytes for weight in everything) - (0 if tied else table.nbytes)
    whole = weight_bytes(model)
    reduce_output_vocabulary(model, torch.arange(10))
    assert whole - weight_bytes(model) == (len(table) - 10) * table.shape[1] * table.element_size()


def test_a_share_of_what_memory_allows() -> None:
    roofline = Roofline(1000.0, 1500.0, target_bytes=100, draft_bytes=10)
    assert roofline.share(4, 0, seconds=1.0) == pytest.approx(0.4)
    assert roofline.share(2, 6, seconds=0.5) == pytest.approx(0.52)


def test_memory_is_measured(tiny_llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.roofline, "BUFFER_BYTES", 2**20)
    model = tiny_llama()
    found = measure_roofline(model, None)
    assert (found.target_bytes, found.draft_bytes) == (weight_bytes(model), 0)
    assert 1e8 < found.read_bytes_per_second < 1e13 and 1e8 < found.copy_bytes_per_second < 1e13
