"""What a training run, and the command spec-train, are told."""

from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train, whatever the task.

    Args:
        output: run folder; holds metrics.jsonl, checkpoints/, the result, config.yaml and provenance.json
        num_epochs: passes over the data, fractions allowed; ignored when max_steps is given
        max_steps: optimiser steps; wins over num_epochs
        batch_size: sequences per optimiser step, over all processes and accumulation steps
        micro_batch_size: sequences per forward pass of one process; lower it when memory runs out
        optimizer: adamw for everything, or muon for the hidden matrices and adamw for the rest
        learning_rate: peak learning rate of the adamw groups
        muon_learning_rate: peak learning rate of the muon matrices, on adamw's scale (updates of equal size)
        weight_decay: decoupled weight decay of matrices; norms, biases and embeddings have none
        warmup_fraction: share of all steps over which the learning rate rises linearly from zero
        schedule: after the warm-up: cosine falls to the end; wsd stays at the peak, then falls along a straight line
        decay_fraction: share of all steps over which wsd falls
        final_learning_rate_fraction: share of the peak at which the schedule ends
        max_grad_norm: gradient norm above which gradients are scaled down; 0 never clips
        ema_decay: evaluate and save an exponential moving average of the weights, decay such as 0.999; 0 for none
        mixed_precision: bf16 runs forward passes in bfloat16; weights and optimiser keep their own type. auto does so
            where the machine multiplies it faster than float32
        seed: fixes the order of the data and everything random in a step
        log_every_steps: steps between two lines of metrics.jsonl
        eval_every_steps: steps between two evaluations; 0 evaluates only at the end
        select_by: metric of the evaluations, larger is better: save the weights at its best instead of the last ones
        patience: evaluations in a row without a new best of select_by after which training stops; null never does
        checkpoint_every_steps: steps between two checkpoints; 0 writes one only at the end
        keep_checkpoints: how many of the newest checkpoints stay on disk
        trackers: accelerate's names of experiment trackers, such as tensorboard or wandb
    """

    output: str
    num_epochs: float = 1.0
    max_steps: int | None = None
    batch_size: int = 16
    micro_batch_size: int = 16
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-4
    muon_learning_rate: float = 3e-4
    weight_decay: float = 0.01
    warmup_fraction: float = 0.03
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_fraction: float = 0.2
    final_learning_rate_fraction: float = 0.1
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    mixed_precision: Literal["no", "bf16", "auto"] = "no"
    seed: int = 0
    log_every_steps: int = 10
    eval_every_steps: int = 0
    select_by: str | None = None
    patience: int | None = None
    checkpoint_every_steps: int = 500
    keep_checkpoints: int = 2
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        positive = ("num_epochs", "batch_size", "micro_batch_size", "learning_rate", "muon_learning_rate")
        for field in (*positive, "log_every_steps", "keep_checkpoints"):
            self._require(getattr(self, field) > 0, field, "give a number above 0")
        for field in ("weight_decay", "max_grad_norm", "seed", "eval_every_steps", "checkpoint_every_steps"):
            self._require(getattr(self, field) >= 0, field, "give 0 or more")
        for field in ("warmup_fraction", "decay_fraction", "final_learning_rate_fraction"):
            self._require(0 <= getattr(self, field) <= 1, field, "give a fraction between 0 and 1")
        self._require(self.max_steps is None or self.max_steps > 0, "max_steps", "give 1 or more, or null")
        self._require(bool(self.output.strip()), "output", "name a folder for the run")
        self._require(self.optimizer in ("adamw", "muon"), "optimizer", "choose adamw or muon")
        self._require(self.mixed_precision in ("no", "bf16", "auto"), "mixed_precision", "choose no, bf16 or auto")
        self._require(self.schedule in ("cosine", "wsd"), "schedule", "choose cosine or wsd")
        if self.schedule == "wsd":
            fits = self.warmup_fraction + self.decay_fraction <= 1 + 1e-9
            remedy = f"it must fit beside warmup_fraction {self.warmup_fraction}: together at most 1"
            self._require(fits, "decay_fraction", remedy)
        self._check_averaging_and_selection()
        object.__setattr__(self, "trackers", tuple(self.trackers))

    def _check_averaging_and_selection(self) -> None:
        self._require(0 <= self.ema_decay < 1, "ema_decay", "give 0 for none, or a fraction such as 0.999")
        self._require(self.patience is None or self.patience > 0, "patience", "give 1 or more, or null")
        evaluates = self.eval_every_steps > 0
        selects = self.select_by is not None and evaluates
        self._require(self.patience is None or selects, "patience", "give select_by and eval_every_steps too")
        named = self.select_by is None or bool(self.select_by.strip())
        self._require(named, "select_by", "name a metric of the evaluations, or null")
        self._require(self.select_by is None or evaluates, "select_by", "give eval_every_steps too")

    def _require(self, condition: bool, field: str, remedy: str) -> None:
        if not condition:
            raise ValueError(f"{field}: {getattr(self, field)!r} is not possible; {remedy}")


@dataclass(frozen=True, kw_only=True)
class DataLimits:
    """How bad training data may be before it is refused. Shares between 0 and 1; what is beyond a limit is refused.

    Args:
        max_truncated_share: of rows longer than max_length, which lose their end
        max_unlearnable_share: of rows without a response token to learn
        max_unmasked_share: of rows with a prompt, or already tokenised, that are learnt whole, prompt included
        max_unended_share: of whole responses without a stop token, which teach not to stop
        max_reencoded_share: of rows whose text, encoded again, gives other tokens, as a served prompt then would
        min_coverage: of response tokens that a reduced output vocabulary holds
    """

    max_truncated_share: float = 0.1
    max_unlearnable_share: float = 0.1
    max_unmasked_share: float = 0.1
    max_unended_share: float = 0.1
    max_reencoded_share: float = 0.1
    min_coverage: float = 0.5

    def __post_init__(self) -> None:
        """Raises ValueError for a value that is no share."""
        for limit in fields(self):
            if not 0 <= getattr(self, limit.name) <= 1:
                raise ValueError(f"{limit.name}: {getattr(self, limit.name)} is not possible; give a share from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Train a language model with cross-entropy: a warm start for a draft, or a target for a domain.

    Args:
        model: model to start from, a folder or a hub id
        data: .jsonl, .parquet or .txt file, folder of datasets, or hub id; the last two also with a split, name:split
        eval_data: held-out data in any of these forms, for eval/loss and eval/accuracy
        max_length: tokens after which a row is cut
        data_limits: how bad the data may be before it is refused
        train: how to train
    """

    model: str
    data: str
    eval_data: str | None = None
    max_length: int = 1024
    data_limits: DataLimits = DataLimits()
    train: TrainConfig

    def __post_init__(self) -> None:
        """Raises ValueError for a length without a token to predict."""
        if self.max_length < 2:
            raise ValueError(f"max_length: {self.max_length} leaves nothing to predict; give 2 or more")
