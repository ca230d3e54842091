"""Ways of decoding against each other, turn by turn in one process: only their ratios mean anything."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from .baselines import Assistance, TransformersBaselines
from .clock import ForwardClock
from .config import BenchConfig
from .costs import Costs, measure_costs
from .decoder import SpeculativeDecoder
from .files import circumstances, refuse_unwritable, write_json
from .heldout import SavedTexts, heldout_prompts, spread
from .latency import Arrivals, Latency, OnTokens, Run, Spread
from .memory import Memory, PeakMemory
from .model import refuse_unsupported_cache
from .pair import Pair
from .params import SamplingParams
from .progress import ProgressBar
from .roofline import Roofline, Weights, measure_roofline
from .trace import Trace

WARM_UP_TOKENS = 16
# what transformers' best number of assistant tokens is found on
SWEEP_PROMPTS = 3
# prompts that the target answers, to stand before others
CONTEXT_TURNS = 32

BEST_ASSISTED = "transformers_assisted_best"


class Mode(Protocol):
    """A way to continue one prompt, which tells of tokens as they come."""

    def __call__(self, prompt: list[int], params: SamplingParams, /, *, on_tokens: OnTokens) -> list[int]:
        """The new tokens."""


@dataclass(frozen=True)
class FirstCall:
    """What it takes until there is a text.

    Attributes:
        load_seconds: to load both models and the tokenizer.
        first_text_seconds: of the first `WARM_UP_TOKENS` tokens after that: weights are packed then, and the C++ is
            compiled if this machine does not have it yet.
    """

    load_seconds: float
    first_text_seconds: float


@dataclass(frozen=True)
class Timing:
    """One setting, timed.

    Attributes:
        sampling: the setting.
        num_draft_tokens: tokens proposed a round; None where that was chosen while running.
        runs: by mode, one a prompt, of the same prompts in the same order: "plain" and "speculative", and where asked
            for "transformers_plain", "transformers_assisted_best" and "transformers_assisted_default".
        sweep: tokens per second of transformers' assisted generation in fixed ways, on prompts of its own; the best of
            them is timed. Empty when not asked for.
        trace: acceptance and seconds of all speculative runs together.
        share_outside_models: of the speculative runs' wall time, what passed outside the two models' forward passes;
            None on an accelerator, where a forward pass returns before it is done.
        costs: c and v(n), measured at this setting.
        predicted_speedup: from the tokens drafted and committed, and the costs.
        weights: what a pass reads of each model.
        roofline: what memory allows; None when not asked for.
        first_call: what it took to begin.
    """

    sampling: SamplingParams
    num_draft_tokens: int | None
    runs: dict[str, list[Run]]
    sweep: dict[Assistance, float]
    trace: Trace
    share_outside_models: float | None
    costs: Costs
    predicted_speedup: float
    weights: Weights
    roofline: Roofline | None = None
    first_call: FirstCall | None = None

    def tokens_per_second(self, mode: str) -> list[float]:
        """By prompt."""
        return [run.tokens_per_second for run in self.runs[mode]]

    def ratios(self, mode: str = "speculative", base: str = "plain") -> list[float]:
        """How many times faster one mode is than another, by prompt."""
        pairs = zip(self.tokens_per_second(mode), self.tokens_per_second(base), strict=True)
        return [fast / slow for fast, slow in pairs]

    @property
    def ratio(self) -> float:
        return median(self.ratios())

    @property
    def best_assistance(self) -> Assistance | None:
        return max(self.sweep, key=lambda each: self.sweep[each]) if self.sweep else None

    @property
    def latency(self) -> dict[str, Latency | None]:
        """By mode."""
        return {mode: Latency.of(runs) for mode, runs in self.runs.items()}

    @property
    def memory(self) -> dict[str, Memory | None]:
        """By mode, the most that any run held; None where that cannot be measured."""
        found = {mode: [run.memory for run in runs if run.memory] for mode, runs in self.runs.items()}
        return {mode: Memory.most(memories) if memories else None for mode, memories in found.items()}

    @property
    def weight_bytes_per_token(self) -> dict[str, float]:
        """By mode, read of weights for a token of the text; every drafted token counts as a pass of the draft model.

        As in `shares_of_bandwidth`, keys and values are left out, and so is the pass over the prompt.
        """
        trace = self.trace
        read = self.weights.bytes_read(trace.num_target_passes, trace.num_drafted)
        speculative = read / trace.num_committed if trace.num_committed else float("nan")
        return {"plain": float(self.weights.target_bytes), "speculative": speculative}

    @property
    def shares_of_bandwidth(self) -> dict[str, float]:
        """By mode, what it read of weights over what memory allows, in all runs together."""
        if self.roofline is None:
            return {}
        seconds = {mode: sum(run.seconds for run in runs) for mode, runs in self.runs.items()}
        plain = self.roofline.share(sum(run.num_tokens for run in self.runs["plain"]), 0, seconds["plain"])
        trace = self.trace
        speculative = self.roofline.share(trace.num_target_passes, trace.num_drafted, seconds["speculative"])
        return {"plain": plain, "speculative": speculative}

    def figures(self) -> dict[str, Any]:
        """All of it, and what follows from it, as JSON values."""
        nested = ("sampling", "runs", "sweep", "trace", "costs", "weights", "roofline", "first_call")
        return {
            **{name: value for name, value in vars(self).items() if name not in nested},
            "sampling": asdict(self.sampling),
            "runs": {mode: [run.figures() for run in runs] for mode, runs in self.runs.items()},
            "sweep": {str(each): rate for each, rate in self.sweep.items()},
            "trace": self.trace.figures(),
            "costs": asdict(self.costs),
            "roofline": asdict(self.roofline) if self.roofline else None,
            "first_call": asdict(self.first_call) if self.first_call else None,
            "shares_of_bandwidth": self.shares_of_bandwidth,
            "weights": asdict(self.weights),
            "weight_bytes_per_token": self.weight_bytes_per_token,
            "tokens_per_second": {mode: asdict(Spread.of(self.tokens_per_second(mode))) for mode in self.runs},
            "latency": {mode: asdict(each) if each else None for mode, each in self.latency.items()},
            "memory": {mode: asdict(each) if each else None for mode, each in self.memory.items()},
            "median_tokens_per_second": {mode: median(self.tokens_per_second(mode)) for mode in self.runs},
            "median_ratios_to_plain": {mode: median(self.ratios(mode)) for mode in self.runs},
            "ratios": self.ratios(),
            "ratio": self.ratio,
            "realised_over_predicted": self.ratio / self.predicted_speedup,
            "best_assistance": str(self.best_assistance) if self.sweep else None,
            "ratio_to_best_assisted": median(self.ratios(base=BEST_ASSISTED)) if self.sweep else None,
        }


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
    started = perf_counter()
    decoder = SpeculativeDecoder.from_pretrained(
        config.target, config.pair, config.speculation, dtype=config.dtype, tuned=config.tuned
    )
    load_seconds = perf_counter() - started
    if config.responses:
        available = [text.prompt for text in SavedTexts(config.responses, decoder, config.prompts).sampled()]
    else:
        available = decoder.encode_all(prompts, settings[0])
    timed = spread(available, config.num_prompts)
    if len(timed) < 5:
        raise ValueError(f"prompts: {config.prompts} has {len(timed)} held-out prompts; a median needs 5 or more")
    baselines, swept = None, []
    if config.transformers:
        swept = spread([prompt for prompt in available if prompt not in timed], SWEEP_PROMPTS)
        if not swept:
            raise ValueError(
                f"num_prompts: all {len(available)} held-out prompts of {config.prompts} would be timed, which leaves "
                "none to find transformers' best number of assistant tokens on; time fewer, or give more prompts"
            )
        baselines = TransformersBaselines(decoder, _stock_draft(config.pair), config.dtype)
    refuse_unwritable(config.output)
    if config.context_tokens:
        turns = _answered(decoder, spread(available, CONTEXT_TURNS), config.max_new_tokens)
        timed, swept = (lengthened(each, turns, config.context_tokens) for each in (timed, swept))
        for model in (decoder.target, *([decoder.draft.model] if decoder.draft else [])):
            refuse_unsupported_cache(model, max(map(len, timed + swept)) + config.max_new_tokens)
    started = perf_counter()
    decoder.engine.generate_ids([timed[0]], replace(settings[0], max_new_tokens=WARM_UP_TOKENS))
    first_call = FirstCall(load_seconds, perf_counter() - started)
    roofline = measure_roofline(decoder.target, _draft_model(decoder)) if config.roofline else None
    runs = 5 * len(timed) + len(baselines.assistances) * len(swept) if baselines else 2 * len(timed)
    with ProgressBar("timing", len(settings) * runs) as bar:
        timings = [
            replace(_time(decoder, timed, params, bar, baselines, swept), roofline=roofline, first_call=first_call)
            for params in settings
        ]
    if config.output:
        found = {"timings": [timing.figures() for timing in timings]}
        write_json(Path(config.output), found | circumstances(decoder.target, asdict(config)))
    return timings


def lengthened(prompts: list[list[int]], turns: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Each prompt with turns of a conversation before it, whole, until it has at least so many tokens.

    Args:
        prompts: token ids.
        turns: token ids of prompts, these or others, and of their answers; a prompt is not asked twice in a row.
        num_tokens: at least.
    """
    longer = []
    for place, prompt in enumerate(prompts):
        others = [turn for turn in turns[place:] + turns[:place] if turn[: len(prompt)] != prompt] or turns
        before = cycle(others)
        while len(prompt) < num_tokens:
            prompt = next(before) + prompt
        longer.append(prompt)
    return longer


def _answered(decoder: SpeculativeDecoder, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Prompts with the target's answers, as a conversation has them behind it."""
    params = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=0)
    completions = decoder.plain.generate_ids(prompts, params)
    return [prompt + completion.ids for prompt, completion in zip(prompts, completions, strict=True)]


def _stock_draft(pair: str) -> str | None:
    """What transformers is assisted by; None for a target that drafts for itself."""
    folder = Path(pair)
    if not (folder / "pair.json").is_file():
        return pair
    return str(folder / "draft") if Pair.load(folder).draft_kind == "model" else None


def _draft_model(decoder: SpeculativeDecoder) -> PreTrainedModel | None:
    """What drafts; None where lookup alone does, whatever was loaded beside it."""
    return decoder.draft.model if decoder.draft and decoder.engine.speculation.proposer != "lookup" else None


def _time(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    params: SamplingParams,
    bar: ProgressBar,
    baselines: TransformersBaselines | None,
    swept: list[list[int]],
) -> Timing:
    engine, clock, total = decoder.engine, ForwardClock(), Trace()
    most = engine.speculation.num_draft_tokens or engine.speculation.max_draft_tokens
    # in the middle of a text
    context_length = int(median(map(len, prompts))) + params.max_new_tokens // 2
    costs = measure_costs(decoder, params, max_draft_tokens=most, context_length=context_length)

    def plain(prompt: list[int], params: SamplingParams, /, *, on_tokens: OnTokens) -> list[int]:
        (completion,) = decoder.plain.generate_ids([prompt], params, on_token=on_tokens)
        return completion.ids

    def speculative(prompt: list[int], params: SamplingParams, /, *, on_tokens: OnTokens) -> list[int]:
        nonlocal total
        completions, trace = engine.begin([prompt], params), Trace()
        with clock:
            for _ in engine.rounds(completions, [trace]):
                on_tokens(trace.rounds[-1].num_committed)
        total += trace
        return completions[0].ids

    modes: dict[str, Mode] = {"plain": plain, "speculative": speculative}
    sweep: dict[Assistance, float] = {}
    warm_up = replace(params, max_new_tokens=WARM_UP_TOKENS)
    if baselines:
        modes["transformers_plain"] = baselines.plain
        modes["transformers_assisted_default"] = baselines.assisted
        baselines.assisted(swept[0], warm_up)
        sweep = baselines.sweep(swept, params, bar)
        best = max(sweep, key=lambda each: sweep[each])
        modes[BEST_ASSISTED] = partial(baselines.assisted, assistance=best)
    for mode in modes.values():
        mode(prompts[0], warm_up, on_tokens=Arrivals().note)
    clock.seconds_of.clear()
    total = Trace()
    runs = _take_turns(modes, prompts, params, bar, decoder.target.device)
    wall = sum(run.seconds for run in runs["speculative"])
    return Timing(
        sampling=params,
        num_draft_tokens=engine.speculation.num_draft_tokens,
        runs=runs,
        sweep=sweep,
        trace=total,
        share_outside_models=1 - clock.seconds / wall if decoder.target.device.type == "cpu" else None,
        costs=costs,
        predicted_speedup=costs.predicted_speedup_of(total),
        weights=Weights.of(decoder.target, _draft_model(decoder)),
    )


def _take_turns(
    modes: dict[str, Mode], prompts: list[list[int]], params: SamplingParams, bar: ProgressBar, device: torch.device
) -> dict[str, list[Run]]:
    """Decode every prompt once in every mode; advances `bar` by each run. `device` is whose memory is looked at."""
    runs: dict[str, list[Run]] = {name: [] for name in modes}
    for number, prompt in enumerate(prompts):
        # who goes first rotates, so that none always finds the machine as the same other left it
        first = number % len(modes)
        for name in [*modes][first:] + [*modes][:first]:
            torch.manual_seed(number)
            with PeakMemory(device) as memory:
                arrivals = Arrivals()
                ids = modes[name](prompt, params, on_tokens=arrivals.note)
                seconds = arrivals.elapsed_seconds
            runs[name].append(Run(len(ids), seconds, tuple(arrivals.noted), memory.found))
            bar.advance(1)
    return runs
