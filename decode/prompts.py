"""Prompts: the embedded sets, files, folders and stdin, and their token ids."""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)

EMBEDDED = ("service", "general")
Split = Literal["train", "heldout"]
Messages = tuple[dict[str, str], ...]
Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat messages, where it comes from, and which split and category it belongs to, if any.

    `code` is what the message asks to complete, where it does; no part of repr(), which responses are known by.
    """

    id: str
    messages: Messages
    split: Split | None = None
    category: str | None = None
    code: str | None = field(default=None, repr=False)

    @property
    def raw(self) -> str:
        """What is continued without the chat template."""
        return self.messages[0]["content"] if self.code is None else self.code


def load_prompts(source: str) -> list[Prompt]:
    """Read a prompt set.

    Rows hold "prompt" (text) or "messages" (role and content), or are those of a known set, told by their fields:

    - Spec-Bench and MT-bench, "turns": the first; the others need answers to those before;
    - HumanEval, "task_id", "prompt" and "entry_point": a message that asks to complete the code; raw, the code;
    - ShareGPT, "conversations": the first human turn; conversations without one are left out aloud;
    - GSM8K, "question" and "answer": the question.

    Any may hold "id" (or "question_id", "task_id"), "category" and "split" ("train" or "heldout").

    Args:
        source: "service" or "general", the sets shipped with draftsmith; "-" for stdin, one prompt a line; a `.jsonl`
            or `.json` file, of a row a line or one array of rows; a `.parquet` file; a folder saved by datasets; any
            other file holds one prompt a line.

    Raises:
        ValueError: no such file, nothing in it, or a malformed line, entry or row, named by number.
    """
    if source in EMBEDDED:
        text = (resources.files(__package__) / "prompt_sets" / f"{source}.jsonl").read_text(encoding="utf-8")
        return _prompts(_json_rows(text, source), source)
    if source == "-":
        return _parse_lines(read_stdin(), "stdin")
    path = Path(source)
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _prompts(_saved_rows(source), source)
    if not path.exists() or path.is_dir():
        raise ValueError(
            f"prompts {source}: no such file; give a file, or one of the embedded sets {', '.join(EMBEDDED)}"
        )
    if path.suffix == ".parquet":
        return _prompts(_parquet_rows(source), source)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts {source}: not UTF-8 text: {error}") from error
    if path.suffix in (".json", ".jsonl"):
        return _prompts(_json_rows(text, source), source)
    return _parse_lines(text, source)


def read_stdin() -> str:
    """All of stdin.

    Raises:
        ValueError: it is not text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts stdin: not UTF-8 text: {error}") from error


def encode(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Token ids of a conversation, up to where the answer begins; a tokenizer without template gets the bare text.

    Raises:
        ValueError: the chat template refuses the messages, or there is no token in them.
    """
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError('each chat message needs a "role" and a "content", both text')
        _refuse_half_characters(message["content"])
    quiet = {"verbose": False}  # a text that is too long is refused in our own words
    if tokenizer.chat_template is None:
        ids: list[int] = tokenizer.encode("\n\n".join(message["content"] for message in messages), **quiet)
    else:
        try:
            ids = tokenizer.apply_chat_template(  # type: ignore[assignment]
                list(messages), add_generation_prompt=True, return_dict=False, tokenizer_kwargs=quiet
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    return _not_empty(ids)


def encode_raw(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text to be continued as it stands, with the special tokens that the model expects around one.

    Raises:
        ValueError: there is no token in it.
    """
    _refuse_half_characters(text)
    ids: list[int] = tokenizer.encode(text, verbose=False)
    return _not_empty(ids)


def as_messages(prompt: str) -> Messages:
    return ({"role": "user", "content": prompt},)


def _refuse_half_characters(text: str) -> None:
    if re.search("[\ud800-\udfff]", text):
        raise ValueError("the prompt holds half a character (a lone surrogate): write valid Unicode text")


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise ValueError("the prompt holds no token: write some text")
    return ids


def _parse_lines(text: str, source: str) -> list[Prompt]:
    return [Prompt(f"{source}:{number}", as_messages(line)) for number, line in _numbered_lines(text, source)]


def _numbered_lines(text: str, source: str) -> list[tuple[int, str]]:
    """Lines that are not blank, and their numbers from 1."""
    # not splitlines: JSON strings may hold U+2028, which is no line end
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"prompts {source}: holds no prompt")
    return numbered


class Place(NamedTuple):
    """Where a row is: on a line, or which entry of an array or row of a table; numbers begin at 1."""

    kind: Literal["line", "entry", "row"]
    number: int


def _json_rows(text: str, source: str) -> Iterator[tuple[Place, Any]]:
    if text.lstrip().startswith("["):
        for number, row in enumerate(_parse_json(text, source), start=1):
            yield Place("entry", number), row
    else:
        for number, line in _numbered_lines(text, source):
            yield Place("line", number), _parse_json(line, source, number)


def _parse_json(text: str, source: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"prompts {source}, line {first_line + error.lineno - 1}"
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # nested too deep, a number of too many digits
        raise ValueError(f"prompts {source}, line {first_line}: not JSON that can be read: {error}") from error


def _parquet_rows(source: str) -> Iterator[tuple[Place, Any]]:
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(source)
    except (OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"prompts {source}: not a Parquet file: {_first_line(error)}") from error
    yield from _table_rows(table.to_pylist())


def _saved_rows(source: str) -> Iterator[tuple[Place, Any]]:
    import datasets

    try:
        saved = datasets.load_from_disk(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"prompts {source}: a datasets folder that cannot be read: {_first_line(error)}") from error
    if isinstance(saved, datasets.DatasetDict):
        folders = ", ".join(str(Path(source) / split) for split in saved)
        raise ValueError(f"prompts {source}: holds several datasets; give the folder of one: {folders}")
    yield from _table_rows(saved)


def _table_rows(rows: Iterable[Row]) -> Iterator[tuple[Place, Any]]:
    """Arrow gives each row all columns, null where there is none."""
    for number, row in enumerate(rows, start=1):
        yield Place("row", number), {name: value for name, value in row.items() if value is not None}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _prompts(rows: Iterable[tuple[Place, Any]], source: str) -> list[Prompt]:
    prompts, total = [], 0
    for place, row in rows:
        total += 1
        prompt = _prompt(row, f"prompts {source}, {place.kind} {place.number}", f"{source}:{place.number}")
        if prompt.messages:
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"prompts {source}: holds no prompt")
    if len(prompts) < total:
        logger.info(
            "prompts %s: %d of %d conversations have no human turn, left out", source, total - len(prompts), total
        )
    return prompts


def _prompt(row: Any, where: str, default_id: str) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f'{where}: not a JSON object; write {{"prompt": "..."}}')
    split = row.get("split")
    if split not in ("train", "heldout", None):
        raise ValueError(f'{where}: split is {split!r}; use "train" or "heldout"')
    for known in FORMATS:
        if all(is_one(row.get(name)) for name, is_one in known.fields.items()):
            try:
                messages = known.read(row)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            row_id = str(row.get("id", row.get(known.id, default_id)))
            return Prompt(row_id, messages, split, row.get("category"), known.code and row[known.code])
    raise ValueError(
        f'{where}: needs a non-empty "prompt" (text) or "messages" (list), or what a known set has: "turns", '
        f'"conversations", or "question" and "answer"; its fields are {", ".join(row) or "none"}'
    )


def _chat(row: Row) -> Messages:
    for message in row["messages"]:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError('each message needs a "role" and a "content", both text')
    return tuple({"role": message["role"], "content": message["content"]} for message in row["messages"])


def _first_turn(row: Row) -> Messages:
    if not _is_text(row["turns"][0]):
        raise ValueError('the first of "turns" must be non-empty text')
    return as_messages(row["turns"][0])


def _first_human_turn(row: Row) -> Messages:
    """No message at all where there is no such turn."""
    for turn in row["conversations"]:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("from", "value")):
            raise ValueError('each turn of "conversations" needs a "from" and a "value", both text')
        if turn["from"] in ("human", "user") and turn["value"].strip():
            return as_messages(turn["value"])
    return ()


def _function_to_complete(row: Row) -> Messages:
    asked = (
        f"Complete the Python function `{row['entry_point']}` as its docstring says. Answer with the whole function."
    )
    code = row["prompt"].strip("\n")
    return as_messages(f"{asked}\n\n```python\n{code}\n```")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


class Format(NamedTuple):
    """A kind of row.

    Attributes:
        fields: what it is told by: the fields that it must have, and what each must be.
        read: its messages.
        id: the field that names it where there is no "id".
        code: the field with the code that it asks to complete.
    """

    fields: dict[str, Callable[[object], bool]]
    read: Callable[[Row], Messages]
    id: str = "id"
    code: str | None = None


# the first that fits; a conversation may be empty, and is then left out
FORMATS = (
    Format(
        {"task_id": _is_text, "prompt": _is_text, "entry_point": _is_text}, _function_to_complete, "task_id", "prompt"
    ),
    Format({"prompt": _is_text}, lambda row: as_messages(row["prompt"])),
    Format({"messages": _is_list}, _chat),
    Format({"turns": _is_list}, _first_turn, "question_id"),
    Format({"conversations": lambda value: isinstance(value, list)}, _first_human_turn),
    Format({"question": _is_text, "answer": _is_text}, lambda row: as_messages(row["question"])),
)
