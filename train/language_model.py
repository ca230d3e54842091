"""The cross-entropy task of `spec-train`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from .config import LanguageModelConfig
from .data import Row, learnable, read_rows
from .data_check import check_data
from .engine import resolve_precision
from .loop import FitResult, StepOutput, fit

IGNORED = -100


class CrossEntropy(torch.nn.Module):
    """A causal language model with its loss inside forward, as the loop wants it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        """Summed cross-entropy in nats.

        Args:
            batch: input_ids, attention_mask and labels, each int64 [batch, length]; labels are IGNORED where
                there is no loss.
        """
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        logits = self.model(**inputs, use_cache=False).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        learnt = labels != IGNORED
        logits, labels = logits[learnt].float(), labels[learnt]
        correct = (logits.argmax(-1) == labels).sum()
        return StepOutput(cross_entropy(logits, labels, reduction="sum"), learnt.sum(), {"accuracy": correct})


@dataclass(frozen=True, kw_only=True)
class LanguageModelTask:
    """Next-token prediction on the tokens whose response mask is true.

    Attributes:
        module: the model under its loss.
        tokenizer: saved beside the model.
        eval_rows: held-out rows; empty for no evaluation.
        micro_batch_size: rows per forward pass of an evaluation.
        state: nothing; every step is like the others.
    """

    module: CrossEntropy
    tokenizer: Any
    eval_rows: Sequence[Row]
    micro_batch_size: int
    state: dict[str, Any] = field(default_factory=dict, init=False)

    def begin_step(self, step: int, num_steps: int) -> None:
        """Nothing to do."""

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Rows padded on the right to input_ids, attention_mask and labels, int64 [batch, longest]."""
        shape = (len(rows), max(len(row["input_ids"]) for row in rows))
        input_ids = torch.full(shape, self.tokenizer.pad_token_id or 0)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED)
        for i, row in enumerate(rows):
            ids, mask = torch.as_tensor(row["input_ids"]).long(), torch.as_tensor(row["response_mask"]).bool()
            input_ids[i, : len(ids)] = ids
            attention_mask[i, : len(ids)] = 1
            labels[i, : len(ids)] = ids.where(mask, IGNORED)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    def evaluate(self, module: torch.nn.Module) -> dict[str, float]:
        """Mean cross-entropy (nats) and accuracy over eval_rows' tokens; every process does all of it."""
        rows = sorted(self.eval_rows, key=lambda row: len(row["input_ids"]))
        if not rows:
            return {}
        device = next(module.parameters()).device
        loss = tokens = correct = 0.0
        for start in range(0, len(rows), self.micro_batch_size):
            batch = self.collate(rows[start : start + self.micro_batch_size])
            output: StepOutput = module({name: tensor.to(device) for name, tensor in batch.items()})
            loss += output.loss_sum.item()
            tokens += output.num_tokens.item()
            correct += output.metric_sums["accuracy"].item()
        return {"loss": loss / tokens, "accuracy": correct / tokens}

    def save(self, module: torch.nn.Module, folder: Path) -> None:
        """The model and its tokenizer, for from_pretrained."""
        assert isinstance(module, CrossEntropy)
        module.model.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)


def train_language_model(config: LanguageModelConfig) -> FitResult:
    """Reads the data, loads the model in fp32, checks that they make sense, trains it.

    Raises:
        ValueError, OSError: data or model that cannot be used; nothing has been written then.
    """
    tokenizer = _load(AutoTokenizer, config.model)
    rows = read_rows(config.data, tokenizer, config.max_length)
    eval_rows = read_rows(config.eval_data, tokenizer, config.max_length) if config.eval_data else []
    model = _load(AutoModelForCausalLM, config.model, dtype=torch.float32)
    largest = max(int(row["input_ids"].max()) for row in [*rows, *eval_rows])
    if largest >= model.config.vocab_size:
        raise ValueError(
            f"data: token id {largest} is beyond the {model.config.vocab_size} of {config.model}; "
            f"tokenize the data with this model's tokenizer"
        )
    for name, given in (("data", rows), ("eval_data", eval_rows)):
        if given:
            stop_ids = _stop_ids(model, tokenizer)
            check_data(given, tokenizer, stop_ids=stop_ids, limits=config.data_limits, name=name)
    rows, eval_rows = learnable(rows), learnable(eval_rows)
    task = LanguageModelTask(
        module=CrossEntropy(model),
        tokenizer=tokenizer,
        eval_rows=eval_rows,
        micro_batch_size=config.train.micro_batch_size,
    )
    lengths = [len(row["input_ids"]) for row in rows]
    return fit(task, rows, lengths, config.train, resolve_precision(asdict(config)))


def _stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a text: those of the generation config and the tokenizer's end of sequence."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}


def _load(auto_class: Any, name: str, **options: Any) -> Any:
    """Raises ValueError, in one line, for a model that is not there or not whole."""
    try:
        return auto_class.from_pretrained(name, **options)
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        missing = "" if Path(name).is_dir() else "there is no such folder, and the hub did not provide it: "
        raise ValueError(f"model {name}: {missing}{reason}") from error
