"""Where a text ends, what of it may be shown, and that the text shown is the text."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.completion import MAX_INCOMPLETE_TOKENS, Completion, Detokenizer
from decode.params import SamplingParams

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150, database=None)
END = 2  # <|im_end|> of the byte tokenizer


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words with their leading space in one token, as SentencePiece writes them, and single bytes for the rest."""
    words = ["▁Hello", "▁world", "▁", "lo", "STOP", "▁STOP", "!", "▁a", "a", "b", "\n", "ab▁", "x.y"]
    pieces = ["<unk>", "</s>", *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(len(words))) for piece in pieces], 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


WORDS = word_tokenizer()


def ids_of(*tokens: str) -> list[int]:
    ids = [WORDS.get_vocab()[token] for token in tokens]
    assert None not in ids
    return ids


def fed(row: Completion, ids: list[int], *sizes: int) -> Completion:
    """Blocks of the given sizes, and the rest; after each, what may be shown is checked against what is never taken
    back."""
    shown: list[str] = []
    for start, end in pairwise([0, *sizes, len(ids)]):
        block = ids[start:end]
        if row.finish_reason or not block:
            break
        kept = row.extend(block, ["accepted"] * len(block))
        assert kept <= len(block)
        assert (kept == len(block)) or row.finish_reason
        assert row.pieces[: len(shown)] == shown
        shown = row.pieces[: row.num_certain_pieces]
    assert len(row.pieces) == len(row.ids) == len(row.provenance)
    assert "".join(row.pieces) == row.text
    assert row.sequence == row.prompt + row.ids
    return row


def decoded(tokenizer: PreTrainedTokenizerFast, text: str, *sizes: int, **params: Any) -> Completion:
    """The text as the byte tokenizer splits it, decoded in blocks."""
    row = Completion([1], SamplingParams(**params), frozenset({END}), tokenizer)
    return fed(row, tokenizer.encode(text), *sizes)


# --- ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_ids", [frozenset({9}), frozenset()])
def test_a_block_is_kept_up_to_the_end_of_the_text(stop_ids: frozenset[int]) -> None:
    row = Completion([3], SamplingParams(max_new_tokens=5), stop_ids)
    assert row.extend([4, 5], ["accepted", "bonus"]) == 2
    assert (row.finish_reason, row.num_remaining) == (None, 3)
    block = [6, 9, 7, 8]
    kept = row.extend(block, ["accepted", "accepted", "accepted", "corrected"])
    assert kept == (2 if stop_ids else 3)
    assert row.ids == [4, 5, *block[:kept]]
    assert row.sequence == [3, *row.ids]
    assert row.provenance == ["accepted", "bonus", *["accepted"] * kept]
    assert (row.finish_reason, row.stop_reason) == (("stop", 9) if stop_ids else ("length", None))
    assert (row.pieces, row.text) == ([], "")  # without a tokenizer there are only ids


def test_stop_ids_of_the_params_end_a_text_beside_those_of_the_model() -> None:
    for token in (5, 7):
        row = Completion([3], SamplingParams(stop_token_ids=(7,)), frozenset({5}))
        assert row.extend([4, token, 4], ["plain"] * 3) == 2
        assert (row.finish_reason, row.stop_reason) == ("stop", token)


def test_a_stop_at_the_last_token_is_a_stop(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    assert decoded(byte_tokenizer, "ab", max_new_tokens=2).finish_reason == "length"
    row = decoded(byte_tokenizer, "ab", max_new_tokens=2, stop=("b",))
    assert (row.finish_reason, row.stop_reason, row.text) == ("stop", "b", "a")
    row = Completion([1], SamplingParams(max_new_tokens=2), frozenset({END}), byte_tokenizer)
    row.extend([100, END, 5], ["plain"] * 3)
    assert (row.finish_reason, row.stop_reason) == ("stop", END)


@pytest.mark.parametrize("sizes", [(), (1, 2, 3, 4, 5, 6, 7, 8), (4,), (5,), (6,)], ids=str)
def test_a_stop_string_ends_the_text_wherever_blocks_end(
    byte_tokenizer: PreTrainedTokenizerFast, sizes: tuple[int, ...]
) -> None:
    row = decoded(byte_tokenizer, "one END two", *sizes, stop=("END",))
    assert (row.finish_reason, row.stop_reason) == ("stop", "END")
    assert row.text == "one "
    assert row.ids == byte_tokenizer.encode("one END")  # the last id is the one that completed it
    assert row.pieces == ["o", "n", "e", " ", "", "", ""]


def test_a_text_without_the_stop_string_goes_on(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    row = decoded(byte_tokenizer, "one EN two", stop=("END",))
    assert (row.finish_reason, row.text) == (None, "one EN two")
    assert row.num_certain_pieces == len(row.ids)


def test_of_several_the_one_that_begins_first_wins(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    row = decoded(byte_tokenizer, "abcde", stop=("d", "bcd", "cd", "zz"))
    assert (row.stop_reason, row.text) == ("bcd", "a")
    row = decoded(byte_tokenizer, "abcde", stop=("bcde", "c"))  # it would begin first, but the other ends first
    assert (row.stop_reason, row.text) == ("c", "ab")
    row = fed(Completion([1], SamplingParams(stop=("b!", "lo")), tokenizer=WORDS), ids_of("▁Hello", "b"))
    assert (row.stop_reason, row.text) == ("lo", "Hel")  # inside one token
    row = fed(Completion([1], SamplingParams(stop=(".y", "x", ".")), tokenizer=WORDS), ids_of("a", "x.y"))
    assert (row.stop_reason, row.text, row.pieces) == ("x", "a", ["a", ""])


def test_the_first_of_two_places_in_one_token_counts() -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["ababab"])
    ids = [WORDS.get_vocab()["a"], tokenizer.convert_tokens_to_ids("ababab")]
    row = fed(Completion([1], SamplingParams(stop=("ba",)), tokenizer=tokenizer), ids)
    assert (row.stop_reason, row.text) == ("ba", "aa")
    row = fed(Completion([1], SamplingParams(stop=("aa",)), tokenizer=tokenizer), ids)
    assert (row.stop_reason, row.text, row.pieces) == ("aa", "", ["", ""])  # begun in the token before


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("aaab", [0, 0, 1, None]),  # "aab" may yet come
        ("aacaab", [0, 0, 3, 3, 3, None]),
        ("xayz", [1, 1, 3, 4]),
    ],
)
def test_what_may_begin_a_stop_string_is_held_back(
    byte_tokenizer: PreTrainedTokenizerFast, text: str, shown: list[int | None]
) -> None:
    row = Completion([1], SamplingParams(stop=("aab", "zzz")), frozenset(), byte_tokenizer)
    found: list[int | None] = []
    for token in byte_tokenizer.encode(text):
        row.extend([token], ["plain"])
        found.append(None if row.finish_reason else row.num_certain_pieces + (text == "xayz" and len(row.ids) == 4))
    assert found == shown


def test_stop_strings_may_hold_characters_of_several_bytes(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    row = decoded(byte_tokenizer, "a東🙂b", stop=("🙂", "\ufffd"))  # half a character is no character
    assert (row.stop_reason, row.text) == ("🙂", "a東")
    assert row.ids == byte_tokenizer.encode("a東🙂")
    row = decoded(byte_tokenizer, "a東🙂b", stop=("東🙂",))
    assert (row.text, row.pieces) == ("a", ["a", *[""] * 7])


def test_the_rest_of_a_character_at_the_end_may_complete_a_stop_string(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*byte_tokenizer.encode("ab"), byte_tokenizer.encode("東")[0]]
    row = Completion([1], SamplingParams(max_new_tokens=3, stop=("b\ufffd",)), frozenset(), byte_tokenizer)
    fed(row, ids)
    assert row.text in ("a", "ab")
    assert "b\ufffd" not in row.text


def test_special_tokens_can_be_stop_strings(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    start = byte_tokenizer.convert_tokens_to_ids("<|im_start|>")
    params = SamplingParams(stop=("<|im_start|>", "!"))
    row = Completion([1], params, frozenset({END}), byte_tokenizer)
    ids = [*byte_tokenizer.encode("ab"), start, *byte_tokenizer.encode("!")]
    fed(row, ids)
    assert (row.finish_reason, row.stop_reason, row.text, row.ids) == ("stop", start, "ab", ids[:3])
    spelled = decoded(byte_tokenizer, "a!", stop=params.stop)
    assert spelled.stop_reason == "!"


def test_special_tokens_without_a_role_can_be_stop_strings() -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([AddedToken("<|eot|>", special=True), "<plain>"])
    assert "<|eot|>" not in tokenizer.all_special_tokens
    eot, plain = tokenizer.convert_tokens_to_ids(["<|eot|>", "<plain>"])
    row = Completion([1], SamplingParams(stop=("<|eot|>", "<plain>")), tokenizer=tokenizer)
    fed(row, [*ids_of("▁Hello"), eot, *ids_of("▁a")])
    assert (row.stop_reason, row.text) == (eot, "Hello")
    row = Completion([1], SamplingParams(stop=("<|eot|>", "<plain>")), tokenizer=tokenizer)
    fed(row, [*ids_of("▁Hello"), plain, *ids_of("▁a")])
    assert (row.stop_reason, row.text) == ("<plain>", "Hello")


@pytest.mark.parametrize("end", ["token", "string", "special"])
def test_nothing_ends_a_text_before_min_new_tokens(byte_tokenizer: PreTrainedTokenizerFast, end: str) -> None:
    """Of penalties, which forbid stop tokens until then, this is the other half: stop strings."""
    stop = {"token": (), "string": ("b",), "special": ("<|im_start|>",)}[end]
    token = {"token": END, "string": byte_tokenizer.encode("b")[0], "special": 1}[end]
    a = byte_tokenizer.encode("a")[0]
    row = Completion([1], SamplingParams(min_new_tokens=3, stop=stop), frozenset({END}), byte_tokenizer)
    fed(row, [token, a, token, a, token, a], 1, 2, 3, 4)
    assert row.ids == [token, a, token, a, token]
    assert row.finish_reason == "stop"
    assert row.text == {"token": "aa", "string": "baba", "special": "aa"}[end]


def test_a_stop_string_begun_before_min_new_tokens_ends_the_text_after_it(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    row = decoded(byte_tokenizer, "xabcabc", min_new_tokens=3, stop=("abc",))
    assert (row.stop_reason, row.text, len(row.ids)) == ("abc", "x", 4)
    row = decoded(byte_tokenizer, "xabcabc", min_new_tokens=4, stop=("abc",))  # it ended too early
    assert (row.stop_reason, row.text, len(row.ids)) == ("abc", "xabc", 7)


def test_bad_words_are_tokenised_alone_and_after_a_space() -> None:
    row = Completion([1], SamplingParams(bad_words=("Hello", " world", "!")), tokenizer=WORDS)
    hello, world, bang = ids_of("▁Hello", "▁world", "!")
    assert (hello,) in row.bad_words
    assert (world,) in row.bad_words
    assert any(word[-1] == bang for word in row.bad_words)
    assert len(set(row.bad_words)) == len(row.bad_words)
    assert all(row.bad_words)


def test_bad_words_of_bytes(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    row = Completion([1], SamplingParams(bad_words=("ab",)), tokenizer=byte_tokenizer)
    assert sorted(row.bad_words) == sorted([tuple(byte_tokenizer.encode("ab")), tuple(byte_tokenizer.encode(" ab"))])


@pytest.mark.parametrize("params", [{"stop": ("x",)}, {"bad_words": ("x",)}])
def test_text_needs_a_tokenizer(params: dict[str, tuple[str, ...]], byte_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"^stop, bad_words: need a tokenizer; decode with one, or use stop_token_ids"):
        Completion([1], SamplingParams(**params))
    Completion([1], SamplingParams(**params), tokenizer=byte_tokenizer)
    Completion([1], SamplingParams(stop_token_ids=(3,), logit_bias={3: 1.0}))


def reference(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], params: SamplingParams
) -> tuple[list[int], str, str | None, int | str | None]:
    """The same by brute force: decode the whole text anew after each token; characters are complete in it."""
    shown_before = ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=True)
        complete = text.rstrip("\ufffd")
        hits = []
        for stop in params.stop:
            place = complete.find(stop, max(0, len(shown_before) - len(stop) + 1))
            if place >= 0:
                hits.append((place, stop))
        if hits and count > params.min_new_tokens:
            return ids[:count], complete[: min(hits)[0]], "stop", min(hits)[1]
        if ids[count - 1] == END and count > params.min_new_tokens:
            return ids[:count], text, "stop", END
        if count == params.max_new_tokens:
            return ids[:count], text, "length", None
        shown_before = complete
    return ids, complete, None, None


@PROPERTY
@given(
    text=st.text(alphabet="abé🙂 ", min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="abé🙂 ", min_size=1, max_size=3), max_size=3),
    specials=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 1)), max_size=3),
    end=st.one_of(st.none(), st.integers(0, 60)),
    sizes=st.lists(st.integers(0, 60), max_size=8),
    min_new_tokens=st.integers(0, 12),
    max_new_tokens=st.integers(12, 60),
)
@example("aab", ["ab", "b"], [], None, [1, 2], 0, 60)
def test_a_text_ends_where_a_plain_search_says(
    byte_tokenizer: PreTrainedTokenizerFast,
    text: str,
    stop: list[str],
    specials: list[tuple[int, int]],
    end: int | None,
    sizes: list[int],
    min_new_tokens: int,
    max_new_tokens: int,
) -> None:
    ids = byte_tokenizer.encode(text)
    for place, token in specials:
        ids.insert(place, token)
    if end is not None:
        ids.insert(end, END)
    params = SamplingParams(stop=tuple(stop), min_new_tokens=min_new_tokens, max_new_tokens=max_new_tokens)
    row = fed(Completion([1], params, frozenset({END}), byte_tokenizer), ids, *sorted(set(sizes) - {0}))
    assert (row.ids, row.text, row.finish_reason, row.stop_reason) == reference(byte_tokenizer, ids, params)


# --- text -------------------------------------------------------------------------------------------------


def pieces_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


TEXTS = [
    "Hello",
    "naïve 東京 🙂 ½",
    "🙂🙂",
    "👨‍👩‍👧‍👦",
    "a\tb\r\n\x0c",
    "\ufffd",
    "x\ufffd\ufffdy",
    " a",
    "a ",
    "  ",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_concatenate_to_the_text(byte_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert len(ids) == len(text.encode())  # characters are split over tokens
    assert "".join(pieces_of(byte_tokenizer, ids)) == text


def test_a_character_appears_when_it_is_complete(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*byte_tokenizer.encode("a東"), END, *byte_tokenizer.encode("🙂")]
    assert pieces_of(byte_tokenizer, ids) == ["a", "", "", "東", "", "", "", "", "🙂", ""]
    # half a character at the end is shown as what it decodes to, at the end
    assert pieces_of(byte_tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


@PROPERTY
@given(
    text=st.text(max_size=25),
    specials=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 2)), max_size=4),
    cut=st.integers(0, 3),
)
@example("🙂é", [(2, 2), (5, 1)], 1)
def test_valid_text_with_special_tokens_anywhere(
    byte_tokenizer: PreTrainedTokenizerFast, text: str, specials: list[tuple[int, int]], cut: int
) -> None:
    ids = byte_tokenizer.encode(text)
    ids = ids[: max(len(ids) - cut, 0)]  # incomplete at the end
    for place, token in specials:
        ids.insert(place, token)
    assert "".join(pieces_of(byte_tokenizer, ids)) == byte_tokenizer.decode(ids, skip_special_tokens=True)


class CountingTokenizer:
    """Counts how many ids were decoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.lengths: list[int] = []

    def decode(self, ids: list[int], **options: Any) -> str:
        self.lengths.append(len(ids))
        return self.tokenizer.decode(ids, **options)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("kind", ["continuation bytes", "text", "special tokens", "emoji", "random"])
def test_the_cost_of_a_token_does_not_grow(byte_tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    ids = {
        "continuation bytes": [byte_tokenizer.encode("🙂")[2]] * 400,
        "text": byte_tokenizer.encode("a b " * 100),
        "special tokens": [0] * 400,
        "emoji": byte_tokenizer.encode("🙂" * 100),
        "random": [(7 * place * place + 31 * place) % 256 + 3 for place in range(400)],
    }[kind]
    counting = CountingTokenizer(byte_tokenizer)
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert len(text) > 0 or kind == "special tokens"
    assert len(counting.lengths) <= 2 * len(ids) + 1
    assert max(counting.lengths) <= 3 * MAX_INCOMPLETE_TOKENS


@pytest.mark.parametrize("length", range(1, 40))
def test_a_character_after_bytes_that_are_no_text_is_not_lost(
    byte_tokenizer: PreTrainedTokenizerFast, length: int
) -> None:
    ids = [byte_tokenizer.encode("🙂")[2]] * length + byte_tokenizer.encode("€ok 🙂")
    text = "".join(pieces_of(byte_tokenizer, ids))
    assert text == byte_tokenizer.decode(ids)
    assert text.endswith("€ok 🙂")


def test_a_stop_string_with_a_special_token_inside_is_refused(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"stop is 'Bye<\|im_end\|>': <\|im_end\|> is no text"):
        Completion([5], SamplingParams(stop="Bye<|im_end|>"), tokenizer=byte_tokenizer)


@PROPERTY
@given(ids=st.lists(st.integers(0, 258), max_size=60))
def test_bytes_that_are_no_text_lose_nothing_that_is(byte_tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    """Replacement characters may be counted differently where runs of invalid bytes are cut; the rest is the same."""
    whole = byte_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces_of(byte_tokenizer, ids)).replace("\ufffd", "") == whole.replace("\ufffd", "")


@PROPERTY
@given(ids=st.lists(st.integers(1, len(WORDS) - 1), max_size=40))
@example(ids_of("▁Hello", "▁world", "▁", "▁", "!"))
@example(ids_of("▁", "▁Hello"))
@example([1, *ids_of("▁Hello"), 1, *ids_of("▁world")])
def test_leading_spaces_survive(ids: list[int]) -> None:
    valid = [token for token in ids if not WORDS.convert_ids_to_tokens(token).startswith("<0x")]
    assert "".join(pieces_of(WORDS, valid)) == WORDS.decode(valid, skip_special_tokens=True)


def test_words_keep_the_space_between_them() -> None:
    ids = ids_of("▁Hello", "▁world", "▁a", "!")
    assert pieces_of(WORDS, ids) == ["Hello", " world", " a", "!", ""]
    assert WORDS.decode(ids[1:2]) == "world"  # the control: decoded alone it has none
    emoji = ids_of("▁Hello", *(f"<0x{byte:02X}>" for byte in "🙂".encode()), "▁a")
    assert pieces_of(WORDS, emoji) == ["Hello", "", "", "", "🙂", " a", ""]


def test_a_run_of_special_tokens_does_not_swallow_a_space() -> None:
    ids = [*ids_of("▁Hello"), *[1] * (2 * MAX_INCOMPLETE_TOKENS), *ids_of("▁world")]
    assert "".join(pieces_of(WORDS, ids)) == WORDS.decode(ids, skip_special_tokens=True) == "Hello world"


def test_a_long_text_of_words_is_the_same_in_pieces() -> None:
    ids = ids_of(*["▁Hello", "▁", "▁world", "!", "\n", "▁a", "b"] * 30)
    assert "".join(pieces_of(WORDS, ids)) == WORDS.decode(ids)
