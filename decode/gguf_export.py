"""A Llama-like draft as a GGUF file, laid out as llama.cpp's own converter does."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

# by transformers' name, what the gguf package calls it: llama.cpp has Mistral among the Llamas
ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
# rotary embeddings that are a factor for each frequency, which llama.cpp reads for Llamas alone
SCALED_ROTARY = ("linear", "llama3")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# how a tokenizer splits text before it merges, and llama.cpp's name for that
PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (SPLIT % r"\p{N}{1,3}",): "llama-bpe",
    (SPLIT % r"\p{N}",): "qwen2",
}


def refuse_no_gguf(model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Refuse a draft that llama.cpp would not read as it is.

    Raises:
        ValueError: there is no gguf package, the architecture is not one of `ARCHITECTURES`, or has biases or rotary
            embeddings that llama.cpp does not know in it, or the tokenizer is no byte-level BPE with merges.
    """
    if find_spec("gguf") is None:
        raise ValueError("to: gguf needs the gguf package; pip install 'draftsmith[gguf]'")
    kind = model.config.model_type
    advice = "export it for another engine"
    if kind not in ARCHITECTURES:
        raise ValueError(f"to: gguf is written for {', '.join(ARCHITECTURES)}, and the draft is {kind}; {advice}")
    known = ("default", *(SCALED_ROTARY if ARCHITECTURES[kind] == "LLAMA" else ()))
    if (rotary := model.config.rope_parameters["rope_type"]) not in known:
        raise ValueError(f"to: gguf holds rotary embeddings {', '.join(known)} of {kind}, not {rotary}; {advice}")
    biased = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    if biased and kind != "qwen2":
        raise ValueError(f"to: gguf has no place for biases of {kind}, such as {biased[0]}; {advice}")
    advised = f"to: gguf is written for byte-level BPE with merges, not the draft's tokenizer; {advice}"
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(advised)
    state = _state(tokenizer)
    if state["model"]["type"] != "BPE" or state["model"].get("byte_fallback") or not state["model"]["merges"]:
        raise ValueError(advised)


def write_gguf(model: PreTrainedModel, folder: Path, path: Path, name: str) -> None:
    """Write a draft that `refuse_no_gguf` lets through, in the dtype of its weights, with its tokenizer.

    Args:
        model: on the CPU.
        folder: with the files of its tokenizer.
        path: of the file.
        name: what the file says that it is.
    """
    import gguf

    config = model.config
    arch = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]]
    is_llama = arch == gguf.MODEL_ARCH.LLAMA
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    file_types = {torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16, torch.float16: gguf.LlamaFileType.MOSTLY_F16}
    writer.add_file_type(file_types.get(model.dtype, gguf.LlamaFileType.ALL_F32))
    _add_tokenizer(writer, folder, config.vocab_size)

    kinds = {torch.bfloat16: gguf.GGMLQuantizationType.BF16, torch.float16: gguf.GGMLQuantizationType.F16}
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    if config.rope_parameters["rope_type"] in SCALED_ROTARY:
        writer.add_tensor("rope_freqs.weight", _frequency_factors(model, head_dim).numpy())
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, key
        num_heads = heads.get(".".join(key.split(".")[-2:]))
        if is_llama and num_heads:
            weight = _interleave(weight, num_heads)
        kind = kinds.get(weight.dtype) if weight.ndim > 1 else None
        if kind is None:  # norms and biases are fp32 in every file
            kind, weight = gguf.GGMLQuantizationType.F32, weight.float()
        writer.add_tensor(gguf_name, weight.contiguous().view(torch.uint8).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_gguf(path: Path, config: PreTrainedConfig) -> tuple[PreTrainedModel, list[str]]:
    """Load what `write_gguf` wrote by transformers' own loader, in fp32, on the CPU.

    Args:
        path: of the file.
        config: the draft's.

    Returns:
        the model, and what is to be told of it.
    """
    found = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    notes = []
    if (rotary := config.rope_parameters["rope_type"]) != "default":
        found.rope_parameters = config.rope_parameters
        notes.append(f"transformers' GGUF loader leaves out the scaling of positions ({rotary}); llama.cpp reads it")
    if getattr(found, "head_dim", None) != getattr(config, "head_dim", None):
        found.head_dim = config.head_dim
        notes.append(f"transformers' GGUF loader leaves out head_dim ({config.head_dim}); llama.cpp reads it")
    if window := getattr(config, "sliding_window", None):
        notes.append(f"llama.cpp attends to all of a text, where the draft attends to the last {window} tokens")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=found, dtype=torch.float32
    )
    return model.eval(), notes


def tokenizer_notes(path: Path, tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    """What becomes of the tokenizer, whose way of splitting a GGUF file names instead of holding it."""
    notes = []
    if _pre_tokenizer(_state(tokenizer)) is None:
        notes.append(
            "no name of llama.cpp's is known to us for how the tokenizer splits text, so the file says 'default': the "
            "server has its tokens from the target, but do not let the draft read text by itself"
        )
    loaded = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours, theirs = ([each.encode(text, add_special_tokens=False) for text in texts] for each in (tokenizer, loaded))
    if differing := sum(a != b for a, b in zip(ours, theirs, strict=True)):
        notes.append(
            f"transformers' GGUF loader has a tokenizer that splits {differing} of {len(texts)} texts otherwise"
        )
    return notes


def _state(tokenizer: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return state


def _pre_tokenizer(state: dict[str, Any]) -> str | None:
    """Llama.cpp's name for how a tokenizer splits text; None where we know none."""
    whole = state["pre_tokenizer"] or {}
    steps = whole.get("pretokenizers", [whole])
    # a ByteLevel without its regular expression only spells bytes
    told = [
        step["pattern"].get("Regex") if step.get("type") == "Split" else step.get("type")
        for step in steps
        if step.get("type") != "ByteLevel" or step["use_regex"]
    ]
    return PRE_TOKENIZERS.get(tuple(told))


def _add_tokenizer(writer: Any, folder: Path, size: int) -> None:
    import gguf

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokens, types = [f"[PAD{index}]" for index in range(size)], [gguf.TokenType.UNUSED] * size
    added = tokenizer.added_tokens_decoder
    for token, index in tokenizer.get_vocab().items():
        if index < size:
            kind = gguf.TokenType.USER_DEFINED if index in added else gguf.TokenType.NORMAL
            tokens[index], types[index] = token, kind
            if index in added and added[index].special:
                types[index] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(_state(tokenizer)) or "default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def _frequency_factors(model: Any, head_dim: int) -> Tensor:
    """By what the frequencies of rotary embeddings are divided, fp32 [head_dim / 2]."""
    theta = model.config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    factors: Tensor = plain / model.get_decoder().rotary_emb.inv_freq
    return factors


def _interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key projection, [num_heads * head_dim, hidden], as llama.cpp orders them for Llamas.

    Rotary embeddings turn pairs of rows of a head, which it has side by side and transformers half a head apart.
    """
    rows, hidden = weight.shape
    return weight.view(num_heads, 2, -1, hidden).transpose(1, 2).reshape(rows, hidden)
