"""Acceptance: computed from p and q on the target's text, and counted while decoding."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from . import figures
from .agreement import probabilities_on_text, range_of, sums_on_text
from .completion import Completion
from .config import EvaluateConfig
from .costs import measure_costs, measure_speedups
from .decoder import SpeculativeDecoder
from .figures import Evaluation, Sample
from .files import circumstances, refuse_unwritable, write_json
from .heldout import SavedTexts, Text, heldout_prompts, spread
from .pair import Pair, refuse_other_target
from .params import SamplingParams, SpeculationParams
from .progress import ProgressBar
from .shared_work import SharedWork, processes
from .trace import Round, Seconds, Trace

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
# enough to tell which number of draft tokens is best, where the draft is not far better than any we have seen
POSITIONS_COUNTED = 4


@dataclass(frozen=True)
class Setting:
    """What is measured at once.

    Attributes:
        params: how tokens are chosen.
        texts: prompts, with answers where some are saved.
        has_answers: whether they are.
    """

    params: SamplingParams
    texts: list[Text]
    has_answers: bool


def evaluate(config: EvaluateConfig) -> list[Evaluation]:
    """Measure a pair's acceptance at every setting, and record in its pair.json what is found at the first.

    Several processes share the prompts and find what one would; the main one alone writes.

    Raises:
        ValueError: a pair, model, prompt set or responses that are missing or do not fit.
    """
    Pair.load(Path(config.pair))  # what is found is recorded there: refuse at once what is no pair
    processes()  # before models are loaded
    prompts = heldout_prompts(config.prompts)
    gamma = POSITIONS_COUNTED if config.num_draft_tokens is None else config.num_draft_tokens
    # token by token and never paused: what is counted at a position is the acceptance there and nothing else
    speculation = SpeculationParams(num_draft_tokens=gamma, never_slower=False, verification="tokenwise")
    decoder = SpeculativeDecoder.from_pretrained(config.target, config.pair, speculation, dtype=config.dtype)
    if config.responses:
        settings = _settings_with_saved_texts(config, decoder)
    else:
        longest = max(config.settings, key=lambda params: params.max_new_tokens)
        encoded = decoder.encode_all(prompts, longest)
        questions = [
            Text(ids, len(ids), prompt.category and str(prompt.category))
            for ids, prompt in zip(encoded, prompts, strict=True)
        ]
        settings = [Setting(params, questions, has_answers=False) for params in config.settings]
    refuse_unwritable(config.output)
    path = Path(f"{config.output}.partial.jsonl") if config.output else None
    work = SharedWork(path, _fingerprint(config, decoder, settings))
    results = [_evaluate(decoder, setting, config, work, f"{number}") for number, setting in enumerate(settings)]
    if work.state.is_main_process:
        _record(results, config, decoder)
    work.finish()
    return results


def _settings_with_saved_texts(config: EvaluateConfig, decoder: SpeculativeDecoder) -> list[Setting]:
    """Texts are generated for settings that none are saved for; for one they must be.

    Raises:
        ValueError: none are saved for any setting.
    """
    assert config.responses is not None
    saved = SavedTexts(config.responses, decoder, config.prompts)
    settings, error = [], None
    for params in config.settings:
        try:
            settings.append(Setting(params, saved.of(params), has_answers=True))
        except ValueError as found:
            error = error or found
            questions = [Text(text.prompt, text.start, text.category) for text in saved.sampled()]
            settings.append(Setting(params, questions, has_answers=False))
    if error and not any(setting.has_answers for setting in settings):
        raise error
    if error:
        logger.info("text is generated for some settings: %s", error)
    return settings


def _evaluate(
    decoder: SpeculativeDecoder, setting: Setting, config: EvaluateConfig, work: SharedWork, name: str
) -> Evaluation:
    """One setting; its name tells its work apart."""
    params, texts = setting.params, setting.texts
    if not setting.has_answers:
        texts = _answered(decoder, setting, config, work, f"{name} text")

    def sums(batch: list[Text], _: ProgressBar) -> list[Any]:
        return [sums_on_text(decoder, text, params) for text in batch]

    def rounds(batch: list[tuple[int, Text]], _: ProgressBar) -> list[Any]:
        places, chosen = zip(*batch, strict=True)
        completions, traces = decoder.engine.generate_ids([text.prompt for text in chosen], params, list(places))
        return [
            (trace.rounds, _sample(decoder, completion, text.category) if place in sampled else None)
            for place, text, completion, trace in zip(places, chosen, completions, traces, strict=True)
        ]

    num_ranges, gamma = range_of(params.max_new_tokens - 1) + 1, decoder.engine.speculation.num_draft_tokens
    assert gamma is not None
    found = work.results(f"{name} alpha", "alpha", [[text] for text in texts], sums)
    of_texts = figures.padded(found, num_ranges)
    decoded = spread(texts, config.num_decoded_prompts)
    sampled = spread(list(range(len(decoded))), config.num_samples)
    batches = _batches(list(enumerate(decoded)), config.batch_size)
    found = work.results(f"{name} rounds", "speculative decoding", batches, rounds)
    traces = [Trace([Round(*each) for each in of_prompt]) for of_prompt, _ in found]
    passes = figures.padded([figures.passes_by_range(trace) for trace in traces], num_ranges)
    of_rounds = figures.of_rounds(traces, gamma)
    betas = of_rounds["betas"]
    costs = work.on_main(lambda: measure_costs(decoder, params))
    best = costs.best_num_draft_tokens(betas)
    count = config.num_timed_prompts
    timed = list(islice(cycle(spread([text.prompt for text in texts], count)), count)) if count else []
    speedups, seconds = work.on_main(
        lambda: measure_speedups(decoder, timed, params, best) if timed else ([], Seconds())
    )
    categories, of_decoded = ([text.category for text in chosen] for chosen in (texts, decoded))
    return Evaluation(
        **figures.means(of_texts, passes),
        **of_rounds,
        prompts=config.prompts,
        sampling=params,
        by_category=figures.by_category(of_texts, categories, passes, traces, of_decoded),
        by_position=figures.by_position(of_texts, passes),
        num_draft_tokens=gamma,
        costs=costs,
        predicted_speedup=[costs.predicted_speedup(betas, number) for number in range(1, len(costs.target_pass))],
        predicted_speedup_intervals=figures.predicted_speedup_intervals(traces, costs),
        best_num_draft_tokens=best,
        measured_speedups=speedups,
        measured_speedup=median(speedups) if speedups else None,
        measured_seconds=seconds,
        samples=[Sample(**sample) for _, sample in found if sample],
    )


def _sample(decoder: SpeculativeDecoder, completion: Completion, category: str | None) -> dict[str, Any]:
    """The fields of `Sample`."""
    text = Text(completion.sequence, len(completion.prompt))
    p, q = probabilities_on_text(decoder, text, completion.params)
    return {
        "prompt": decoder.tokenizer.decode(completion.prompt),
        "category": category,
        "pieces": completion.pieces,
        "provenance": completion.provenance,
        "p": p,
        "q": q,
    }


def _answered(
    decoder: SpeculativeDecoder, setting: Setting, config: EvaluateConfig, work: SharedWork, stage: str
) -> list[Text]:
    """Text of the target, sampled plainly."""
    params, questions = setting.params, setting.texts

    def answers(batch: list[tuple[int, Text]], bar: ProgressBar) -> list[Any]:
        places, chosen = zip(*batch, strict=True)
        completions = decoder.plain.generate_ids(
            [text.prompt for text in chosen],
            params,
            streams=list(places),
            on_token=lambda rows: bar.advance(rows / params.max_new_tokens),
        )
        return [completion.ids for completion in completions]

    # plain decoding shares nothing between rows: a larger batch than speculative decoding's is cheap
    batches = _batches(list(enumerate(questions)), 4 * config.batch_size)
    found = work.results(stage, "target text", batches, answers)
    return [
        Text(question.prompt + ids, question.start, question.category)
        for question, ids in zip(questions, found, strict=True)
    ]


def _batches(items: list[Item], size: int) -> list[list[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _fingerprint(config: EvaluateConfig, decoder: SpeculativeDecoder, settings: Sequence[Setting]) -> str:
    """Of all that what is found depends on; weights count by name, size and time of change."""
    pair, target = Pair.load(Path(config.pair)), config.target
    files = [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for folder in (config.pair, target or pair.target_id())
        for path in sorted(Path(folder).rglob("*.safetensors"))
    ]
    told = {name: value for name, value in asdict(config).items() if name not in ("output", "num_timed_prompts")}
    texts = [setting.texts for setting in settings]
    about = [told, pair.self_draft, decoder.target_description, str(decoder.target.device), files, texts]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _record(results: Sequence[Evaluation], config: EvaluateConfig, decoder: SpeculativeDecoder) -> None:
    """All settings go into the output, the first one's figures at its top; and those into the pair, without texts."""
    found = [result.as_json() for result in results]
    first = found[0] | circumstances(decoder.target, asdict(config))
    if config.output:
        write_json(Path(config.output), first | ({"settings": found} if len(found) > 1 else {}))
    folder = Path(config.pair)
    pair = Pair.load(folder)
    try:
        refuse_other_target(pair.target, decoder.target_description, f"pair {folder}")
    except ValueError as error:
        logger.info("not recorded in pair.json: %s", error)
        return
    pair.measured = first | {"samples": []}  # a pair is handed on, whatever the prompts say
    if config.num_draft_tokens is None:
        pair.num_draft_tokens = results[0].best_num_draft_tokens
    pair.save(folder)
