"""What the teacher says of the responses, on disk: one pass of the frozen target, read back in every epoch.

Of responses that were kept with its hidden states, the pass is spared.
"""

import hashlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decode.pair import describe_target, load_model, load_tokenizer
from decode.progress import ProgressBar
from train.provenance import provenance

from .config import CacheConfig
from .parts import begin, finish, is_complete, part_path, partial, read_record, refuse_full_disk, save_part
from .responses import COLUMNS, GREEDY, RECORD, SPLITS, has_split, load_responses, refuse_responses_of_another_target
from .signal import (
    SIGNAL_RECORD,
    SignalRecord,
    load_record,
    load_signal,
    signal_record,
)
from .teacher import TeacherHead, collate, compile_layers, compiled, final_hidden_states

logger = logging.getLogger(__name__)

# what a kill costs at most; and what is in memory at a time
PASSES_PER_PART = 8


class Part(NamedTuple):
    """Some consecutive rows of a split: what is made at once, and kept in one file."""

    path: Path
    rows: datasets.Dataset
    num_tokens: int


def cache(config: CacheConfig) -> Path:
    """Write the responses anew, with the teacher's signal for each of their tokens.

    The columns are those of `respond`, and those of `SignalRecord.columns`, each the raw bytes of its values for the
    row's response tokens, in order. Interrupted, the same call goes on after the last complete part.

    Raises:
        ValueError: responses or a model that are not there or do not fit together, an output that holds something else
            or was made with other settings, or a disk that does not hold the signal.
    """
    datasets.disable_progress_bars()
    output = Path(config.output)
    made_by = read_record(config.responses, RECORD)
    name = config.target or made_by.get("target", {}).get("id") or made_by["settings"]["target"]
    settings = {key: value for key, value in asdict(config).items() if key not in ("responses", "output")}
    settings["target"] = name
    settings["responses_sha256"] = hashlib.sha256((Path(config.responses) / RECORD).read_bytes()).hexdigest()
    if is_complete(output, SIGNAL_RECORD, settings):
        return output
    folder = partial(output)
    tokenizer = load_tokenizer(name, "target")
    refuse_responses_of_another_target(config.responses, name, tokenizer)
    kept = _kept_states(config, describe_target(name, tokenizer))
    splits = _responses(config.responses, list(COLUMNS) + ["teacher_hidden"] * (kept is not None))
    target = load_model(name, kept.dtype if kept else config.dtype, "target", layers=kept is None)  # type: ignore[arg-type]
    head = TeacherHead(target)
    if config.compile:
        if kept is None:
            compile_layers(target)
        head.log_normalizers = compiled(head.log_normalizers)  # type: ignore[method-assign]
        head.log_probabilities = compiled(head.log_probabilities)  # type: ignore[method-assign]
    top_k, temperature = (config.top_k, config.temperature) if config.kind == "top_k" else (None, None)
    record = signal_record(target, head, describe_target(name, tokenizer), top_k, temperature)
    parts = _parts(folder, splits, PASSES_PER_PART * config.tokens_per_pass)
    _refuse_full_disk(output, record, splits, parts)
    content = {"settings": settings, **asdict(record), "provenance": provenance(asdict(config))}
    begin(output, SIGNAL_RECORD, content)
    features = datasets.Features({**COLUMNS, **record.features()})
    with ProgressBar("teacher signal", sum(part.num_tokens for part in parts)) as bar:
        for part in parts:
            end = bar.done + part.num_tokens
            if part.path.exists():
                bar.skip(end)
                continue
            rows = part.rows.to_list()
            for num_tokens in _add_signal(rows, target, head, record, config, kept):
                bar.advance(num_tokens)
            save_part(rows, features, part.path)
    shutil.copy(Path(config.responses) / RECORD, folder / RECORD)
    finish(output, [part.path for part in parts], features, SIGNAL_RECORD)
    return output


def top_k_and_tail(log_p: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest tokens of each distribution, and what is left for all others.

    Args:
        log_p: fp32 [tokens, vocab]; its entries for the k likeliest are overwritten.
        k: at most vocab.

    Returns:
        ids int64 [tokens, k] and their log p [tokens, k], descending; the log of the others' mass [tokens], -inf for
        none. The others are summed as they are: 1 - sum p would lose a mass below 1e-7.
    """
    top = log_p.topk(k, dim=1)
    log_tail = log_p.scatter_(1, top.indices, -torch.inf).logsumexp(dim=1)
    return top.indices, top.values, log_tail


def _kept_states(config: CacheConfig, target: dict[str, str | None]) -> SignalRecord | None:
    """How the responses keep this target's hidden states; None where they do not, or not in the dtype asked for."""
    record = load_record(config.responses)
    if record is None or record.kind != "hidden_states" or config.dtype not in ("auto", record.dtype):
        return None
    # a fine-tuned target has the config and tokens of another, so it must be in the same place too
    if record.target != target:
        return None
    logger.info("hidden states are read from %s; the target passes over nothing", config.responses)
    return record


def _responses(folder: str, columns: list[str]) -> dict[str, datasets.Dataset]:
    """All splits, with no more than these columns."""
    there = [split for split in SPLITS if split != GREEDY or has_split(folder, split)]
    return {split: load_responses(folder, split).select_columns(columns) for split in there}


def _parts(folder: Path, splits: dict[str, datasets.Dataset], max_tokens: int) -> list[Part]:
    """The files to be made: rows of at most so many tokens together, but at least one row."""
    parts = []
    for split, rows in splits.items():
        lengths = pc.list_value_length(_column(rows, "input_ids")).to_pylist()
        ends, num_tokens = [], 0
        for place, length in enumerate(lengths):
            if num_tokens and num_tokens + length > max_tokens:
                ends.append(place)
                num_tokens = 0
            num_tokens += length
        ends.append(len(lengths))
        for number, (start, end) in enumerate(pairwise([0, *ends])):
            path = part_path(folder, split, number, len(ends))
            parts.append(Part(path, rows.select(range(start, end)), sum(lengths[start:end])))
    return parts


def _size_of_text(rows: datasets.Dataset) -> int:
    size: int = sum(_column(rows, name).nbytes for name in COLUMNS)
    return size


def _column(rows: datasets.Dataset, name: str) -> pa.ChunkedArray:
    return rows.with_format("arrow")[:][name]


def _num_response_tokens(rows: datasets.Dataset) -> int:
    """Of those that anything predicts: not of one at the very beginning."""
    mask = _column(rows, "response_mask")
    count: int = pc.sum(pc.list_flatten(mask)).as_py() - pc.sum(pc.list_element(mask, 0)).as_py()
    return count


def _refuse_full_disk(
    output: Path, record: SignalRecord, splits: dict[str, datasets.Dataset], parts: list[Part]
) -> None:
    """Say how large the signal will be, before anything is made.

    Raises:
        ValueError: the disk does not hold what is still to be written.
    """
    num_tokens = sum(map(_num_response_tokens, splits.values()))
    signal, text = num_tokens * record.bytes_per_token, sum(_size_of_text(rows) for rows in splits.values())
    logger.info(
        "teacher signal: %d response tokens of %d bytes each, %d bytes in all, beside %d bytes of text",
        *(num_tokens, record.bytes_per_token, signal, text),
    )
    needed = signal + text - sum(part.path.stat().st_size for part in parts if part.path.exists())
    refuse_full_disk(output, needed, "keep less with kind top_k and a smaller top_k")


@torch.inference_mode()
def _add_signal(
    rows: list[dict[str, Any]],
    target: PreTrainedModel,
    head: TeacherHead,
    record: SignalRecord,
    config: CacheConfig,
    kept: SignalRecord | None,
) -> Iterator[int]:
    """Put the signal's columns into the rows; yields after each pass how many tokens of text it took."""
    for places in _passes([len(row["input_ids"]) for row in rows], config.tokens_per_pass):
        chosen = [rows[place] for place in places]
        batch = {name: tensor.to(target.device) for name, tensor in collate(chosen, 0).items()}
        if kept is None:
            hidden = final_hidden_states(target, batch)
        else:
            hidden = load_signal(chosen, kept, ("teacher_hidden",))["teacher_hidden"].to(target.device)
            for row in chosen:
                del row["teacher_hidden"]
        following = pad(batch["input_ids"][:, 1:], (0, 1))[batch["predicts"]]
        size = config.chunk_size
        chunks = [
            _signal(states, tokens, head, record)
            for states, tokens in zip(torch.split(hidden, size), torch.split(following, size), strict=True)
        ]
        counts = batch["predicts"].sum(dim=1).tolist()
        for name in record.columns():
            values = torch.cat([chunk[name] for chunk in chunks])
            for row, of_row in zip(chosen, torch.split(values, counts), strict=True):
                row[name] = record.to_bytes(name, of_row)
        yield sum(len(row["input_ids"]) for row in chosen)


def _passes(lengths: list[int], tokens_per_pass: int) -> Iterator[list[int]]:
    """Places of rows of like length, the longest first: as many at a time as fill a pass, padding included."""
    places = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    while places:
        num_rows = max(1, tokens_per_pass // lengths[places[0]])
        yield places[:num_rows]
        places = places[num_rows:]


def _signal(hidden: Tensor, following: Tensor, head: TeacherHead, record: SignalRecord) -> dict[str, Tensor]:
    """What is kept of some tokens, by column, before its dtype is that of the column.

    Args:
        hidden: [tokens, hidden], what entered the head; for so few that their logits fit into memory.
        following: int64 [tokens], the text's own tokens.
    """
    if record.k is None or record.temperature is None:
        return {"teacher_hidden": hidden, "log_normalizers": head.log_normalizers(hidden)}
    log_p = head.log_probabilities(hidden)
    if record.temperature != 1:
        log_p = (log_p / record.temperature).log_softmax(dim=1)
    own = log_p.gather(1, following.unsqueeze(1)).squeeze(1)
    ids, log_p, log_tail = top_k_and_tail(log_p, record.k)
    # below that, p is zero in any arithmetic; but -inf times zero would be no number
    log_p = log_p.clamp_min(torch.finfo(torch.float16).min)
    return {"top_ids": ids, "top_log_p": log_p, "log_tail": log_tail, "token_log_p": own}
