"""Layers of a target: which of them to keep, the target without the others, and a copy of it."""

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from decode.progress import ProgressBar

from .losses import acceptance
from .responses import load_responses
from .teacher import Batch, TeacherHead, collate, final_hidden_states

logger = logging.getLogger(__name__)

# settings that hold one value per layer
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
# texts that a pass reads at a time, and tokens whose q stands beside p at a time, when acceptance is measured
ROWS_PER_PASS = 8
TOKENS_PER_CHUNK = 256


@dataclass(frozen=True)
class Removal:
    """A layer that was left out, and the target's acceptance of what it says without that and all left out before."""

    layer: int
    alpha: float


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
    return evenly_spaced(wanted, num_layers)


def evenly_spaced(count: int, num_layers: int) -> list[int]:
    """So many layers from the first to the last; some of them more than once where there are fewer."""
    if count == 1:
        return [0]
    return [round(index * (num_layers - 1) / (count - 1)) for index in range(count)]


def eliminate_layers(
    target: PreTrainedModel, count: int, responses: str, num_tokens: int
) -> tuple[list[int], list[Removal]]:
    """Layers to keep, by backward elimination: drop again and again the one whose absence leaves alpha highest.

    Takes up to n²/2 passes for n layers, each through the layers of one candidate; no weights are copied.

    Args:
        target: in eval mode; unchanged afterwards.
        count: layers to keep.
        responses: what `respond` wrote; its training responses are read.
        num_tokens: response tokens to measure alpha on.

    Returns:
        the layers that are left, ascending, and those that went, the first one first.
    """
    layers = list(range(target.config.get_text_config().num_hidden_layers))
    calibration = Calibration(target, responses, num_tokens)
    removals = []
    # the work of a candidate is the layers it has
    with ProgressBar("choosing layers", sum(n * (n - 1) for n in range(count + 1, len(layers) + 1))) as bar:
        while len(layers) > count:
            alphas = {}
            for layer in layers:
                others = [other for other in layers if other != layer]
                with only_layers(target, others):
                    alphas[layer] = calibration.alpha()
                bar.advance(len(others))
            least_missed = max(alphas, key=alphas.__getitem__)
            layers.remove(least_missed)
            removals.append(Removal(least_missed, alphas[least_missed]))
            logger.info("without layer %d: %d left, alpha %.3f", least_missed, len(layers), alphas[least_missed])
    return layers, removals


class Calibration:
    """Text of the target to measure acceptance on, and the target's distributions there, computed once.

    Args:
        target: with all of its layers now, with some of them when `alpha` is asked for.
        responses: what `respond` wrote; its training responses are read.
        num_tokens: response tokens at least, as far as there are so many.
    """

    def __init__(self, target: PreTrainedModel, responses: str, num_tokens: int) -> None:
        self.target = target
        self.head = TeacherHead(target)
        self.batches = _batches(responses, num_tokens, target.device)
        with torch.inference_mode():
            self.log_p = [self.head.log_probabilities(states) for states in self._hidden_states()]

    @torch.inference_mode()
    def alpha(self, draft: PreTrainedModel | None = None, draft_vocab: Tensor | None = None) -> float:
        """Mean over the response tokens of sum_v min(p, q) at temperature 1.

        Args:
            draft: a shadow of the target, which q is of; None for the layers the target has now.
            draft_vocab: int64 ids of the columns of its head, where those are not all; p is not renormalised over them.
        """
        shared = []
        for log_p, states in zip(self.log_p, self._hidden_states(draft), strict=True):
            if draft is None:
                log_q = self.head.log_probabilities(states)
            else:
                log_q = self.head.scaled(draft.get_output_embeddings()(states).float()).log_softmax(dim=-1)
            shared.append(acceptance(log_p if draft_vocab is None else log_p[:, draft_vocab.to(log_p.device)], log_q))
        return float(torch.cat(shared).mean())

    @torch.inference_mode()
    def pass_through(self) -> None:
        """Read the text, for who looks on."""
        self._hidden_states()

    def _hidden_states(self, draft: PreTrainedModel | None = None) -> tuple[Tensor, ...]:
        """What enters the head for the response tokens, in chunks of [tokens, hidden]."""
        states = torch.cat([final_hidden_states(draft or self.target, batch) for batch in self.batches])
        return torch.split(states, TOKENS_PER_CHUNK)


def _batches(responses: str, num_tokens: int, device: torch.device) -> list[Batch]:
    rows = load_responses(responses, "train").shuffle(seed=0, keep_in_memory=True)
    chosen, found = [], 0
    for row in rows.select_columns(["input_ids", "response_mask"]):
        chosen.append(row)
        found += sum(row["response_mask"][1:])
        if found >= num_tokens:
            break
    logger.info("choosing layers by acceptance on %d tokens of %d responses", found, len(chosen))
    chosen.sort(key=lambda row: len(row["input_ids"]))  # little padding
    starts = range(0, len(chosen), ROWS_PER_PASS)
    batches = [collate(chosen[start : start + ROWS_PER_PASS], 0) for start in starts]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


@contextmanager
def only_layers(model: PreTrainedModel, layers: list[int]) -> Iterator[None]:
    """While it lasts, the model has these of its layers alone, in this order. For passes without a cache.

    Raises:
        ValueError: the model does not keep its layers in one list.
    """
    prefix, every_layer = _layer_list(model)
    parent_name, _, name = prefix.rpartition(".")
    parent = model.get_submodule(parent_name)
    config = model.config.get_text_config()
    settings = {key: getattr(config, key) for key in ("num_hidden_layers", *PER_LAYER) if hasattr(config, key)}
    try:
        setattr(parent, name, nn.ModuleList(every_layer[layer] for layer in layers))
        keep_settings(config, layers)
        yield
    finally:
        setattr(parent, name, every_layer)
        for key, value in settings.items():
            setattr(config, key, value)


def draft_from_layers(target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A model of the target's class with copies of these layers, in this order, and of all that is not a layer."""
    prefix, _ = _layer_list(target)
    config = copy.deepcopy(target.config)
    keep_settings(config.get_text_config(), layers)
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


def keep_settings(config: PreTrainedConfig, layers: list[int]) -> None:
    """Let a text model's config speak of these layers only."""
    for name in PER_LAYER:
        if of_each := getattr(config, name, None):
            setattr(config, name, [of_each[layer] for layer in layers])
    config.num_hidden_layers = len(layers)


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
