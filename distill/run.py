"""Distillation: train a pair's draft on the target's distributions, and leave the trained pair."""

import functools
import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.costs import Costs, measure_costs
from decode.decoder import SpeculativeDecoder
from decode.pair import (
    Pair,
    describe_target,
    load_draft_vocab,
    load_model,
    load_tensors,
    load_tokenizer,
    refuse_other_tokenizer,
    stop_token_ids,
)
from decode.params import SamplingParams
from decode.self_draft import SelfDraft, own_parameters, self_draft
from train.checkpoint import write_text
from train.data_check import check_data
from train.engine import autocasts, resolve_precision
from train.folder import RunFolder
from train.loop import FitResult, fit
from train.packing import collate_packed, pack, refuse_unpackable
from train.provenance import provenance

from .branches import refuse_unbranchable
from .config import RunConfig
from .module import DistillModule
from .parity import prove_parity, why_unprovable
from .parts import read_record
from .responses import RECORD, refuse_responses_of_another_target
from .signal import SignalRecord, load_record, load_signal, refuse_cache_of_another_target
from .size import refuse_full_disk
from .task import DistillTask
from .teacher import Batch, TeacherHead, collate, compile_layers, multiplies_float32_sooner
from .texts import Rows, Texts, column, load_texts, without_signal

logger = logging.getLogger(__name__)

# A backward pass of fused attention takes a CPU three times as long, but keeps no scores of all pairs of tokens.
EAGER_ATTENTION_TOKENS = 512


@dataclass(frozen=True)
class Prepared:
    """A run that could begin: what `fit` is given."""

    task: DistillTask
    rows: Rows
    lengths: list[int]
    resolved_config: dict[str, Any]


def distill(config: RunConfig) -> FitResult:
    """Train the pair's draft; the trained pair is `train.output`/pair.

    Raises:
        ValueError: a pair, target or responses that are missing or do not fit together; a disk too full; a finished
            pair that accepts less, or more, than was predicted for it.
    """
    datasets.disable_progress_bars()
    prepared = prepare(config)
    task = prepared.task
    refuse_full_disk(task.module, config.train, saves_all=not task.own)
    reason = why_unprovable(task, config) if config.parity_prompts else None
    if reason:
        logger.info("parity is not proved: %s", reason)
    result = fit(task, prepared.rows, prepared.lengths, config.train, prepared.resolved_config, result_name="pair")
    if config.parity_prompts and reason is None and PartialState().is_main_process:
        prove_parity(task, result.result, config)
    return result


def prepare(config: RunConfig) -> Prepared:
    """Load and check everything that a run needs.

    Raises:
        ValueError: a pair, target or responses that are missing or do not fit together.
    """
    folder = Path(config.pair)
    pair = Pair.load(folder)
    tensors = load_tensors(folder)
    if pair.draft_kind != "model" and not tensors:
        raise ValueError(f"pair {folder}: its target drafts for itself ({pair.draft_kind}); there is nothing to train")
    target_name = config.target or pair.target_id()
    tokenizer = load_tokenizer(target_name, "target")
    draft_name = str(folder / "draft")
    if pair.draft_kind == "model":
        refuse_other_tokenizer(tokenizer, load_tokenizer(draft_name, "draft"), target_name, draft_name)
    texts = load_texts(config, tokenizer)
    if texts.by_target:
        refuse_responses_of_another_target(config.responses, target_name, tokenizer)
    record = _signal_record(config, target_name, tokenizer)
    lengths = [len(ids) for ids in column(texts.train, "input_ids")]
    if config.packing_length is not None and max(lengths) > config.packing_length:
        raise ValueError(f"packing_length: {config.packing_length} is not possible; a text has {max(lengths)} tokens")
    resolved = resolve_precision(asdict(config))
    resolved["objective"]["stages"] = [asdict(stage) for stage in config.objective.stages_or_default]
    run = RunFolder(Path(config.train.output), "pair")
    run.check(resolved)  # before anything is written there
    has_begun = run.checkpoints.exists() or run.result.exists()
    if (config.train.select_by or "").startswith("greedy") and texts.heldout_greedy is None:
        raise ValueError(f"train.select_by: {config.responses} has no greedy answers; choose another metric")
    costs = _costs(config, target_name, has_begun)
    # of a kept signal only the head is wanted: but for costs and parity, a target that fits nowhere here can teach
    target = load_model(target_name, role="target", layers=record is None)
    dtype = target.dtype
    if not autocasts(config.train.mixed_precision):
        _multiply_sooner(target)
    own: dict[str, nn.Parameter] = {}
    if pair.draft_kind == "model":
        draft = load_model(draft_name, "float32", "draft")
    else:
        whole, spec = load_model(target_name, "float32", "draft"), SelfDraft.of(pair.self_draft)
        draft = self_draft(whole, spec, tensors=tensors)
        own = own_parameters(draft, spec, whole)
        if config.train_embeddings:
            raise ValueError("train_embeddings: those of a target that drafts for itself stay as they are; use false")
    passing = [draft] if record else [draft, target]  # those that texts go through
    reference = _reference(config, tokenizer, target_name)
    _refuse_unknown_tokens(texts, [target, draft])
    if config.packing_length is not None:
        for model in passing:
            refuse_unpackable(model)
    if config.branches.share:
        refuse_unbranchable(target, "target")
        refuse_unbranchable(draft, "draft")
    token_ids = _token_ids(load_draft_vocab(folder), draft, target)
    stop_ids = stop_token_ids(target, tokenizer)
    ends = stop_ids
    if texts.by_target:
        sampling = read_record(config.responses, RECORD)["settings"].get("sampling", {})
        # a stop string ends a text with whatever token completed it
        ends = frozenset() if sampling.get("stop") else stop_ids | frozenset(sampling.get("stop_token_ids", ()))
    chosen = None if token_ids is None else token_ids.cpu().numpy()
    check_data(
        without_signal(texts.train),
        tokenizer,
        stop_ids=ends,
        token_ids=chosen,
        limits=config.data_limits,
        name="responses",
    )
    texts = texts.learnable()
    teacher = TeacherHead(target, token_ids, config.temperature)
    if config.objective.alignment_weight:
        _refuse_alignment(draft, target, record)
    _choose_trainable(draft, config.train_embeddings, own)
    if config.compile:
        _choose_attention(draft, config, min(max(lengths), config.max_length))
        for model in passing:
            compile_layers(model)
    module = DistillModule(draft, teacher, None if record else target, config, frozenset(stop_ids), reference)
    pair.provenance = {**provenance(resolved), "started_from": pair.provenance}
    pair.sampling = {"temperature": config.temperature}
    pair.measured = {}  # was of the draft before
    if config.target:
        pair.target = describe_target(config.target, tokenizer)
    padding_id = tokenizer.eos_token_id or 0
    with_signal = functools.partial(_collate, padding_id=padding_id, record=record)
    task = DistillTask(module, with_signal, texts, config, costs, tokenizer, pair, own, _inputs(config), dtype)
    return Prepared(task, texts.train, [len(ids) for ids in column(texts.train, "input_ids")], resolved)


def _collate(
    rows: list[dict[str, Any]], packing_length: int | None, padding_id: int, record: SignalRecord | None
) -> Batch:
    if packing_length is None:
        batch = collate(rows, padding_id)
    else:
        sequences = pack(rows, packing_length)
        rows = [rows[place] for sequence in sequences for place in sequence["places"]]
        batch = collate_packed(sequences, padding_id)
    return batch if record is None else batch | load_signal(rows, record)


def _signal_record(config: RunConfig, target_name: str, tokenizer: Tokenizer) -> SignalRecord | None:
    """Of the signal that the teacher left; None when it is online.

    Raises:
        ValueError: it is wanted and was not kept, or at another temperature.
    """
    if config.teacher == "online":
        return None
    record = load_record(config.responses)
    if record is None:
        raise ValueError(
            f"teacher: responses {config.responses} keep no signal; make it with `spec-distill cache`, "
            "or responses with keep_states true, or use teacher online"
        )
    if record.kind == "top_k" and record.temperature != config.temperature:
        raise ValueError(
            f"temperature: {config.temperature} differs from {record.temperature}, at which the teacher's likeliest "
            f"tokens in {config.responses} were kept; make them anew"
        )
    refuse_cache_of_another_target(config.responses, record, target_name, tokenizer)
    return record


def _multiply_sooner(target: PreTrainedModel) -> None:
    if multiplies_float32_sooner(target):
        size = 4 * target.num_parameters() / 2**30
        logger.info("target: in float32, %.1f GiB, which this CPU multiplies sooner than bfloat16", size)
        target.float()


def _inputs(config: RunConfig) -> dict[str, str]:
    """What tells other responses, or another pair, of the same name: hashes of files."""
    folders = {"responses": Path(config.responses), "pair": Path(config.pair)}
    of_pair = ("draft_vocab.safetensors", "draft/config.json", "draft/model.safetensors")
    names = {"responses": (RECORD, "cache.json"), "pair": of_pair}
    files = [(what, folder / name) for what, folder in folders.items() for name in names[what]]
    files += [("responses", folders["responses"])]
    found: dict[str, str] = {}
    for what, path in files:
        if path.is_file():
            with path.open("rb") as file:
                found[what] = found.get(what, "") + hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _costs(config: RunConfig, target_name: str, has_begun: bool) -> Costs | None:
    """Measured once a run, by the main process while the others wait: they must all predict the same."""
    if not config.measure_speed:
        return None
    path = Path(config.train.output) / "costs.json"
    with PartialState(cpu=not torch.accelerator.is_available()).main_process_first():
        # what a run left that came to nothing may be of another draft
        if PartialState().is_main_process and not (has_begun and path.is_file()):
            decoder = SpeculativeDecoder.from_pretrained(target_name, config.pair)
            costs = measure_costs(decoder, SamplingParams(temperature=config.temperature))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asdict(costs), indent=1))
        costs = Costs(**json.loads(path.read_text(encoding="utf-8")))
    logger.info(
        "costs measured here: a draft step %.3f of a target pass, a pass over 4 tokens %.2f, over 8 %.2f",
        costs.draft_step,
        costs.target_pass[3],
        costs.target_pass[7],
    )
    return costs


def _reference(config: RunConfig, tokenizer: Tokenizer, target_name: str) -> PreTrainedModel | None:
    if config.objective.reference is None or config.objective.selected_fraction == 1:
        return None
    if (kind := Pair.load(Path(config.objective.reference)).draft_kind) != "model":
        raise ValueError(
            f"reference: {config.objective.reference} has no draft of its own ({kind}); give a pair with one"
        )
    name = str(Path(config.objective.reference) / "draft")
    refuse_other_tokenizer(tokenizer, load_tokenizer(name, "reference"), target_name, name)
    return load_model(name, "float32", "reference")


def _token_ids(chosen: Tensor | None, draft: PreTrainedModel, target: PreTrainedModel) -> Tensor | None:
    """The draft's output vocabulary in the target's ids; None where all of them are the draft's too."""
    if chosen is not None:
        return chosen.to(target.device)
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (draft, target)]
    return None if sizes[0] == sizes[1] else torch.arange(min(sizes), device=target.device)


def _refuse_unknown_tokens(texts: Texts, models: list[PreTrainedModel]) -> None:
    size: int = min(model.get_input_embeddings().num_embeddings for model in models)  # type: ignore[type-var, assignment]
    for rows in (texts.train, texts.heldout):
        largest = max((max(ids, default=0) for ids in column(rows, "input_ids")), default=0)
        if largest >= size:
            raise ValueError(
                f"responses: token id {largest} is beyond the {size} of target and draft; "
                "tokenize them with the target's tokenizer"
            )


def _refuse_alignment(draft: PreTrainedModel, target: PreTrainedModel, record: SignalRecord | None) -> None:
    if draft.config.get_text_config().hidden_size != target.config.get_text_config().hidden_size:
        raise ValueError("alignment_weight: draft and target differ in hidden size; use 0")
    if record is not None and record.kind == "top_k":
        raise ValueError("alignment_weight: the responses keep the teacher's likeliest tokens, no hidden states; use 0")


def _choose_attention(draft: PreTrainedModel, config: RunConfig, longest: int) -> None:
    if draft.device.type == "cpu" and config.packing_length is None and longest <= EAGER_ATTENTION_TOKENS:
        logger.info("attention is computed in the open (eager), which is faster than fused for texts this short")
        draft.set_attn_implementation("eager")


def _choose_trainable(draft: PreTrainedModel, train_embeddings: bool, own: dict[str, nn.Parameter]) -> None:
    if own:  # all else is the target's
        draft.requires_grad_(False)
        for weight in own.values():
            weight.requires_grad_(True)
        return
    draft.requires_grad_(True)
    head = draft.get_output_embeddings()
    if not train_embeddings:
        draft.get_input_embeddings().requires_grad_(False)
        head.requires_grad_(False)
    elif head.bias is not None:
        head.bias.requires_grad_(False)  # the loss takes it as it is
