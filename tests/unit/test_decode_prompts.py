"""Where prompts come from, and which line is at fault when one cannot be read."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from decode.heldout import heldout_prompts
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


# --- known sets -------------------------------------------------------------------------------------------

CODE = 'def double(x):\n    """Twice x."""\n'
ASKED = "Complete the Python function `double` as its docstring says. Answer with the whole function.\n\n"
HUMAN = {"from": "human", "value": "First?"}
GPT = {"from": "gpt", "value": "Yes."}
# a row of each set; the text of its prompt, its id if it has one, and its category
KNOWN: dict[str, tuple[dict[str, Any], str, str | None, str | None]] = {
    "Spec-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["First?", "Then?"]},
        "First?",
        "81",
        "writing",
    ),
    "MT-bench": (
        {"question_id": 101, "category": "math", "turns": ["First?", "Then?"], "reference": ["One", "Two"]},
        "First?",
        "101",
        "math",
    ),
    "HumanEval": (
        {
            "task_id": "HumanEval/0",
            "prompt": CODE,
            "entry_point": "double",
            "canonical_solution": "    return 2 * x\n",
            "test": "assert double(1) == 2\n",
        },
        f'{ASKED}```python\ndef double(x):\n    """Twice x."""\n```',
        "HumanEval/0",
        None,
    ),
    "GSM8K": ({"question": "How many?", "answer": "2\n#### 2"}, "How many?", None, None),
    "ShareGPT": ({"id": "a_0", "conversations": [HUMAN, GPT, {**HUMAN, "value": "Then?"}]}, "First?", "a_0", None),
}


@pytest.mark.parametrize("row", KNOWN.values(), ids=KNOWN)
def test_known_sets_are_told_by_their_fields(
    row: tuple[dict[str, Any], str, str | None, str | None], tmp_path: Path
) -> None:
    fields, text, row_id, category = row
    source = write(tmp_path, "", fields)
    (prompt,) = load_prompts(source)
    assert prompt.messages == as_messages(text)
    assert (prompt.id, prompt.category, prompt.split) == (row_id or f"{source}:2", category, None)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "saved"])
def test_a_set_is_the_same_in_every_container(suffix: str, tmp_path: Path) -> None:
    """Parquet and datasets give each row the columns of all, null where it has none."""
    rows = [row for row, *_ in KNOWN.values()]
    path = tmp_path / f"prompts.{suffix}"
    if suffix in ("json", "jsonl"):
        path.write_text(json.dumps(rows, indent=1))
    else:
        table = datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for row in rows for name in row})
        assert table[0]["answer"] is None
        table.save_to_disk(str(path)) if suffix == "saved" else table.to_parquet(str(path))
    prompts = load_prompts(str(path))
    assert [prompt.messages for prompt in prompts] == [as_messages(text) for _, text, *_ in KNOWN.values()]
    assert [prompt.id for prompt in prompts] == ["81", "101", "HumanEval/0", f"{path}:4", "a_0"]
    assert [prompt.category for prompt in prompts] == ["writing", "math", None, None, None]


def test_rows_of_a_json_file_may_be_lines(tmp_path: Path) -> None:
    source = write(tmp_path, {"prompt": "One"}, {"turns": ["Two"]}, name="prompts.json")
    assert [prompt.messages for prompt in load_prompts(source)] == [as_messages("One"), as_messages("Two")]


def test_code_to_be_completed_is_continued_as_it_stands_when_raw(tmp_path: Path) -> None:
    completed, plain = load_prompts(write(tmp_path, KNOWN["HumanEval"][0], {"prompt": "Say"}))
    assert (completed.raw, plain.raw) == (CODE, "Say")
    assert "code" not in repr(completed)  # responses are known by it, and the messages say it all
    incomplete = {key: value for key, value in KNOWN["HumanEval"][0].items() if key != "entry_point"}
    (prompt,) = load_prompts(write(tmp_path, incomplete))
    assert prompt.messages == as_messages(CODE)  # nothing says that it is to be completed


def test_conversations_without_a_human_turn_are_left_out_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blank = {"from": "human", "value": " "}
    conversations = [[], [GPT], [GPT, HUMAN], [blank, GPT, {"from": "user", "value": "Later?"}]]
    source = write(tmp_path, *({"conversations": turns} for turns in conversations))
    with caplog.at_level("INFO"):
        prompts = load_prompts(source)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["First?", "Later?"]
    assert [prompt.id for prompt in prompts] == [f"{source}:3", f"{source}:4"]
    assert f"prompts {source}: 2 of 4 conversations have no human turn, left out" in caplog.text
    with pytest.raises(ValueError, match=r"holds no prompt$"):
        load_prompts(write(tmp_path, {"conversations": [GPT]}))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, 'needs a non-empty "prompt" .* its fields are none$'),
        ({"text": "x", "id": 1}, 'needs a non-empty "prompt" .* its fields are text, id$'),
        ({"question": "x"}, 'needs a non-empty "prompt" .* its fields are question$'),
        ({"question": "x", "answers": ["y"]}, 'needs a non-empty "prompt" .* its fields are question, answers$'),
        ({"turns": []}, 'needs a non-empty "prompt" .* its fields are turns$'),
        ({"conversations": "x"}, 'needs a non-empty "prompt" .* its fields are conversations$'),
        ({"turns": [" "]}, 'the first of "turns" must be non-empty text$'),
        ({"turns": [{"role": "user"}]}, 'the first of "turns" must be non-empty text$'),
        ({"conversations": ["x"]}, 'each turn of "conversations" needs a "from" and a "value", both text$'),
        ({"conversations": [{"role": "user", "content": "x"}]}, 'each turn of "conversations" needs a "from" '),
        ({"turns": ["x"], "split": "test"}, 'split is \'test\'; use "train" or "heldout"$'),
        ([1], "not a JSON object; write "),
    ],
)
def test_what_fits_no_set_is_named_by_its_place_and_fields(row: Any, reason: str, tmp_path: Path) -> None:
    source = write(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(ValueError, match=f"^prompts {source}, line 2: {reason}") as caught:
        load_prompts(source)
    assert "\n" not in str(caught.value)
    source = write(tmp_path, json.dumps([{"prompt": "fine"}, row], indent=1), name="prompts.json")
    with pytest.raises(ValueError, match=f"^prompts {source}, entry 2: {reason}"):
        load_prompts(source)


def test_a_json_array_that_is_none_is_named_by_its_line(tmp_path: Path) -> None:
    source = write(tmp_path, "[", '{"prompt": "x"},', '{"prompt": "y"', "]", name="prompts.json")
    with pytest.raises(ValueError, match=f"^prompts {source}, line 4: not JSON: Expecting ',' delimiter at column 1$"):
        load_prompts(source)
    with pytest.raises(ValueError, match=r"holds no prompt$"):
        load_prompts(write(tmp_path, "[]", name="prompts.json"))


def test_a_table_with_faults_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"question": ["x", None], "answer": ["1", "2"]}), path)
    with pytest.raises(
        ValueError, match=f'^prompts {path}, row 2: needs a non-empty "prompt" .* its fields are answer$'
    ):
        load_prompts(str(path))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(ValueError, match=f"^prompts {path}: holds no prompt$"):
        load_prompts(str(path))
    path.write_text("no table")
    with pytest.raises(ValueError, match=f"^prompts {path}: not a Parquet file: .*") as caught:
        load_prompts(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_of_several_datasets_names_them(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"question": "How many?", "answer": "2"}])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path))
    message = f"^prompts {tmp_path}: holds several datasets; give the folder of one: {tmp_path}/train, {tmp_path}/test$"
    with pytest.raises(ValueError, match=message):
        load_prompts(str(tmp_path))
    assert load_prompts(f"{tmp_path}/test") == [Prompt(f"{tmp_path}/test:1", as_messages("How many?"))]
    (tmp_path / "test" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"test: a datasets folder that cannot be read: ") as caught:
        load_prompts(f"{tmp_path}/test")
    assert "\n" not in str(caught.value)
