"""Files, folders and hub ids to ids and masks; what is malformed is named by its place."""

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from train.data import Row, encode, learnable, read_rows

TEXTS = [{"text": "one"}, {"text": "two"}]
CHAT = {
    "messages": [
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2", "name": "me"},
    ]
}
CHAT_TEXT = "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"


@pytest.fixture
def tokenizer(byte_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy, whose template a test may change."""
    return copy.deepcopy(byte_tokenizer)


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def whole(row: Row, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode(row["input_ids"].tolist())


def learnt(row: Row, tokenizer: PreTrainedTokenizerFast) -> str:
    assert len(row["input_ids"]) == len(row["response_mask"])
    return tokenizer.decode(row["input_ids"][row["response_mask"]].tolist())


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


# --- one record -------------------------------------------------------------------------------------------


def test_a_text_is_learnt_whole_and_ends_once(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("héllo", "héllo<|im_end|>"):
        row = encode({"text": text}, tokenizer, 100)
        assert learnt(row, tokenizer) == whole(row, tokenizer) == "héllo<|im_end|>"
        assert not row["has_prompt"]


def test_only_the_response_is_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    row = encode({"prompt": "Two?", "response": "2"}, tokenizer, 100)
    assert whole(row, tokenizer) == CHAT_TEXT
    assert learnt(row, tokenizer) == "2<|im_end|>"  # the template's line break after it is never drafted
    assert row["has_prompt"]


def test_a_turn_without_a_token_that_ends_it_is_learnt_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}a: {% endif %}"
    )
    assert learnt(encode({"prompt": "Two?", "response": "2"}, tokenizer, 100), tokenizer) == "2\n"


def test_every_reply_of_a_conversation_is_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, "SABCDE", strict=True)]
    row = encode({"messages": messages}, tokenizer, 1000)
    assert learnt(row, tokenizer) == "B<|im_end|>D<|im_end|>"
    # what follows the last reply is not read
    assert [c for c in whole(row, tokenizer) if c.isupper()] == list("SABCD")


def test_token_ids_are_taken_before_all_else_and_keep_why_they_ended() -> None:
    record = {"input_ids": [5, 6, 7], "response_mask": [0, 1, 1], "text": "other", "finish_reason": "length"}
    row = encode(record, None, 100)
    assert row["input_ids"].tolist() == [5, 6, 7]
    assert row["response_mask"].tolist() == [False, True, True]
    assert (row["input_ids"].dtype, row["response_mask"].dtype) == (np.int32, np.bool_)
    assert (row["truncated"], row["has_prompt"], row["finish_reason"]) == (False, True, "length")


@pytest.mark.parametrize("record", [{"text": "1234"}, {"input_ids": [1, 2, 3, 4, 5], "response_mask": [0, 1, 1, 1, 1]}])
def test_a_row_says_whether_it_was_cut(record: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    for max_length, truncated in {4: True, 5: False}.items():
        row = encode(record, tokenizer, max_length)
        assert len(row["input_ids"]) == len(row["response_mask"]) == max_length
        assert row["truncated"] is truncated
        assert "finish_reason" not in row


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    # as templates do that drop the reasoning of earlier turns
    before = tokenizer.chat_template
    tokenizer.chat_template = before.replace("message['content']", "(message['content'] if loop.last else '…')")
    assert tokenizer.chat_template != before
    with pytest.raises(ValueError, match="message 2: the chat template renders the prompt differently"):
        encode({"prompt": "Two?", "response": "2"}, tokenizer, 100)


def test_without_a_chat_template_prompts_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode({"prompt": "Two?", "response": "2"}, tokenizer, 100)
    assert encode({"text": "Two?"}, tokenizer, 100)["response_mask"].tolist() == [True] * 5


# --- lines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"not JSON \(.* at column 13\)"),
        ('["a"]', "must be an object, not list"),
        ('{"txt": "a"}', 'needs "text", "prompt" and "response", "messages", or "input_ids" and "response_mask"'),
        ('{"prompt": "a"}', 'needs "text"'),
        ('{"input_ids": [1]}', 'needs "text"'),
        ('{"text": 3}', '"text" must be a string, not int'),
        ('{"prompt": "a", "response": null}', '"response" must be a string, not NoneType'),
        ('{"messages": "a"}', '"messages" must be a list'),
        ('{"messages": [{"role": "user", "content": "a"}]}', 'no turn with role "assistant"'),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}', '"content" must be a string'),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', '"messages" begins with an answer'),
        ('{"input_ids": [1, 2], "response_mask": [1]}', "2 input_ids but 1 in response_mask"),
        ('{"input_ids": [], "response_mask": []}', '"input_ids" must be a list of token ids, one or more'),
        ('{"input_ids": [1.5], "response_mask": [1]}', '"input_ids" must be a list of token ids'),
        ('{"input_ids": [-1], "response_mask": [1]}', '"input_ids" must be a list of token ids'),
        ('{"input_ids": 7, "response_mask": 1}', '"input_ids" must be a list of token ids'),
        ('{"input_ids": [1], "response_mask": ["no"]}', '"response_mask" must be a list of true and false'),
    ],
)
def test_a_malformed_line_is_named(line: str, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "data.jsonl", {"text": "good"}, "", line)
    with pytest.raises(ValueError, match=rf"data\.jsonl, line 3: .*{message}"):
        read_rows(path, tokenizer, 100)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"data\.txt, line 2: .*utf-8"):
        read_rows(path, tokenizer, 100)


def test_a_template_that_refuses_is_a_line_too(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "data.jsonl", {"prompt": "a", "response": "b"})
    with pytest.raises(ValueError, match="line 1: the chat template refuses these messages: roles must"):
        read_rows(path, tokenizer, 100)


@pytest.mark.parametrize(("name", "content"), [("a.txt", ""), ("a.txt", "\n\n"), ("a.jsonl", '{"text": " "}\n')])
def test_a_source_without_rows_is_refused(
    name: str, content: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^data: .*{name} has no rows, so nothing to learn from"):
        read_rows(tmp_path / name, tokenizer, 100)


def test_another_kind_of_file_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"must be a \.jsonl, \.txt or \.parquet file"):
        read_rows(write(tmp_path / "data.csv", "a"), tokenizer, 100)


def test_a_text_file_has_one_document_a_line(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    # U+2028 separates lines for str.splitlines, but not in a text file
    path = tmp_path / "data.txt"
    path.write_bytes("one\r\n\ntwo\u2028still two\n".encode())
    texts = [whole(row, tokenizer) for row in read_rows(path, tokenizer, 100)]
    assert texts == ["one<|im_end|>", "two\u2028still two<|im_end|>"]


def test_rows_without_a_response_are_read_and_left_out_aloud(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    records = [{"text": "0123456789"}, {"prompt": "x" * 50, "response": "y"}]
    path = write(tmp_path / "data.jsonl", *records)
    rows = read_rows(path, tokenizer, 8)
    assert [row["truncated"] for row in rows] == [True, True]
    with caplog.at_level("INFO"):
        assert [whole(row, tokenizer) for row in learnable(rows)] == ["01234567"]
    assert "1 of 2 rows have no response token" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        assert len(learnable(read_rows(path, tokenizer, 1000))) == 2
    assert caplog.text == ""


# --- Arrow ------------------------------------------------------------------------------------------------


def test_parquet_rows_of_every_shape(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    records = [
        {"text": "one"},
        {"prompt": "Two?", "response": "2"},
        CHAT,
        {"input_ids": [8, 9], "response_mask": [False, True], "finish_reason": "stop"},
    ]
    columns = {key: [record.get(key) for record in records] for key in {key for record in records for key in record}}
    pq.write_table(pa.table({**columns, "unread": [1] * 4}), tmp_path / "data.parquet")
    # in the file each row has all columns, null where it has none; and each message a "name"
    tokenizer.chat_template = "{% for m in messages if m.name is defined and not m.name %}refused{% endfor %}" + str(
        tokenizer.chat_template
    )
    assert len(pq.read_table(tmp_path / "data.parquet").to_pylist()[0]) == len(columns) + 1
    rows = read_rows(tmp_path / "data.parquet", tokenizer, 100)
    assert [whole(row, tokenizer) for row in rows[:3]] == ["one<|im_end|>", CHAT_TEXT, CHAT_TEXT]
    assert [learnt(row, tokenizer) for row in rows[1:3]] == ["2<|im_end|>"] * 2
    assert rows[3]["input_ids"].tolist() == [8, 9]
    assert [row.get("finish_reason") for row in rows] == [None, None, None, "stop"]


def test_a_faulty_parquet_file_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "null.parquet")
    pq.write_table(pa.table({"txt": ["a"]}), tmp_path / "other.parquet")
    (tmp_path / "no.parquet").write_text("not one")
    for name, message in {
        "null": "null.parquet, row 2: a row needs",
        "other": "other.parquet has the columns txt; a row needs",
        "no": "no.parquet is not a parquet file",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_rows(tmp_path / f"{name}.parquet", tokenizer, 100)


def test_a_saved_dataset_is_read_as_it_is(tmp_path: Path) -> None:
    columns = {"input_ids": [[5, 6, 7], [8, 9]], "response_mask": [[0, 1, 1], [0, 1]]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    rows = read_rows(tmp_path / "saved", None, 100)
    assert [row["input_ids"].tolist() for row in rows] == columns["input_ids"]
    assert [row["response_mask"].tolist() for row in rows] == [[False, True, True], [False, True]]
    with pytest.raises(ValueError, match="saved has no splits; give it without :train"):
        read_rows(f"{tmp_path}/saved:train", None, 100)


def test_a_saved_dataset_with_splits_is_read_by_split(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    one, two = (datasets.Dataset.from_list([record]) for record in TEXTS)
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict({"test": two}).save_to_disk(str(tmp_path / "single"))
    for source, text in {"both:train": "one", "both:test": "two", "both/test": "two", "single": "two"}.items():
        (row,) = read_rows(f"{tmp_path}/{source}", tokenizer, 100)
        assert whole(row, tokenizer) == f"{text}<|im_end|>"
    for source, message in {
        "both": "both has several splits; give .*both:train, .*both:test$",
        "both:dev": "both has other splits; give .*both:train, .*both:test$",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_rows(f"{tmp_path}/{source}", tokenizer, 100)


def test_a_saved_dataset_with_faults_is_refused(tmp_path: Path) -> None:
    uneven = {"input_ids": [[1, 2], [1, 2]], "response_mask": [[1, 1], [1]]}
    datasets.Dataset.from_dict(uneven).save_to_disk(str(tmp_path / "uneven"))
    datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(str(tmp_path / "lacking"))
    for name, message in {
        "uneven": "uneven, row 2: 2 input_ids but 1 in response_mask",
        "lacking": 'lacking, row 1: a row needs .*"response_mask"',
    }.items():
        with pytest.raises(ValueError, match=message):
            read_rows(tmp_path / name, None, 100)


@pytest.mark.usefixtures("_own_cache")
def test_a_folder_of_data_files_is_read_by_split(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write(folder / "train.jsonl", {"text": "one"}, CHAT)
    write(folder / "test.jsonl", {"text": "two"}, CHAT)
    for source, texts in {
        ":train": ["one<|im_end|>", CHAT_TEXT],
        ":train[1:]": [CHAT_TEXT],
        ":test": ["two<|im_end|>", CHAT_TEXT],
    }.items():
        assert [whole(row, tokenizer) for row in read_rows(f"{folder}{source}", tokenizer, 100)] == texts
    with pytest.raises(ValueError, match=r"files has several splits; give .*files:train, .*files:test$"):
        read_rows(folder, tokenizer, 100)
    with pytest.raises(ValueError, match=r'^data: .*files cannot be read: Unknown split "dev"'):
        read_rows(f"{folder}:dev", tokenizer, 100)


@pytest.mark.usefixtures("_own_cache")
def test_a_source_that_is_nowhere_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "empty").mkdir()
    for source, message in {
        str(tmp_path / "empty"): "^data: .*empty cannot be read: ",
        str(tmp_path / "data.jsonl"): r"^data: .*data\.jsonl does not exist here, and the hub did not provide it: ",
        "somebody/something:train": "^data: somebody/something does not exist here, and the hub did not provide it: ",
    }.items():
        with pytest.raises(ValueError, match=message) as caught:
            read_rows(source, tokenizer, 100)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("source", "split"), [("a/b", None), ("a/b:test", "test"), ("a/b:train[:2]", "train[:2]")])
def test_a_hub_id_may_name_a_split(
    source: str, split: str | None, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, split: str | None) -> Any:
        asked.append((name, split))
        one = datasets.Dataset.from_list(TEXTS)
        return one if split else datasets.DatasetDict({"train": one})

    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = read_rows(source, tokenizer, 100)
    assert asked == [("a/b", split)]
    assert [whole(row, tokenizer) for row in rows] == ["one<|im_end|>", "two<|im_end|>"]


def test_reading_twice_gives_the_same_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "data.jsonl", *[{"text": str(number)} for number in range(50)])
    texts = [whole(row, tokenizer) for row in read_rows(path, tokenizer, 100)]
    assert texts == [f"{number}<|im_end|>" for number in range(50)]
    assert texts == [whole(row, tokenizer) for row in read_rows(path, tokenizer, 100)]
