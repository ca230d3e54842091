"""Plain against speculative decoding, turn by turn in one process: only their ratio means anything."""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from .config import BenchConfig
from .costs import Costs, measure_costs
from .decoder import SpeculativeDecoder
from .evaluate import heldout_prompts, saved_texts, spread
from .files import refuse_unwritable, write_json
from .params import SamplingParams
from .progress import ProgressBar
from .speculative import Seconds, Trace

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Timing:
    """One setting, timed on num_prompts prompts.

    Attributes:
        sampling: the setting.
        plain_tokens_per_second, speculative_tokens_per_second: medians over prompts.
        ratios: speculative over plain, by prompt.
        trace: acceptance of all speculative runs together.
        seconds: what speculative time was spent on.
        costs: c and v(n), measured at this setting.
        predicted_speedup: from the measured acceptance and costs.
    """

    sampling: SamplingParams
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    ratios: list[float]
    trace: Trace
    seconds: Seconds
    costs: Costs
    predicted_speedup: float

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def bench(config: BenchConfig) -> list[Timing]:
    """Time every setting; see `Timing`.

    Raises:
        ValueError: a pair, model or prompt set that is missing or does not fit.
    """
    settings = [
        SamplingParams(
            temperature=temperature,
            top_p=config.top_p if temperature else 1.0,
            max_new_tokens=config.max_new_tokens,
        )
        for temperature in config.temperatures
    ]
    prompts = heldout_prompts(config.prompts)
    decoder = SpeculativeDecoder.from_pretrained(
        config.target, config.pair, num_draft_tokens=config.num_draft_tokens, dtype=config.dtype
    )
    if config.responses:
        encoded = [ids[:start] for ids, start in saved_texts(config.responses, decoder, config.prompts)]
    else:
        encoded = decoder.encode_all(prompts, settings[0])
    encoded = spread(encoded, config.num_prompts)
    if len(encoded) < 5:
        raise ValueError(f"prompts: {config.prompts} has {len(encoded)} held-out prompts; a median needs 5 or more")
    refuse_unwritable(config.output)
    with ProgressBar("timing", len(settings) * len(encoded)) as bar:
        timings = [_time(decoder, encoded, params, bar) for params in settings]
    if config.output:
        write_json(Path(config.output), [{**asdict(timing), "ratio": timing.ratio} for timing in timings])
    return timings


def _time(decoder: SpeculativeDecoder, encoded: list[list[int]], params: SamplingParams, bar: ProgressBar) -> Timing:
    engine = decoder.engine
    costs = measure_costs(decoder, params, max_draft_tokens=engine.num_draft_tokens)
    warm_up = replace(params, max_new_tokens=WARM_UP_TOKENS)
    decoder.plain.generate_ids(encoded[:1], warm_up)
    engine.generate_ids(encoded[:1], warm_up)
    engine.seconds = Seconds()
    plain, speculative, total = [], [], Trace()

    def time_plain(prompt: list[int], params: SamplingParams) -> None:
        started = perf_counter()
        (completion,) = decoder.plain.generate_ids([prompt], params)
        plain.append(len(completion.ids) / (perf_counter() - started))

    def time_speculative(prompt: list[int], params: SamplingParams) -> None:
        nonlocal total
        started = perf_counter()
        (completion,), (trace,) = engine.generate_ids([prompt], params)
        speculative.append(len(completion.ids) / (perf_counter() - started))
        total += trace

    for number, prompt in enumerate(encoded):
        # who goes first alternates, so that neither always finds the machine as the other left it
        turns = (time_plain, time_speculative) if number % 2 == 0 else (time_speculative, time_plain)
        for turn in turns:
            turn(prompt, replace(params, seed=number))
        bar.advance(1)
    return Timing(
        sampling=params,
        plain_tokens_per_second=median(plain),
        speculative_tokens_per_second=median(speculative),
        ratios=[fast / slow for fast, slow in zip(speculative, plain, strict=True)],
        trace=total,
        seconds=engine.seconds,
        costs=costs,
        predicted_speedup=costs.predicted_speedup(total.betas, engine.num_draft_tokens),
    )
