"""What the teacher says of a text, as it is kept on disk.

Beside each response stands a signal for each of its tokens, in one of two kinds.

`top_k` holds the k likeliest tokens at one temperature, their log p, the log of the mass of all others, and the log p
of the text's own token; nothing is renormalised. log p is kept in fp16, whose rounding is at most 2^-11 of log p, so
that p is off by at most 2^-11 p |log p| <= 2^-11 / e = 0.00018, and the p of a position together by at most 2^-11 of
its entropy in nats. The mass of the others is that beside the exact p.

`hidden_states` holds what entered the target's head, to the bit, and the logsumexp of the logits it became: with the
frozen head, whole distributions at any temperature.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.pair import describe_target, refuse_other_target

from .config import SignalKind
from .parts import read_record
from .teacher import TeacherHead

SIGNAL_RECORD = "cache.json"


@dataclass(frozen=True, kw_only=True)
class SignalRecord:
    """What `cache.json` says of a signal.

    Attributes:
        kind: which of the two.
        k: tokens kept at each position; None for hidden states.
        temperature: of the distributions; None for hidden states, which serve any.
        dtype: that of the target, and of its hidden states.
        vocab_size, hidden_size: the shape of the target's head.
        target: the teacher: where it was, and the hashes of its config and tokenizer.
    """

    kind: SignalKind
    k: int | None
    temperature: float | None
    dtype: str
    vocab_size: int
    hidden_size: int
    target: dict[str, str | None]

    def columns(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Of each column: the dtype it is kept in, and the shape of what it holds for one token."""
        if self.k is not None:
            ids = torch.uint16 if self.vocab_size <= 2**16 else torch.int32
            return {
                "top_ids": (ids, (self.k,)),
                "top_log_p": (torch.float16, (self.k,)),
                "log_tail": (torch.float32, ()),
                "token_log_p": (torch.float32, ()),
            }
        return {
            "teacher_hidden": (getattr(torch, self.dtype), (self.hidden_size,)),
            "log_normalizers": (torch.float32, ()),
        }

    @property
    def bytes_per_token(self) -> int:
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.columns().values())

    def features(self) -> datasets.Features:
        """Of the columns: the raw bytes of each row's values."""
        return datasets.Features({name: datasets.Value("large_binary") for name in self.columns()})

    def to_bytes(self, name: str, values: Tensor) -> bytes:
        """What a row has in a column, from values for each of its response tokens."""
        dtype, _ = self.columns()[name]
        return values.cpu().to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


def signal_record(
    target: PreTrainedModel,
    head: TeacherHead,
    described: dict[str, str | None],
    k: int | None = None,
    temperature: float | None = None,
) -> SignalRecord:
    """Of a signal that this target is about to give: of its k likeliest tokens at a temperature, or its hidden states.

    Raises:
        ValueError: the target has no k tokens.
    """
    vocab_size, hidden_size = head.weight.shape
    if k is not None and k > vocab_size:
        raise ValueError(f"top_k: {k} is not possible; the target has {vocab_size} tokens")
    return SignalRecord(
        kind="hidden_states" if k is None else "top_k",
        k=k,
        temperature=temperature,
        dtype=str(target.dtype).removeprefix("torch."),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        target=described,
    )


def load_record(folder: str) -> SignalRecord | None:
    """What signal stands beside these responses; None where there is none.

    Raises:
        ValueError: its record is damaged.
    """
    if not (Path(folder) / SIGNAL_RECORD).is_file():
        return None
    record = read_record(folder, SIGNAL_RECORD)
    try:
        return SignalRecord(**{field.name: record[field.name] for field in fields(SignalRecord)})
    except KeyError as error:
        raise ValueError(f"responses {folder}: {SIGNAL_RECORD} does not say its {error}; make them anew") from error


def load_signal(
    rows: list[dict[str, Any]], record: SignalRecord, columns: Collection[str] | None = None
) -> dict[str, Tensor]:
    """The signal of some rows, for all their response tokens in order.

    Args:
        rows: of a folder that has one.
        record: what `load_record` says of it.
        columns: those wanted; None for all.

    Returns:
        For top_k: top_ids int64 [tokens, k], by descending p; top_log_p fp32 [tokens, k]; log_tail fp32 [tokens], the
        log of the mass of all other tokens, -inf for none; token_log_p fp32 [tokens], log p of the text's own token.
        For hidden_states: teacher_hidden [tokens, hidden] in the target's dtype; log_normalizers fp32 [tokens], at
        temperature 1.
    """
    signal = {}
    for name, (dtype, shape) in record.columns().items():
        if columns is not None and name not in columns:
            continue
        raw = bytearray().join(row[name] for row in rows)
        values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        signal[name] = values.view(-1, *shape)
    if record.kind == "top_k":
        signal["top_ids"], signal["top_log_p"] = signal["top_ids"].long(), signal["top_log_p"].float()
    return signal


def refuse_cache_of_another_target(folder: str, record: SignalRecord, name: str, tokenizer: Tokenizer) -> None:
    """A teacher's signal can stand in for that teacher only.

    Raises:
        ValueError: the signal in `folder` is not that of target `name`.
    """
    refuse_other_target(record.target, describe_target(name, tokenizer), f"teacher's signal in {folder}")
