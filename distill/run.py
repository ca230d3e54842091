"""Distillation: train a pair's draft on the target's distributions, and leave the trained pair."""

import copy
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute as pc
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.pair import (
    Pair,
    describe_target,
    load_draft_vocab,
    load_model,
    load_tokenizer,
    refuse_other_tokenizer,
    save_draft_vocab,
)
from train.loop import FitResult, StepOutput, fit
from train.provenance import provenance

from .config import RunConfig
from .losses import acceptance, forward_kl, sum_over_chunks
from .responses import hidden_states_dtype, load_responses, refuse_responses_of_another_target
from .teacher import Batch, TeacherHead, collate, final_hidden_states, teacher_signal

logger = logging.getLogger(__name__)


class DistillModule(nn.Module):
    """The draft and what it is taught: forward KL to the teacher on response tokens.

    Args:
        draft: the model that learns, fp32.
        head: the teacher's frozen head, on the draft's output vocabulary.
        target: runs a pass per batch; None when batches bring the teacher's hidden states.
    """

    def __init__(
        self, draft: PreTrainedModel, head: TeacherHead, target: PreTrainedModel | None, config: RunConfig
    ) -> None:
        super().__init__()
        self.draft = draft
        self.head = head
        # in a list, so that its parameters are not this module's: it is neither trained nor saved nor replicated
        self._target = [target]
        self.alignment_weight = config.alignment_weight
        self.chunk_size = config.chunk_size

    def forward(self, batch: Batch) -> StepOutput:
        """Loss and metrics summed over the response tokens of `collate`'s batch."""
        teacher_hidden, log_normalizers = teacher_signal(batch, self._target[0])
        hidden = final_hidden_states(self.draft, batch)

        def chunk_loss(logits: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                normalizers = None if log_normalizers is None else log_normalizers[tokens]
                log_p = self.head.log_probabilities(teacher_hidden[tokens], normalizers)
            log_q = self.head.draft_log_probabilities(logits)
            loss = forward_kl(log_p, log_q).sum()
            with torch.no_grad():
                alpha = acceptance(log_p, log_q).sum()
                top1_agreement = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).float().sum()
            return loss, torch.stack([loss.detach(), alpha, top1_agreement])

        loss_sum, metrics = sum_over_chunks(chunk_loss, hidden, self._head_rows(), self.chunk_size)
        if self.alignment_weight:
            similarity = nn.functional.cosine_similarity(hidden.float(), teacher_hidden.float(), dim=-1)
            loss_sum = loss_sum + self.alignment_weight * (1 - similarity).sum()
        names = ("forward_kl", "alpha", "top1_agreement")
        return StepOutput(
            loss_sum=loss_sum,
            num_tokens=batch["predicts"].sum(),
            metric_sums=dict(zip(names, metrics, strict=True)),
        )

    def _head_rows(self) -> Tensor:
        weight: Tensor = self.draft.get_output_embeddings().weight
        return weight if self.head.token_ids is None else weight[self.head.token_ids]


class DistillTask:
    """What `train.loop.fit` trains: a `DistillModule` on responses, judged by alpha on held-out responses.

    Args:
        module: what learns.
        tokenizer: goes into the pair.
        heldout: responses to judge by.
        pair: what the trained pair will say of itself.
        kept_dtype: of the hidden states kept with the responses; None when the teacher is online.
        micro_batch_size: held-out responses at a time.
    """

    def __init__(
        self,
        module: DistillModule,
        tokenizer: Tokenizer,
        heldout: datasets.Dataset,
        pair: Pair,
        kept_dtype: torch.dtype | None,
        micro_batch_size: int,
    ) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.heldout = heldout
        self.pair = pair
        self.kept_dtype = kept_dtype
        self.micro_batch_size = micro_batch_size

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        return collate(rows, padding_id=self.tokenizer.eos_token_id or 0, kept_dtype=self.kept_dtype)

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Mean alpha, forward KL and top-1 agreement (among the draft's ids) over all held-out response tokens."""
        sums: dict[str, float] = {}
        device = self.module.draft.device
        for start in range(0, len(self.heldout), self.micro_batch_size):
            rows = [self.heldout[i] for i in range(start, min(start + self.micro_batch_size, len(self.heldout)))]
            output: StepOutput = module({name: tensor.to(device) for name, tensor in self.collate(rows).items()})
            for name, value in {**output.metric_sums, "tokens": output.num_tokens}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        num_tokens = sums.pop("tokens")
        return {name: total / num_tokens for name, total in sums.items()}

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write the pair, its draft in the target's dtype."""
        draft = copy.deepcopy(self.module.draft)
        nn.Module.to(draft, self.module.head.weight.dtype)
        draft.save_pretrained(folder / "draft")
        self.tokenizer.save_pretrained(folder / "draft")
        if self.module.head.token_ids is not None:
            save_draft_vocab(folder, self.module.head.token_ids.cpu())
        self.pair.save(folder)


def distill(config: RunConfig) -> FitResult:
    """Train the pair's draft; the trained pair is `train.output`/pair.

    Raises:
        ValueError: a pair, target or responses that are missing or do not fit together.
    """
    datasets.disable_progress_bars()
    folder = Path(config.pair)
    pair = Pair.load(folder)
    target_name = config.target or pair.target_id()
    rows, heldout = load_responses(config.responses, "train"), load_responses(config.responses, "heldout")
    kept_dtype = _kept_dtype(config, rows)
    tokenizer, draft_name = load_tokenizer(target_name, "target"), str(folder / "draft")
    refuse_responses_of_another_target(config.responses, target_name, tokenizer, states=False)
    refuse_other_tokenizer(tokenizer, load_tokenizer(draft_name, "draft"), target_name, draft_name)
    target = load_model(target_name, role="target")
    draft = load_model(draft_name, "float32", "draft")
    head = TeacherHead(target, _on(target.device, load_draft_vocab(folder)), config.temperature)
    if config.alignment_weight and draft.config.get_text_config().hidden_size != head.weight.shape[1]:
        raise ValueError("alignment_weight: draft and target differ in hidden size; use 0")
    if kept_dtype:
        _refuse_other_states(collate([rows[0]], 0, kept_dtype), head, config.responses)
    _choose_trainable(draft, config.train_embeddings)
    module = DistillModule(draft, head, None if kept_dtype else target, config)
    resolved = asdict(config)
    pair.provenance = {**provenance(resolved), "started_from": pair.provenance}
    pair.sampling = {"temperature": config.temperature}
    pair.measured = {}  # was of the draft before
    if config.target:
        pair.target = describe_target(config.target, tokenizer)
    task = DistillTask(module, tokenizer, heldout, pair, kept_dtype, config.train.micro_batch_size)
    lengths = pc.list_value_length(rows.with_format("arrow")[:]["input_ids"]).to_pylist()
    return fit(task, rows, lengths, config.train, resolved, result_name="pair")


def _kept_dtype(config: RunConfig, rows: datasets.Dataset) -> torch.dtype | None:
    """Dtype of the kept hidden states; None when the teacher is online.

    Raises:
        ValueError: they are wanted and were not kept.
    """
    if config.teacher == "online":
        return None
    if "hidden_states" not in rows.column_names:
        raise ValueError(
            f"teacher: responses {config.responses} keep no hidden states; "
            "make them with `spec-distill respond --keep_hidden_states true`, or use teacher online"
        )
    return hidden_states_dtype(config.responses)


def _refuse_other_states(batch: Batch, head: TeacherHead, responses: str) -> None:
    """States of another model would pass for this one's: compare normalisers."""
    states, kept = batch["teacher_hidden"].to(head.weight.device), batch["log_normalizers"]
    if states.shape[1] == head.weight.shape[1]:
        error = (head.log_normalizers(states).cpu() - kept).abs().mean()
        # the same products, maybe summed in another order or on another device
        if error <= max(1e-3, torch.finfo(states.dtype).eps) * kept.abs().mean():
            return
    raise ValueError(f"teacher: the hidden states in {responses} are not of this target; make them anew with it")


def _choose_trainable(draft: PreTrainedModel, train_embeddings: bool) -> None:
    draft.requires_grad_(True)
    head = draft.get_output_embeddings()
    if not train_embeddings:
        draft.get_input_embeddings().requires_grad_(False)
        head.requires_grad_(False)
    elif head.bias is not None:
        head.bias.requires_grad_(False)  # the loss takes the teacher's


def _on(device: torch.device, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
