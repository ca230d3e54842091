"""Text in, text out: what is streamed is what is generated, and a pair loads in each of its forms."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from decode import SamplingParams, SpeculativeDecoder
from decode.decoder import Detokenizer
from decode.pair import Pair, save_draft_vocab
from decode.plain import PlainDecoder
from decode.prompts import Prompt, as_messages
from decode.speculative import Trace

ModelFolder = Callable[..., Path]
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=40, seed=1)
TEXTS = ["Hello", "naïve 東京 🙂 ½", "🙂🙂", "a\tb\r\n\x0c", "\ufffd", "x\ufffd\ufffdy", ""]


@pytest.fixture(scope="module")
def target_folder(tiny_model_folder: ModelFolder) -> Path:
    return tiny_model_folder(seed=0)


@pytest.fixture(scope="module")
def draft_folder(tiny_model_folder: ModelFolder) -> Path:
    return tiny_model_folder(seed=1, num_layers=1)


@pytest.fixture
def pair_folder(target_folder: Path, draft_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(draft_folder, tmp_path / "pair" / "draft")
    Pair(target={"id": str(target_folder)}, num_draft_tokens=5).save(tmp_path / "pair")
    return tmp_path / "pair"


@pytest.fixture(scope="module")
def decoder(target_folder: Path, draft_folder: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder))


def pieces_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_concatenate_to_the_text(byte_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    pieces = pieces_of(byte_tokenizer, ids)
    assert len(ids) == len(text.encode())  # characters are split over tokens
    assert "".join(pieces) == text


def test_a_character_appears_when_it_is_complete(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = [*byte_tokenizer.encode("a東"), byte_tokenizer.eos_token_id, *byte_tokenizer.encode("🙂")]
    assert pieces_of(byte_tokenizer, ids) == ["a", "", "", "東", "", "", "", "", "🙂", ""]
    # half a character at the end is shown as what it decodes to, at the end
    assert pieces_of(byte_tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(ids=st.lists(st.integers(0, 258), max_size=20))
def test_any_ids_concatenate_to_what_they_decode_to(byte_tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    assert "".join(pieces_of(byte_tokenizer, ids)) == byte_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("params", [None, SAMPLED, SamplingParams(temperature=2.0, max_new_tokens=60)])
def test_the_stream_is_the_text(decoder: SpeculativeDecoder, params: SamplingParams | None) -> None:
    for prompt in ("Hello", "naïve 🙂")[: 1 if params is None else 2]:
        (generation,) = decoder.generate(prompt, params)
        trace = Trace()
        pieces = list(decoder.stream(prompt, params, trace))
        assert "".join(piece.text for piece in pieces) == generation.text
        # a piece a token, and perhaps the rest of a character that the last token left incomplete
        assert [piece.provenance for piece in pieces][: len(generation.ids)] == generation.provenance
        assert len(pieces) - len(generation.ids) in (0, 1)
        assert trace == generation.trace
        assert generation.text == decoder.tokenizer.decode(generation.ids, skip_special_tokens=True)


def test_greedy_text_is_that_of_the_target_alone(decoder: SpeculativeDecoder) -> None:
    prompts = ["Hello", "naïve 🙂", "A longer prompt than the others."]
    params = SamplingParams(max_new_tokens=40)
    together = decoder.generate(prompts, params)
    expected = decoder.plain.generate_ids([decoder.encode(prompt) for prompt in prompts], params)
    assert [generation.ids for generation in together] == [completion.ids for completion in expected]
    assert [generation.finish_reason for generation in together] == [reference.finish_reason for reference in expected]
    for prompt, generation in zip(prompts, together, strict=True):
        assert decoder.generate([prompt], params)[0].ids == generation.ids


def test_the_stop_token_is_an_id_but_no_text(decoder: SpeculativeDecoder) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=200, seed=3)
    generations = decoder.generate(["a", "b", "c", "d", "e"], params)
    stopped = [generation for generation in generations if generation.finish_reason == "stop"]
    assert stopped
    for generation in stopped:
        assert generation.ids[-1] == decoder.tokenizer.eos_token_id
        assert generation.ids.count(decoder.tokenizer.eos_token_id) == 1
        assert "<|im_end|>" not in generation.text


def test_a_conversation_is_a_prompt(decoder: SpeculativeDecoder) -> None:
    assert decoder.encode("Hi") == decoder.encode([{"role": "user", "content": "Hi"}])
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert decoder.tokenizer.decode(decoder.encode(chat)).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    (generation,) = decoder.generate(chat, SAMPLED)
    assert "".join(piece.text for piece in decoder.stream(chat, SAMPLED)) == generation.text
    assert generation.ids != decoder.generate("Hi", SAMPLED)[0].ids
    assert decoder.generate([]) == []


def test_a_stream_can_be_left(decoder: SpeculativeDecoder) -> None:
    stream = decoder.stream("Hello", SAMPLED)
    first = [next(stream).text for _ in range(3)]
    stream.close()
    assert [piece.text for piece in decoder.stream("Hello", SAMPLED)][:3] == first


def test_prompts_that_do_not_fit_are_named(decoder: SpeculativeDecoder) -> None:
    prompts = [Prompt("short", as_messages("x")), Prompt("long-7", as_messages("x" * 460))]
    params = SamplingParams(max_new_tokens=60)
    assert decoder.encode_all(prompts[:1], params) == [decoder.encode("x")]
    with pytest.raises(ValueError, match=r"^prompt long-7: .* is \d+ tokens, longer than the context of 512 .*shorten"):
        decoder.encode_all(prompts, params)
    longest = SamplingParams(max_new_tokens=512 - len(decoder.encode("x")) - decoder.engine.num_draft_tokens)
    decoder.encode_all(prompts[:1], longest)
    with pytest.raises(ValueError, match="513 tokens"):
        decoder.encode_all(prompts[:1], SamplingParams(max_new_tokens=longest.max_new_tokens + 1))


def test_a_pair_names_its_target_and_how_much_to_draft(pair_folder: Path, target_folder: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair_folder))
    assert decoder.engine.num_draft_tokens == 5
    assert decoder.proposer.draft_vocab is None
    plain = PlainDecoder(AutoModelForCausalLM.from_pretrained(target_folder), frozenset({2}))
    expected = plain.generate_ids([decoder.encode("Hello")], SamplingParams(max_new_tokens=12))
    assert decoder.generate("Hello", SamplingParams(max_new_tokens=12))[0].ids == expected[0].ids
    assert SpeculativeDecoder.from_pretrained(None, str(pair_folder), num_draft_tokens=2).engine.num_draft_tokens == 2


def test_another_target_can_be_given(pair_folder: Path, tiny_model_folder: ModelFolder) -> None:
    other = tiny_model_folder(seed=3)
    decoder = SpeculativeDecoder.from_pretrained(str(other), str(pair_folder))
    expected = AutoModelForCausalLM.from_pretrained(other).lm_head.weight
    assert torch.equal(decoder.target.get_output_embeddings().weight, expected)
    half = SpeculativeDecoder.from_pretrained(str(other), str(pair_folder), dtype="bfloat16")
    assert half.target.dtype == half.proposer.model.dtype == torch.bfloat16
    assert len(half.generate("Hello", SAMPLED)[0].ids) > 0


def test_a_reduced_vocabulary_is_a_view_of_the_draft(pair_folder: Path) -> None:
    ids = torch.tensor([2, *range(40, 140)])
    save_draft_vocab(pair_folder, ids)
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair_folder))
    assert torch.equal(decoder.proposer.draft_vocab, ids)
    assert decoder.proposer.model.get_output_embeddings().out_features == len(ids)
    full = AutoModelForCausalLM.from_pretrained(pair_folder / "draft")  # the checkpoint itself stays a stock model
    text = torch.tensor([decoder.encode("Hello")])
    with torch.inference_mode():
        torch.testing.assert_close(decoder.proposer.score(text), full(text).logits[..., ids], rtol=0, atol=1e-5)


def test_a_draft_without_a_pair_needs_a_target(draft_folder: Path, target_folder: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder))
    assert decoder.engine.num_draft_tokens == 3
    with pytest.raises(ValueError, match=rf"^pair {draft_folder}: holds no pair.json; .*--target$"):
        SpeculativeDecoder.from_pretrained(None, str(draft_folder))


@pytest.mark.parametrize("num_draft_tokens", [0, -1])
def test_at_least_one_token_is_drafted(target_folder: Path, draft_folder: Path, num_draft_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"num_draft_tokens is {num_draft_tokens}: draft at least 1"):
        SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder), num_draft_tokens=num_draft_tokens)


def test_a_draft_with_another_tokenizer_is_refused(target_folder: Path, pair_folder: Path) -> None:
    path = pair_folder / "draft" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"^draft {pair_folder}/draft: its tokenizer is not that .* id {vocabulary['b']} is"
    ):
        SpeculativeDecoder.from_pretrained(str(target_folder), str(pair_folder))


def test_padding_of_the_draft_is_never_proposed(
    target_folder: Path,
    tiny_llama: Callable[..., LlamaForCausalLM],
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    draft = tiny_llama(seed=1, num_layers=1, vocab_size=300)
    with torch.no_grad():
        draft.lm_head.weight[259:] *= 30  # its likeliest columns
    draft.save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    decoder = SpeculativeDecoder.from_pretrained(str(target_folder), str(tmp_path))
    assert decoder.proposer.score(torch.tensor([[1, 5]])).shape[-1] == 259
    (generation,) = decoder.generate("Hello", SAMPLED)
    assert generation.trace.num_drafted > 0
    assert max(generation.ids) < 259
