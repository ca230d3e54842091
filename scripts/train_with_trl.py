"""TRL's half of scripts/compare_trl: runs in TRL's environment and knows nothing of draftsmith.

GKDTrainer is TRL's trainer that learns a teacher's distributions on texts that are there already (lmbda 0); in its
DistillationTrainer the student always writes them. Beta 0 is forward KL; the loss is at temperature 1, whatever the
configuration says. Chosen in TRL's favour: bf16 autocast and the teacher in its own type where the machine multiplies
bf16 sooner than fp32, and fp32 for both where not, batches of texts of like length,
activations kept (TRL recomputes them unless told), embeddings and head trained too, with which it learns faster than
without, and a learning rate that follows the clock, so that its schedule ends with the time.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import datasets
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, TrainerCallback
from transformers.utils.logging import disable_progress_bar

IGNORED = -100  # the label of tokens that are not learnt
WARM_UP = 0.05


class Clock(TrainerCallback):
    """Ends training when its time is over, and says which share of the peak the learning rate has until then."""

    def __init__(self, seconds: float, now: Callable[[], float] = perf_counter) -> None:
        self.limit, self.now = seconds, now
        self.started: float | None = None
        self.seconds = 0.0  # at the end of the last step

    def learning_rate_factor(self, step: int) -> float:
        """A linear warm-up, then half a cosine down to zero; the step does not matter."""
        progress = min(1.0, self.elapsed() / self.limit)
        if progress < WARM_UP:
            return progress / WARM_UP
        return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = self.elapsed()
        control.should_training_stop = self.seconds >= self.limit

    def elapsed(self) -> float:
        """Seconds since training began."""
        return 0.0 if self.started is None else self.now() - self.started


def with_labels(row: dict[str, list[Any]]) -> dict[str, list[int]]:
    """The same tokens, and the same ones of them to learn, in transformers' terms."""
    labels = [
        token if learnt else IGNORED for token, learnt in zip(row["input_ids"], row["response_mask"], strict=True)
    ]
    return {"input_ids": row["input_ids"], "labels": labels}


def main() -> None:
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    options = parse()
    datasets.disable_progress_bars()
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.draft)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    bf16 = has_bf16_products()
    teacher = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto" if bf16 else torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=torch.float32)
    rows = datasets.load_from_disk(f"{options.responses}/train").select_columns(["input_ids", "response_mask"])
    clock = Clock(options.seconds)

    class Trainer(GKDTrainer):
        num_tokens = 0

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            schedule = torch.optim.lr_scheduler.LambdaLR
            self.lr_scheduler = schedule(optimizer or self.optimizer, clock.learning_rate_factor)
            return self.lr_scheduler

        def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
            self.num_tokens += int((inputs["labels"] != IGNORED).sum())
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = Trainer(
        model=draft,
        teacher_model=teacher,
        args=GKDConfig(
            output_dir=options.output,
            lmbda=0.0,
            beta=0.0,
            temperature=1.0,
            learning_rate=options.learning_rate,
            max_steps=1_000_000,  # the clock ends it
            per_device_train_batch_size=options.micro_batch_size,
            gradient_accumulation_steps=options.batch_size // options.micro_batch_size,
            train_sampling_strategy="group_by_length",
            bf16=bf16,
            use_cpu=not torch.accelerator.is_available(),
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=25,
            seed=0,
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED),
        train_dataset=rows.map(with_labels, remove_columns=["response_mask"], keep_in_memory=True),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    took = {"num_steps": trainer.state.global_step, "num_tokens": trainer.num_tokens, "seconds": clock.seconds}
    draft.to(AutoConfig.from_pretrained(options.target).dtype).save_pretrained(f"{options.output}/draft")
    tokenizer.save_pretrained(f"{options.output}/draft")
    Path(options.output, "took.json").write_text(json.dumps(took, indent=1))


def has_bf16_products() -> bool:
    """Faster than those of fp32; as `mixed_precision: auto` of draftsmith finds out."""
    if not torch.accelerator.is_available():
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("draft", "target", "responses", "output"):
        parser.add_argument(f"--{name}", required=True, help="a folder")
    parser.add_argument("--seconds", type=float, required=True, help="of training")
    parser.add_argument("--learning-rate", type=float, required=True, help="at its peak")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per optimiser step")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="sequences per forward pass")
    return parser.parse_args()


if __name__ == "__main__":
    main()
