"""Responses of the target: generated once, kept as token ids, learnt from and judged on many times."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.native_sampling import log_normalizers
from decode.pair import describe_target, load_model, load_tokenizer, refuse_other_target, stop_token_ids
from decode.params import SamplingParams
from decode.plain import PlainDecoder
from decode.progress import ProgressBar
from decode.prompts import Prompt, encode, load_prompts
from train.provenance import provenance

from .config import RespondConfig
from .parts import begin, finish, is_complete, part_path, partial, read_record, refuse_full_disk, save_part
from .signal import SIGNAL_RECORD, SignalRecord, signal_record
from .teacher import TeacherHead

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


class Question(NamedTuple):
    """A prompt to be answered, its token ids, and its place among them all, which tells apart its noise."""

    prompt: Prompt
    ids: list[int]
    place: int


class Batch(NamedTuple):
    """Questions answered at once, how, and where the answers are kept."""

    path: Path
    questions: list[Question]
    sampling: SamplingParams


class States:
    """What entered the target's head before each token of a batch of rows, and the normalisers of what left it."""

    def __init__(self) -> None:
        self.passes: list[tuple[dict[int, int], Tensor, Tensor]] = []

    def on_pass(self, rows: list[int], hidden: Tensor, logits: Tensor) -> None:
        places = {row: place for place, row in enumerate(rows)}
        self.passes.append((places, hidden[:, -1], log_normalizers(logits[:, -1])))

    def signal(self, row: int, num_tokens: int) -> dict[str, Tensor]:
        """For the first tokens of a row's response."""
        kept = [(hidden[places[row]], totals[places[row]]) for places, hidden, totals in self.passes[:num_tokens]]
        hidden, totals = zip(*kept, strict=True)
        return {"teacher_hidden": torch.stack(hidden), "log_normalizers": torch.stack(totals)}


def respond(config: RespondConfig) -> Path:
    """Generate a response to every prompt and save them as a `datasets.DatasetDict`.

    Its splits are train, heldout, and heldout_greedy, which answers the held-out prompts again at temperature 0, to
    judge a draft by in greedy decoding. Columns: id, category, input_ids (prompt and response), response_mask (true on
    the response), finish_reason; where states are kept, those of a signal too. Interrupted, the same call goes on after
    the last complete batch.

    Raises:
        ValueError: a bad prompt set or model, a prompt longer than the context, an output that holds the responses of
            another configuration or target, or a disk that may not hold what is to be kept.
    """
    datasets.disable_progress_bars()
    output = Path(config.output)
    prompts = _all_samples(load_prompts(config.prompts), config)
    settings = {key: value for key, value in asdict(config).items() if key != "output"}
    settings["prompts_sha256"] = hashlib.sha256(repr(prompts).encode()).hexdigest()
    if is_complete(output, RECORD, settings):
        return output
    tokenizer = load_tokenizer(config.target, "target")
    questions = [Question(prompt, encode(tokenizer, prompt.messages), place) for place, prompt in enumerate(prompts)]
    model = load_model(config.target, config.dtype, "target")
    _refuse_long_prompts(questions, config, model.config.get_text_config())
    batches = list(_batches(questions, config, partial(output)))
    described = describe_target(config.target, tokenizer)
    signal = signal_record(model, TeacherHead(model), described) if config.keep_states else None
    if signal is not None:
        _refuse_full_disk(output, batches, signal)
    about = {"settings": settings, "target": described, "provenance": provenance(asdict(config))}
    begin(output, RECORD, about)
    if signal is not None:
        begin(output, SIGNAL_RECORD, {**asdict(signal), **about})
    needs_text = config.sampling.stop or config.sampling.bad_words
    decoder = PlainDecoder(model, stop_token_ids(model, tokenizer), tokenizer if needs_text else None)
    features = datasets.Features({**COLUMNS, **(signal.features() if signal else {})})
    with ProgressBar("responses", sum(len(batch.questions) for batch in batches)) as bar:
        for batch in batches:
            end = bar.done + len(batch.questions)
            if batch.path.exists():
                bar.skip(end)
                continue
            save_part(_answered(decoder, batch, signal, bar), features, batch.path)
            bar.set(end)
    finish(output, [batch.path for batch in batches], features, RECORD)
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
    made_by = read_record(folder, RECORD).get("target", {})
    refuse_other_target(made_by, describe_target(name, tokenizer), f"responses {folder}", ("tokenizer_sha256",))


def heldout_places(total: int, share: float) -> set[int]:
    """Which of so many things to hold out: at least one, evenly spaced, but not all."""
    count = min(max(1, round(share * total)), total - 1)
    return {(number + 1) * total // count - 1 for number in range(count)}


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


def _batches(questions: list[Question], config: RespondConfig, folder: Path) -> Iterator[Batch]:
    by_split = {split: [each for each in questions if each.prompt.split == split] for split in ("train", "heldout")}
    by_split[GREEDY] = by_split["heldout"]
    for split, chosen in by_split.items():
        sampling = replace(config.sampling, temperature=0.0) if split == GREEDY else config.sampling
        starts = range(0, len(chosen), config.batch_size)
        for number, start in enumerate(starts):
            path = part_path(folder, split, number, len(starts))
            yield Batch(path, chosen[start : start + config.batch_size], sampling)


def _answered(
    decoder: PlainDecoder, batch: Batch, signal: SignalRecord | None, bar: ProgressBar
) -> list[dict[str, Any]]:
    """The rows of a batch."""
    states = States()
    completions = decoder.generate_ids(
        [question.ids for question in batch.questions],
        batch.sampling,
        streams=[question.place for question in batch.questions],
        on_token=lambda rows: bar.advance(rows / batch.sampling.max_new_tokens),
        on_pass=states.on_pass if signal else None,
    )
    rows = []
    for place, (question, completion) in enumerate(zip(batch.questions, completions, strict=True)):
        row: dict[str, Any] = {
            "id": question.prompt.id,
            "category": question.prompt.category,
            "input_ids": completion.prompt + completion.ids,
            "response_mask": [False] * len(completion.prompt) + [True] * len(completion.ids),
            "finish_reason": completion.finish_reason,
        }
        if signal:
            kept = states.signal(place, len(completion.ids))
            row |= {name: signal.to_bytes(name, values) for name, values in kept.items()}
        rows.append(row)
    return rows


def _refuse_full_disk(output: Path, batches: list[Batch], signal: SignalRecord) -> None:
    """Raises ValueError where the disk would not hold the states of responses that are all of full length."""
    tokens = sum(len(each.questions) * each.sampling.max_new_tokens for each in batches if not each.path.exists())
    logger.info(
        "states: at most %d bytes, %d for each token of a response",
        tokens * signal.bytes_per_token,
        signal.bytes_per_token,
    )
    refuse_full_disk(output, tokens * signal.bytes_per_token, "leave keep_states false")


def _refuse_long_prompts(questions: list[Question], config: RespondConfig, model_config: PretrainedConfig) -> None:
    limit = getattr(model_config, "max_position_embeddings", None)
    for prompt, ids, _ in questions:
        if limit is not None and len(ids) + config.sampling.max_new_tokens > limit:
            raise ValueError(
                f"prompt {prompt.id}: {len(ids)} tokens and {config.sampling.max_new_tokens} new ones are more than "
                f"the target's context of {limit}; shorten it, or lower sampling.max_new_tokens"
            )
