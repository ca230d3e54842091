"""Responses of the target: generated once, kept as token ids, learnt from and judged on many times."""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.completion import Completion
from decode.pair import describe_target, load_model, load_tokenizer, refuse_other_target, stop_token_ids
from decode.params import SamplingParams
from decode.plain import PlainDecoder
from decode.progress import ProgressBar
from decode.prompts import Prompt, encode, load_prompts
from train.checkpoint import publish, remove_folder, write_text
from train.provenance import provenance

from .config import RespondConfig

logger = logging.getLogger(__name__)

RECORD = "respond.json"
COLUMNS = datasets.Features(
    {
        "id": datasets.Value("string"),
        "category": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "response_mask": datasets.List(datasets.Value("bool")),
        "finish_reason": datasets.Value("string"),
    }
)
# raw bytes in the target's own dtype: Arrow knows no bfloat16
STATE_COLUMNS = {
    "hidden_states": datasets.Value("large_binary"),
    "log_normalizers": datasets.List(datasets.Value("float32")),
}


def respond(config: RespondConfig) -> Path:
    """Generate a response to every prompt and save them as a `datasets.DatasetDict` with train and heldout.

    Columns: id, category, input_ids (prompt and response), response_mask (true on the response), finish_reason;
    with keep_hidden_states also hidden_states (what entered the head for each response token, raw bytes of
    [response, hidden]) and log_normalizers (logsumexp of its unprocessed logits). Interrupted, the same call
    goes on after the last complete batch.

    Raises:
        ValueError: a bad prompt set or model, a prompt longer than the context, or an output that holds the
            responses of another configuration.
    """
    datasets.disable_progress_bars()
    output = Path(config.output)
    parts = output.parent / f".{output.name}.partial"
    prompts = _all_samples(load_prompts(config.prompts), config)
    settings = {key: value for key, value in asdict(config).items() if key != "output"}
    settings["prompts_sha256"] = hashlib.sha256(repr(prompts).encode()).hexdigest()
    if output.exists():
        _refuse_other_settings(output, settings)
        remove_folder(parts)
        logger.info("%s is complete already; nothing to do", output)
        return output
    if begun := (parts / RECORD).is_file():
        _refuse_other_settings(parts, settings)
    tokenizer = load_tokenizer(config.target, "target")
    encoded = [encode(tokenizer, prompt.messages) for prompt in prompts]
    model = load_model(config.target, config.dtype, "target")
    _refuse_long_prompts(prompts, encoded, config, model.config.get_text_config())
    logger.info("%d responses, of which %d held out", len(prompts), sum(p.split == "heldout" for p in prompts))
    if not begun:
        parts.mkdir(parents=True, exist_ok=True)
        record = {
            "settings": settings,
            "target": describe_target(config.target, tokenizer),
            "hidden_states_dtype": str(model.dtype).removeprefix("torch."),
        }
        write_text(parts / RECORD, json.dumps({**record, "provenance": provenance(asdict(config))}, indent=2))
    needs_text = config.sampling.stop or config.sampling.bad_words
    decoder = PlainDecoder(model, stop_token_ids(model, tokenizer), tokenizer if needs_text else None)
    _generate(decoder, prompts, encoded, config, parts)
    _assemble(parts, prompts, output)
    return output


def load_responses(folder: str, split: str) -> datasets.Dataset:
    """One split of what `respond` wrote.

    Raises:
        ValueError: the folder holds no finished responses.
    """
    path = Path(folder) / split
    if not path.is_dir():
        raise ValueError(f"responses {folder}: holds no {split}/; give a folder that `spec-distill respond` finished")
    dataset = datasets.load_from_disk(str(path))
    if missing := {"input_ids", "response_mask"} - set(dataset.column_names):
        raise ValueError(f"responses {folder}: lacks the column {', '.join(sorted(missing))}")
    return dataset


def hidden_states_dtype(folder: str) -> torch.dtype:
    """In which dtype the hidden states of these responses were kept."""
    return getattr(torch, _record(Path(folder))["hidden_states_dtype"])  # type: ignore[no-any-return]


def refuse_responses_of_another_target(folder: str, name: str, tokenizer: Tokenizer, states: bool) -> None:
    """Text of another target can teach, if its tokens are the same; its hidden states can not.

    Raises:
        ValueError: the responses are in another tokenizer's ids; or `states` are wanted, and not of target `name`.
    """
    keys = ("tokenizer_sha256", "config_sha256") if states else ("tokenizer_sha256",)
    made_by = _record(Path(folder)).get("target", {})
    refuse_other_target(made_by, describe_target(name, tokenizer), f"responses {folder}", keys)


def _record(folder: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
        record["settings"], record["hidden_states_dtype"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"responses {folder}: {RECORD} is missing or damaged; make them anew") from error
    return record


def _all_samples(prompts: list[Prompt], config: RespondConfig) -> list[Prompt]:
    """Held-out prompts once, training prompts as often as asked; a split is made where the set has none.

    Raises:
        ValueError: nothing to train on, or nothing held out.
    """
    total = len(prompts)
    heldout = {place for place, prompt in enumerate(prompts) if prompt.split == "heldout"}
    if not any(prompt.split for prompt in prompts):
        # at least one, evenly spaced
        num_heldout = min(max(1, round(config.heldout_fraction * total)), total - 1)
        heldout = {(number + 1) * total // num_heldout - 1 for number in range(num_heldout)}
    if not 0 < len(heldout) < total:
        lacking = "train" if heldout else "heldout"
        raise ValueError(f"prompts {config.prompts}: none of {total} is in the split {lacking!r}; add or mark some")
    samples = []
    for place, prompt in enumerate(prompts):
        if place in heldout:
            samples.append(replace(prompt, split="heldout"))
        else:
            samples += [replace(prompt, split="train")] * config.samples_per_prompt
    return samples


def _generate(
    decoder: PlainDecoder, prompts: list[Prompt], encoded: list[list[int]], config: RespondConfig, parts: Path
) -> None:
    """Write a part per batch, but for those that are there."""
    with ProgressBar("responses", len(prompts)) as bar:
        for start in range(0, len(prompts), config.batch_size):
            part = parts / f"{start:08d}"
            batch = slice(start, start + config.batch_size)
            end = start + len(encoded[batch])
            if part.exists():
                bar.skip(end)
                continue
            completions = decoder.generate_ids(
                encoded[batch],
                config.sampling,
                streams=list(range(start, end)),
                keep_hidden_states=config.keep_hidden_states,
                on_token=lambda rows: bar.advance(rows / config.sampling.max_new_tokens),
            )
            rows = list(_rows(prompts[batch], encoded[batch], completions))
            _save(datasets.Dataset.from_list(rows, features=_features(config)), part)
            bar.set(end)


def _rows(prompts: list[Prompt], encoded: list[list[int]], completions: list[Completion]) -> Iterator[dict[str, Any]]:
    for prompt, prompt_ids, completion in zip(prompts, encoded, completions, strict=True):
        row: dict[str, Any] = {
            "id": prompt.id,
            "category": prompt.category,
            "input_ids": prompt_ids + completion.ids,
            "response_mask": [False] * len(prompt_ids) + [True] * len(completion.ids),
            "finish_reason": completion.finish_reason,
        }
        if completion.hidden_states is not None and completion.log_normalizers is not None:
            row["hidden_states"] = _raw_bytes(completion.hidden_states)
            row["log_normalizers"] = completion.log_normalizers.tolist()
        yield row


def _raw_bytes(states: Tensor) -> bytes:
    return states.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _features(config: RespondConfig) -> datasets.Features:
    return datasets.Features({**COLUMNS, **(STATE_COLUMNS if config.keep_hidden_states else {})})


def _assemble(parts: Path, prompts: list[Prompt], output: Path) -> None:
    """Join the parts, split them, and let the output appear complete or not at all."""
    everything = datasets.concatenate_datasets(
        [datasets.load_from_disk(str(part)) for part in sorted(parts.glob("[0-9]*"))]
    )
    splits = datasets.DatasetDict()
    for split in ("train", "heldout"):
        splits[split] = everything.select([place for place, prompt in enumerate(prompts) if prompt.split == split])
    finished = output.parent / f".{output.name}.finished"
    remove_folder(finished)
    splits.save_to_disk(str(finished))
    shutil.copy(parts / RECORD, finished / RECORD)
    publish(finished, output)
    remove_folder(parts)


def _save(dataset: datasets.Dataset, folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp")
    remove_folder(temporary)
    dataset.save_to_disk(str(temporary))
    publish(temporary, folder)


def _refuse_other_settings(folder: Path, settings: dict[str, Any]) -> None:
    """What is there may be reused only if the same configuration made it."""
    if not (folder / RECORD).is_file():
        raise ValueError(f"output {folder}: exists and holds no responses; give another folder")
    recorded = _record(folder)["settings"]
    wanted = json.loads(json.dumps(settings))
    # a release that did not know a field wrote what its default gives
    unrecorded = json.loads(json.dumps(asdict(SamplingParams(seed=0))))
    recorded["sampling"] = {**unrecorded, **recorded.get("sampling", wanted["sampling"])}
    for key, value in wanted.items():
        if recorded.get(key, value) != value:  # what is not recorded cannot be compared
            raise ValueError(
                f"{key}: {value!r} differs from {recorded.get(key)!r}, with which {folder} was begun; "
                "restore it, give another output, or delete the folder"
            )


def _refuse_long_prompts(
    prompts: list[Prompt], encoded: list[list[int]], config: RespondConfig, model_config: PretrainedConfig
) -> None:
    limit = getattr(model_config, "max_position_embeddings", None)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if limit is not None and len(ids) + config.sampling.max_new_tokens > limit:
            raise ValueError(
                f"prompt {prompt.id}: {len(ids)} tokens and {config.sampling.max_new_tokens} new ones are more than "
                f"the target's context of {limit}; shorten it, or lower sampling.max_new_tokens"
            )
