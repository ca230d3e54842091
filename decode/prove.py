"""Evidence that a pair says what its target alone would say: same greedy text, same distribution, promised acceptance.

Every check compares speculative decoding with the target's own passes over the finished texts, so that it can fail
for whatever is wrong between the two: a cache, a mask, a rule, a distribution that is not the one drawn from.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .completion import Completion
from .config import ProveConfig
from .decoder import SpeculativeDecoder
from .files import refuse_unwritable, write_json
from .heldout import heldout_prompts, spread
from .model import CachedModel
from .native_round import Unwarped
from .pair import Pair
from .params import SamplingParams, SpeculationParams
from .progress import ProgressBar
from .proposer import Proposal, Proposer
from .provenance import provenance
from .sampler import BatchSampler
from .sampling import Distribution, LogitsWarper
from .trace import Trace

# the chance that a sound pair fails a check
HONEST = 1e-5
# of acceptance, on average: what passes of other widths may round away
MIN_DRIFT = 0.003
BATCH_SIZE = 8
BINS = 20
CHUNK_TOKENS = 128  # tokens whose full distributions exist at a time


@dataclass(frozen=True)
class Check:
    """One thing that was to be shown.

    Attributes:
        name: of it.
        passed: whether it holds.
        found: what was found, in a line.
        figures: behind that, JSON values.
    """

    name: str
    passed: bool
    found: str
    figures: dict[str, Any]


@dataclass(frozen=True)
class Divergence:
    """Where a greedy text leaves that of plain decoding.

    Attributes:
        prompt: its number.
        position: of the first token that differs, in the answer.
        plain_token, speculative_token: the two.
        gap: how far the target's logit of the lesser of the two lies below its largest.
        is_tie: whether that is within the rounding of its dtype.
    """

    prompt: int
    position: int
    plain_token: int
    speculative_token: int
    gap: float
    is_tie: bool


def prove(config: ProveConfig) -> list[Check]:
    """Make all checks, and write them to proof.json in the pair's folder.

    Raises:
        ValueError: a pair, model or prompt set that is missing or does not fit: tokenizers that differ, for one.
    """
    folder = Path(config.pair)
    pair = Pair.load(folder)
    num_draft_tokens = pair.num_draft_tokens if config.num_draft_tokens is None else config.num_draft_tokens
    speculation = SpeculationParams(num_draft_tokens=num_draft_tokens, never_slower=False)
    prompts = spread(heldout_prompts(config.prompts), config.num_prompts)
    decoder = SpeculativeDecoder.from_pretrained(config.target, config.pair, speculation, dtype=config.dtype)
    encoded = decoder.encode_all(prompts, replace(config.sampling, max_new_tokens=config.max_new_tokens))
    refuse_unwritable(str(folder / "proof.json"))
    batches = -(-len(encoded) // BATCH_SIZE)
    decoders = [decoder]
    if decoder.target.dtype != torch.float32:
        exact = SpeculativeDecoder.from_pretrained(config.target, config.pair, speculation, dtype="float32")
        decoders = [exact, decoder]
    with ProgressBar("proving", (len(decoders) + 3) * batches) as bar:
        checks = [_greedy_check(each, encoded, config, bar) for each in decoders]
        checks += [check(decoder, encoded, config, bar) for check in (_distribution_check, _acceptance_check)]
    write_json(
        folder / "proof.json",
        {
            "passed": all(check.passed for check in checks),
            "checks": [asdict(check) for check in checks],
            "target": decoder.target_description,
            "provenance": provenance(asdict(config)),
        },
    )
    return checks


# greedy texts


def _greedy_check(
    decoder: SpeculativeDecoder, prompts: list[list[int]], config: ProveConfig, bar: ProgressBar
) -> Check:
    params = SamplingParams(max_new_tokens=config.max_new_tokens)
    found = []
    for start, batch in _batches(prompts):
        plain = decoder.plain.generate_ids(batch, params)
        speculative, _ = decoder.engine.generate_ids(batch, params)
        bar.advance(1)
        for place, (ours, theirs) in enumerate(zip(speculative, plain, strict=True)):
            if ours.ids != theirs.ids:
                found.append(_divergence(decoder, start + place, ours, theirs, config.tie_steps))
    is_exact = decoder.target.dtype == torch.float32  # where no two tokens tie but by a fault
    bugs = [each for each in found if is_exact or not each.is_tie]
    told = f"{len(prompts)} texts are those of plain decoding"
    if found:
        told = f"{len(found)} of {len(prompts)} texts leave plain decoding, each where two logits tie by rounding"
    if bugs:
        said = [decoder.tokenizer.decode([token]) for token in (bugs[0].speculative_token, bugs[0].plain_token)]
        told = (
            f"{len(bugs)} of {len(prompts)} texts are not those of plain decoding: prompt {bugs[0].prompt}, token "
            f"{bugs[0].position} is {said[0]!r} and not {said[1]!r}, whose logits are {bugs[0].gap:.3g} apart"
        )
    figures = {
        "num_texts": len(prompts),
        "tie_steps": config.tie_steps,
        "divergences": [asdict(each) for each in found],
    }
    return Check(f"greedy, {str(decoder.target.dtype).removeprefix('torch.')}", not bugs, told, figures)


def _divergence(
    decoder: SpeculativeDecoder, prompt: int, ours: Completion, theirs: Completion, tie_steps: float
) -> Divergence:
    pairs = zip(ours.ids, theirs.ids, strict=False)
    # a text that ends early without another token differs where it ends
    shorter = min(len(ours.ids), len(theirs.ids)) - 1
    position = next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
    prefix = theirs.prompt + theirs.ids[:position]
    logits = _logits(decoder.target, prefix, len(prefix) - 1)[0].float()
    tokens = theirs.ids[position], ours.ids[position]
    largest = logits.max()
    gap = float(largest - logits[list(tokens)].min())
    step = torch.finfo(decoder.target.dtype).eps * float(largest.abs())
    return Divergence(prompt, position, *tokens, gap, gap <= tie_steps * step and tokens[0] != tokens[1])


# the distribution of sampled texts


def _distribution_check(
    decoder: SpeculativeDecoder, prompts: list[list[int]], config: ProveConfig, bar: ProgressBar
) -> Check:
    """Texts of speculative decoding, and of plain decoding as a control of the same size, against the target's p.

    Where in the target's distribution each token lies, with the others in some order, is uniform if and only if tokens
    follow it (Rosenblatt 1952). Two orders: by p, and by q / p, in which what the draft says too often comes first.
    """
    params = replace(config.sampling, max_new_tokens=config.max_new_tokens, seed=None)
    generator = torch.Generator().manual_seed(config.seed)
    torch.manual_seed(config.seed)
    ways: dict[str, Callable[[list[list[int]]], list[Completion]]] = {
        "speculative": lambda batch: decoder.engine.generate_ids(batch, params)[0],
        "plain": lambda batch: decoder.plain.generate_ids(batch, params),
    }
    values: dict[str, list[Tensor]] = {way: [] for way in ways}
    outside = dict.fromkeys(ways, 0)
    for _, batch in _batches(prompts):
        for way, decode in ways.items():
            for completion in decode(batch):
                for p, q, tokens in _scored(decoder, completion, params):
                    values[way].append(torch.stack([_places(p, order, tokens, generator) for order in (p, q / p)]))
                    outside[way] += int((p.gather(1, tokens[:, None]) == 0).sum())
            bar.advance(1)
    p_values = {way: _uniform_p_values(torch.cat(of_way, dim=1)) for way, of_way in values.items()}
    num_tokens = sum(each.shape[1] for each in values["speculative"])
    # at the edge of a nucleus a pass over the whole text may round another way than the one that was sampled from
    allowed = 3 * outside["plain"] + num_tokens // 500
    figures = {"p_values": p_values, "outside": outside, "num_tokens": num_tokens, "bins": BINS, "honest": HONEST}
    name = "sampled distribution"
    if min(p_values["plain"]) < HONEST:
        return Check(name, False, "plain decoding itself does not follow the target's distribution", figures)
    if outside["speculative"] > allowed:
        told = f"{outside['speculative']} of {num_tokens} tokens are such as the target never says"
        return Check(name, False, f"{told} (plain decoding: {outside['plain']})", figures)
    lowest, control = min(p_values["speculative"]), min(p_values["plain"])
    told = f"{num_tokens} tokens, chance of one as uneven {lowest:.2g}; of plain decoding's {control:.2g}"
    if lowest < HONEST:
        told = f"tokens do not follow the target's distribution: {told}"
    return Check(name, lowest >= HONEST, told, figures)


def _places(p: Tensor, order: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Where in p each token lies, in [0, 1): the mass of what comes before it, and a random share of what is beside it.

    Args:
        p, order: fp32 [tokens, vocab]; what has more of `order` comes first.
        tokens: int64 [tokens].
    """
    order = order.nan_to_num(nan=-1.0, posinf=-1.0)  # tokens that the target never says
    here = order.gather(1, tokens[:, None])
    before, beside = (torch.where(mask, p, 0.0).sum(dim=1) for mask in (order > here, order == here))
    return before + torch.rand(len(tokens), generator=generator).to(p.device) * beside


def _uniform_p_values(values: Tensor) -> list[float]:
    """Of each row in [0, 1), the chance that uniform numbers are as unevenly spread: Pearson's chi-square."""
    found = []
    for row in values.double().cpu():
        counts = torch.histc(row.clamp(0, 1), BINS, 0, 1)
        expected = len(row) / BINS
        statistic = ((counts - expected) ** 2 / expected).sum()
        found.append(float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2).double(), statistic / 2)))
    return found


# acceptance


def _acceptance_check(
    decoder: SpeculativeDecoder, prompts: list[list[int]], config: ProveConfig, bar: ProgressBar
) -> Check:
    """Drafted tokens that were accepted, against what p and q promise at the same places.

    Twice: with the q that they were really drawn from, which tells of the rule; and with the q of the finished text,
    which tells of the draft.
    """
    params = replace(config.sampling, max_new_tokens=config.max_new_tokens, seed=None)
    torch.manual_seed(config.seed + 1)
    engine = decoder.engine
    speculation, proposer = engine.speculation, engine.proposer
    assert proposer is not None
    promised, of_drawn, accepted = [], [], 0
    for _, batch in _batches(prompts):
        engine.proposer = recorder = _Recorder(proposer)
        engine.speculation = replace(speculation, verification="tokenwise")
        try:
            completions, traces = engine.generate_ids(batch, params)
        finally:
            engine.speculation, engine.proposer = speculation, proposer
        for completion, trace in zip(completions, traces, strict=True):
            judged, place = set(_judged_places(trace)), 0
            for p, q, _ in _scored(decoder, completion, params):
                for of_p, of_q in zip(p, q, strict=True):
                    if place in judged:
                        drawn = recorder.q[id(completion.sequence), len(completion.prompt) + place].dense(len(of_p))
                        promised.append(float(torch.minimum(of_p, of_q).sum()))
                        of_drawn.append(float(torch.minimum(of_p, drawn).sum()))
                    place += 1
            accepted += trace.num_accepted
        bar.advance(1)
    return _acceptance_found(torch.tensor(promised).double(), torch.tensor(of_drawn).double(), accepted)


def _acceptance_found(promised: Tensor, of_drawn: Tensor, accepted: int) -> Check:
    """From sum_v min(p, q) of each judged token, with q of the text and with q that was drawn from."""
    name, judged = "acceptance", len(promised)
    if not judged:
        return Check(name, False, "nothing was drafted; give longer texts", {})
    of_drawn, drift = of_drawn.clamp(0, 1), of_drawn - promised
    coins = (accepted - of_drawn.sum()) / (of_drawn * (1 - of_drawn)).sum().clamp_min(1e-9).sqrt()
    error = drift.std(correction=0).clamp_min(1e-12) / judged**0.5
    p_values = {"rule": _two_sided(coins), "draft": _two_sided(drift.mean() / error)}
    figures = {
        "judged": judged,
        "counted": accepted / judged,
        "by_q_drawn_from": float(of_drawn.mean()),
        "by_q_of_the_text": float(promised.mean()),
        "p_values": p_values,
        "honest": HONEST,
    }
    told = f"{accepted / judged:.3f} of {judged} drafted tokens, {float(promised.mean()):.3f} promised by p and q"
    if p_values["rule"] < HONEST:
        told += f": the rule accepts otherwise than {float(of_drawn.mean()):.3f}, which p and q at hand say"
        return Check(name, False, told, figures)
    if p_values["draft"] < HONEST and abs(float(drift.mean())) > MIN_DRIFT:
        told += f", but {float(of_drawn.mean()):.3f} by the q that was drawn from: it is not that of the text so far"
        return Check(name, False, told, figures)
    return Check(name, True, told, figures)


def _two_sided(deviation: Tensor) -> float:
    """The chance that a standard normal number is as far from 0."""
    return float(torch.special.erfc(deviation.abs() / 2**0.5))


class _Recorder:
    """A proposer that keeps what another one's tokens were drawn from.

    Attributes:
        q: by text, told by the identity of its list, and place in it.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.q: dict[tuple[int, int], Distribution] = {}

    def start(self, sequences: list[list[int]], target: CachedModel) -> None:
        self.proposer.start(sequences, target)

    def propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: BatchSampler) -> Proposal:
        proposal = self.proposer.propose(sequences, num_drafted, sampler)
        q = proposal.q.distribution() if isinstance(proposal.q, Unwarped) else proposal.q
        assert q is not None
        for row, ids in enumerate(sequences):
            for step in range(proposal.tokens.shape[1]):
                self.q[id(ids), len(ids) + step] = q[row, step]
        return proposal

    def select_rows(self, rows: list[int]) -> None:
        self.proposer.select_rows(rows)


def _judged_places(trace: Trace) -> Iterator[int]:
    """The places in the answer of the tokens that were judged."""
    start = 0
    for each in trace.rounds:
        yield from range(start, start + each.num_verified)
        start += each.num_committed


# what they share


def _batches(prompts: list[list[int]]) -> Iterator[tuple[int, list[list[int]]]]:
    for start in range(0, len(prompts), BATCH_SIZE):
        yield start, prompts[start : start + BATCH_SIZE]


@torch.inference_mode()
def _logits(target: Any, ids: list[int], start: int) -> Tensor:
    """The target's logits after each token from `start` on, [tokens, vocab], in its own dtype."""
    cached = CachedModel(target, 1, len(ids))
    return cached.forward(torch.tensor([ids], device=target.device))[0, start:]


@torch.inference_mode()
def _scored(
    decoder: SpeculativeDecoder, completion: Completion, params: SamplingParams
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """p and q, fp32 [tokens, vocab], that each token of an answer was drawn from, and the tokens, int64; in chunks."""
    ids, start = completion.prompt + completion.ids, len(completion.prompt)
    assert decoder.draft is not None
    of_target = _logits(decoder.target, ids[:-1], start - 1)
    of_draft = decoder.draft.score(torch.tensor([ids[:-1]], device=decoder.target.device))[0, start - 1 :]
    vocab_size = of_target.shape[-1]
    settings = [params.temperature], [params.top_k], [params.top_p], [params.min_p]
    warp, warp_draft = (LogitsWarper(*settings, of_target.device, exact) for exact in (True, False))
    tokens = torch.tensor(completion.ids, device=of_target.device)
    for chunk in torch.split(torch.arange(len(tokens)), CHUNK_TOKENS):
        p = warp(of_target[chunk].unsqueeze(0)).dense(vocab_size)[0]
        q = warp_draft(of_draft[chunk].to(of_target.device).unsqueeze(0))
        if decoder.draft.draft_vocab is not None:
            q = q.renamed(decoder.draft.draft_vocab.to(of_target.device))
        yield p, q.dense(vocab_size)[0], tokens[chunk]
