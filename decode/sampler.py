"""Chooses tokens for the rows of a batch: draws what is drafted, judges it, draws what follows."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .completion import Completion
from .model import CachedModel
from .native_round import Rule, Unwarped, judge
from .native_sampling import NativeWarper, arrive, can_arrive, can_draw, draw
from .noise import ROWS_AT_A_TIME, RowNoise
from .params import SamplingParams, SpeculationParams
from .penalties import Penalties
from .sampling import Distribution, sample
from .verify import verify_block, verify_equal, verify_lossy_lenience, verify_lossy_typical, verify_tokenwise

Verifier = Callable[[Distribution, Distribution, Tensor, Tensor, Tensor], tuple[Tensor, Distribution]]


class BatchSampler:
    """Everything that depends on sampling parameters and seeds, for the rows of a batch, one round at a time.

    Args:
        completions: the rows.
        seeds, streams: of their noise.
        speculation: how to draft and verify.
        device: where the target's logits are.
        vocab_size: their width.
    """

    def __init__(
        self,
        completions: list[Completion],
        seeds: list[int],
        streams: list[int],
        speculation: SpeculationParams,
        device: torch.device,
        vocab_size: int | None = None,
    ) -> None:
        self.completions = completions
        self.speculation = speculation
        self.device = device
        self.noise = RowNoise(seeds, streams, device, vocab_size)
        self.spread: Tensor | None = None  # of the columns that are drafted from
        self._set_up()

    def select_rows(self, rows: list[int]) -> None:
        """Go on with these rows only, in this order."""
        self.completions = [self.completions[row] for row in rows]
        self.noise.select_rows(rows)
        self._set_up()

    def begin_round(self, num_drafted: int) -> None:
        """Before the first call of a round that drafts up to so many tokens a row."""
        self.penalties = Penalties(self.completions, self.device) if self.has_penalties else None
        if not self.needs_noise:
            nothing = np.zeros((len(self.completions), num_drafted + 1), dtype=np.uint64)
            self.token_keys = self.draft_keys = self.coin_keys = nothing
            self.next_keys = nothing[:, 0]
            return
        starts = np.array([[len(row.ids)] for row in self.completions])
        steps = np.arange(num_drafted + 1)[None]
        # where text is a function of the seed, so is the noise at each place of it; elsewhere a round must not meet
        # the noise of the one before, which its outcome depends on
        purposes = ["draft"] * (num_drafted + 1) + ["coin"] * num_drafted + ["next"]
        keys = self.noise.keys(purposes, starts, np.concatenate([steps, steps[:, :-1], [[0]]], axis=1))
        self.draft_keys, self.coin_keys = keys[:, : num_drafted + 1], keys[:, num_drafted + 1 : -1]
        self.token_keys, self.next_keys = self.draft_keys, keys[:, -1]
        if any(self.follows_seed):
            self.token_keys = self.noise.keys("token", starts + steps)
            self.draft_keys = np.where(np.array(self.follows_seed)[:, None], self.token_keys, self.draft_keys)

    def draft(
        self, logits: Tensor, drafted: Tensor, token_ids: Tensor | None = None, columns: Tensor | None = None
    ) -> tuple[Tensor, Distribution]:
        """Draw the next drafted token of every row.

        Args:
            logits: [rows, columns] of the draft, after the tokens drafted so far.
            drafted: int64 [rows, drafted so far].
            token_ids: int64 [columns], the token of each column; None where column i is token i.
            columns: int64 [vocab], the inverse; the number of columns for tokens that have none.

        Returns:
            tokens int64 [rows], and the q they were sampled from, [rows, columns].
        """
        keys = self.draft_keys[:, drafted.shape[1]]
        if (temperatures := self.draft_warper.temperatures) and not self.penalties and can_draw(logits):
            spread = self.noise.spread_of(range(logits.shape[-1]) if token_ids is None else token_ids)
            columns, weights = draw(logits, temperatures, keys, spread)
            q = Distribution(weights, token_ids)
            return q.tokens(columns), q
        scores = logits.unsqueeze(1)
        if self.penalties:
            scores = self.penalties(scores, drafted, columns)
        q = self.draft_warper(scores)[:, 0]
        if token_ids is not None:
            q = q.renamed(token_ids)
        return self._draw(q, keys), q

    def can_draft_at_once(self, logits: Tensor) -> bool:
        """Whether tokens that follow such logits can be drafted by `draft_at_once`."""
        # of tokens that tie as the largest, a bound does not tell which one has all the mass
        has_q = not (self.needs_q and self.draft_warper.is_greedy)
        return has_q and can_draw(logits) and not self.penalties and self.speculation.entropy_bound is None

    def draft_at_once(
        self, cached: CachedModel, logits: Tensor, num_drafted: int, token_ids: Tensor | None
    ) -> tuple[Tensor, Unwarped]:
        """Draw so many tokens of every row, as `draft` does one after the other.

        Args:
            cached: what drafts, which must have `can_draft`.
            logits: [rows, columns], of the first.
            token_ids: as there.

        Returns:
            tokens int64 [rows, drafted], and the q they were sampled from.
        """
        room = cached.room_for_logits(num_drafted)[..., : logits.shape[-1]]
        room[:, 0] = logits
        q = Unwarped(room, self.draft_warper, token_ids)
        if self.spread is None:
            self.spread = self.noise.spread_of(range(logits.shape[-1]) if token_ids is None else token_ids)
        assert len(self.spread) == logits.shape[-1]
        return cached.draft(q.address, num_drafted, self.draft_keys[:, :num_drafted], self.spread), q

    def distribution(self, logits: Tensor, drafted: Tensor) -> Distribution:
        """The target's p at the drafted tokens and after them, from logits [rows, drafted + 1, vocab]."""
        if self.penalties:
            logits = self.penalties(logits, drafted)
        return self.warper(logits)

    def choose(self, logits: Tensor) -> Tensor:
        """Tokens of a pass without drafted ones: from logits [rows, 1, vocab] to int64 [rows], some rows at a time."""
        if self.penalties:
            logits = self.penalties(logits, torch.zeros(len(logits), 0, dtype=torch.long, device=self.device))
        keys, step = self._plain_keys(), self.rows_at_a_time
        if self.warper.temperatures and can_draw(logits):
            spread = self.noise.spread_of(range(logits.shape[-1]))
            return draw(logits[:, 0], self.warper.temperatures, keys[:, 0], spread, with_weights=False)[0]
        tokens = [
            self._draw(warper(part), keys[number * step : (number + 1) * step])
            for number, (warper, part) in enumerate(zip(self.warpers, torch.split(logits, step), strict=True))
        ]
        return torch.cat(tokens).squeeze(1)

    def judge(
        self, logits: Tensor, q: Distribution | Unwarped | None, drafted: Tensor, num_drafted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How many drafted tokens of each row are accepted, and the token that follows them.

        Args:
            logits: of the target at the drafted tokens and after them, [rows, drafted + 1, vocab].
            q: [rows, drafted, columns]; may be None when no row needs it.
            drafted: int64 [rows, drafted].
            num_drafted: int64 [rows].
        """
        width = drafted.shape[1]  # of a proposal that may be shorter than was asked for
        token_keys, coin_keys = self.token_keys[:, : width + 1], self.coin_keys[:, :width]
        if self._can_judge(logits, q):
            needed = q if self.needs_q and isinstance(q, Unwarped) else None
            coins = self.noise.uniforms(coin_keys) if needed else torch.empty(drafted.shape)
            spread = self.noise.spread_of(range(logits.shape[-1]))
            keys = token_keys, self.next_keys
            return judge(Unwarped(logits, self.warper), needed, drafted, num_drafted, self.rules, coins, *keys, spread)
        p = self.distribution(logits, drafted)
        if all(self.follows_seed):
            return self._judge_equal(p, drafted, num_drafted, token_keys)
        q = q.distribution() if isinstance(q, Unwarped) else q
        assert q is not None
        if not any(self.follows_seed):
            return self._judge_by_coins(p, q, drafted, num_drafted, coin_keys, self.next_keys)
        num_accepted, next_tokens = torch.zeros_like(num_drafted), torch.zeros_like(num_drafted)
        seeded = np.array(self.follows_seed)
        here = torch.from_numpy(seeded).to(self.device)
        num_accepted[here], next_tokens[here] = self._judge_equal(
            p[here], drafted[here], num_drafted[here], token_keys[seeded]
        )
        here, coined = ~here, ~seeded
        num_accepted[here], next_tokens[here] = self._judge_by_coins(
            p[here], q[here], drafted[here], num_drafted[here], coin_keys[coined], self.next_keys[coined]
        )
        return num_accepted, next_tokens

    def _set_up(self) -> None:
        params = [row.params for row in self.completions]
        verification, lossy = self.speculation.verification, self.speculation.lossy
        # greedy text needs no coin: the target's choice is a function of the text
        self.follows_seed = [
            each.temperature == 0
            or (lossy is None and (verification == "seeded" or (verification == "auto" and each.seed is not None)))
            for each in params
        ]
        self.needs_noise = any(each.temperature for each in params) or bool(self.speculation.draft_temperature)
        self.has_penalties = any(each.has_penalties for each in params)
        self.needs_q = not all(self.follows_seed)
        of_coins: Rule = "tokenwise" if verification == "tokenwise" else "block"
        self.rules: list[Rule] = ["equal" if follows else of_coins for follows in self.follows_seed]
        self.warper = self._warper(params)
        self.draft_warper = self._warper(params, self.speculation.draft_temperature, exact=False)
        # whole vocabularies of many rows, in fp32 and time and again, would go through memory and not a core's cache
        self.rows_at_a_time = ROWS_AT_A_TIME if self.device.type == "cpu" else len(params)
        self.warpers = [self.warper]
        if len(params) > self.rows_at_a_time:
            starts = range(0, len(params), self.rows_at_a_time)
            self.warpers = [self._warper(params[start : start + self.rows_at_a_time]) for start in starts]

    def _warper(
        self, params: list[SamplingParams], temperature: float | None = None, exact: bool = True
    ) -> NativeWarper:
        temperatures = [each.temperature if temperature is None else temperature for each in params]
        top_k, top_p = [each.top_k for each in params], [each.top_p for each in params]
        return NativeWarper(temperatures, top_k, top_p, [each.min_p for each in params], self.device, exact)

    def _can_judge(self, logits: Tensor, q: Distribution | Unwarped | None) -> bool:
        """Whether C++ can judge what was drafted from these."""
        by_coins = self.speculation.lossy is None and isinstance(q, Unwarped)
        return can_draw(logits) and not self.penalties and (by_coins or not self.needs_q)

    def _plain_keys(self) -> np.ndarray:
        """For the token of a pass without drafted ones: uint64 [rows, 1]."""
        # as `judge` draws for a row that drafted nothing while its neighbours did
        follows_seed = np.array(self.follows_seed)[:, None]
        return np.where(follows_seed, self.token_keys[:, :1], self.next_keys[:, None])

    def _judge_equal(
        self, p: Distribution, drafted: Tensor, num_drafted: Tensor, keys: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        tokens = self._draw(p, keys)
        num_accepted = verify_equal(tokens, drafted, num_drafted)
        return num_accepted, tokens.gather(1, num_accepted.unsqueeze(1)).squeeze(1)

    def _judge_by_coins(
        self,
        p: Distribution,
        q: Distribution,
        drafted: Tensor,
        num_drafted: Tensor,
        coin_keys: np.ndarray,
        next_keys: np.ndarray,
    ) -> tuple[Tensor, Tensor]:
        coins = self.noise.uniforms(coin_keys)
        num_accepted, weights = self._verify(p, q, drafted, num_drafted, coins)
        return num_accepted, self._draw(weights, next_keys)

    def _verify(
        self, p: Distribution, q: Distribution, drafted: Tensor, num_drafted: Tensor, coins: Tensor
    ) -> tuple[Tensor, Distribution]:
        if (lenience := self.speculation.lossy_lenience) is not None:
            return verify_lossy_lenience(p, q, drafted, num_drafted, coins, lenience)
        if (epsilon := self.speculation.lossy_typical) is not None:
            return verify_lossy_typical(p, drafted, num_drafted, epsilon)
        verify: Verifier = verify_tokenwise if self.speculation.verification == "tokenwise" else verify_block
        return verify(p, q, drafted, num_drafted, coins)

    def _draw(self, weights: Distribution, keys: np.ndarray) -> Tensor:
        num_columns = weights.probabilities.shape[-1]
        if num_columns == 1 and weights.token_ids is not None:
            return weights.token_ids.squeeze(-1)
        ids = range(num_columns) if weights.token_ids is None else weights.token_ids
        if can_arrive(weights):
            return arrive(weights, keys, self.noise.spread_of(ids))
        return sample(weights, self.noise.exponentials(keys, ids))
