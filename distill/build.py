"""A new pair: a draft made of the target's layers, of another model or with random weights, and its output tokens."""

import copy
import logging
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.pair import (
    Pair,
    describe_target,
    load_model,
    load_tokenizer,
    refuse_other_tokenizer,
    save_draft_vocab,
    save_tensors,
    stop_token_ids,
)
from decode.self_draft import SelfDraft
from train.checkpoint import publish, remove_folder
from train.provenance import provenance

from .config import BuildConfig, FreshConfig
from .layers import choose_layers, draft_from_layers, eliminate_layers, evenly_spaced, keep_settings
from .responses import load_responses, refuse_responses_of_another_target
from .self_draft import choose_self_draft, forget_search
from .teacher import multiplies_float32_sooner
from .vocab import choose_vocab, probability_mass, smallest_vocab

logger = logging.getLogger(__name__)

# layers to keep when nothing says what the draft is made of
NUM_LAYERS = 4
NUM_DRAFT_TOKENS = 3
# what widths of feed-forward layers are multiples of
WIDTH_STEP = 32


def build(config: BuildConfig) -> Path:
    """Write a new pair.

    Raises:
        ValueError: the output exists, a layer that the target does not have, a width that its heads do not divide, a
            draft with another tokenizer, or responses that are not there.
    """
    output = Path(config.output)
    tokenizer = load_tokenizer(config.target, "target")
    resolved = {**asdict(config), "layers": _wanted_layers(config)}
    if config.kind == "model":
        resolved["num_draft_tokens"] = config.num_draft_tokens or NUM_DRAFT_TOKENS
    if output.exists():
        _refuse_other_pair(output, resolved)
        logger.info("%s is complete already; nothing to do", output)
        return output
    if config.responses is not None:
        load_responses(config.responses, "train")  # refuse what is not there before models are loaded
        refuse_responses_of_another_target(config.responses, config.target, tokenizer)
    target = load_model(config.target, role="target")
    draft, origin = _draft_of_its_own(config, target, tokenizer)
    token_ids, share = _draft_vocab(config, target, draft or target, tokenizer)
    found: dict[str, Any] = {"vocab_share": share}
    spec: SelfDraft | None = None
    tensors: dict[str, Tensor] = {}
    if config.kind != "model":
        spec, tensors, of_search = choose_self_draft(config, target, tokenizer, token_ids)
        found |= of_search
    elif draft is None:
        found |= _found_layers(config, target, resolved["layers"])
        draft, origin = draft_from_layers(target, found["layers"]), f"layers {found['layers']} of the target"
    temporary = output.parent / f".{output.name}.tmp"
    remove_folder(temporary)
    if draft is None:
        temporary.mkdir(parents=True)
        if tensors:
            save_tensors(temporary, tensors)
    else:
        draft.save_pretrained(temporary / "draft")
        tokenizer.save_pretrained(temporary / "draft")
    if token_ids is not None:
        save_draft_vocab(temporary, token_ids)
    Pair(
        target=describe_target(config.target, tokenizer),
        draft_kind=config.kind,
        self_draft={} if spec is None else asdict(spec),
        num_draft_tokens=config.num_draft_tokens
        or found.get("calibration", {}).get("num_draft_tokens", NUM_DRAFT_TOKENS),
        provenance={**provenance(resolved), **found},
    ).save(temporary)
    publish(temporary, output)
    if draft is None:
        forget_search(config)
        logger.info("%s: the target drafts for itself: %s", output, spec)
        return output
    parameters = sum(parameter.numel() for parameter in draft.parameters())
    logger.info("%s: a draft of %s, %.1f M parameters", output, origin, parameters / 1e6)
    return output


def fresh_draft(target: PreTrainedModel, fresh: FreshConfig) -> PreTrainedModel:
    """A model of the target's class with random weights; embeddings and head are the target's if the width is.

    Raises:
        ValueError: a width that is no multiple of the target's head_dim.
    """
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    for name, size in _sizes(text_config, fresh).items():
        setattr(text_config, name, size)
    keep_settings(text_config, evenly_spaced(fresh.num_layers, text_config.num_hidden_layers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fresh.seed)
        draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    for ours, theirs in (
        (draft.get_input_embeddings(), target.get_input_embeddings()),
        (draft.get_output_embeddings(), target.get_output_embeddings()),
    ):
        if ours.weight.shape == theirs.weight.shape:
            ours.load_state_dict(theirs.state_dict())
    if text_config.hidden_size != target.config.get_text_config().hidden_size:
        logger.info("embeddings of another width than the target's are random: train them too, --train_embeddings true")
    draft.generation_config = copy.deepcopy(target.generation_config)
    draft.eval()
    return draft


def _sizes(config: PreTrainedConfig, fresh: FreshConfig) -> dict[str, int]:
    """Settings of a width: heads as wide as the target's, key-value heads and feed-forward layers in its ratios."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads, remainder = divmod(fresh.hidden_size, head_dim)
    if remainder:
        raise ValueError(
            f"fresh.hidden_size: {fresh.hidden_size} is not possible; "
            f"give a multiple of the target's head_dim, {head_dim}"
        )
    sizes = {"hidden_size": fresh.hidden_size, "num_attention_heads": num_heads}
    if num_kv_heads := getattr(config, "num_key_value_heads", None):
        most = max(1, num_heads * num_kv_heads // config.num_attention_heads)
        sizes["num_key_value_heads"] = max(number for number in range(1, most + 1) if num_heads % number == 0)
    if intermediate_size := getattr(config, "intermediate_size", None):
        in_proportion = intermediate_size * fresh.hidden_size / config.hidden_size
        rounded = WIDTH_STEP * max(1, round(in_proportion / WIDTH_STEP))
        sizes["intermediate_size"] = fresh.intermediate_size or rounded
    elif fresh.intermediate_size:
        raise ValueError(f"fresh.intermediate_size: model type {config.model_type!r} does not set it; leave it out")
    return sizes


def _wanted_layers(config: BuildConfig) -> int | list[int] | None:
    """What the config says of layers, as far as it is known before they are chosen; None for a draft of its own.

    Raises:
        ValueError: the target has no such layers.
    """
    if config.draft is not None or config.fresh is not None or config.kind != "model":
        return None
    wanted = NUM_LAYERS if config.layers is None else config.layers
    num_layers = AutoConfig.from_pretrained(config.target).get_text_config().num_hidden_layers
    layers = choose_layers(wanted, num_layers)
    return wanted if config.choose == "greedy" else layers


def _found_layers(config: BuildConfig, target: PreTrainedModel, wanted: int | list[int]) -> dict[str, Any]:
    """The layers to keep and, where they are chosen greedily, the others with alpha without them."""
    if isinstance(wanted, list):
        return {"layers": wanted}
    assert config.responses is not None
    layers, removals = eliminate_layers(target, wanted, config.responses, config.calibration_tokens)
    return {"layers": layers, "removed_layers": [asdict(removal) for removal in removals]}


def _draft_of_its_own(
    config: BuildConfig, target: PreTrainedModel, tokenizer: Tokenizer
) -> tuple[PreTrainedModel | None, str]:
    """The draft and what it was made of; None where it is made of layers."""
    if config.draft is not None:
        refuse_other_tokenizer(tokenizer, load_tokenizer(config.draft, "draft"), config.target, config.draft)
        return load_model(config.draft, role="draft"), config.draft
    if config.fresh is not None:
        fresh = config.fresh
        return fresh_draft(target, fresh), f"{fresh.num_layers} random layers of width {fresh.hidden_size}"
    return None, ""


def _draft_vocab(
    config: BuildConfig, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer
) -> tuple[Tensor | None, float]:
    """Ids of the draft's output vocabulary, int64 ascending, and their share of probability mass.

    Args:
        draft: whose head must have those ids.

    Returns:
        None and 1.0 for the whole vocabulary.
    """
    if config.responses is None or (config.vocab_size is None and config.vocab_coverage is None):
        return None, 1.0
    # one of the two may be padded further than the other
    teacher = load_model(config.target, "float32") if multiplies_float32_sooner(target) else target
    mass = probability_mass(config.responses, teacher)[: draft.get_output_embeddings().out_features]
    special = {*stop_token_ids(target, tokenizer), *tokenizer.all_special_ids}
    always = {token for token in special if token < len(mass)}
    if config.vocab_coverage is not None:
        token_ids = smallest_vocab(mass, config.vocab_coverage, always)
    else:
        assert config.vocab_size is not None
        token_ids = choose_vocab(mass, config.vocab_size, always)
    share = float(mass[token_ids].sum())
    logger.info("output vocabulary: %d tokens, %.1f%% of probability mass", len(token_ids), 100 * share)
    return token_ids, share


def _refuse_other_pair(output: Path, resolved: dict[str, object]) -> None:
    if not (output / "pair.json").is_file():
        raise ValueError(f"output {output}: exists and holds no pair; give another folder")
    # a release that did not know a field did what its default says
    unrecorded = {field.name: field.default for field in fields(BuildConfig)}
    recorded = {**unrecorded, **Pair.load(output).provenance.get("resolved_config", {})}
    for key, wanted in resolved.items():
        if key != "output" and recorded[key] != wanted:
            raise ValueError(
                f"{key}: {wanted!r} differs from {recorded[key]!r}, with which {output} was built; "
                "give another output, or delete the folder"
            )
