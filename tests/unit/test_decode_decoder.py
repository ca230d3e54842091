"""Text in, text out: what is streamed is what is generated, and a pair loads in each of its forms."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from decode import SamplingParams, SpeculationParams, SpeculativeDecoder
from decode.decoder import Generation
from decode.llama import llama_forward
from decode.pair import Pair, save_draft_vocab
from decode.plain import PlainDecoder
from decode.prompts import Prompt, as_messages
from decode.trace import Trace

ModelFolder = Callable[..., Path]
SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=40, seed=1)


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


@pytest.mark.parametrize(
    "params",
    [
        None,
        SAMPLED,
        SamplingParams(temperature=2.0, max_new_tokens=60, seed=2),
        SamplingParams(temperature=1.5, max_new_tokens=60, seed=2, stop=("e", "\ufffd\ufffd", "xy", "<|im_start|>")),
        SamplingParams(temperature=1.5, max_new_tokens=30, seed=3, logprobs=2, min_new_tokens=9, stop_token_ids=(90,)),
    ],
)
def test_the_stream_is_the_text(decoder: SpeculativeDecoder, params: SamplingParams | None) -> None:
    for prompt in ("Hello", "naïve 🙂")[: 1 if params is None else 2]:
        (generation,) = decoder.generate(prompt, params)
        trace = Trace()
        pieces = list(decoder.stream(prompt, params, trace))
        assert "".join(piece.text for piece in pieces) == generation.text
        assert [piece.token for piece in pieces] == generation.ids
        # the clock decides how many tokens a pass reads, and that the last bits
        streamed = [piece.logprobs for piece in pieces if piece.logprobs]
        for ours, theirs in zip(streamed, generation.logprobs, strict=True):
            assert ours.chosen == pytest.approx(theirs.chosen, rel=1e-4)
            assert ours.top == pytest.approx(theirs.top, rel=1e-4)
        assert trace.num_committed == generation.trace.num_committed == len(generation.ids)
        if not isinstance(generation.stop_reason, str):
            assert generation.text == decoder.tokenizer.decode(generation.ids, skip_special_tokens=True)


def test_provenance_and_trace_of_a_stream_are_those_of_the_text(target_folder: Path, draft_folder: Path) -> None:
    """With a fixed number of draft tokens: otherwise measured seconds decide it."""
    speculation = SpeculationParams(num_draft_tokens=3, never_slower=False)
    decoder = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder), speculation)
    (generation,) = decoder.generate("Hello", SAMPLED)
    trace = Trace()
    pieces = list(decoder.stream("Hello", SAMPLED, trace))
    assert [piece.provenance for piece in pieces] == generation.provenance
    assert trace.rounds == generation.trace.rounds
    assert trace.num_paused == 0


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
    generations = decoder.generate([*"abcdefgh"], params)
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
    longest = SamplingParams(max_new_tokens=512 - len(decoder.encode("x")))
    decoder.encode_all(prompts[:1], longest)
    assert len(decoder.generate("x", longest)[0].ids) <= longest.max_new_tokens
    with pytest.raises(ValueError, match="513 tokens"):
        decoder.encode_all(prompts[:1], SamplingParams(max_new_tokens=longest.max_new_tokens + 1))


def test_a_pair_names_its_target_and_what_was_measured(pair_folder: Path, target_folder: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair_folder))
    assert decoder.draft.draft_vocab is None
    plain = PlainDecoder(AutoModelForCausalLM.from_pretrained(target_folder), frozenset({2}))
    expected = plain.generate_ids([decoder.encode("Hello")], SamplingParams(max_new_tokens=12))
    assert decoder.generate("Hello", SamplingParams(max_new_tokens=12))[0].ids == expected[0].ids
    pair = Pair.load(pair_folder)
    pair.measured = {"betas": [0.9, 0.2]}
    pair.save(pair_folder)
    known = SpeculativeDecoder.from_pretrained(None, str(pair_folder))
    assert known.engine.pacer.betas(3) == pytest.approx([0.9, 0.2, 0.2])
    assert decoder.engine.pacer.betas(1) != pytest.approx([0.9])


def test_another_target_can_be_given(pair_folder: Path, tiny_model_folder: ModelFolder) -> None:
    other = tiny_model_folder(seed=3)
    decoder = SpeculativeDecoder.from_pretrained(str(other), str(pair_folder))
    expected = AutoModelForCausalLM.from_pretrained(other).lm_head.weight
    assert torch.equal(decoder.target.get_output_embeddings().weight, expected)
    half = SpeculativeDecoder.from_pretrained(str(other), str(pair_folder), dtype="bfloat16")
    assert half.target.dtype == half.draft.model.dtype == torch.bfloat16
    mixed = SpeculativeDecoder.from_pretrained(str(other), str(pair_folder), draft_dtype="bfloat16")
    assert (mixed.target.dtype, mixed.draft.model.dtype) == (torch.float32, torch.bfloat16)
    params = SamplingParams(max_new_tokens=12)
    assert mixed.generate("Hello", params)[0].ids == decoder.generate("Hello", params)[0].ids
    assert len(half.generate("Hello", SAMPLED)[0].ids) > 0


def test_a_reduced_vocabulary_is_a_view_of_the_draft(pair_folder: Path) -> None:
    ids = torch.tensor([2, *range(40, 140)])
    save_draft_vocab(pair_folder, ids)
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair_folder))
    assert torch.equal(decoder.draft.draft_vocab, ids)
    assert decoder.draft.model.get_output_embeddings().out_features == len(ids)
    full = AutoModelForCausalLM.from_pretrained(pair_folder / "draft")  # the checkpoint itself stays a stock model
    text = torch.tensor([decoder.encode("Hello")])
    with torch.inference_mode():
        torch.testing.assert_close(decoder.draft.score(text), full(text).logits[..., ids], rtol=0, atol=1e-5)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def relatives(
    request: pytest.FixtureRequest,
    tiny_llama: Callable[..., LlamaForCausalLM],
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> tuple[str, str]:
    """Folders of a target and of a draft with its embeddings and head, and a layer of its own."""
    target = tiny_llama(seed=0, tie_word_embeddings=request.param)
    draft = tiny_llama(seed=1, num_layers=1, tie_word_embeddings=request.param)
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.lm_head.load_state_dict(target.lm_head.state_dict())
    for name, model in (("target", target), ("relative", draft)):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer.save_pretrained(tmp_path / name)
    return str(tmp_path / "target"), str(tmp_path / "relative")


def shares(decoder: SpeculativeDecoder) -> tuple[bool, bool]:
    """Whether target and draft have one and the same embedding, and one and the same head."""
    models = decoder.target, decoder.draft.model
    embeddings = {model.get_input_embeddings().weight.data_ptr() for model in models}
    return len(embeddings) == 1, len({model.get_output_embeddings().weight.data_ptr() for model in models}) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_of_the_target_are_held_once(
    relatives: tuple[str, str], dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = relatives
    with caplog.at_level(logging.INFO):
        decoder = SpeculativeDecoder.from_pretrained(target, draft, dtype=dtype)
    assert shares(decoder) == (True, True)
    tied = decoder.target.config.tie_word_embeddings
    num_spared = (1 if tied else 2) * 259 * 32 * decoder.target.dtype.itemsize
    assert caplog.text.count("embeddings with the target") == 1
    assert f"draft shares {num_spared / 2**20:.1f} MiB of embeddings with the target" in caplog.text
    assert (decoder.draft.model.lm_head.weight is decoder.draft.model.model.embed_tokens.weight) == tied
    # nothing else has changed
    stock = AutoModelForCausalLM.from_pretrained(draft, dtype=dtype)
    text = torch.tensor([decoder.encode("Hello")])
    with torch.inference_mode():
        assert torch.equal(decoder.draft.score(text), stock(text).logits)
    fast = llama_forward(decoder.draft.model)
    assert fast is not None
    decoder.generate("Hello", SAMPLED)
    assert llama_forward(decoder.draft.model) is fast
    params = SamplingParams(max_new_tokens=20)
    (plain,) = decoder.plain.generate_ids([decoder.encode("Hello")], params)
    assert dtype == "bfloat16" or decoder.generate("Hello", params)[0].ids == plain.ids


def test_untuned_it_is_transformers_that_passes(relatives: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    target, draft = relatives
    tuned = SpeculativeDecoder.from_pretrained(target, draft, dtype="float32")
    with caplog.at_level(logging.INFO):
        decoder = SpeculativeDecoder.from_pretrained(target, draft, dtype="float32", tuned=False)
        params = SamplingParams(max_new_tokens=20)
        (untuned,) = decoder.generate("Hello", params)
    assert caplog.text.count("transformers' own forward pass: so it was asked") == 2  # target and draft
    assert untuned.ids == tuned.generate("Hello", params)[0].ids


def test_a_reduced_head_is_the_drafts_own(relatives: tuple[str, str], tmp_path: Path) -> None:
    target, draft = relatives
    shutil.copytree(draft, tmp_path / "pair" / "draft")
    Pair(target={"id": target}).save(tmp_path / "pair")
    ids = torch.tensor([2, *range(40, 140)])
    save_draft_vocab(tmp_path / "pair", ids)
    decoder = SpeculativeDecoder.from_pretrained(None, str(tmp_path / "pair"))
    assert shares(decoder) == (True, False)
    assert torch.equal(decoder.draft.model.lm_head.weight, decoder.target.lm_head.weight[ids])
    assert decoder.target.lm_head.weight.shape == (259, 32)
    params = SamplingParams(max_new_tokens=20)
    (plain,) = decoder.plain.generate_ids([decoder.encode("Hello")], params)
    assert decoder.generate("Hello", params)[0].ids == plain.ids


def test_other_embeddings_stay_apart(
    relatives: tuple[str, str], draft_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = relatives
    with caplog.at_level(logging.INFO):
        assert shares(SpeculativeDecoder.from_pretrained(target, str(draft_folder))) == (False, False)
        assert shares(SpeculativeDecoder.from_pretrained(target, draft, draft_dtype="bfloat16")) == (False, False)
    assert "embeddings with the target" not in caplog.text
    # one weight of the embeddings alone is enough; an untied head stays shared
    model = AutoModelForCausalLM.from_pretrained(draft)
    with torch.no_grad():
        model.model.embed_tokens.weight[258, 31] += 0.01
    model.save_pretrained(draft)
    decoder = SpeculativeDecoder.from_pretrained(target, draft)
    assert shares(decoder) == (False, not model.config.tie_word_embeddings)
    assert not torch.equal(decoder.draft.model.model.embed_tokens.weight, decoder.target.model.embed_tokens.weight)


def test_a_draft_without_a_pair_needs_a_target(draft_folder: Path, target_folder: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder))
    assert decoder.engine.speculation == SpeculationParams()
    with pytest.raises(ValueError, match=rf"^pair {draft_folder}: holds no pair.json; .*--target$"):
        SpeculativeDecoder.from_pretrained(None, str(draft_folder))


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
    assert decoder.draft.score(torch.tensor([[1, 5]])).shape[-1] == 259
    (generation,) = decoder.generate("Hello", SAMPLED)
    assert generation.trace.num_drafted > 0
    assert max(generation.ids) < 259


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(target_folder: Path, draft_folder: Path, device: str) -> None:
    with pytest.raises(ValueError, match=rf"^device of draft: '{device}' is not one of this machine"):
        SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder), draft_device=device)
    there = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder), draft_device="cpu")
    assert there.draft.model.device.type == "cpu"


def test_lookup_needs_no_draft(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=60)
    expected: Generation
    (expected,) = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder)).generate("Hello", params)
    (tmp_path / "reference.txt").write_text(expected.text)
    fixed = dict(num_draft_tokens=4, never_slower=False)
    for reference in (None, str(tmp_path / "reference.txt")):
        speculation = SpeculationParams(proposer="lookup", reference=reference, **fixed)
        decoder = SpeculativeDecoder.from_pretrained(str(target_folder), None, speculation)
        assert decoder.draft is None
        assert decoder.generate("Hello", params)[0].ids == expected.ids
    for proposer in ("draft", "cascade"):
        with pytest.raises(ValueError, match=rf"^proposer: {proposer} needs a draft; give a pair, or use lookup$"):
            SpeculativeDecoder.from_pretrained(str(target_folder), None, SpeculationParams(proposer=proposer))
    with pytest.raises(ValueError, match=r"^target: none given, and no pair that names one"):
        SpeculativeDecoder.from_pretrained(None, None, SpeculationParams(proposer="lookup"))


def test_a_reference_that_cannot_be_read_is_refused(target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"caf\xe9")
    for path, reason in (
        (tmp_path / "nowhere", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "bytes", "utf-8"),
    ):
        speculation = SpeculationParams(proposer="lookup", reference=str(path))
        with pytest.raises(ValueError, match=rf"^reference {path}: cannot be read as UTF-8 text: .*{reason}"):
            SpeculativeDecoder.from_pretrained(str(target_folder), None, speculation)


def test_each_prompt_may_have_its_own_parameters(decoder: SpeculativeDecoder) -> None:
    prompts = ["Hello", "naïve 🙂", "A longer prompt than the others."]
    params = [
        SamplingParams(max_new_tokens=9),
        SamplingParams(temperature=1.2, seed=4, max_new_tokens=30, stop=("e", "a")),
        SamplingParams(temperature=0.7, seed=4, max_new_tokens=20, top_k=9, repetition_penalty=1.3),
    ]
    together = decoder.generate(prompts, params)
    for prompt, each, generation in zip(prompts, params, together, strict=True):
        (alone,) = decoder.generate(prompt, [each])
        assert (alone.ids, alone.text, alone.stop_reason) == (generation.ids, generation.text, generation.stop_reason)
    with pytest.raises(ValueError, match=r"^params: 2 for 3 prompts"):
        decoder.generate(prompts, params[:2])


def test_raw_text_goes_on_without_the_template(decoder: SpeculativeDecoder) -> None:
    assert decoder.encode("Once", raw=True) == decoder.tokenizer.encode("Once")
    with pytest.raises(ValueError, match=r"^raw: continues text; give a text instead of chat messages$"):
        decoder.encode([{"role": "user", "content": "x"}], raw=True)
    (generation,) = decoder.generate("Once", SAMPLED, raw=True)
    assert "".join(piece.text for piece in decoder.stream("Once", SAMPLED, raw=True)) == generation.text
    assert generation.ids != decoder.generate("Once", SAMPLED)[0].ids


def test_raw_code_goes_on_without_what_was_asked(decoder: SpeculativeDecoder) -> None:
    prompts = [Prompt("1", as_messages("Complete this: def"), code="def")]
    assert decoder.encode_all(prompts, SAMPLED, raw=True) == [decoder.encode("def", raw=True)]
    assert decoder.encode_all(prompts, SAMPLED) == [decoder.encode("Complete this: def")]


def test_a_lossy_text_says_so(target_folder: Path, draft_folder: Path) -> None:
    speculation = SpeculationParams(lossy_lenience=0.5)
    decoder = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder), speculation)
    assert decoder.generate("Hello", SAMPLED)[0].lossy == "lenience 0.5"
    assert decoder.generate("Hello")[0].lossy is None  # greedy texts are exact all the same


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_tokens_that_the_target_lacks_are_refused(decoder: SpeculativeDecoder, field: str) -> None:
    for token in (-1, 259):
        value = {token: 1.0} if field == "logit_bias" else [token]
        with pytest.raises(ValueError, match=rf"^{field}: there is no token {token}; ids are 0 to 258$"):
            decoder.generate("Hello", SamplingParams(**{field: value}))


@pytest.mark.parametrize("proposer", ["draft", "lookup", "cascade"])
def test_several_texts_may_take_turns(target_folder: Path, draft_folder: Path, proposer: str) -> None:
    speculation = SpeculationParams(num_draft_tokens=3, never_slower=False, proposer=proposer)
    decoder = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder), speculation)
    prompts = ["A prompt that is longer than the other one", "B"]
    expected = [decoder.generate(prompt, SAMPLED)[0].ids for prompt in prompts]
    streams, found = [decoder.stream(prompt, SAMPLED) for prompt in prompts], [[], []]
    for _ in range(5):
        for stream, tokens in zip(streams, found, strict=True):
            tokens.append(next(stream).token)
    assert [answer.ids for answer in decoder.generate(prompts, [SAMPLED, SAMPLED])] == expected
    for stream, tokens in zip(streams, found, strict=True):
        tokens += [piece.token for piece in stream]
    assert found == expected


def test_the_generator_of_torch_is_drawn_from_only_without_a_seed(decoder: SpeculativeDecoder) -> None:
    for params, draws in ((None, False), (SAMPLED, False), (SamplingParams(temperature=1.0, max_new_tokens=2), True)):
        state = torch.get_rng_state()
        decoder.generate("Hello", params)
        assert torch.equal(state, torch.get_rng_state()) != draws


def test_special_tokens_beyond_the_head_are_never_said(
    target_folder: Path, draft_folder: Path, tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder))
    decoder.tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    plain = decoder.generate("Hello", SAMPLED)[0].ids
    params = SamplingParams(
        temperature=1.0, max_new_tokens=40, seed=1, stop="<|extra|>", bad_words="<|extra|>", min_new_tokens=0
    )
    assert decoder.generate("Hello", params)[0].ids == plain
    decoder.generate("Hello", SamplingParams(max_new_tokens=4, stop="<|extra|>", min_new_tokens=2))
    with pytest.raises(ValueError, match="prompt: there is no token 259; ids are 0 to 258"):
        decoder.generate("<|extra|>")
    with pytest.raises(ValueError, match="a prompt holds no token"):
        decoder.engine.generate_ids([[]], SAMPLED)


@pytest.mark.parametrize("proposer", ["draft", "lookup"])
def test_nothing_left_to_say_is_refused(target_folder: Path, draft_folder: Path, proposer: str) -> None:
    speculation = SpeculationParams(proposer=proposer)
    decoder = SpeculativeDecoder.from_pretrained(str(target_folder), str(draft_folder), speculation)
    everything = {token: -float("inf") for token in range(259) if token != 2}
    params = SamplingParams(temperature=1.0, logit_bias=everything, max_new_tokens=6)
    assert decoder.generate("Hello", params)[0].ids == [2]
    with pytest.raises(ValueError, match="leave no token to choose"):
        decoder.generate("Hello", SamplingParams(logit_bias=everything, max_new_tokens=6, min_new_tokens=3))
    (answer,) = decoder.generate("Hello", SamplingParams(temperature=0.1, logit_bias={70: 1e4}, max_new_tokens=3))
    assert answer.ids == [70] * 3


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "assistant", "content": None}, {"content": "x"}])
def test_a_message_without_text_is_refused(decoder: SpeculativeDecoder, message: dict[str, str]) -> None:
    with pytest.raises(ValueError, match='needs a "role" and a "content"'):
        decoder.generate([message])
