"""Text files to token ids and response masks."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

logger = logging.getLogger(__name__)

Row = dict[str, np.ndarray[Any, np.dtype[Any]]]


def read_rows(path: Path, tokenizer: Any, max_length: int) -> list[Row]:
    """Reads a training text; all of it stays in memory, at five bytes a token.

    Args:
        path: a .jsonl file (rows with "text", with "prompt" and "response", or with "messages"), a .txt file
            (one document per line), or a folder saved by datasets with columns input_ids and response_mask.
        tokenizer: a transformers tokenizer; unused for a folder.
        max_length: tokens after which a row is cut.

    Returns:
        Rows {"input_ids": int32 [length], "response_mask": bool [length]}; the loss is on the tokens whose
        mask is true. A row without such a token, beyond the first position, teaches nothing and is left out.

    Raises:
        ValueError: a line or row that is malformed, named with its number, or nothing to learn from.
    """
    rows, num_read = [], 0
    for place, ids, mask in _saved_rows(path) if path.is_dir() else _text_rows(path, tokenizer):
        num_read += 1
        if len(ids) != len(mask):
            raise ValueError(f"{place}: {len(ids)} input_ids but {len(mask)} in response_mask")
        row = {
            "input_ids": np.asarray(ids[:max_length], np.int32),
            "response_mask": np.asarray(mask[:max_length], np.bool_),
        }
        if row["response_mask"][1:].any():
            rows.append(row)
    if not rows:
        raise ValueError(f"data: {path} has nothing to learn from in {num_read} rows of <= {max_length} tokens")
    if len(rows) < num_read:
        logger.info("%s: %d of %d rows have no response token, left out", path, num_read - len(rows), num_read)
    return rows


def encode(record: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids and response mask of one JSON record.

    Raises:
        ValueError: the record has none of the known shapes, or the chat template rewrites what came before.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a row must be an object, not {type(record).__name__}")
    if "messages" in record:
        return _encode_messages(record["messages"], tokenizer)
    if "prompt" in record and "response" in record:
        prompt, response = _string(record, "prompt"), _string(record, "response")
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return _encode_messages(messages, tokenizer)
    if "text" in record:
        return _encode_text(_string(record, "text"), tokenizer)
    raise ValueError('a row needs "text", "prompt" and "response", or "messages"')


def _encode_text(text: str, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The whole document, its end included, is learnt."""
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
    if not tokenizer.chat_template:
        raise ValueError('the tokenizer has no chat template; use rows with "text"')
    for message in messages:
        _string(message, "content")
    ids = _apply_template(tokenizer, messages[: replies[-1] + 1], add_generation_prompt=False)
    mask = [False] * len(ids)
    for reply in replies:
        prompt = _apply_template(tokenizer, messages[:reply], add_generation_prompt=True)
        through = _apply_template(tokenizer, messages[: reply + 1], add_generation_prompt=False)
        if through[: len(prompt)] != prompt or ids[: len(through)] != through:
            raise ValueError(
                f"message {reply + 1}: the chat template renders the prompt differently once the reply is "
                f"there, so a loss mask would be wrong; use one reply a row, or another template"
            )
        mask[len(prompt) : len(through)] = [True] * (len(through) - len(prompt))
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


def _text_rows(path: Path, tokenizer: Any) -> Iterator[tuple[str, list[int], list[bool]]]:
    if path.suffix not in (".jsonl", ".txt"):
        raise ValueError(f"data: {path} must be a .jsonl file, a .txt file or a folder saved by datasets")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                text = line.decode("utf-8").strip("\r\n")
                if text.strip():
                    record = json.loads(text) if path.suffix == ".jsonl" else {"text": text}
                    yield place, *encode(record, tokenizer)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error


def _saved_rows(path: Path) -> Iterator[tuple[str, list[int], list[bool]]]:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"data: {path} was not written by datasets' save_to_disk") from error
    if isinstance(dataset, datasets.DatasetDict):
        raise ValueError(f"data: {path} has several splits; name one, such as {path / next(iter(dataset))}")
    missing = {"input_ids", "response_mask"} - set(dataset.column_names)
    if missing:
        raise ValueError(f"data: {path} lacks the column {', '.join(sorted(missing))}")
    for number, row in enumerate(dataset, start=1):
        yield f"{path}, row {number}", row["input_ids"], row["response_mask"]
