"""Acceptance: computed from p and q on the target's text, and counted while decoding."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .config import EvaluateConfig
from .costs import Costs, measure_costs
from .decoder import SpeculativeDecoder
from .files import refuse_unwritable, write_json
from .model import CachedModel
from .pair import Pair, refuse_other_target
from .params import SamplingParams, SpeculationParams
from .progress import ProgressBar
from .prompts import Prompt, load_prompts
from .sampling import next_token_distribution
from .trace import Trace

logger = logging.getLogger(__name__)

Interval = tuple[float, float]
Item = TypeVar("Item")
# tokens whose two full distributions exist at a time
CHUNK_TOKENS = 512
# enough to tell which number of draft tokens is best, where the draft is not far better than any we have seen
POSITIONS_COUNTED = 4


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        prompts: which prompts, and how many.
        num_tokens: response tokens that alpha is a mean over.
        alpha: mean of sum_v min(p, q) over positions of target-distributed text.
        alpha_interval: 95%, bootstrap over prompts.
        betas: acceptance counted at each position of a round, given that it was reached.
        block_efficiency: tokens committed per target pass, the bonus token included; counted.
        block_efficiency_interval: 95%, bootstrap over prompts.
        first_position_interval: 95% interval of betas[0]. It may lie below alpha's: rounds begin more often where
            the draft has just failed than where it has just succeeded.
        counts: drafted, verified, accepted and committed tokens, and target passes.
        num_draft_tokens: tokens proposed a round.
        costs: measured here.
        predicted_speedup: by num_draft_tokens, from 1.
        sampling: the sampling parameters.
    """

    prompts: str
    num_prompts: int
    num_tokens: int
    alpha: float
    alpha_interval: Interval
    betas: list[float]
    block_efficiency: float
    block_efficiency_interval: Interval
    first_position_interval: Interval
    counts: dict[str, int]
    num_draft_tokens: int
    costs: Costs
    predicted_speedup: list[float]
    sampling: SamplingParams

    @property
    def best_num_draft_tokens(self) -> int:
        return self.costs.best_num_draft_tokens(self.betas)


def evaluate(config: EvaluateConfig) -> Evaluation:
    """Measure a pair's acceptance, and record it in its pair.json.

    Raises:
        ValueError: a pair, model, prompt set or responses that are missing or do not fit.
    """
    Pair.load(Path(config.pair))  # what is found is recorded there: refuse at once what is no pair
    prompts = heldout_prompts(config.prompts)
    gamma = POSITIONS_COUNTED if config.num_draft_tokens is None else config.num_draft_tokens
    # token by token and never paused: what is counted at a position is the acceptance there and nothing else
    speculation = SpeculationParams(num_draft_tokens=gamma, never_slower=False, verification="tokenwise")
    decoder = SpeculativeDecoder.from_pretrained(config.target, config.pair, speculation, dtype=config.dtype)
    if config.responses:
        texts = saved_texts(config.responses, decoder, config.prompts, config.sampling)
        encoded = [ids[:start] for ids, start in texts]
    else:
        encoded = decoder.encode_all(prompts, config.sampling)
    refuse_unwritable(config.output)
    if not config.responses:
        texts = _generated_texts(decoder, encoded, config)
    alphas = _alphas_on_texts(decoder, texts, config)
    traces = _decode(decoder, spread(encoded, config.num_decoded_prompts), config)
    costs = measure_costs(decoder, config.sampling)
    total = sum(traces, Trace())
    lengths = np.array([len(text_alphas) for text_alphas in alphas])
    sums = np.array([float(text_alphas.sum()) for text_alphas in alphas])
    result = Evaluation(
        prompts=config.prompts,
        num_prompts=len(texts),
        num_tokens=int(lengths.sum()),
        alpha=float(sums.sum() / lengths.sum()),
        alpha_interval=bootstrap_interval(sums, lengths),
        betas=total.betas,
        block_efficiency=total.block_efficiency,
        block_efficiency_interval=bootstrap_interval(
            np.array([trace.num_committed for trace in traces]),
            np.array([trace.num_target_passes for trace in traces]),
        ),
        first_position_interval=bootstrap_interval(
            np.array([sum(trace.accepted[:1]) for trace in traces]),
            np.array([sum(trace.reached[:1]) for trace in traces]),
        ),
        counts={
            "target_passes": total.num_target_passes,
            "drafted": total.num_drafted,
            "verified": total.num_verified,
            "accepted": total.num_accepted,
            "committed": total.num_committed,
        },
        num_draft_tokens=gamma,
        costs=costs,
        predicted_speedup=[costs.predicted_speedup(total.betas, number) for number in range(1, len(costs.target_pass))],
        sampling=config.sampling,
    )
    _record(result, config, decoder)
    return result


def heldout_prompts(source: str) -> list[Prompt]:
    """The prompts of a set that are marked as held out; all of them when none is marked."""
    prompts = load_prompts(source)
    return [prompt for prompt in prompts if prompt.split == "heldout"] or prompts


def spread(items: list[Item], count: int) -> list[Item]:
    """`count` items evenly from a list, which may be sorted by category; all of them when there are fewer."""
    chosen = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[place] for place in chosen]


def bootstrap_interval(numerators: np.ndarray, denominators: np.ndarray, seed: int = 0) -> Interval:
    """95% percentile interval of sum(numerators) / sum(denominators) when the prompts are drawn anew.

    Args:
        numerators, denominators: one entry per prompt; resampled together, 2,000 times.
        seed: of the resampling.
    """
    rows = np.random.default_rng(seed).integers(len(numerators), size=(2000, len(numerators)))
    with np.errstate(invalid="ignore"):
        ratios = numerators[rows].sum(axis=1) / denominators[rows].sum(axis=1)
    low, high = np.nanpercentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def saved_texts(
    folder: str, decoder: SpeculativeDecoder, prompts: str, sampling: SamplingParams | None = None
) -> list[tuple[list[int], int]]:
    """Held-out texts of `spec-distill respond`: ids, and where the response begins.

    Args:
        folder: what it wrote.
        decoder: whose target the texts must be of.
        prompts: the prompt set that they must answer.
        sampling: how they must have been sampled; None for any way.

    Raises:
        ValueError: they are not there, or not what they must be.
    """
    import datasets

    path = Path(folder)
    if not (path / "respond.json").is_file():
        raise ValueError(f"responses {folder}: not there; give a folder that `spec-distill respond` finished")
    try:
        record = json.loads((path / "respond.json").read_text())
        made_with = record["settings"]
        made_with_sampling = SamplingParams(**made_with["sampling"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"responses {folder}: respond.json is damaged: {error}") from error
    refuse_other_target(record.get("target", {}), decoder.target_description, f"responses {folder}")
    for name, made in vars(made_with_sampling).items() if sampling else ():
        if name not in ("seed", "logprobs") and getattr(sampling, name) != made:
            raise ValueError(
                f"sampling.{name}: {getattr(sampling, name)} differs from {made}, with which {folder} was made: "
                "alpha belongs to text sampled as it will be served; leave responses out, or make them anew"
            )
    if made_with["prompts"] != prompts:
        raise ValueError(f"prompts: {prompts!r} are not those of {folder}, made for {made_with['prompts']!r}")
    rows = datasets.load_from_disk(str(path / "heldout")).select_columns(["input_ids", "response_mask"])
    return [(row["input_ids"], row["response_mask"].index(True)) for row in rows]


def _generated_texts(
    decoder: SpeculativeDecoder, encoded: list[list[int]], config: EvaluateConfig
) -> list[tuple[list[int], int]]:
    texts = []
    # plain decoding shares nothing between rows: a larger batch than speculative decoding's is cheap
    size = 4 * config.batch_size
    with ProgressBar("target text", len(encoded)) as bar:
        for start in range(0, len(encoded), size):
            batch = encoded[start : start + size]
            completions = decoder.plain.generate_ids(
                batch,
                config.sampling,
                streams=list(range(start, start + len(batch))),
                on_token=lambda rows: bar.advance(rows / config.sampling.max_new_tokens),
            )
            texts += [
                (prompt + completion.ids, len(prompt)) for prompt, completion in zip(batch, completions, strict=True)
            ]
            bar.set(start + len(batch))
    return texts


@torch.inference_mode()
def _alphas_on_texts(
    decoder: SpeculativeDecoder, texts: list[tuple[list[int], int]], config: EvaluateConfig
) -> list[Tensor]:
    """sum_v min(p, q) before each response token, fp32 [response] per text."""
    alphas = []
    assert decoder.draft is not None
    with ProgressBar("alpha", len(texts)) as bar:
        for ids, start in texts:
            tokens = torch.tensor([ids[:-1]], device=decoder.target.device)
            target = CachedModel(decoder.target, 1, len(ids))  # p by the passes that decoding makes
            target.read([ids[:start]])
            p_logits = target.forward(tokens[:, start - 1 :])[0]
            q_logits = decoder.draft.score(tokens)[0, start - 1 :]
            chunks = [
                _alpha(decoder, p_chunk, q_chunk, config.sampling)
                for p_chunk, q_chunk in zip(
                    torch.split(p_logits, CHUNK_TOKENS), torch.split(q_logits, CHUNK_TOKENS), strict=True
                )
            ]
            alphas.append(torch.cat(chunks))
            bar.advance(1)
    return alphas


def _alpha(decoder: SpeculativeDecoder, p_logits: Tensor, q_logits: Tensor, params: SamplingParams) -> Tensor:
    p = next_token_distribution(p_logits, params.temperature, params.top_k, params.top_p, params.min_p)
    q = next_token_distribution(q_logits, params.temperature, params.top_k, params.top_p, params.min_p)
    assert decoder.draft is not None
    token_ids = decoder.draft.draft_vocab
    columns = slice(q.shape[1]) if token_ids is None else token_ids
    return torch.minimum(p[:, columns], q).sum(dim=-1)


def _decode(decoder: SpeculativeDecoder, encoded: list[list[int]], config: EvaluateConfig) -> list[Trace]:
    traces: list[Trace] = []
    with ProgressBar("speculative decoding", len(encoded)) as bar:
        for start in range(0, len(encoded), config.batch_size):
            batch = encoded[start : start + config.batch_size]
            streams = list(range(start, start + len(batch)))
            traces += decoder.engine.generate_ids(batch, config.sampling, streams)[1]
            bar.set(start + len(batch))
    return traces


def _record(result: Evaluation, config: EvaluateConfig, decoder: SpeculativeDecoder) -> None:
    figures: dict[str, Any] = {**asdict(result), "best_num_draft_tokens": result.best_num_draft_tokens}
    if config.output:
        write_json(Path(config.output), figures)
    folder = Path(config.pair)
    pair = Pair.load(folder)
    try:
        refuse_other_target(pair.target, decoder.target_description, f"pair {folder}")
    except ValueError as error:
        logger.info("not recorded in pair.json: %s", error)
        return
    pair.measured = figures
    if config.num_draft_tokens is None:
        pair.num_draft_tokens = result.best_num_draft_tokens
    pair.save(folder)
