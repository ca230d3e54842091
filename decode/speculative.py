"""The loop: propose, verify in one target pass, commit. Without a proposer, it is plain decoding."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .completion import Completion, Logprobs
from .model import CachedModel
from .pacing import Pacer
from .params import Provenance, SamplingParams, SpeculationParams
from .proposer import Proposal, Proposer
from .sampler import BatchSampler
from .trace import Round, Seconds, Stopwatch, Trace

PLAIN = SpeculationParams()
# shown which rows a pass of the target was for, what entered its head, [rows, n, hidden], and logits [rows, n, vocab]
OnPass = Callable[[list[int], Tensor, Tensor], None]


class SpeculativeEngine:
    """Decodes token ids with a target and a proposer, in the target's distribution.

    Args:
        target: a decoder-only model in eval mode.
        proposer: what drafts; None decodes plainly.
        speculation: how to draft and verify.
        stop_ids: tokens that end a text; they are kept as its last token.
        tokenizer: for stop strings, bad words and text; ids alone need none.
        betas: acceptance at each position of a round, as far as it is known beforehand.
        first_num_draft_tokens: tokens to draft a round before costs are known.

    Several texts may be decoded by turns, as streams are; an engine is not for several threads at once.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        proposer: Proposer | None,
        speculation: SpeculationParams = PLAIN,
        stop_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
        betas: Sequence[float] = (),
        first_num_draft_tokens: int = 3,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.speculation = speculation
        # tokenizers may name tokens that the model cannot say
        self.stop_ids = frozenset(token for token in stop_ids if token < target.get_output_embeddings().out_features)
        self.tokenizer = tokenizer
        self.pacer = Pacer(speculation, betas, first_num_draft_tokens)
        # whose text the proposer has read
        self.proposing_for: CachedModel | None = None

    def generate_ids(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        streams: list[int] | None = None,
    ) -> tuple[list[Completion], list[Trace]]:
        """Continue every prompt, all rows in one batch.

        Args:
            prompts: token ids, at least one per prompt.
            params: for all rows, or one per row.
            streams: tells apart the noise of rows with the same seed. By default, rows that share one `params` have
                their places in the list, and rows with params of their own have seeds of their own.
        """
        completions = self.begin(prompts, params)
        traces = [Trace() for _ in prompts]
        if isinstance(params, SamplingParams) and streams is None:
            streams = list(range(len(prompts)))
        for _ in self.rounds(completions, traces, streams):
            pass
        return completions, traces

    def begin(self, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[Completion]:
        """The rows to be decoded.

        Raises:
            ValueError: not as many params as prompts; an empty prompt; a token id that the target does not have.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: {len(each)} for {len(prompts)} prompts; give one for all, or one for each")
        vocab_size = self.target.get_output_embeddings().out_features
        for one in each:
            for name, ids in (("logit_bias", one.logit_bias), ("stop_token_ids", one.stop_token_ids)):
                if strange := [token for token in ids if not 0 <= token < vocab_size]:
                    raise ValueError(f"{name}: there is no token {strange[0]}; ids are 0 to {vocab_size - 1}")
        for prompt in prompts:
            if not prompt:
                raise ValueError("a prompt holds no token: write some text")
            if strange := [token for token in prompt if not 0 <= token < vocab_size]:
                raise ValueError(f"prompt: there is no token {strange[0]}; ids are 0 to {vocab_size - 1}")
        rows = [
            Completion(prompt, one, self.stop_ids, self.tokenizer) for prompt, one in zip(prompts, each, strict=True)
        ]
        for row in rows:  # special tokens may have been added to the tokenizer alone
            row.stop_ids = frozenset(token for token in row.stop_ids if token < vocab_size)
            row.bad_words = [word for word in row.bad_words if max(word) < vocab_size]
        return rows

    @torch.inference_mode()
    def rounds(
        self,
        completions: list[Completion],
        traces: list[Trace],
        streams: list[int] | None = None,
        on_pass: OnPass | None = None,
    ) -> Iterator[list[int]]:
        """Run round after round until every row has ended, filling `completions` and `traces` in place.

        A round drafts some tokens for every unfinished row, scores them in one target pass, and commits the accepted
        ones and one more from the target. Yields after each round which rows it was for; `on_pass` is called within it.
        """
        if not completions:
            return
        device = self.target.device
        capacity = max(len(row.prompt) + row.params.max_new_tokens for row in completions)
        speculation = self.speculation
        # one row alone is never fed beyond its own end
        has_neighbours = self.proposer is not None and len(completions) > 1
        spare = (speculation.num_draft_tokens or speculation.max_draft_tokens) if has_neighbours else 0
        target = CachedModel(self.target, len(completions), capacity, spare, keep_hidden_states=on_pass is not None)
        sampler = BatchSampler(completions, *_seeds(completions, streams), speculation, device, target.vocab_size)
        active = list(range(len(completions)))
        sequences = [row.sequence for row in completions]
        target.read(sequences)

        while active:
            if self.proposer and self.proposing_for is not target:  # a new text, or one of several that take turns
                self.proposer.start(sequences, target)
                self.proposing_for = target
            rows = [completions[row] for row in active]
            watch = Stopwatch(device)
            watch.mark()
            limits = [row.num_remaining - 1 for row in rows]
            num_drafted = self.pacer.num_draft_tokens(len(rows), max(limits)) if self.proposer else 0
            sampler.begin_round(num_drafted)
            proposal = self._propose(sequences, [min(limit, num_drafted) for limit in limits], sampler)
            watch.mark()
            pending = torch.tensor([[ids[-1]] for ids in sequences], device=device)
            logits = (proposal.score or target.forward)(torch.cat([pending, proposal.tokens], dim=1))
            if on_pass:
                assert target.hidden_states is not None
                on_pass(active, target.hidden_states, logits)
            watch.mark()
            if proposal.tokens.shape[1]:
                num_accepted, next_tokens = sampler.judge(logits, proposal.q, proposal.tokens, proposal.num_drafted)
            else:
                num_accepted, next_tokens = proposal.num_drafted, sampler.choose(logits)
            verdicts = torch.stack([num_accepted, proposal.num_drafted, next_tokens], dim=1)
            # the round's only wait for the device: everything the host must know, in one transfer
            results = torch.cat([verdicts, proposal.tokens], dim=1).tolist()
            done = [_commit(row, result) for row, result in zip(rows, results, strict=True)]
            if any(row.params.logprobs is not None for row in rows):
                _add_logprobs(rows, done, logits)
            target.rollback([len(ids) - 1 for ids in sequences])
            watch.mark()
            self._record(watch, [traces[row] for row in active], done, proposal)
            round_rows = active
            going = [place for place, row in enumerate(rows) if row.finish_reason is None]
            if len(going) < len(active):
                going = _with_few_moves(going)
                active = [active[place] for place in going]
                sequences = [sequences[place] for place in going]
                if active:
                    target.select_rows(going)
                    sampler.select_rows(going)
                    if self.proposer:
                        self.proposer.select_rows(going)
            yield round_rows

    def _propose(self, sequences: list[list[int]], num_drafted: list[int], sampler: BatchSampler) -> Proposal:
        if self.proposer and max(num_drafted) > 0:
            return self.proposer.propose(sequences, num_drafted, sampler)
        nothing = torch.zeros(len(sequences), 0, dtype=torch.long, device=self.target.device)
        return Proposal(nothing, torch.zeros(len(sequences), dtype=torch.long, device=self.target.device), None)

    def _record(self, watch: Stopwatch, traces: list[Trace], done: list[Round], proposal: Proposal) -> None:
        seconds = Seconds(*watch.laps())
        paused = self.proposer is not None and self.pacer.paused
        for trace, each in zip(traces, done, strict=True):
            trace.rounds.append(each)
            trace.seconds += seconds
            trace.num_paused += paused
        if self.proposer:
            self.pacer.observe(len(traces), proposal.tokens.shape[1], done, seconds)


def _seeds(completions: list[Completion], streams: list[int] | None) -> tuple[list[int], list[int]]:
    """Seed and stream of each row; rows without a seed share a fresh one, and differ by their places."""
    draws = any(row.params.seed is None and row.params.temperature for row in completions)
    fresh = int(torch.randint(2**62, ())) if draws else 0
    seeds = [fresh if row.params.seed is None else row.params.seed for row in completions]
    if streams is None:
        streams = [place if row.params.seed is None else 0 for place, row in enumerate(completions)]
    return seeds, streams


def _with_few_moves(going: list[int]) -> list[int]:
    """These ascending places, in an order in which the last ones take the seats of those that are missing."""
    here, movers = set(going), [place for place in going if place >= len(going)]
    return [place if place in here else movers.pop() for place in range(len(going))]


def _commit(row: Completion, result: list[int]) -> Round:
    """Append to a row what a round gave it: number accepted, number drafted, next token, drafted tokens."""
    num_accepted, num_drafted, next_token, *drafted = result
    last: Provenance = "plain" if num_drafted == 0 else "bonus" if num_accepted == num_drafted else "corrected"
    provenance: list[Provenance] = [*["accepted"] * num_accepted, last]  # type: ignore[list-item]
    kept = row.extend([*drafted[:num_accepted], next_token], provenance)
    return Round(num_drafted, num_accepted, kept)


def _add_logprobs(rows: list[Completion], done: list[Round], logits: Tensor) -> None:
    """Log-probabilities of the tokens that were just committed, from logits [rows, positions, vocab]."""
    logits = logits[:, : max(each.num_committed for each in done)].float()
    most = max(row.params.logprobs or 0 for row in rows)
    totals = logits.logsumexp(dim=-1)
    top = logits.topk(min(most, logits.shape[-1]), dim=-1)
    for place, (row, each) in enumerate(zip(rows, done, strict=True)):
        if (wanted := row.params.logprobs) is None:
            continue
        positions = range(each.num_committed)
        tokens = row.ids[len(row.ids) - each.num_committed :]
        chosen = (logits[place, positions, tokens] - totals[place, : each.num_committed]).tolist()
        values = (top.values[place, :, :wanted] - totals[place, :, None]).tolist()
        ids = top.indices[place, :, :wanted].tolist()
        for position in positions:
            best = dict(zip(ids[position], values[position], strict=True))
            row.logprobs.append(Logprobs(chosen[position], best))
