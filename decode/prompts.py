"""Prompts: the embedded sets, files and stdin, and their token ids."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

EMBEDDED = ("service", "general")
Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat messages, where it comes from, and which split it belongs to, if any."""

    id: str
    messages: tuple[dict[str, str], ...]
    split: Split | None = None
    category: str | None = None


def load_prompts(source: str) -> list[Prompt]:
    """Read a prompt set.

    Args:
        source: "service" or "general", the sets shipped with draftsmith; "-" for stdin, one prompt a line; a
            `.jsonl` file whose rows hold "prompt" (text) or "messages" (role and content), and optionally "id",
            "category" and "split" ("train" or "heldout"); any other file holds one prompt a line.

    Raises:
        ValueError: no such file, nothing in it, or a malformed line, named by number.
    """
    if source in EMBEDDED:
        text = (resources.files(__package__) / "prompt_sets" / f"{source}.jsonl").read_text(encoding="utf-8")
        return _parse_jsonl(text, source)
    if source == "-":
        return _parse_lines(read_stdin(), "stdin")
    path = Path(source)
    if not path.exists() or path.is_dir():
        raise ValueError(
            f"prompts {source}: no such file; give a file, or one of the embedded sets {', '.join(EMBEDDED)}"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts {source}: not UTF-8 text: {error}") from error
    return _parse_jsonl(text, source) if path.suffix == ".jsonl" else _parse_lines(text, source)


def read_stdin() -> str:
    """All of stdin.

    Raises:
        ValueError: it is not text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts stdin: not UTF-8 text: {error}") from error


def encode(tokenizer: Tokenizer, messages: tuple[dict[str, str], ...]) -> list[int]:
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


def as_messages(prompt: str) -> tuple[dict[str, str], ...]:
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


def _parse_jsonl(text: str, source: str) -> list[Prompt]:
    return [_parse_row(line, source, number) for number, line in _numbered_lines(text, source)]


def _numbered_lines(text: str, source: str) -> list[tuple[int, str]]:
    """Lines that are not blank, and their numbers from 1."""
    # not splitlines: JSON strings may hold U+2028, which is no line end
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"prompts {source}: holds no prompt")
    return numbered


def _parse_row(line: str, source: str, number: int) -> Prompt:
    where = f"prompts {source}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # nested too deep, a number of too many digits
        raise ValueError(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: not a JSON object; write {{"prompt": "..."}}')
    split = row.get("split")
    if split not in ("train", "heldout", None):
        raise ValueError(f'{where}: split is {split!r}; use "train" or "heldout"')
    return Prompt(str(row.get("id", f"{source}:{number}")), _messages(row, where), split, row.get("category"))


def _messages(row: dict[str, object], where: str) -> tuple[dict[str, str], ...]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(prompt, str) and prompt.strip():
        return as_messages(prompt)
    if isinstance(messages, list) and messages:
        for message in messages:
            parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f'{where}: each message needs a "role" and a "content", both text')
        return tuple({"role": message["role"], "content": message["content"]} for message in messages)
    raise ValueError(f'{where}: needs a non-empty "prompt" (text) or "messages" (list)')
