"""Text to ids and masks; what is malformed is named by file and line."""

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from train.language_data import encode, read_rows


@pytest.fixture
def tokenizer(byte_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy, whose template a test may change."""
    return copy.deepcopy(byte_tokenizer)


def learnt(ids: Any, mask: Any, tokenizer: PreTrainedTokenizerFast) -> str:
    assert len(ids) == len(mask)
    return tokenizer.decode([int(i) for i, m in zip(ids, mask, strict=True) if m])


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_a_text_is_learnt_whole_and_ends_once(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("héllo", "héllo<|im_end|>"):
        ids, mask = encode({"text": text}, tokenizer)
        assert learnt(ids, mask, tokenizer) == tokenizer.decode(ids) == "héllo<|im_end|>"


def test_only_the_response_is_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, mask = encode({"prompt": "Two?", "response": "2"}, tokenizer)
    assert tokenizer.decode(ids) == ("<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n")
    assert learnt(ids, mask, tokenizer) == "2<|im_end|>\n"


def test_every_reply_of_a_conversation_is_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, "SABCDE", strict=True)]
    ids, mask = encode({"messages": messages}, tokenizer)
    assert learnt(ids, mask, tokenizer) == "B<|im_end|>\nD<|im_end|>\n"
    text = tokenizer.decode(ids)
    assert [c for c in text if c.isupper()] == list("SABCD")  # what follows the last reply is not read


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    # as templates do that drop the reasoning of earlier turns
    before = tokenizer.chat_template
    tokenizer.chat_template = before.replace("message['content']", "(message['content'] if loop.last else '…')")
    assert tokenizer.chat_template != before
    with pytest.raises(ValueError, match="message 2: the chat template renders the prompt differently"):
        encode({"prompt": "Two?", "response": "2"}, tokenizer)


def test_without_a_chat_template_prompts_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode({"prompt": "Two?", "response": "2"}, tokenizer)
    assert encode({"text": "Two?"}, tokenizer)[1] == [True] * 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"not JSON \(.* at column 13\)"),
        ('["a"]', "must be an object, not list"),
        ('{"txt": "a"}', 'needs "text", "prompt" and "response", or "messages"'),
        ('{"prompt": "a"}', 'needs "text", "prompt" and "response", or "messages"'),
        ('{"text": 3}', '"text" must be a string, not int'),
        ('{"prompt": "a", "response": null}', '"response" must be a string, not NoneType'),
        ('{"messages": "a"}', '"messages" must be a list'),
        ('{"messages": [{"role": "user", "content": "a"}]}', 'no turn with role "assistant"'),
        ('{"messages": [{"role": "assistant"}]}', '"content" must be a string'),
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


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(content: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "data.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match="nothing to learn from in 0 rows"):
        read_rows(path, tokenizer, 100)


def test_another_kind_of_file_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"must be a \.jsonl file"):
        read_rows(write(tmp_path / "data.csv", "a"), tokenizer, 100)


def test_a_text_file_has_one_document_a_line(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    # U+2028 separates lines for str.splitlines, but not in a text file
    path = tmp_path / "data.txt"
    path.write_bytes("one\r\n\ntwo\u2028still two\n".encode())
    rows = read_rows(path, tokenizer, 100)
    texts = [tokenizer.decode(row["input_ids"].tolist()) for row in rows]
    assert texts == ["one<|im_end|>", "two\u2028still two<|im_end|>"]


def test_rows_are_cut_and_those_left_without_a_response_are_dropped_aloud(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    records = [{"text": "0123456789"}, {"prompt": "x" * 50, "response": "y"}]
    path = write(tmp_path / "data.jsonl", *records)
    with caplog.at_level("INFO"):
        rows = read_rows(path, tokenizer, 8)
    assert [tokenizer.decode(row["input_ids"].tolist()) for row in rows] == ["01234567"]
    assert "1 of 2 rows have no response token" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        assert len(read_rows(path, tokenizer, 1000)) == 2
    assert caplog.text == ""


def test_a_saved_dataset_is_read_as_it_is(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    columns = {"input_ids": [[5, 6, 7], [8, 9]], "response_mask": [[0, 1, 1], [0, 1]]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    rows = read_rows(tmp_path / "saved", None, 100)
    assert [row["input_ids"].tolist() for row in rows] == columns["input_ids"]
    assert [row["response_mask"].tolist() for row in rows] == [[False, True, True], [False, True]]


def test_a_saved_dataset_with_faults_is_refused(tmp_path: Path) -> None:
    uneven = datasets.Dataset.from_dict({"input_ids": [[1, 2], [1, 2]], "response_mask": [[1, 1], [1]]})
    uneven.save_to_disk(str(tmp_path / "uneven"))
    datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(str(tmp_path / "lacking"))
    datasets.DatasetDict({"train": uneven}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "empty").mkdir()
    for name, message in {
        "uneven": "row 2: 2 input_ids but 1 in response_mask",
        "lacking": "lacks the column response_mask",
        "splits": "several splits; name one, such as .*splits/train",
        "empty": "not written by datasets' save_to_disk",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_rows(tmp_path / name, None, 100)
