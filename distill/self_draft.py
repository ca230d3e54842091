"""Which part of a target drafts for it: found by the speedup that measured acceptance and costs predict."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.costs import Costs, measure_costs
from decode.decoder import SpeculativeDecoder
from decode.pair import describe_target
from decode.params import SamplingParams
from decode.progress import ProgressBar
from decode.self_draft import SelfDraft, new_adapter, self_draft
from decode.self_proposer import self_draft_proposer
from decode.shadow import places_of
from train.checkpoint import write_text

from .config import BuildConfig
from .layers import Calibration
from .low_rank import factorise
from .parts import read_record
from .responses import RECORD

logger = logging.getLogger(__name__)

# candidates for the next sublayer to go, of those that were missed least when last tried
NUM_CANDIDATES = 8
# sublayers in a row whose going makes nothing better, after which the search ends
PATIENCE = 8
LOW_RANK_SHARE = 0.5
SAMPLING = SamplingParams(temperature=1.0)

Sublayer = tuple[Literal["attention", "mlp"], int]


@dataclass(frozen=True)
class Worth:
    """What a way of drafting is worth.

    Attributes:
        alpha: acceptance at temperature 1 on the calibration text.
        draft_step: c, in target passes over one token.
        num_draft_tokens: of the largest predicted speedup.
        predicted_speedup: with alpha at each position.
    """

    alpha: float
    draft_step: float
    num_draft_tokens: int
    predicted_speedup: float

    @classmethod
    def of(cls, alpha: float, costs: Costs) -> "Worth":
        """The best that this acceptance gives at these costs."""
        best = costs.best_num_draft_tokens([alpha])
        return cls(alpha, costs.draft_step, best, costs.predicted_speedup([alpha], best))


@dataclass(frozen=True)
class SublayerCosts:
    """What each sublayer adds to a draft step, from three draft steps that were measured.

    Attributes:
        whole: of a draft step through everything, and of the target's passes.
        attention, mlp: one of each, in target passes over one token.
        num_layers: of the target.
    """

    whole: Costs
    attention: float
    mlp: float
    num_layers: int

    def of(self, spec: SelfDraft) -> Costs:
        """Costs of drafting so."""
        depth = self.num_layers if spec.num_layers is None else spec.num_layers
        attentions = self.num_layers - depth + len(spec.skipped_attention)
        mlps = self.num_layers - depth + len(spec.skipped_mlp)
        step = self.whole.draft_step - attentions * self.attention - mlps * self.mlp
        return replace(self.whole, draft_step=max(step, 0.0))


def choose_self_draft(
    config: BuildConfig, target: PreTrainedModel, tokenizer: Tokenizer, draft_vocab: Tensor | None
) -> tuple[SelfDraft, dict[str, Tensor], dict[str, Any]]:
    """What of the target drafts, what it has of its own for that, and what was found on the way: for `pair.json`.

    Raises:
        ValueError: the target cannot draft for itself, or not in this way.
    """
    spec = SelfDraft(
        skipped_attention=tuple(config.skipped_attention or ()),
        skipped_mlp=tuple(config.skipped_mlp or ()),
        num_layers=config.exit_layer,
        bits=config.bits or (8 if config.kind == "quantised" else None),
        low_rank=config.kind == "low_rank",
        adapter=config.adapter,
    )
    places = places_of(target)
    spec.check(places)
    tensors = {} if spec.adapter is None else new_adapter(target, spec.adapter)
    if config.responses is None:
        return spec, tensors, {}
    calibration = Calibration(target, config.responses, config.calibration_tokens)
    if config.kind == "skip" and config.skipped_attention is None and config.skipped_mlp is None:
        costs = measure_sublayers(target, tokenizer, spec, draft_vocab)
        of = _searched(config, tokenizer, draft_vocab)
        measured = _kept_alphas(config, of)
        spec = _search(spec, costs, calibration, draft_vocab, measured, lambda: _keep_alphas(config, of, measured))
    elif config.kind == "exit" and config.exit_layer is None:
        if places.num_layers < 2:
            raise ValueError("kind: a target of one layer has no exit before its end; give another kind")
        costs = measure_sublayers(target, tokenizer, spec, draft_vocab)
        depths = [replace(spec, num_layers=depth, adapter=None) for depth in range(1, places.num_layers)]
        with ProgressBar("choosing the exit", len(depths)) as bar:
            worths = {each: Worth.of(_alpha(each, calibration, draft_vocab, bar), costs.of(each)) for each in depths}
        best = max(worths, key=lambda each: worths[each].predicted_speedup)
        spec = replace(spec, num_layers=best.num_layers)
    elif config.kind == "low_rank":
        tensors = factorise(target, calibration, config.low_rank_share or LOW_RANK_SHARE)
    alpha = calibration.alpha(self_draft(target, spec, draft_vocab, tensors), draft_vocab)
    worth = Worth.of(alpha, _costs(target, tokenizer, spec, draft_vocab, tensors))
    logger.info(
        "drafting so is accepted at %.3f and costs %.2f of a target pass: %.2f times as fast as plain decoding is "
        "predicted, with %d drafted",
        *(worth.alpha, worth.draft_step, worth.predicted_speedup, worth.num_draft_tokens),
    )
    if worth.predicted_speedup < 1:
        logger.warning("this does not pay on this machine: decoding will go on plainly")
    return spec, tensors, {"calibration": asdict(worth)}


def measure_sublayers(
    target: PreTrainedModel, tokenizer: Tokenizer, spec: SelfDraft, draft_vocab: Tensor | None
) -> SublayerCosts:
    """Times draft steps with everything, without attention and without MLPs."""
    num_layers = places_of(target).num_layers
    every = tuple(range(num_layers))
    whole, without_attention, without_mlp = (
        _costs(target, tokenizer, each, draft_vocab)
        for each in (
            replace(spec, skipped_attention=(), skipped_mlp=(), num_layers=None),
            replace(spec, skipped_attention=every, skipped_mlp=(), num_layers=None),
            replace(spec, skipped_attention=(), skipped_mlp=every, num_layers=None),
        )
    )
    attention, mlp = (
        max(0.0, whole.draft_step - other.draft_step) / num_layers for other in (without_attention, without_mlp)
    )
    logger.info(
        "costs measured here, in target passes: a draft step through everything %.2f, of which each attention %.4f and "
        "each MLP %.4f",
        *(whole.draft_step, attention, mlp),
    )
    return SublayerCosts(whole, attention, mlp, num_layers)


def _costs(
    target: PreTrainedModel,
    tokenizer: Tokenizer,
    spec: SelfDraft,
    draft_vocab: Tensor | None,
    tensors: dict[str, Tensor] | None = None,
) -> Costs:
    decoder = SpeculativeDecoder(target, tokenizer, self_draft_proposer(target, spec, draft_vocab, tensors))
    return measure_costs(decoder, SAMPLING)


def _search(
    start: SelfDraft,
    costs: SublayerCosts,
    calibration: Calibration,
    draft_vocab: Tensor | None,
    alphas: dict[str, float],
    keep: Callable[[], None],
) -> SelfDraft:
    """Leave out one sublayer after the other, each time that of the largest predicted speedup; the best on the way.

    Args:
        start: what is left out already.
        costs: of sublayers.
        calibration: text to measure acceptance on.
        draft_vocab: int64 ids of a reduced output vocabulary.
        alphas: what was measured by an earlier attempt, by `_name`; added to.
        keep: called after each measurement.
    """
    layers = range(costs.num_layers)
    remaining: list[Sublayer] = [("attention", layer) for layer in layers] + [("mlp", layer) for layer in layers]
    spec = best = start
    last_tried: dict[Sublayer, float] = {}
    best_worth, num_in_vain = 0.0, 0
    with ProgressBar("choosing what to skip", len(remaining) * (1 + NUM_CANDIDATES)) as bar:
        while remaining and num_in_vain < PATIENCE:
            if last_tried:
                candidates = sorted(remaining, key=lambda sublayer: -last_tried[sublayer])[:NUM_CANDIDATES]
            else:
                candidates = remaining
            worths: dict[Sublayer, Worth] = {}
            for sublayer in candidates:
                tried = _without(spec, sublayer)
                if (name := _name(tried)) not in alphas:
                    draft = self_draft(calibration.target, tried, draft_vocab)
                    alphas[name] = calibration.alpha(draft, draft_vocab)
                    keep()
                last_tried[sublayer] = alphas[name]
                worths[sublayer] = Worth.of(alphas[name], costs.of(tried))
                bar.advance(1)
            chosen = max(worths, key=lambda sublayer: worths[sublayer].predicted_speedup)
            spec, worth = _without(spec, chosen), worths[chosen]
            remaining.remove(chosen)
            num_in_vain += 1
            if worth.predicted_speedup > best_worth:
                best, best_worth, num_in_vain = spec, worth.predicted_speedup, 0
            logger.info(
                "without %s %d: alpha %.3f, predicted speedup %.3f", *chosen, worth.alpha, worth.predicted_speedup
            )
    return best


def _without(spec: SelfDraft, sublayer: Sublayer) -> SelfDraft:
    kind, layer = sublayer
    if kind == "attention":
        return replace(spec, skipped_attention=tuple(sorted((*spec.skipped_attention, layer))))
    return replace(spec, skipped_mlp=tuple(sorted((*spec.skipped_mlp, layer))))


def _alpha(spec: SelfDraft, calibration: Calibration, draft_vocab: Tensor | None, bar: ProgressBar) -> float:
    alpha = calibration.alpha(self_draft(calibration.target, spec, draft_vocab), draft_vocab)
    bar.advance(1)
    return alpha


def _name(spec: SelfDraft) -> str:
    return json.dumps(asdict(spec))


def _path_of_alphas(config: BuildConfig) -> Path:
    output = Path(config.output)
    return output.parent / f".{output.name}.search.json"


def _kept_alphas(config: BuildConfig, of: list[Any]) -> dict[str, float]:
    """What an interrupted search of the same kind has measured."""
    path = _path_of_alphas(config)
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if content.get("of") != of:
        return {}
    logger.info("going on with %d measurements of an interrupted search", len(content["alphas"]))
    alphas: dict[str, float] = content["alphas"]
    return alphas


def _keep_alphas(config: BuildConfig, of: list[Any], alphas: dict[str, float]) -> None:
    path = _path_of_alphas(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"of": of, "alphas": alphas}))


def forget_search(config: BuildConfig) -> None:
    """The pair is there."""
    _path_of_alphas(config).unlink(missing_ok=True)


def _searched(config: BuildConfig, tokenizer: Tokenizer, draft_vocab: Tensor | None) -> list[Any]:
    """What acceptance depends on, as JSON has it."""
    assert config.responses is not None
    ids = None if draft_vocab is None else draft_vocab.tolist()
    record = read_record(config.responses, RECORD)
    return [describe_target(config.target, tokenizer), config.responses, record, config.calibration_tokens, ids]
