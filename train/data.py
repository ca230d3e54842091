"""Training text, from files, folders and the hub, to token ids and response masks."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

logger = logging.getLogger(__name__)

# What a row may hold; other columns are not read.
COLUMNS = ("input_ids", "response_mask", "finish_reason", "messages", "prompt", "response", "text")
SHAPES = '"text", "prompt" and "response", "messages", or "input_ids" and "response_mask"'

Row = dict[str, Any]


def read_rows(source: str | Path, tokenizer: Any, max_length: int) -> list[Row]:
    """Reads training data, in its own order; all of it stays in memory, at five bytes a token.

    Args:
        source: a .jsonl or .parquet file, a .txt file (one document per line), a folder saved by datasets, a folder
            that datasets.load_dataset can read, or a hub id. Folders and hub ids may name a split, as in
            "org/name:test"; where load_dataset reads them, also part of one, as in "org/name:train[:1000]".
        tokenizer: a transformers tokenizer; unused for rows of token ids.
        max_length: tokens after which a row is cut.

    Returns:
        Rows as of `encode`. Blank texts are left out.

    Raises:
        ValueError: a source that cannot be read or holds no rows; a malformed line or row, named with its number.
    """
    rows = []
    for place, record in _records(str(source)):
        try:
            row = encode(record, tokenizer, max_length)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if len(row["input_ids"]):
            rows.append(row)
    if not rows:
        raise ValueError(f"data: {source} has no rows, so nothing to learn from; give another source")
    return rows


def learnable(rows: Sequence[Row]) -> list[Row]:
    """The rows with a response token beyond the first position; the others teach nothing and are left out aloud."""
    kept = [row for row in rows if row["response_mask"][1:].any()]
    if len(kept) < len(rows):
        logger.info("%d of %d rows have no response token, left out", len(rows) - len(kept), len(rows))
    return kept


def encode(record: Any, tokenizer: Any, max_length: int) -> Row:
    """Token ids and response mask of one record.

    Args:
        record: an object with "text", with "prompt" and "response", with "messages", or, already tokenised, with
            "input_ids" and "response_mask"; "finish_reason" says why the model that wrote the response stopped.
        tokenizer: a transformers tokenizer; unused for token ids.
        max_length: tokens after which the row is cut.

    Returns:
        input_ids: int32 [length].
        response_mask: bool [length]; the loss is on the tokens whose mask is true.
        truncated: whether the row was cut.
        has_prompt: false for a text, which is learnt whole.
        finish_reason: where the record has one.

    Raises:
        ValueError: the record has none of the known shapes, or the chat template rewrites what came before.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a row must be an object, not {type(record).__name__}")
    has_prompt = True
    if "input_ids" in record and "response_mask" in record:
        ids, mask = _tokenised(record)
    elif "messages" in record:
        ids, mask = _encode_messages(record["messages"], tokenizer)
    elif "prompt" in record and "response" in record:
        prompt, response = _string(record, "prompt"), _string(record, "response")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        ids, mask = _encode_messages(messages, tokenizer)
    elif "text" in record:
        ids, mask = _encode_text(_string(record, "text"), tokenizer)
        has_prompt = False
    else:
        raise ValueError(f"a row needs {SHAPES}")
    row = {
        "input_ids": np.asarray(ids[:max_length], np.int32),
        "response_mask": np.asarray(mask[:max_length], np.bool_),
        "truncated": len(ids) > max_length,
        "has_prompt": has_prompt,
    }
    return row | ({"finish_reason": record["finish_reason"]} if "finish_reason" in record else {})


def _tokenised(record: dict[str, Any]) -> tuple[Any, Any]:
    ids, mask = np.asarray(record["input_ids"]), np.asarray(record["response_mask"])
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min(initial=0) < 0:
        raise ValueError('"input_ids" must be a list of token ids, one or more')
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} input_ids but {len(mask)} in response_mask")
    if mask.ndim != 1 or mask.dtype.kind not in "biu":
        raise ValueError('"response_mask" must be a list of true and false, or of 1 and 0')
    return ids, mask


def _encode_text(text: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The whole document, its end included, is learnt. A blank one has no tokens."""
    if not text.strip():
        return [], []
    ids: list[int] = list(tokenizer(text, verbose=False)["input_ids"])
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids, [True] * len(ids)


def _encode_messages(messages: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Every assistant turn is learnt: the tokens that follow those of the prompt that would elicit it."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError('"messages" must be a list of objects with "role" and "content"')
    replies = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not replies:
        raise ValueError('"messages" has no turn with role "assistant" to learn')
    if replies[0] == 0:
        raise ValueError('"messages" begins with an answer; put what it answers before it, or leave it out')
    if not tokenizer.chat_template:
        raise ValueError('the tokenizer has no chat template; use rows with "text"')
    for message in messages:
        _string(message, "content")
    ids = _apply_template(tokenizer, messages[: replies[-1] + 1], add_generation_prompt=False)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    mask = [False] * len(ids)
    for reply in replies:
        prompt = _apply_template(tokenizer, messages[:reply], add_generation_prompt=True)
        through = _apply_template(tokenizer, messages[: reply + 1], add_generation_prompt=False)
        if through[: len(prompt)] != prompt or ids[: len(through)] != through:
            raise ValueError(
                f"message {reply + 1}: the chat template renders the prompt differently once the reply is "
                f"there, so a loss mask would be wrong; use one reply a row, or another template"
            )
        # what the template puts behind the token that ends a turn is never drafted
        ends = [place for place in range(len(prompt), len(through)) if through[place] in special]
        end = max(ends, default=len(through) - 1) + 1
        mask[len(prompt) : end] = [True] * (end - len(prompt))
    return ids, mask


def _apply_template(tokenizer: Any, messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # no warning of a length that max_length will cut
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    return ids


def _string(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f'"{key}" must be a string, not {type(value).__name__}')
    return value


def _records(source: str) -> Iterator[tuple[str, Any]]:
    """What a source holds, in order: where each record is, and the record."""
    path = Path(source)
    if not path.is_file():
        yield from _dataset_records(source)
    elif path.suffix in (".jsonl", ".txt"):
        yield from _line_records(path)
    elif path.suffix == ".parquet":
        yield from _parquet_records(path)
    else:
        raise ValueError(f"data: {path} must be a .jsonl, .txt or .parquet file, a folder or a hub id")


def _line_records(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                text = line.decode("utf-8").strip("\r\n")
                if not text.strip():
                    continue
                record = json.loads(text) if path.suffix == ".jsonl" else {"text": text}
            except json.JSONDecodeError as error:
                raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{place}: {error}") from error
            yield place, record


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"data: {path} is not a parquet file: {error}") from error
    columns = _known(file.schema_arrow.names, str(path))
    number = 0
    for batch in file.iter_batches(columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", _without_nulls(row)


def _dataset_records(source: str) -> Iterator[tuple[str, Any]]:
    # a path may hold colons, and so may a split: train[:1000]
    name, _, split = (source, "", "") if Path(source).exists() else source.partition(":")
    dataset = _load_dataset(name, split or None)
    columns = _known(dataset.column_names, source)
    for number, row in enumerate(dataset.select_columns(columns), start=1):
        yield f"{source}, row {number}", _without_nulls(row)


def _load_dataset(name: str, split: str | None) -> Any:
    """One split of a folder or of a hub's dataset; None takes the only one.

    Raises:
        ValueError: nothing that can be read, or no such split.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    folder = Path(name)
    saved = any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        fault = "cannot be read" if folder.is_dir() else "does not exist here, and the hub did not provide it"
        raise ValueError(f"data: {name} {fault}: {reason}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        if saved and split:
            raise ValueError(f"data: {name} has no splits; give it without :{split}")
        return loaded
    if split is None and len(loaded) == 1:
        split = next(iter(loaded))
    if split not in loaded:
        choices = ", ".join(f"{name}:{choice}" for choice in loaded)
        raise ValueError(f"data: {name} has {'several splits' if split is None else 'other splits'}; give {choices}")
    return loaded[split]


def _known(columns: list[str], source: str) -> list[str]:
    known = [column for column in columns if column in COLUMNS]
    if not known:
        raise ValueError(f"data: {source} has the columns {', '.join(columns)}; a row needs {SHAPES}")
    return known


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives each row all columns, null where there is none. What is null in messages, transformers leaves out."""
    return {key: value for key, value in row.items() if value is not None}
