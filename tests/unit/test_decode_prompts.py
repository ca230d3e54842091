"""Where prompts come from, and which line is at fault when one cannot be read."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from decode.evaluate import heldout_prompts
from decode.prompts import Prompt, as_messages, encode, load_prompts


def write(tmp_path: Path, *rows: Any, name: str = "prompts.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_rows_may_say_more_than_the_prompt(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "Bo"}]
    source = write(
        tmp_path,
        {"prompt": "One"},
        "",
        {"prompt": "Two", "id": 7, "category": "c", "split": "heldout", "other": 1},
        {"messages": chat},
    )
    first, second, third = load_prompts(source)
    assert first == Prompt(f"{source}:1", ({"role": "user", "content": "One"},), None, None)
    assert second == Prompt("7", as_messages("Two"), "heldout", "c")
    assert third.id == f"{source}:4"  # the number of the line, blank ones counted
    assert third.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})


def test_line_separators_inside_strings_are_no_line_ends(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\x0cfive\r\nsix"
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + '\r\n{"prompt": "next"}\r\n', newline="")
    assert [prompt.messages for prompt in load_prompts(str(path))] == [as_messages(text), as_messages("next")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x"', "not JSON: Expecting ',' delimiter at column 15"),
        ("prompt: x", "not JSON: Expecting value at column 1"),
        ("[1]", "not a JSON object; write "),
        ('"text"', "not a JSON object; write "),
        ('{"prompt": "x", "split": "test"}', 'split is \'test\'; use "train" or "heldout"'),
        ('{"prompt": "x", "split": []}', "split is \\[\\]; use "),
        ("{}", 'needs a non-empty "prompt"'),
        ('{"prompt": "  "}', 'needs a non-empty "prompt"'),
        ('{"prompt": 3}', 'needs a non-empty "prompt"'),
        ('{"messages": []}', 'needs a non-empty "prompt"'),
        ('{"messages": ["x"]}', 'each message needs a "role" and a "content"'),
        ('{"messages": [{"role": "user"}]}', 'each message needs a "role" and a "content"'),
        ('{"messages": [{"content": "x"}]}', 'each message needs a "role" and a "content"'),
        ('{"messages": [{"role": 1, "content": "x"}]}', 'each message needs a "role" and a "content"'),
        ('{"messages": [{"role": "user", "content": 1}]}', 'each message needs a "role" and a "content"'),
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: str, reason: str, tmp_path: Path) -> None:
    source = write(tmp_path, {"prompt": "fine"}, "", line, {"prompt": "fine"})
    with pytest.raises(ValueError, match=f"^prompts {source}, line 3: {reason}"):
        load_prompts(source)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    for name in ("prompts.jsonl", "prompts.txt"):
        source = write(tmp_path, "", "  ", name=name)
        with pytest.raises(ValueError, match=f"^prompts {source}: holds no prompt$"):
            load_prompts(source)
    with pytest.raises(ValueError, match=r"nowhere.jsonl: no such file; give a file, or one of .* service, general$"):
        load_prompts(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="no such file"):
        load_prompts(str(tmp_path))


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_text_that_is_not_utf8_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^prompts {path}: not UTF-8 text: .*position 15"):
        load_prompts(str(path))


def test_other_files_hold_one_prompt_a_line(tmp_path: Path) -> None:
    source = write(tmp_path, "first", "", '{"prompt": "not parsed"}', name="prompts.txt")
    prompts = load_prompts(source)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["first", '{"prompt": "not parsed"}']
    assert [prompt.id for prompt in prompts] == [f"{source}:1", f"{source}:3"]


def test_stdin_holds_one_prompt_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))
    assert [prompt.messages for prompt in load_prompts("-")] == [as_messages("first"), as_messages("second")]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(ValueError, match=r"^prompts stdin: holds no prompt$"):
        load_prompts("-")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with pytest.raises(ValueError, match=r"^prompts stdin: not UTF-8 text: "):
        load_prompts("-")


@pytest.mark.parametrize("name", ["service", "general"])
def test_embedded_sets_hold_out_what_they_mark(name: str) -> None:
    prompts = load_prompts(name)
    heldout = heldout_prompts(name)
    assert heldout == [prompt for prompt in prompts if prompt.split == "heldout"]
    assert len(heldout) == 80
    assert len({prompt.id for prompt in prompts}) == len(prompts) > 500


def test_a_set_that_marks_nothing_is_held_out_whole(tmp_path: Path) -> None:
    source = write(tmp_path, {"prompt": "One"}, {"prompt": "Two"})
    assert heldout_prompts(source) == load_prompts(source)
    source = write(tmp_path, {"prompt": "One"}, {"prompt": "Two", "split": "heldout"})
    assert [prompt.messages[0]["content"] for prompt in heldout_prompts(source)] == ["Two"]


def test_a_conversation_is_encoded_up_to_the_answer(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = ({"role": "system", "content": "S"}, {"role": "user", "content": "é"})
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    assert byte_tokenizer.decode(encode(byte_tokenizer, messages)) == text


def test_without_a_template_the_text_is_bare(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer.backend_tokenizer)
    assert bare.chat_template is None
    assert bare.decode(encode(bare, as_messages("Once upon"))) == "Once upon"
    with pytest.raises(ValueError, match="holds no token"):
        encode(bare, as_messages(""))


def test_a_template_may_refuse(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    strict = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer.backend_tokenizer,
        chat_template="{{ raise_exception('System role not supported') }}",
    )
    with pytest.raises(ValueError, match="chat template refuses these messages: System role not supported"):
        encode(strict, as_messages("Hi"))
