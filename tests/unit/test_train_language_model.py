"""The cross-entropy task: its loss, its padding, its folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from train.language_model import CrossEntropy, LanguageModelTask

ROWS: list[dict[str, Any]] = [
    {"input_ids": np.array([3, 4, 5, 6, 7]), "response_mask": np.array([0, 0, 1, 1, 1], bool)},
    {"input_ids": [8, 9, 10], "response_mask": [True, False, True]},
]


MakeTask = Callable[..., LanguageModelTask]


@pytest.fixture
def task(tiny_llama: Callable[..., LlamaForCausalLM], byte_tokenizer: PreTrainedTokenizerFast) -> MakeTask:
    """Builds the task of a fresh tiny model."""

    def make(eval_rows: Sequence[dict[str, Any]] = (), micro_batch_size: int = 2) -> LanguageModelTask:
        return LanguageModelTask(
            module=CrossEntropy(tiny_llama()),
            tokenizer=byte_tokenizer,
            eval_rows=eval_rows,
            micro_batch_size=micro_batch_size,
        )

    return make


def reference(model: Any, rows: list[dict[str, Any]]) -> tuple[float, int, int]:
    """Loss sum, tokens and correct tokens, row by row and token by token, without padding."""
    loss, tokens, correct = 0.0, 0, 0
    for row in rows:
        ids = [int(i) for i in row["input_ids"]]
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        for position in range(1, len(ids)):
            if row["response_mask"][position]:
                loss -= log_probs[position - 1, ids[position]].item()
                correct += int(log_probs[position - 1].argmax()) == ids[position]
                tokens += 1
    return loss, tokens, correct


def test_loss_is_the_sum_over_response_tokens_whatever_the_padding(task: MakeTask) -> None:
    subject = task()
    with torch.no_grad():
        loss, tokens, correct = reference(subject.module.model, ROWS)
        output = subject.module(subject.collate(ROWS))
    assert tokens == output.num_tokens == 4  # the first position of a row predicts nothing
    assert output.loss_sum.item() == pytest.approx(loss, rel=1e-5)
    assert output.metric_sums["accuracy"] == correct
    with torch.no_grad():  # the control: another mask gives another loss
        other = subject.module(subject.collate([ROWS[0], ROWS[1] | {"response_mask": [True, True, True]}]))
    assert other.loss_sum.item() != pytest.approx(loss, rel=1e-3)


def test_padding_is_on_the_right_and_unlearnt(task: MakeTask) -> None:
    batch = task().collate(ROWS)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 5, 6, 7], [8, -100, 10, -100, -100]]


def test_a_batch_without_response_tokens_has_zero_loss_and_gradients(task: MakeTask) -> None:
    subject = task()
    output = subject.module(subject.collate([{"input_ids": [1, 2], "response_mask": [1, 0]}]))
    output.loss_sum.backward()
    assert (output.loss_sum.item(), output.num_tokens.item()) == (0.0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in subject.module.parameters())


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_evaluation_is_a_mean_over_tokens(micro_batch_size: int, task: MakeTask) -> None:
    subject = task(eval_rows=ROWS, micro_batch_size=micro_batch_size)
    with torch.no_grad():
        loss, tokens, correct = reference(subject.module.model, ROWS)
        metrics = subject.evaluate(subject.module)
    assert metrics == pytest.approx({"loss": loss / tokens, "accuracy": correct / tokens}, rel=1e-5)
    assert task().evaluate(subject.module) == {}


def test_the_saved_folder_is_stock(tmp_path: Path, task: MakeTask) -> None:
    subject = task()
    subject.save(subject.module, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), subject.module.model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("hi").input_ids == subject.tokenizer("hi").input_ids
