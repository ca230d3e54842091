"""The speculative loop: propose, verify in one target pass, commit. Token ids only; no text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .model import CachedModel
from .noise import RowNoise
from .params import Completion, Provenance, SamplingParams
from .proposer import Proposer
from .sampling import next_token_distribution
from .verify import verify_tokenwise

Verifier = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Trace:
    """What happened while one row was decoded.

    Attributes:
        num_target_passes: passes that committed tokens to this row, one a round.
        reached: reached[k] counts rounds in which position k was judged: all before it were accepted.
        accepted: accepted[k] counts those in which the token drafted there was accepted.
        num_drafted: tokens proposed, judged or not.
        num_committed: tokens of the text.
    """

    num_target_passes: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_committed: int = 0

    def add_round(self, num_drafted: int, num_accepted: int, num_committed: int) -> None:
        """Count a round; positions after the end of the text were never part of it and are not counted."""
        self.num_target_passes += 1
        self.num_drafted += num_drafted
        self.num_committed += num_committed
        longer = num_drafted - len(self.reached)
        self.reached += [0] * longer
        self.accepted += [0] * longer
        for position in range(min(num_accepted + 1, num_drafted, num_committed)):
            self.reached[position] += 1
            self.accepted[position] += position < num_accepted

    def __add__(self, other: "Trace") -> "Trace":
        return Trace(
            num_target_passes=self.num_target_passes + other.num_target_passes,
            reached=[sum(counts) for counts in zip_longest(self.reached, other.reached, fillvalue=0)],
            accepted=[sum(counts) for counts in zip_longest(self.accepted, other.accepted, fillvalue=0)],
            num_drafted=self.num_drafted + other.num_drafted,
            num_committed=self.num_committed + other.num_committed,
        )

    @property
    def betas(self) -> list[float]:
        """Share accepted of the tokens judged at each position, up to the last position that was reached."""
        return [accepted / reached for accepted, reached in zip(self.accepted, self.reached, strict=True) if reached]

    @property
    def block_efficiency(self) -> float:
        """Tokens committed per target pass, the bonus token included."""
        return self.num_committed / self.num_target_passes if self.num_target_passes else float("nan")


@dataclass
class Seconds:
    """Wall time by what it was spent on; `rest` is sampling, verification and bookkeeping."""

    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0


class SpeculativeEngine:
    """Decodes token ids with a target and a proposer, in the target's distribution.

    Args:
        target: a decoder-only model in eval mode.
        proposer: what drafts.
        num_draft_tokens: tokens proposed a round (gamma).
        stop_ids: tokens that end a text; they are kept as its last token.
        verify: the acceptance rule.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        proposer: Proposer,
        num_draft_tokens: int,
        stop_ids: frozenset[int],
        verify: Verifier = verify_tokenwise,
    ) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}: draft at least 1 token a round")
        self.target = target
        self.proposer = proposer
        self.num_draft_tokens = num_draft_tokens
        self.stop_ids = stop_ids
        self.verify = verify
        self.seconds = Seconds()

    def capacity(self, prompts: list[list[int]], params: SamplingParams) -> int:
        """How many tokens the caches must hold: a row that waits for its neighbours may draft past its end."""
        return max(map(len, prompts)) + params.max_new_tokens + self.num_draft_tokens

    def generate_ids(self, prompts: list[list[int]], params: SamplingParams) -> tuple[list[Completion], list[Trace]]:
        """Continue every prompt, all rows in one batch; see `rounds` for what a round is."""
        completions, traces = [Completion() for _ in prompts], [Trace() for _ in prompts]
        for _ in self.rounds(prompts, params, completions, traces):
            pass
        return completions, traces

    @torch.inference_mode()
    def rounds(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        completions: list[Completion],
        traces: list[Trace],
    ) -> Iterator[None]:
        """Run round after round until every row has ended, filling `completions` and `traces` in place.

        A round drafts gamma tokens for every unfinished row, scores them in one target pass, and commits the
        accepted ones and one more from the target. Yields after each round, for whoever streams.
        """
        device = self.target.device
        capacity = self.capacity(prompts, params)
        target = CachedModel(self.target, len(prompts), capacity)
        noise = RowNoise(params.seed, list(range(len(prompts))), device)
        active = list(range(len(prompts)))
        sequences = [list(prompt) for prompt in prompts]
        target.prefill(prompts)
        self.proposer.start(prompts, capacity)

        def process(logits: Tensor) -> Tensor:
            return next_token_distribution(logits, params.temperature, params.top_k, params.top_p)

        while active:
            started = perf_counter()
            remaining = max(params.max_new_tokens - len(completions[row].ids) for row in active)
            num_drafted = min(self.num_draft_tokens, remaining - 1)
            uniforms = noise.draw(2 * num_drafted + 1)
            proposal = self.proposer.propose(sequences, process, uniforms[:, :num_drafted])
            drafted = perf_counter()
            pending = torch.tensor([ids[-1] for ids in sequences], device=device).unsqueeze(1)
            logits = target.forward(torch.cat([pending, proposal.tokens], dim=1))
            scored = perf_counter()
            num_accepted, next_tokens = self.verify(
                process(logits),
                proposal.probabilities,
                proposal.tokens,
                uniforms[:, num_drafted : 2 * num_drafted],
                uniforms[:, -1],
            )
            # the round's only wait for the device: everything the host must know, in one transfer
            verdicts = torch.cat([num_accepted.unsqueeze(1), next_tokens.unsqueeze(1), proposal.tokens], dim=1)
            for place, (accepted, next_token, *tokens) in enumerate(verdicts.tolist()):
                row = active[place]
                block = [*tokens[:accepted], next_token]
                last: Provenance = "bonus" if accepted == num_drafted else "corrected"
                provenance: list[Provenance] = [*["accepted"] * accepted, last]  # type: ignore[list-item]
                kept = completions[row].extend(block, provenance, self.stop_ids, params.max_new_tokens)
                sequences[place] += block[:kept]
                traces[row].add_round(num_drafted, accepted, kept)
            target.rollback([len(ids) - 1 for ids in sequences])
            going = [place for place, row in enumerate(active) if completions[row].finish_reason is None]
            if len(going) < len(active):
                active = [active[place] for place in going]
                sequences = [sequences[place] for place in going]
                for rows in (target, self.proposer, noise):
                    rows.select_rows(going)
            self.seconds.draft += drafted - started
            self.seconds.verify += scored - drafted
            self.seconds.rest += perf_counter() - scored
            yield
