"""What the teacher says of the responses, on disk: one pass of the frozen target, read back in every epoch.

Beside each response stands a signal for each of its tokens, in one of two kinds.

`top_k` holds the k likeliest tokens at one temperature, their log p, the log of the mass of all others, and the log p
of the text's own token; nothing is renormalised. log p is kept in fp16, whose rounding is at most 2^-11 of log p, so
that p is off by at most 2^-11 p |log p| <= 2^-11 / e = 0.00018, and the p of a position together by at most 2^-11 of
its entropy in nats. The mass of the others is that beside the exact p.

`hidden_states` holds what entered the target's head, to the bit, and the logsumexp of the logits it became: with the
frozen head, whole distributions at any temperature.
"""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
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
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.pair import describe_target, load_model, load_tokenizer, refuse_other_target
from decode.progress import ProgressBar
from train.checkpoint import publish, write_text
from train.provenance import provenance

from .config import CacheConfig, SignalKind
from .responses import (
    COLUMNS,
    GREEDY,
    RECORD,
    SPLITS,
    has_split,
    is_complete,
    load_responses,
    partial,
    read_record,
    refuse_responses_of_another_target,
)
from .teacher import TeacherHead, collate, compile_layers, compiled, final_hidden_states

logger = logging.getLogger(__name__)

SIGNAL_RECORD = "cache.json"
# what a kill costs at most; and what is in memory at a time
PASSES_PER_PART = 8


@dataclass(frozen=True, kw_only=True)
class CacheRecord:
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


class Part(NamedTuple):
    """Some consecutive rows of a split: what is made at once, and kept in one file."""

    path: Path
    rows: datasets.Dataset
    num_tokens: int


def cache(config: CacheConfig) -> Path:
    """Write the responses anew, with the teacher's signal for each of their tokens.

    The columns are those of `respond`, and those of `CacheRecord.columns`, each the raw bytes of its values for the
    row's response tokens, in order. Interrupted, the same call goes on after the last complete part.

    Raises:
        ValueError: responses or a model that are not there or do not fit together, an output that holds something else
            or was made with other settings, or a disk that does not hold the signal.
    """
    datasets.disable_progress_bars()
    output = Path(config.output)
    made_by = read_record(config.responses)
    name = config.target or made_by.get("target", {}).get("id") or made_by["settings"]["target"]
    settings = {key: value for key, value in asdict(config).items() if key not in ("responses", "output")}
    settings["target"] = name
    settings["responses_sha256"] = hashlib.sha256((Path(config.responses) / RECORD).read_bytes()).hexdigest()
    if is_complete(output, SIGNAL_RECORD, settings):
        return output
    folder = partial(output)
    splits = _responses(config.responses)
    tokenizer = load_tokenizer(name, "target")
    refuse_responses_of_another_target(config.responses, name, tokenizer)
    target = load_model(name, config.dtype, "target")
    head = TeacherHead(target)
    if config.compile:
        compile_layers(target)
        head.log_normalizers = compiled(head.log_normalizers)  # type: ignore[method-assign]
        head.log_probabilities = compiled(head.log_probabilities)  # type: ignore[method-assign]
    record = _record(config, target, head, describe_target(name, tokenizer))
    parts = _parts(folder, splits, PASSES_PER_PART * config.tokens_per_pass)
    _refuse_full_disk(output, record, splits, parts)
    if (begun := load_record(str(folder))) is None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"settings": settings, **asdict(record), "provenance": provenance(asdict(config))}
        write_text(folder / SIGNAL_RECORD, json.dumps(content, indent=2))
    elif begun != record:
        raise ValueError(f"output {output}: was begun with another target of the same name; delete {folder}")
    with ProgressBar("teacher signal", sum(part.num_tokens for part in parts)) as bar:
        for part in parts:
            end = bar.done + part.num_tokens
            if part.path.exists():
                bar.skip(end)
                continue
            rows = part.rows.to_list()
            for num_tokens in _add_signal(rows, target, head, record, config):
                bar.advance(num_tokens)
            _save(rows, _features(record), part.path)
    _finish(folder, parts, _features(record), Path(config.responses))
    publish(folder, output)
    return output


def load_record(folder: str) -> CacheRecord | None:
    """What signal stands beside these responses; None where there is none.

    Raises:
        ValueError: its record is damaged.
    """
    if not (Path(folder) / SIGNAL_RECORD).is_file():
        return None
    record = read_record(folder, SIGNAL_RECORD)
    try:
        return CacheRecord(**{field.name: record[field.name] for field in fields(CacheRecord)})
    except KeyError as error:
        raise ValueError(f"responses {folder}: {SIGNAL_RECORD} does not say its {error}; make them anew") from error


def load_signal(rows: list[dict[str, Any]], record: CacheRecord) -> dict[str, Tensor]:
    """The signal of some rows, for all their response tokens in order.

    Args:
        rows: of a folder that `cache` wrote.
        record: what `load_record` says of it.

    Returns:
        For top_k: top_ids int64 [tokens, k], by descending p; top_log_p fp32 [tokens, k]; log_tail fp32 [tokens], the
        log of the mass of all other tokens, -inf for none; token_log_p fp32 [tokens], log p of the text's own token.
        For hidden_states: teacher_hidden [tokens, hidden] in the target's dtype; log_normalizers fp32 [tokens], at
        temperature 1.
    """
    signal = {}
    for name, (dtype, shape) in record.columns().items():
        raw = bytearray().join(row[name] for row in rows)
        values = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        signal[name] = values.view(-1, *shape)
    if record.kind == "top_k":
        signal["top_ids"], signal["top_log_p"] = signal["top_ids"].long(), signal["top_log_p"].float()
    return signal


def refuse_cache_of_another_target(folder: str, record: CacheRecord, name: str, tokenizer: Tokenizer) -> None:
    """A teacher's signal can stand in for that teacher only.

    Raises:
        ValueError: the signal in `folder` is not that of target `name`.
    """
    refuse_other_target(record.target, describe_target(name, tokenizer), f"teacher's signal in {folder}")


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


def _responses(folder: str) -> dict[str, datasets.Dataset]:
    """All splits, without a signal that they may have already."""
    there = [split for split in SPLITS if split != GREEDY or has_split(folder, split)]
    return {split: load_responses(folder, split).select_columns(list(COLUMNS)) for split in there}


def _record(
    config: CacheConfig, target: PreTrainedModel, head: TeacherHead, described: dict[str, str | None]
) -> CacheRecord:
    vocab_size, hidden_size = head.weight.shape
    top_k = config.kind == "top_k"
    if top_k and config.top_k > vocab_size:
        raise ValueError(f"top_k: {config.top_k} is not possible; the target has {vocab_size} tokens")
    return CacheRecord(
        kind=config.kind,
        k=config.top_k if top_k else None,
        temperature=config.temperature if top_k else None,
        dtype=str(target.dtype).removeprefix("torch."),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        target=described,
    )


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
            path = folder / split / f"data-{number:05d}-of-{len(ends):05d}.arrow"
            parts.append(Part(path, rows.select(range(start, end)), sum(lengths[start:end])))
    return parts


def _column(rows: datasets.Dataset, name: str) -> pa.ChunkedArray:
    return rows.with_format("arrow")[:][name]


def _num_response_tokens(rows: datasets.Dataset) -> int:
    """Of those that anything predicts: not of one at the very beginning."""
    mask = _column(rows, "response_mask")
    count: int = pc.sum(pc.list_flatten(mask)).as_py() - pc.sum(pc.list_element(mask, 0)).as_py()
    return count


def _refuse_full_disk(
    output: Path, record: CacheRecord, splits: dict[str, datasets.Dataset], parts: list[Part]
) -> None:
    """Say how large the signal will be, before anything is made.

    Raises:
        ValueError: the disk does not hold what is still to be written.
    """
    num_tokens = sum(map(_num_response_tokens, splits.values()))
    signal, text = num_tokens * record.bytes_per_token, sum(rows.data.nbytes for rows in splits.values())
    logger.info(
        "teacher signal: %d response tokens of %d bytes each, %d bytes in all, beside %d bytes of text",
        *(num_tokens, record.bytes_per_token, signal, text),
    )
    needed = signal + text - sum(part.path.stat().st_size for part in parts if part.path.exists())
    output.parent.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(output.parent).free):
        raise ValueError(
            f"output {output}: needs {needed / 1e9:.2f} GB, and the disk has {free / 1e9:.2f} GB free; "
            "free some, name a folder on another disk, or keep less with kind top_k and a smaller top_k"
        )


@torch.inference_mode()
def _add_signal(
    rows: list[dict[str, Any]], target: PreTrainedModel, head: TeacherHead, record: CacheRecord, config: CacheConfig
) -> Iterator[int]:
    """Put the signal's columns into the rows; yields after each pass how many tokens of text it took."""
    for places in _passes([len(row["input_ids"]) for row in rows], config.tokens_per_pass):
        chosen = [rows[place] for place in places]
        batch = {name: tensor.to(target.device) for name, tensor in collate(chosen, 0).items()}
        hidden = final_hidden_states(target, batch)
        following = pad(batch["input_ids"][:, 1:], (0, 1))[batch["predicts"]]
        size = config.chunk_size
        chunks = [
            _signal(states, tokens, head, record)
            for states, tokens in zip(torch.split(hidden, size), torch.split(following, size), strict=True)
        ]
        counts = batch["predicts"].sum(dim=1).tolist()
        for name, (dtype, _) in record.columns().items():
            values = torch.cat([chunk[name] for chunk in chunks]).cpu().to(dtype)
            for row, of_row in zip(chosen, torch.split(values, counts), strict=True):
                row[name] = of_row.view(torch.uint8).numpy().tobytes()
        yield sum(len(row["input_ids"]) for row in chosen)


def _passes(lengths: list[int], tokens_per_pass: int) -> Iterator[list[int]]:
    """Places of rows of like length, the longest first: as many at a time as fill a pass, padding included."""
    places = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    while places:
        num_rows = max(1, tokens_per_pass // lengths[places[0]])
        yield places[:num_rows]
        places = places[num_rows:]


def _signal(hidden: Tensor, following: Tensor, head: TeacherHead, record: CacheRecord) -> dict[str, Tensor]:
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


def _features(record: CacheRecord) -> datasets.Features:
    return datasets.Features({**COLUMNS, **{name: datasets.Value("large_binary") for name in record.columns()}})


def _save(rows: list[dict[str, Any]], features: datasets.Features, path: Path) -> None:
    """One file of a split, as `datasets` writes them: complete, or not under its name."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    schema = features.arrow_schema
    with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    publish(temporary, path)


def _finish(folder: Path, parts: list[Part], features: datasets.Features, responses: Path) -> None:
    """Write what makes a `datasets.DatasetDict` of the parts where they lie; a copy of them would need the disk twice.

    `datasets` reads a split from the files that its state.json names, by the features in its dataset_info.json.
    """
    splits: dict[str, list[str]] = {}
    for part in parts:
        splits.setdefault(part.path.parent.name, []).append(part.path.name)
    for split, names in splits.items():
        datasets.DatasetInfo(features=features).write_to_directory(str(folder / split))
        # tells `datasets` which rows a derived file is of
        fingerprint = hashlib.sha256(f"{split} {(folder / SIGNAL_RECORD).read_text()}".encode()).hexdigest()[:16]
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        write_text(folder / split / "state.json", json.dumps(state, indent=2))
    write_text(folder / "dataset_dict.json", json.dumps({"splits": list(splits)}))
    shutil.copy(responses / RECORD, folder / RECORD)
