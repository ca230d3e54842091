"""Responses of the target: generated once, kept as token ids, learnt from and judged on many times."""

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

from decode.pair import load_model, load_tokenizer, stop_token_ids
from decode.params import Completion
from decode.plain import PlainDecoder
from decode.progress import ProgressBar
from decode.prompts import Prompt, encode, load_prompts
from train.checkpoint import write_text
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
    settings = {key: value for key, value in asdict(config).items() if key != "output"}
    if output.exists():
        _refuse_other_settings(output, settings)
        logger.info("%s is complete already; nothing to do", output)
        return output
    tokenizer = load_tokenizer(config.target, "target")
    prompts = _all_samples(load_prompts(config.prompts), config)
    encoded = [encode(tokenizer, prompt.messages) for prompt in prompts]
    model = load_model(config.target, config.dtype, "target")
    _refuse_long_prompts(prompts, encoded, config, model.config.get_text_config())
    decoder = PlainDecoder(model, stop_token_ids(model, tokenizer))
    parts = output.parent / f".{output.name}.partial"
    if parts.exists():
        _refuse_other_settings(parts, settings)
    else:
        parts.mkdir(parents=True)
        record = {"settings": settings, "hidden_states_dtype": str(model.dtype).removeprefix("torch.")}
        write_text(parts / RECORD, json.dumps({**record, "provenance": provenance(asdict(config))}, indent=2))
    with ProgressBar("responses", len(prompts)) as bar:
        for start in range(0, len(prompts), config.batch_size):
            part = parts / f"{start:08d}"
            batch = slice(start, start + config.batch_size)
            end = start + len(encoded[batch])
            if part.exists():
                bar.skip(end)
            else:
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
    record = json.loads((Path(folder) / RECORD).read_text())
    return getattr(torch, record["hidden_states_dtype"])  # type: ignore[no-any-return]


def _all_samples(prompts: list[Prompt], config: RespondConfig) -> list[Prompt]:
    """Held-out prompts once, training prompts as often as asked; a split is made where the set has none."""
    period = round(1 / config.heldout_fraction)
    if not any(prompt.split for prompt in prompts):
        prompts = [
            replace(prompt, split="heldout" if number % period == 0 else "train")
            for number, prompt in enumerate(prompts, start=1)
        ]
    samples = []
    for prompt in prompts:
        samples += [prompt] * (1 if prompt.split == "heldout" else config.samples_per_prompt)
    return samples


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
        [datasets.load_from_disk(str(part)) for part in sorted(parts.iterdir()) if part.is_dir()]
    )
    places: dict[str, list[int]] = {"train": [], "heldout": []}
    for place, prompt in enumerate(prompts):
        places[prompt.split or "train"].append(place)
    if empty := [split for split, rows in places.items() if not rows]:
        raise ValueError(f"prompts: none of them is in the split {empty[0]!r}; mark some, or mark none at all")
    splits = datasets.DatasetDict({split: everything.select(rows) for split, rows in places.items()})
    finished = output.parent / f".{output.name}.finished"
    shutil.rmtree(finished, ignore_errors=True)
    splits.save_to_disk(str(finished))
    shutil.copy(parts / RECORD, finished / RECORD)
    finished.rename(output)
    shutil.rmtree(parts)


def _save(dataset: datasets.Dataset, folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    dataset.save_to_disk(str(temporary))
    temporary.rename(folder)


def _refuse_other_settings(folder: Path, settings: dict[str, Any]) -> None:
    """What is there may be reused only if the same configuration made it."""
    if not (folder / RECORD).is_file():
        raise ValueError(f"output {folder}: exists and holds no responses; give another folder")
    recorded = json.loads((folder / RECORD).read_text())["settings"]
    wanted = json.loads(json.dumps(settings))
    for key, value in wanted.items():
        if recorded.get(key) != value:
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
