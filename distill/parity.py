"""The last gate of a run: the finished pair, decoding, accepts what was predicted for it on the held-out text."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from decode.decoder import SpeculativeDecoder
from decode.heldout import spread
from decode.params import SamplingParams, SpeculationParams
from train.checkpoint import write_text

from .config import RunConfig
from .judge import expected_rounds
from .parts import read_record
from .responses import RECORD
from .task import DistillTask
from .texts import Rows

logger = logging.getLogger(__name__)

# a sound run fails once in a thousand times
CONFIDENCE, RESAMPLES = 0.999, 5000
BATCH_SIZE = 8
MIN_PROMPTS = 4


def why_unprovable(task: DistillTask, config: RunConfig) -> str | None:
    """Why the held-out texts do not tell what the pair will accept; None where they do."""
    if not task.texts.by_target:
        return f"{config.responses} is not text of the target"
    record = read_record(config.responses, RECORD)
    key = "config_sha256"
    if record.get("target", {}).get(key, task.pair.target.get(key)) != task.pair.target.get(key):
        return f"{config.responses} is text of another target"
    if (count := min(config.parity_prompts, len(task.texts.heldout))) < MIN_PROMPTS:
        return f"{count} held-out prompts tell too little"
    sampling = _sampling_of(config)
    plain = SamplingParams(
        temperature=config.temperature,
        max_new_tokens=sampling.max_new_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
        seed=sampling.seed,
    )
    if sampling != plain:
        return f"{config.responses} was not sampled at temperature {config.temperature} and nothing else"
    return None


def prove_parity(task: DistillTask, pair: Path, config: RunConfig) -> None:
    """Decode held-out prompts with the pair and compare tokens per target pass with what its draft's q promise.

    Writes parity.json beside the pair.

    Raises:
        ValueError: they differ by more than chance.
    """
    path = pair.parent / "parity.json"
    if path.is_file():
        return
    task.load_saved(pair)
    speculation = SpeculationParams(
        num_draft_tokens=task.pair.num_draft_tokens, never_slower=False, verification="tokenwise"
    )
    decoder = SpeculativeDecoder.from_pretrained(config.target, str(pair), speculation)
    found = {}
    for name, rows, temperature in (
        ("sampled", task.texts.heldout, config.temperature),
        ("greedy", task.texts.heldout_greedy, 0.0),
    ):
        if rows is None:
            continue
        rows = [rows[place] for place in spread(list(range(len(rows))), config.parity_prompts)]
        predicted = _predicted(task, rows, greedy=temperature == 0)
        longest = max(int(sum(row["response_mask"])) for row in rows)
        params = replace(
            _sampling_of(config), temperature=temperature, max_new_tokens=longest, logprobs=None, seed=config.train.seed
        )
        measured = _measured(decoder, rows, params)
        low, high = difference_interval(predicted, measured)
        found[name] = {
            "predicted_block_efficiency": _ratio(predicted),
            "measured_block_efficiency": _ratio(measured),
            "difference_interval": [low, high],
            "num_prompts": len(rows),
        }
        logger.info(
            "parity, %s: %.3f tokens per target pass predicted, %.3f decoded (difference %.3f to %.3f)",
            name,
            _ratio(predicted),
            _ratio(measured),
            low,
            high,
        )
        if not low <= 0 <= high:
            raise ValueError(
                f"parity: {_ratio(predicted):.3f} tokens per target pass were predicted for {pair} ({name}), and it "
                f"decoded {_ratio(measured):.3f}; training and serving disagree, do not use this pair"
            )
    write_text(path, json.dumps(found, indent=1))


def difference_interval(
    predicted: Sequence[tuple[float, float]], measured: Sequence[tuple[float, float]], seed: int = 0
) -> tuple[float, float]:
    """Interval of measured minus predicted tokens per target pass: Student's, with the bootstrap's error over prompts.

    Args:
        predicted, measured: (tokens, target passes) of each prompt, in the same order; two or more.
        seed: of the resampling.
    """
    count = len(measured)
    sides = np.array([measured, predicted])
    rows = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    totals = sides[:, rows].sum(axis=2)
    ratios = totals[..., 0] / totals[..., 1]
    error = float(np.std(ratios[0] - ratios[1])) * math.sqrt(count / (count - 1))
    # where next to nothing is accepted, prompts may all be alike by chance: then the error of so many coins
    tokens, passes = np.sum(predicted, axis=0)
    of_coins = float(tokens / passes**2 * math.sqrt((tokens - passes + 1) * passes / tokens))
    difference, reach = _ratio(measured) - _ratio(predicted), students_quantile(count - 1) * max(error, of_coins)
    return difference - reach, difference + reach


def students_quantile(freedom: int) -> float:
    """Of Student's distribution, for CONFIDENCE; by Cornish and Fisher's expansion, a little low below five."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(float(term) / float(freedom) ** power for power, term in enumerate(terms, start=1))


def _sampling_of(config: RunConfig) -> SamplingParams:
    """How the responses were sampled."""
    return SamplingParams(**read_record(config.responses, RECORD)["settings"]["sampling"])


def _predicted(task: DistillTask, rows: Rows, greedy: bool) -> list[tuple[float, float]]:
    rounds = []
    for scores in task.scores(rows):
        acceptance = scores.greedy_acceptance if greedy else scores.acceptance
        rounds.append(expected_rounds(acceptance.double().numpy(), task.pair.num_draft_tokens))
    return [(each.num_tokens, each.count) for each in rounds]


def _measured(decoder: SpeculativeDecoder, rows: Rows, params: SamplingParams) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start in range(0, len(rows), BATCH_SIZE):
        batch = rows[start : start + BATCH_SIZE]
        prompts = [list(row["input_ids"][: list(row["response_mask"]).index(True)]) for row in batch]
        streams = list(range(start, start + len(prompts)))
        traces = decoder.engine.generate_ids(prompts, params, streams)[1]
        found += [(trace.num_committed, trace.num_target_passes) for trace in traces]
    return found


def _ratio(of_prompts: Sequence[tuple[float, float]]) -> float:
    tokens, passes = np.sum(of_prompts, axis=0)
    return float(tokens / passes)
