"""Responses of the target: generated once, kept as token ids, learnt from and judged on many times."""

import hashlib
import json
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
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
GREEDY = "heldout_greedy"
SPLITS = ("train", "heldout", GREEDY)
COLUMNS = datasets.Features(
    {
        "id": datasets.Value("string"),
        "category": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "response_mask": datasets.List(datasets.Value("bool")),
        "finish_reason": datasets.Value("string"),
    }
)
# a prompt and its token ids
Question = tuple[Prompt, list[int]]


def respond(config: RespondConfig) -> Path:
    """Generate a response to every prompt and save them as a `datasets.DatasetDict`.

    Its splits are train, heldout, and heldout_greedy, which answers the held-out prompts again at temperature 0, to
    judge a draft by in greedy decoding. Columns: id, category, input_ids (prompt and response), response_mask (true on
    the response), finish_reason. Interrupted, the same call goes on after the last complete batch.

    Raises:
        ValueError: a bad prompt set or model, a prompt longer than the context, or an output that holds the
            responses of another configuration.
    """
    datasets.disable_progress_bars()
    output = Path(config.output)
    prompts = _all_samples(load_prompts(config.prompts), config)
    settings = {key: value for key, value in asdict(config).items() if key != "output"}
    settings["prompts_sha256"] = hashlib.sha256(repr(prompts).encode()).hexdigest()
    if is_complete(output, RECORD, settings):
        return output
    parts = partial(output)
    tokenizer = load_tokenizer(config.target, "target")
    questions = [(prompt, encode(tokenizer, prompt.messages)) for prompt in prompts]
    heldout = [question for question in questions if question[0].split == "heldout"]
    model = load_model(config.target, config.dtype, "target")
    _refuse_long_prompts(questions, config, model.config.get_text_config())
    logger.info("%d responses, of which %d held out, which are also answered greedily", len(questions), len(heldout))
    if not (parts / RECORD).is_file():
        parts.mkdir(parents=True, exist_ok=True)
        record = {
            "settings": settings,
            "target": describe_target(config.target, tokenizer),
            "provenance": provenance(asdict(config)),
        }
        write_text(parts / RECORD, json.dumps(record, indent=2))
    needs_text = config.sampling.stop or config.sampling.bad_words
    decoder = PlainDecoder(model, stop_token_ids(model, tokenizer), tokenizer if needs_text else None)
    _generate(decoder, questions, config.sampling, config.batch_size, parts)
    _generate(decoder, heldout, replace(config.sampling, temperature=0.0), config.batch_size, parts / GREEDY)
    _assemble(parts, prompts, output)
    return output


def load_responses(folder: str, split: str) -> datasets.Dataset:
    """One split of what `respond` wrote.

    Raises:
        ValueError: the folder holds no finished responses, or those of an older release, which knew fewer splits.
    """
    try:
        dataset = datasets.load_from_disk(str(Path(folder) / split))
    except FileNotFoundError as error:
        remedy = "give a folder that `spec-distill respond` finished"
        if split == GREEDY and (Path(folder) / "dataset_dict.json").is_file():
            remedy = "an older release wrote it; make it anew with `spec-distill respond`"
        raise ValueError(f"responses {folder}: holds no {split}/; {remedy}") from error
    if missing := {"input_ids", "response_mask"} - set(dataset.column_names):
        raise ValueError(f"responses {folder}: lacks the column {', '.join(sorted(missing))}")
    return dataset


def has_split(folder: str, split: str) -> bool:
    """Whether responses have a split: older releases wrote no heldout_greedy."""
    return (Path(folder) / split).is_dir()


def refuse_responses_of_another_target(folder: str, name: str, tokenizer: Tokenizer) -> None:
    """Text of another target can teach, if its tokens are the same.

    Raises:
        ValueError: the responses are in the ids of another tokenizer than that of target `name`.
    """
    made_by = read_record(folder).get("target", {})
    refuse_other_target(made_by, describe_target(name, tokenizer), f"responses {folder}", ("tokenizer_sha256",))


def heldout_places(total: int, share: float) -> set[int]:
    """Which of so many things to hold out: at least one, evenly spaced, but not all."""
    count = min(max(1, round(share * total)), total - 1)
    return {(number + 1) * total // count - 1 for number in range(count)}


def partial(output: Path) -> Path:
    """Where the parts of a folder are until all of them are there."""
    return output.parent / f".{output.name}.partial"


def is_complete(output: Path, record_name: str, settings: dict[str, Any]) -> bool:
    """Whether a folder made of parts is there already, and these settings made it; they are in its record.

    Raises:
        ValueError: the folder is something else, or was made or begun with other settings.
    """
    parts = partial(output)
    if output.exists():
        _refuse_other_settings(output, record_name, settings)
        remove_folder(parts)
        logger.info("%s is complete already; nothing to do", output)
        return True
    if (parts / record_name).is_file():
        _refuse_other_settings(parts, record_name, settings)
    return False


def read_record(folder: str, name: str = RECORD) -> dict[str, Any]:
    """What is written beside responses: how they, or what goes with them, were made.

    Raises:
        ValueError: there is no such record, or no sense in it.
    """
    try:
        record: dict[str, Any] = json.loads((Path(folder) / name).read_text())
        record["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"responses {folder}: {name} is missing or damaged; make them anew") from error
    return record


def _all_samples(prompts: list[Prompt], config: RespondConfig) -> list[Prompt]:
    """Held-out prompts once, training prompts as often as asked; a split is made where the set has none.

    Raises:
        ValueError: nothing to train on, or nothing held out.
    """
    total = len(prompts)
    heldout = {place for place, prompt in enumerate(prompts) if prompt.split == "heldout"}
    if not any(prompt.split for prompt in prompts):
        heldout = heldout_places(total, config.heldout_fraction)
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
    decoder: PlainDecoder, questions: list[Question], sampling: SamplingParams, batch_size: int, parts: Path
) -> None:
    """Write a part per batch, but for those that are there."""
    with ProgressBar("responses" if sampling.temperature else "greedy responses", len(questions)) as bar:
        for start in range(0, len(questions), batch_size):
            part = parts / f"{start:08d}"
            batch = questions[start : start + batch_size]
            end = start + len(batch)
            if part.exists():
                bar.skip(end)
                continue
            completions = decoder.generate_ids(
                [ids for _, ids in batch],
                sampling,
                streams=list(range(start, end)),
                on_token=lambda rows: bar.advance(rows / sampling.max_new_tokens),
            )
            rows = [_row(prompt, completion) for (prompt, _), completion in zip(batch, completions, strict=True)]
            _save(datasets.Dataset.from_list(rows, features=COLUMNS), part)
            bar.set(end)


def _row(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "category": prompt.category,
        "input_ids": completion.prompt + completion.ids,
        "response_mask": [False] * len(completion.prompt) + [True] * len(completion.ids),
        "finish_reason": completion.finish_reason,
    }


def _assemble(parts: Path, prompts: list[Prompt], output: Path) -> None:
    """Join the parts, split them, and let the output appear complete or not at all."""
    sampled, splits = _joined(parts), datasets.DatasetDict()
    for split in ("train", "heldout"):
        splits[split] = sampled.select([place for place, prompt in enumerate(prompts) if prompt.split == split])
    splits[GREEDY] = _joined(parts / GREEDY)
    finished = output.parent / f".{output.name}.finished"
    remove_folder(finished)
    splits.save_to_disk(str(finished))
    shutil.copy(parts / RECORD, finished / RECORD)
    publish(finished, output)
    remove_folder(parts)


def _joined(parts: Path) -> datasets.Dataset:
    return datasets.concatenate_datasets([datasets.load_from_disk(str(part)) for part in sorted(parts.glob("[0-9]*"))])


def _save(dataset: datasets.Dataset, folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp")
    remove_folder(temporary)
    dataset.save_to_disk(str(temporary))
    publish(temporary, folder)


def _refuse_other_settings(folder: Path, record_name: str, settings: dict[str, Any]) -> None:
    """What is there may be reused only if the same configuration made it."""
    if not (folder / record_name).is_file():
        raise ValueError(f"output {folder}: exists and holds no {record_name}; give another folder")
    recorded = read_record(str(folder), record_name)["settings"]
    wanted = json.loads(json.dumps(settings))
    if "sampling" in wanted:
        # a release that did not know a field wrote what its default gives
        unrecorded = json.loads(json.dumps(asdict(SamplingParams(seed=0))))
        recorded["sampling"] = {**unrecorded, **recorded.get("sampling", wanted["sampling"])}
    for key, value in wanted.items():
        if recorded.get(key, value) != value:  # what is not recorded cannot be compared
            raise ValueError(
                f"{key}: {value!r} differs from {recorded.get(key)!r}, with which {folder} was begun; "
                "restore it, give another output, or delete the folder"
            )


def _refuse_long_prompts(questions: list[Question], config: RespondConfig, model_config: PretrainedConfig) -> None:
    limit = getattr(model_config, "max_position_embeddings", None)
    for prompt, ids in questions:
        if limit is not None and len(ids) + config.sampling.max_new_tokens > limit:
            raise ValueError(
                f"prompt {prompt.id}: {len(ids)} tokens and {config.sampling.max_new_tokens} new ones are more than "
                f"the target's context of {limit}; shorten it, or lower sampling.max_new_tokens"
            )
