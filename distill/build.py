"""How a draft is made from a target: some of its layers, its embeddings and head, fewer output tokens."""

import copy
import logging
import re
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.pair import (
    Pair,
    describe_target,
    load_model,
    load_tokenizer,
    save_draft_vocab,
    stop_token_ids,
)
from train.checkpoint import publish, remove_folder
from train.provenance import provenance

from .config import BuildConfig
from .responses import hidden_states_dtype, load_responses, refuse_responses_of_another_target
from .teacher import TeacherHead, collate, teacher_signal

logger = logging.getLogger(__name__)

# enough for the mass of rare tokens to settle; a pass over more changes few of the chosen ids
VOCAB_SAMPLE_TOKENS = 30_000
# settings that hold one value per layer
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def build(config: BuildConfig) -> Path:
    """Write a new pair whose draft is made of layers of the target.

    Raises:
        ValueError: the output exists, a layer that the target does not have, or responses that are not there.
    """
    output = Path(config.output)
    tokenizer = load_tokenizer(config.target, "target")
    num_layers = AutoConfig.from_pretrained(config.target).get_text_config().num_hidden_layers
    layers = choose_layers(config.layers, num_layers)
    resolved = {**asdict(config), "layers": layers}
    if output.exists():
        _refuse_other_pair(output, resolved)
        logger.info("%s is complete already; nothing to do", output)
        return output
    if config.responses is not None:
        kept = "hidden_states" in load_responses(config.responses, "train").column_names
        refuse_responses_of_another_target(config.responses, config.target, tokenizer, states=kept)
    target = load_model(config.target, role="target")
    token_ids = _draft_vocab(config, target, tokenizer)
    draft = draft_from_layers(target, layers)
    temporary = output.parent / f".{output.name}.tmp"
    remove_folder(temporary)
    draft.save_pretrained(temporary / "draft")
    tokenizer.save_pretrained(temporary / "draft")
    if token_ids is not None:
        save_draft_vocab(temporary, token_ids)
    Pair(
        target=describe_target(config.target, tokenizer),
        num_draft_tokens=config.num_draft_tokens,
        provenance=provenance(resolved),
    ).save(temporary)
    publish(temporary, output)
    parameters = sum(parameter.numel() for parameter in draft.parameters())
    logger.info("%s: a draft of layers %s of the target, %.1f M parameters", output, layers, parameters / 1e6)
    return output


def choose_layers(wanted: int | list[int], num_layers: int) -> list[int]:
    """Layers of the target to keep: the list as it is, or that many evenly spaced from the first to the last.

    Raises:
        ValueError: the target has no such layers.
    """
    if isinstance(wanted, list):
        if not wanted or not all(0 <= layer < num_layers for layer in wanted):
            raise ValueError(f"layers: {wanted} is not possible; the target has layers 0 to {num_layers - 1}")
        return wanted
    if not 1 <= wanted <= num_layers:
        raise ValueError(f"layers: {wanted} is not possible; the target has {num_layers} layers")
    if wanted == 1:
        return [0]
    return [round(index * (num_layers - 1) / (wanted - 1)) for index in range(wanted)]


def draft_from_layers(target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A model of the target's class with copies of these layers, in this order, and of all that is not a layer."""
    prefix, _ = _layer_list(target)
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = len(layers)
    for name in PER_LAYER:
        if of_each := getattr(text_config, name, None):
            setattr(text_config, name, [of_each[layer] for layer in layers])
    weights = target.state_dict()
    of_layer = re.compile(re.escape(prefix) + r"\.(\d+)\.(.+)")
    chosen = {name: tensor for name, tensor in weights.items() if not of_layer.fullmatch(name)}
    for name, tensor in weights.items():
        if match := of_layer.fullmatch(name):
            for place in [place for place, layer in enumerate(layers) if layer == int(match[1])]:
                chosen[f"{prefix}.{place}.{match[2]}"] = tensor
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    draft.load_state_dict(chosen)
    if target.generation_config is not None:
        draft.generation_config = copy.deepcopy(target.generation_config)
    draft.eval()
    return draft


@torch.inference_mode()
def probability_mass(responses: str, target: PreTrainedModel) -> Tensor:
    """The target's mean next-token distribution over its training responses, fp32 [vocab].

    The mean of p has less noise than counts of the tokens drawn from it. Uses the hidden states kept with the
    responses where there are any.
    """
    rows = load_responses(responses, "train").shuffle(seed=0, keep_in_memory=True)
    kept_dtype = hidden_states_dtype(responses) if "hidden_states" in rows.column_names else None
    head = TeacherHead(target)
    mass = torch.zeros(len(head.weight), device=target.device)
    num_tokens = 0
    for row in rows:
        batch = {name: tensor.to(target.device) for name, tensor in collate([row], 0, kept_dtype).items()}
        log_p = head.log_probabilities(*teacher_signal(batch, target))
        mass += log_p.exp().sum(dim=0)
        num_tokens += len(log_p)
        if num_tokens >= VOCAB_SAMPLE_TOKENS:
            break
    return mass / num_tokens


def choose_vocab(mass: Tensor, size: int, always: set[int]) -> Tensor:
    """The `size` token ids of largest mass, `always` among them, int64 ascending.

    Raises:
        ValueError: `always` alone is more.
    """
    if size < len(always):
        raise ValueError(f"vocab_size: {size} has no room for the {len(always)} special tokens; give more")
    mass = mass.clone()
    mass[list(always)] = torch.inf
    return mass.topk(min(size, len(mass))).indices.sort().values.cpu()


def _draft_vocab(config: BuildConfig, target: PreTrainedModel, tokenizer: Tokenizer) -> Tensor | None:
    """Ids of the draft's output vocabulary, int64 ascending; None for all of them."""
    if config.vocab_size is None or config.responses is None:
        return None
    mass = probability_mass(config.responses, target)
    always = {*stop_token_ids(target, tokenizer), *tokenizer.all_special_ids}
    token_ids = choose_vocab(mass, config.vocab_size, always)
    share = 100 * float(mass[token_ids].sum())
    logger.info("output vocabulary: %d tokens, %.1f%% of probability mass", len(token_ids), share)
    return token_ids


def _layer_list(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and modules of the decoder layers.

    Raises:
        ValueError: the model does not keep them in one list.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name, module
    raise ValueError(f"target: model type {model.config.model_type!r} has no list of {num_layers} decoder layers")


def _refuse_other_pair(output: Path, resolved: dict[str, object]) -> None:
    if not (output / "pair.json").is_file():
        raise ValueError(f"output {output}: exists and holds no pair; give another folder")
    recorded = Pair.load(output).provenance.get("resolved_config", {})
    for key, wanted in resolved.items():
        if key != "output" and recorded.get(key) != wanted:
            raise ValueError(
                f"{key}: {wanted!r} differs from {recorded.get(key)!r}, with which {output} was built; "
                "give another output, or delete the folder"
            )
