"""A pair's draft for other engines: what they read, the command that serves it, and what they cannot be told."""

import json
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .config import Engine, ExportConfig
from .files import write_json
from .full_head import fit_vocabulary, logits_of, mass_outside, own_texts
from .gguf_export import load_gguf, refuse_no_gguf, tokenizer_notes, write_gguf
from .pair import Pair, describe_target, load_draft_vocab, load_model, load_tokenizer, refuse_other_tokenizer
from .provenance import provenance

NAMES: dict[Engine, str] = {"transformers": "transformers", "vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp"}
# two logits of one draft in fp32, before and after
TOLERANCE = 1e-3

EXAMPLE = '''"""Assisted generation by transformers; draft/generation_config.json says how many tokens are drafted."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = {target!r}

tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET)
draft = AutoModelForCausalLM.from_pretrained(Path(__file__).parent / "draft")

text = " ".join(sys.argv[1:]) or "Where is my order?"
if tokenizer.chat_template:
    messages = [{{"role": "user", "content": text}}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
'''


@dataclass(frozen=True)
class Export:
    """What was written, and what its engine makes of it.

    Attributes:
        output: the folder.
        engine: which it is for.
        target: as the pair names it.
        command: what serves the two.
        num_speculative_tokens: drafted a round, as the pair recommends.
        max_logit_difference: between the pair's draft and what was written, loaded back, over the draft's vocabulary.
        mass_outside: mean share of probability that what was written gives to tokens outside that; None where there
            are no such tokens.
        outside_likeliest: share of positions at which one of them is its likeliest.
        notes: what the engine cannot be told, and what was done about it.
    """

    output: str
    engine: Engine
    target: str
    command: str
    num_speculative_tokens: int
    max_logit_difference: float
    mass_outside: float | None
    outside_likeliest: float | None
    notes: list[str]


@torch.no_grad()
def export(config: ExportConfig) -> Export:
    """Write a pair's draft for another engine, load it back, and compare.

    Raises:
        ValueError: a pair that is missing or has no draft model, an output that holds something, a target that is
            missing or has another tokenizer, a draft that cannot be a GGUF file, or logits that are not the draft's.
    """
    folder, output, engine = Path(config.pair), Path(config.output).resolve(), NAMES[config.to]
    pair = Pair.load(folder)
    _refuse(config, pair)
    name = config.target or pair.target_id()
    tokenizer = load_tokenizer(str(folder / "draft"), "draft")
    refuse_other_tokenizer(load_tokenizer(name, "target"), tokenizer, name, str(folder / "draft"))
    target = describe_target(name, tokenizer)["id"] or name
    size: int = AutoConfig.from_pretrained(name).get_text_config().vocab_size
    model = load_model(str(folder / "draft"), role="draft", device_name="cpu")
    if config.to == "gguf":
        refuse_no_gguf(model, tokenizer)

    dtype = model.dtype
    _cast(model, torch.float32)  # exact, and so is the way back
    kept = _vocabulary(folder, model, size)
    texts = own_texts(model, tokenizer, config.prompts, kept)
    reference = logits_of(model, texts[0])[:, kept]
    notes = [f"{engine} {note}" for note in fit_vocabulary(model, kept, size, texts, dtype)]
    _cast(model, dtype)

    temporary = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if config.to == "gguf":
            path = temporary / "draft.gguf"
            write_gguf(model, folder / "draft", path, f"draft of {target}")
            notes += tokenizer_notes(path, tokenizer, [str(tokenizer.decode(ids)) for ids in texts])
            written, more = load_gguf(path, model.config)
            notes += more
        else:
            written = _write_folder(model, tokenizer, temporary / "draft", pair.num_draft_tokens)
        difference = float((logits_of(written, texts[0])[:, kept] - reference).abs().max())
        if not difference <= TOLERANCE:
            raise ValueError(
                f"to: {config.to} does not hold this draft: loaded back, its logits differ by {difference:.3g}, more "
                f"than {TOLERANCE}, and nothing is kept; export it for another engine"
            )
        mass, likeliest = mass_outside(written, kept, texts[1::2] or texts) if len(kept) < size else (None, None)
        if mass is not None:
            notes.append(
                f"of the draft's probability {mass:.2g} lies outside its vocabulary, as does its likeliest token at "
                f"{likeliest:.1%} of positions; the target rejects what is drafted there"
            )
        exported = Export(
            output=str(output),
            engine=config.to,
            target=target,
            command=_command(config.to, target, output, pair.num_draft_tokens),
            num_speculative_tokens=pair.num_draft_tokens,
            max_logit_difference=difference,
            mass_outside=mass,
            outside_likeliest=likeliest,
            notes=notes + _notes(config.to, pair),
        )
        _write_texts(temporary, exported)
        write_json(temporary / "export.json", {**asdict(exported), "provenance": provenance(asdict(config))})
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return exported


def _refuse(config: ExportConfig, pair: Pair) -> None:
    """Raises ValueError for what no export can be made of, or into."""
    if pair.draft_kind != "model":
        raise ValueError(
            f"pair {config.pair}: its target drafts for itself (draft_kind {pair.draft_kind!r}), which no other engine "
            "knows; give a pair with a draft model"
        )
    output = Path(config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output {config.output}: holds something; give another folder")


def _vocabulary(folder: Path, model: PreTrainedModel, size: int) -> Tensor:
    """Ids that the draft has learnt to say and a target of so many tokens knows, int64 [draft_vocab]."""
    num_rows = model.get_output_embeddings().out_features
    kept = load_draft_vocab(folder)
    kept = torch.arange(num_rows) if kept is None else kept
    if (largest := int(kept.max())) >= num_rows:
        raise ValueError(f"draft vocabulary: id {largest} is beyond the {num_rows} of the draft's head")
    return kept[kept < size]


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The weights alone: rotary tables are fp32 in every model."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def _write_folder(model: PreTrainedModel, tokenizer: Tokenizer, path: Path, number: int) -> PreTrainedModel:
    """A stock folder, and the model that is loaded from it, in fp32."""
    settings = model.generation_config
    assert settings is not None
    settings.num_assistant_tokens = number
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0  # off; None would be replaced by 0.4
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return load_model(str(path), "float32", "exported draft", "cpu")


def _command(engine: Engine, target: str, output: Path, number: int) -> str:
    draft = str(output / "draft")
    if engine == "transformers":
        return shlex.join(["python", str(output / "example.py")])
    if engine == "vllm":
        speculative = {"model": draft, "num_speculative_tokens": number, "method": "draft_model"}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculative)])
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm STANDALONE "
            f"--speculative-draft-model-path {shlex.quote(draft)} --speculative-num-steps {number} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {number + 1}"
        )
    return (
        f"llama-server -m TARGET.gguf -md {shlex.quote(f'{draft}.gguf')} --spec-type draft-simple "
        f"--spec-draft-n-max {number} --spec-draft-n-min 0 --spec-draft-p-min 0"
    )


def _notes(engine: Engine, pair: Pair) -> list[str]:
    notes = []
    if not pair.measured:
        notes.append("the number of draft tokens was never measured: `spec-decode evaluate` finds the best, here")
    if engine == "transformers":
        return notes
    notes.append(
        f"{NAMES[engine]} drafts the likeliest token by default: above temperature 0 it accepts less than alpha, which "
        "is of drawn ones" + ('; newer releases draw with "draft_sample_method": "probabilistic"' * (engine == "vllm"))
    )
    if engine == "gguf":
        notes.append("TARGET.gguf is the target, as llama.cpp's convert_hf_to_gguf.py writes it")
        notes.append(
            "older releases of llama.cpp know no --spec-type, and call the others --draft-max, -min and -p-min"
        )
    notes.append(f"the command follows the documentation of {NAMES[engine]}; it was not run")
    return notes


def _write_texts(folder: Path, exported: Export) -> None:
    """Beside the weights: what runs them, and what a person should know."""
    if exported.engine == "transformers":
        (folder / "example.py").write_text(EXAMPLE.format(target=exported.target), encoding="utf-8")
    else:
        script, first = folder / "serve.sh", ""
        if exported.engine == "gguf":
            first = "target=${1:?the target as a GGUF file comes first}\nshift\n"
        command = exported.command.replace("-m TARGET.gguf", '-m "$target"')
        script.write_text(f'#!/bin/sh\n{first}exec {command} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    notes = "".join(f"- {note}\n" for note in exported.notes)
    (folder / "README.md").write_text(
        f"# A draft for {exported.target}\n\nFor {NAMES[exported.engine]}, by draftsmith's `spec-decode export`. "
        f"Draft tokens a round: {exported.num_speculative_tokens}.\n\n    {exported.command}\n\nLoaded back, its "
        f"logits differ from the pair's by at most {exported.max_logit_difference:.2g}.\n\n{notes}",
        encoding="utf-8",
    )
