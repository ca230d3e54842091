"""What is written for other engines is the draft, and they are told what they can be told."""

import json
import runpy
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from decode import SamplingParams, SpeculationParams, SpeculativeDecoder, cli, gguf_export
from decode.config import ExportConfig
from decode.export import Export, export
from decode.full_head import fit_vocabulary, mass_outside
from decode.pair import Pair, save_draft_vocab

Export_ = Callable[..., Export]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n")]
END_OF_TEXT = 259 + len(MERGES)  # which some classes of transformers want
SIZE = END_OF_TEXT + 1
# of Llama and its like; with merges
SHAPE: dict[str, Any] = dict(
    vocab_size=SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(scope="session")
def bpe_tokenizer(byte_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The byte tokenizer, with GPT-2's way of splitting text and a few merges."""
    state = json.loads(byte_tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = MERGES
    state["model"]["vocab"] |= {left + right: 259 + place for place, (left, right) in enumerate(MERGES)}
    state["model"]["vocab"]["<|endoftext|>"] = END_OF_TEXT
    state["added_tokens"].append(state["added_tokens"][0] | {"id": END_OF_TEXT, "content": "<|endoftext|>"})
    state["pre_tokenizer"]["use_regex"] = True
    pad, start, end = byte_tokenizer.convert_ids_to_tokens([0, 1, 2])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        chat_template=byte_tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def make_pair(
    tiny_llama: Callable[..., LlamaForCausalLM], byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Callable[..., Path]:
    """A pair of a target and a draft, by default the target with some noise on its weights."""

    def made(
        draft: PreTrainedModel | None = None,
        vocab: Tensor | None = None,
        target: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerFast = byte_tokenizer,
        **pair: Any,
    ) -> Path:
        target = target or tiny_llama(seed=0, tie_word_embeddings=True)
        draft = draft or noisy(tiny_llama(seed=0, tie_word_embeddings=True))
        for model, folder in ((target, tmp_path / "target"), (draft, tmp_path / "pair" / "draft")):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        if vocab is not None:
            save_draft_vocab(tmp_path / "pair", vocab)
        defaults = {"target": {"id": str(tmp_path / "target")}, "num_draft_tokens": 3}
        Pair(**defaults | pair).save(tmp_path / "pair")
        return tmp_path / "pair"

    return made


@pytest.fixture
def run(tmp_path: Path) -> Export_:
    """Exports the pair to a folder named by the engine."""

    def export_to(engine: Any, **changes: Any) -> Export:
        config = ExportConfig(pair=str(tmp_path / "pair"), to=engine, output=str(tmp_path / f"for {engine}"))
        return export(replace(config, **changes))

    return export_to


def noisy(model: Any, share: float = 0.1) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += share * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def weights_of(folder: Path) -> dict[str, Tensor]:
    weights = load_file(folder / "draft" / "model.safetensors")
    return weights | {"lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"])}


def half_of_the_tokens(size: int = 259) -> Tensor:
    return torch.cat([torch.arange(3), torch.arange(3, size, 2)])


# the vocabulary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reduced_vocabulary(
    dtype: torch.dtype, make_pair: Callable[..., Path], run: Export_, tiny_llama: Any
) -> None:
    vocab = half_of_the_tokens()
    pair = make_pair(noisy(tiny_llama(tie_word_embeddings=True)).to(dtype), vocab)
    exported = run("transformers")
    before, after = weights_of(pair), weights_of(Path(exported.output))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"lm_head.weight"}
    assert all(weight.dtype == dtype for weight in after.values())
    rows, kept = after["lm_head.weight"], torch.isin(torch.arange(259), vocab)
    assert torch.equal(rows[kept], before["lm_head.weight"][kept])
    assert not rows[~kept].any()
    loaded = AutoModelForCausalLM.from_pretrained(Path(exported.output) / "draft")
    assert not loaded.config.tie_word_embeddings
    assert exported.mass_outside is not None and 0 < exported.mass_outside < 0.5
    said = " ".join(exported.notes)
    assert f"the rows of the {259 - len(vocab)} tokens outside it are zero, those of its {len(vocab)} are as" in said
    assert f"of the draft's probability {exported.mass_outside:.2g} lies outside its vocabulary" in said


def test_a_whole_vocabulary_is_copied(make_pair: Callable[..., Path], run: Export_) -> None:
    pair = make_pair(measured={"betas": [0.5]})
    exported = run("transformers")
    before, after = (load_file(folder / "draft/model.safetensors") for folder in (pair, Path(exported.output)))
    assert before.keys() == after.keys()  # tied as it was
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (exported.mass_outside, exported.outside_likeliest, exported.notes) == (None, None, [])
    assert exported.max_logit_difference == 0


@pytest.mark.parametrize(("drafts", "targets"), [(259, 272), (272, 259)])
@pytest.mark.parametrize("reduced", [False, True])
def test_padding_becomes_the_targets(
    drafts: int, targets: int, reduced: bool, make_pair: Callable[..., Path], run: Export_, tiny_llama: Any
) -> None:
    draft = noisy(tiny_llama(vocab_size=drafts, tie_word_embeddings=True))
    vocab = half_of_the_tokens()
    pair = make_pair(draft, vocab if reduced else None, target=tiny_llama(vocab_size=targets))
    exported = run("vllm")
    before, after = weights_of(pair), weights_of(Path(exported.output))
    kept = vocab if reduced else torch.arange(259)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert len(after[name]) == targets
        assert torch.equal(after[name][kept], before[name][kept])
    assert not after["lm_head.weight"][259:].any()
    config = json.loads((Path(exported.output) / "draft" / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (targets, targets == 259 and not reduced)
    assert (
        exported.notes[0] == f"vLLM wants as many tokens of the draft as of the target: {drafts} rows became {targets}"
    )
    assert (exported.mass_outside is None) == (targets == 259 and not reduced)


def test_where_logits_are_negative_the_other_rows_point_away(tiny_llama: Any) -> None:
    vocab, texts = half_of_the_tokens(), torch.randint(3, 259, (6, 20)).tolist()

    def negative() -> Any:
        """A draft whose hidden states share a direction, along which all its logits are far below zero."""
        model = tiny_llama(num_layers=1)
        with torch.no_grad():
            model.model.embed_tokens.weight += 3.0
            model.lm_head.weight -= 1.0
        return model

    with torch.no_grad():
        model = negative()
        rows = model.lm_head.weight[vocab].clone()
        (note,) = fit_vocabulary(model, vocab, 259, texts, torch.bfloat16)
        assert "point away from the mean of its hidden states" in note
        assert torch.equal(model.lm_head.weight[vocab], rows)
        mass, likeliest = mass_outside(model, vocab, texts)
        assert mass < 0.01 and likeliest == 0
        zeroed = negative()
        zeroed.lm_head.weight[~torch.isin(torch.arange(259), vocab)] = 0
        assert mass_outside(zeroed, vocab, texts) == pytest.approx((1.0, 1.0), abs=1e-3)


def test_a_head_with_a_bias_says_no_other_token(tiny_llama: Any) -> None:
    model, vocab = tiny_llama(), half_of_the_tokens()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(259), requires_grad=False)
    texts = [[3, 4, 5], [6, 7, 8]]
    with torch.no_grad():
        fit_vocabulary(model, vocab, 259, texts, torch.float16)
        assert mass_outside(model, vocab, texts) == (0, 0)
    assert not model.lm_head.bias[vocab].any()


# transformers


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that transformers commits in each round of assisted generation."""
    counts: list[int] = []
    update = AssistedCandidateGenerator.update_candidate_strategy

    def watched(self: Any, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        counts.append(int(num_matches) + 1)
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", watched)
    return counts


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("number", [1, 4])
def test_transformers_commits_what_we_commit_round_by_round(
    reduced: bool, number: int, make_pair: Callable[..., Path], run: Export_, matches: list[int]
) -> None:
    pair = make_pair(vocab=half_of_the_tokens() if reduced else None, num_draft_tokens=number)
    exported = run("transformers")
    draft: Any = AutoModelForCausalLM.from_pretrained(Path(exported.output) / "draft")
    speculation = SpeculationParams(num_draft_tokens=number, never_slower=False)
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair), speculation)
    target: Any = decoder.target
    accepted = 0
    for prompt in ("Item 3", "0000"):
        ids = decoder.encode(prompt)
        ((completion,), (trace,)) = decoder.engine.generate_ids([ids], SamplingParams(max_new_tokens=32))
        matches.clear()
        tokens = torch.tensor([ids])
        output = target.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            assistant_model=draft,
            max_new_tokens=32,
            eos_token_id=sorted(decoder.engine.stop_ids),
            do_sample=False,
        )
        assert output[0, len(ids) :].tolist() == completion.ids
        ours = [each.num_committed for each in trace.rounds]
        # where a text ends in a round, only what is before its end was committed
        assert len(matches) == len(ours)
        assert matches[:-1] == ours[:-1]
        accepted += trace.num_accepted
    assert accepted > 4


def test_the_example_says_what_the_target_says(
    make_pair: Callable[..., Path], run: Export_, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = make_pair(vocab=half_of_the_tokens())
    exported = run("transformers")
    monkeypatch.setattr("sys.argv", ["example.py", "Item", "3"])
    runpy.run_path(str(Path(exported.output) / "example.py"))
    decoder = SpeculativeDecoder.from_pretrained(None, str(pair))
    (generation,) = decoder.generate("Item 3", SamplingParams(max_new_tokens=128))
    assert capsys.readouterr().out == generation.text + "\n"
    assert exported.command == f"python '{exported.output}/example.py'"


# commands


def test_commands_name_the_models_and_the_number(make_pair: Callable[..., Path], run: Export_, tmp_path: Path) -> None:
    make_pair(num_draft_tokens=5)
    target, draft = str(tmp_path / "target"), f"{tmp_path}/for %s/draft"
    wanted = {
        "vllm": [
            *("vllm", "serve", target, "--speculative-config"),
            json.dumps({"model": draft % "vllm", "num_speculative_tokens": 5, "method": "draft_model"}),
        ],
        "sglang": [
            *("python", "-m", "sglang.launch_server", "--model-path", target),
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft % "sglang"),
            *("--speculative-num-steps", "5", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "6"),
        ],
    }
    for engine, words in wanted.items():
        exported = run(engine)
        (tmp_path / words[0]).write_text('#!/bin/sh\nfor word in "$0" "$@"; do printf "%s\\n" "$word"; done\n')
        (tmp_path / words[0]).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        for command in (["sh", "-c", exported.command], [f"{exported.output}/serve.sh"]):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            assert done.stdout.splitlines() == [str(tmp_path / words[0]), *words[1:]]
        done = subprocess.run([f"{exported.output}/serve.sh", "--port", "1"], env=environment, capture_output=True)
        assert done.stdout.decode().endswith("--port\n1\n")
        said = (Path(exported.output) / "README.md").read_text()
        assert exported.command in said
        assert all(f"- {note}\n" in said for note in exported.notes)
        assert "was not run" in exported.notes[-1]
        record = json.loads((Path(exported.output) / "export.json").read_text())
        assert (record["command"], record["num_speculative_tokens"]) == (exported.command, 5)
        assert record["provenance"]["resolved_config"]["to"] == engine


def test_the_summary_ends_with_the_command(
    make_pair: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = make_pair(vocab=half_of_the_tokens())
    line = ["export", "--pair", str(pair), "--to", "vllm", "--output", str(tmp_path / "out")]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"vllm serve {tmp_path / 'target'} --speculative-config '{{")
    assert "knows no reduced output vocabulary" in " ".join(out.split())
    assert cli.main(line) == 2
    assert f"output {tmp_path / 'out'}: holds something" in capsys.readouterr().err


# GGUF


def drafts() -> dict[str, Callable[[], Any]]:
    llama3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0) | dict(
        original_max_position_embeddings=64
    )
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=llama3)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float32), ("llama", torch.float16), *((name, torch.bfloat16) for name in drafts())],
)
def test_transformers_reads_the_gguf_file(
    name: str,
    dtype: torch.dtype,
    make_pair: Callable[..., Path],
    run: Export_,
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    torch.manual_seed(0)
    draft = noisy(drafts()[name]()).to(dtype)  # norms and biases are not what they are at first
    pair = make_pair(draft, target=drafts()[name](), tokenizer=bpe_tokenizer, measured={"betas": [0.5]})
    exported = run("gguf")
    assert exported.max_logit_difference < 1e-4
    reader = GGUFReader(f"{exported.output}/draft.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == {"qwen2": "qwen2", "qwen3": "qwen3"}.get(name, "llama")
    assert fields["tokenizer.ggml.pre"] == ("qwen2" if name == "qwen2" else "gpt-2")
    assert fields["tokenizer.chat_template"] == bpe_tokenizer.chat_template
    assert [fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding")] == [1, 2, 0]
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.1.attn_q.weight"] == {torch.float32: "F32", torch.float16: "F16"}.get(dtype, "BF16")
    assert kinds["blk.1.attn_norm.weight"] == "F32"
    assert ("output.weight" in kinds) == (name != "llama, tied")
    assert ("rope_freqs.weight" in kinds) == (name == "llama 3")
    if name == "llama 3":
        (factors,) = (tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
        assert factors.min() == 1 and factors.max() == 4
        assert any("leaves out the scaling of positions (llama3)" in note for note in exported.notes)

    tokenizer = AutoTokenizer.from_pretrained(exported.output, gguf_file="draft.gguf")
    ours = AutoTokenizer.from_pretrained(pair / "draft")
    assert tokenizer.get_vocab() == ours.get_vocab() == bpe_tokenizer.get_vocab()
    for text in ("<|im_start|>in the thing<|im_end|>", "the  12 ünd\n\n"):
        assert tokenizer.encode(text) == ours.encode(text)
    assert tokenizer.chat_template == bpe_tokenizer.chat_template
    assert not any("splits" in note for note in exported.notes)
    if name in ("llama", "qwen2"):  # read by the loader alone, told nothing
        loaded = AutoModelForCausalLM.from_pretrained(exported.output, gguf_file="draft.gguf", dtype=dtype)
        stored = AutoModelForCausalLM.from_pretrained(pair / "draft")
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), stored.parameters(), strict=True))


def test_a_reduced_and_padded_vocabulary_in_a_gguf_file(
    make_pair: Callable[..., Path], run: Export_, tiny_llama: Any, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    draft = noisy(tiny_llama(vocab_size=SIZE, tie_word_embeddings=True))
    make_pair(draft, half_of_the_tokens(SIZE), target=tiny_llama(vocab_size=272), tokenizer=bpe_tokenizer)
    exported = run("gguf")
    reader = GGUFReader(f"{exported.output}/draft.gguf")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert tokens[SIZE - 2 : SIZE + 1] == ["in", "<|endoftext|>", f"[PAD{SIZE}]"]
    assert [types[index] for index in (0, 3, SIZE - 1, SIZE)] == [3, 1, 3, 5]  # control, normal, control, unused
    assert exported.mass_outside is not None
    command = f"llama-server -m TARGET.gguf -md '{exported.output}/draft.gguf' --spec-type draft-simple "
    assert exported.command == command + "--spec-draft-n-max 3 --spec-draft-n-min 0 --spec-draft-p-min 0"
    done = subprocess.run([f"{exported.output}/serve.sh"], capture_output=True, text=True, check=False)
    assert done.returncode and "the target as a GGUF file comes first" in done.stderr


def test_weights_in_the_wrong_order_are_noticed_and_nothing_is_left(
    make_pair: Callable[..., Path],
    run: Export_,
    tiny_llama: Any,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(gguf_export, "_interleave", lambda weight, num_heads: weight)
    make_pair(tiny_llama(vocab_size=SIZE), target=tiny_llama(vocab_size=SIZE), tokenizer=bpe_tokenizer)
    with pytest.raises(ValueError, match="to: gguf does not hold this draft: loaded back, its logits differ by"):
        run("gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair", "target"]


def test_how_text_is_split_has_a_name_or_none(bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    state = json.loads(bpe_tokenizer.backend_tokenizer.to_str())
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

    def name(*steps: dict[str, Any]) -> str | None:
        whole = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": list(steps)}
        return gguf_export._pre_tokenizer({**state, "pre_tokenizer": whole})

    def split(pattern: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}

    digits = {"type": "Digits", "individual_digits": True}
    assert name(bytes_only | {"use_regex": True}) == "gpt-2"
    assert name(digits, bytes_only | {"use_regex": True}) == "smollm"
    assert name(split(gguf_export.SPLIT % r"\p{N}{1,3}"), bytes_only) == "llama-bpe"
    assert name(split(gguf_export.SPLIT % r"\p{N}"), bytes_only) == "qwen2"
    assert name(split("x"), bytes_only) is None
    assert name(bytes_only) is None


# what is refused


def test_a_target_that_drafts_for_itself(make_pair: Callable[..., Path], run: Export_, tmp_path: Path) -> None:
    make_pair(draft_kind="exit", self_draft={"kind": "exit"})
    with pytest.raises(ValueError, match=r"drafts for itself \(draft_kind 'exit'\), which no other engine knows"):
        run("vllm")
    with pytest.raises(ValueError, match="there is no such folder"):
        run("vllm", pair=str(tmp_path / "none"))


def test_an_output_that_holds_something(make_pair: Callable[..., Path], run: Export_, tmp_path: Path) -> None:
    make_pair()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for output in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(ValueError, match="holds something; give another folder"):
            run("vllm", output=str(output))
    (tmp_path / "out" / "mine").unlink()
    run("vllm", output=str(tmp_path / "out"))


def test_another_tokenizer_than_the_targets(
    make_pair: Callable[..., Path], run: Export_, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_pair()
    bpe_tokenizer.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="its tokenizer is not that of target"):
        run("transformers")


def test_a_vocabulary_beyond_the_head(make_pair: Callable[..., Path], run: Export_) -> None:
    make_pair(vocab=torch.tensor([5, 259]))
    with pytest.raises(ValueError, match="draft vocabulary: id 259 is beyond the 259 of the draft's head"):
        run("sglang")


def test_drafts_that_no_gguf_file_holds(
    make_pair: Callable[..., Path],
    run: Export_,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    gpt2 = GPT2Config(vocab_size=SIZE, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256}
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    refused: list[tuple[Any, str]] = [
        (GPT2LMHeadModel(gpt2), "to: gguf is written for llama, mistral, qwen2, qwen3, and the draft is gpt2"),
        (LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=yarn)), "default, linear, llama3 of llama, not yarn"),
        (Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=linear)), "default of qwen2, not linear"),
        (LlamaForCausalLM(LlamaConfig(**SHAPE, mlp_bias=True)), "biases of llama, such as model.layers.0.mlp"),
    ]
    for draft, message in refused:
        make_pair(draft, target=draft, tokenizer=bpe_tokenizer)
        with pytest.raises(ValueError, match=message):
            run("gguf")
    make_pair()
    with pytest.raises(ValueError, match="byte-level BPE with merges, not the draft's tokenizer"):
        run("gguf")
    monkeypatch.setattr(gguf_export, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the gguf package; pip install 'draftsmith\[gguf\]'"):
        run("gguf")
    assert not (tmp_path / "for gguf").exists()
