"""What changes logits before they are warped: biases, penalties on what was said, and what must not be said.

In the order of transformers: logit bias, repetition penalty, then vLLM's frequency and presence penalties, bad words,
min_new_tokens. A position inside a block sees the tokens drafted before it.
"""

from collections import Counter

import torch
from torch import Tensor

from .completion import Completion


class Penalties:
    """The penalties of a batch's rows, for one round: what was committed so far is counted once.

    Args:
        completions: the rows.
        device: where logits are.
    """

    def __init__(self, completions: list[Completion], device: torch.device) -> None:
        self.device = device
        self.lengths = torch.tensor([len(row.ids) for row in completions], device=device)
        params = [row.params for row in completions]
        self.repetition = self._column([each.repetition_penalty for each in params])
        self.presence = self._column([each.presence_penalty for each in params])
        self.frequency = self._column([each.frequency_penalty for each in params])
        self.min_new_tokens = torch.tensor(
            [row.params.min_new_tokens if row.stop_ids else 0 for row in completions], device=device
        )
        self.repeats = any(each.penalises_repeats for each in params)
        counts = [Counter(dict.fromkeys(row.prompt, 0)) for row in completions] if self.repeats else []
        for count, row in zip(counts, completions, strict=False):
            count.update(row.ids)
        # short lists are filled up with a token they hold already, which is then treated twice alike
        self.seen = self._table([list(count) for count in counts])
        self.seen_counts = self._table([list(count.values()) for count in counts])
        self.bias_ids = self._table([list(each.logit_bias) for each in params])
        self.biases = self._table([list(each.logit_bias.values()) for each in params], torch.float32, fill=0.0)
        self.forbids = any(-torch.inf in each.logit_bias.values() or each.bad_words for each in params)
        self.stop_ids = self._table([sorted(row.stop_ids) for row in completions])
        words = [row.bad_words for row in completions]
        longest = max((len(word) for each in words for word in each), default=1)
        self.bad_ends = self._table([[word[-1] for word in each] for each in words])
        # [rows, words, longest - 1]: what must precede the end; -1 stands for anything, -2 for nothing
        starts = [[(-1,) * (longest - len(word)) + word[:-1] for word in each] for each in words]
        most = max(map(len, starts), default=0)
        nothing = (-2,) * max(longest - 1, 1)
        self.bad_starts = torch.tensor(
            [[start or (-1,) for start in each] + [nothing] * (most - len(each)) for each in starts], device=device
        ).reshape(len(words), most, max(longest - 1, 1))
        tails = [row.sequence[-max(longest - 1, 1) :] for row in completions]
        self.tails = torch.tensor([[-3] * (max(longest - 1, 1) - len(tail)) + tail for tail in tails], device=device)

    def __call__(self, logits: Tensor, drafted: Tensor, columns: Tensor | None = None) -> Tensor:
        """Penalised logits of the last positions of a block.

        Args:
            logits: [rows, positions, vocab] or, of a reduced vocabulary, [rows, positions, columns]; any floating
                dtype.
            drafted: int64 [rows, drafted]: tokens of the block so far; the last position sees them all, the one
                before it all but the last, and so on.
            columns: int64 [vocab], the column of each token; the number of columns for tokens that have none.

        Returns:
            fp32, in the shape of the logits.

        Raises:
            ValueError: every token is forbidden.
        """
        scores = logits.to(torch.float32, copy=True)  # the caller's logits are also those of log-probabilities
        num_positions, num_columns = scores.shape[1:]
        if columns is not None:  # tokens without a column share one that is dropped in the end
            scores = torch.nn.functional.pad(scores, (0, 1))
        num_drafted = drafted.shape[1]
        first = num_drafted - num_positions + 1
        # how many drafted tokens each position sees
        sees = torch.arange(first, num_drafted + 1, device=self.device)
        self._add(scores, self.bias_ids, self.biases.unsqueeze(1), columns)
        if self.repeats:
            self._penalise_repeats(scores, drafted, sees, columns)
        if self.bad_ends.shape[1]:
            self._add(
                scores,
                self.bad_ends,
                _minus_infinity_where(self._completes_bad_word(drafted, first, num_positions)),
                columns,
            )
        too_short = self.lengths.unsqueeze(1) + sees < self.min_new_tokens.unsqueeze(1)
        if self.stop_ids.shape[1]:
            self._add(scores, self.stop_ids, _minus_infinity_where(too_short).unsqueeze(2), columns)
        scores = scores[..., :num_columns]
        # a reduced vocabulary may well have none of the tokens that are left
        if self.forbids and columns is None and bool((scores.amax(dim=-1) == -torch.inf).any()):
            raise ValueError("sampling: logit_bias, bad_words and min_new_tokens leave no token to choose")
        return scores

    def _penalise_repeats(self, scores: Tensor, drafted: Tensor, sees: Tensor, columns: Tensor | None) -> None:
        ids = torch.cat([self.seen, drafted], dim=1)
        visible = torch.arange(drafted.shape[1], device=self.device) < sees.unsqueeze(1)  # [positions, drafted]
        same = (ids.unsqueeze(2) == drafted.unsqueeze(1)).unsqueeze(1) & visible.unsqueeze(1)
        in_block = same.sum(dim=3)  # [rows, positions, ids]
        drafted_before = drafted.unsqueeze(2) == self.seen.unsqueeze(1)
        counts = torch.where(drafted_before, self.seen_counts.unsqueeze(1), 0).amax(dim=2)
        before = torch.cat([self.seen_counts, counts], dim=1).unsqueeze(1)
        known = torch.cat([torch.ones_like(self.seen, dtype=torch.bool), drafted_before.any(dim=2)], dim=1)
        in_answer = before + in_block
        anywhere = known.unsqueeze(1) | (in_block > 0)
        places = self._places(ids, columns).unsqueeze(1).expand(-1, scores.shape[1], -1)
        found = scores.gather(2, places)
        repeated = torch.where(found < 0, found * self.repetition, found / self.repetition)
        found = torch.where(anywhere, repeated, found)
        found = found - self.frequency * in_answer - self.presence * (in_answer > 0)
        scores.scatter_(2, places, found)

    def _completes_bad_word(self, drafted: Tensor, first: int, num_positions: int) -> Tensor:
        """Whether each bad word wants but its last token, bool [rows, positions, words]."""
        context = torch.cat([self.tails, drafted], dim=1)
        length = self.tails.shape[1]
        ends = torch.stack(
            [context[:, seen : seen + length] for seen in range(first, first + num_positions)], dim=1
        ).unsqueeze(2)
        starts = self.bad_starts.unsqueeze(1)
        return ((starts == ends) | (starts == -1)).all(dim=3)

    def _add(self, scores: Tensor, ids: Tensor, amounts: Tensor, columns: Tensor | None) -> None:
        shape = (*scores.shape[:2], ids.shape[1])
        scores.scatter_add_(2, self._places(ids, columns).unsqueeze(1).expand(shape), amounts.expand(shape))

    def _places(self, ids: Tensor, columns: Tensor | None) -> Tensor:
        return ids if columns is None else columns[ids]

    def _column(self, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self.device)[:, None, None]

    def _table(
        self, lists: list[list[int]] | list[list[float]], dtype: torch.dtype = torch.long, fill: float | None = None
    ) -> Tensor:
        """[rows, longest], short rows filled with `fill` or their first entry, empty ones with 0."""
        longest = max(map(len, lists), default=0)
        filled = [[*each, *[each[0] if each and fill is None else fill or 0] * (longest - len(each))] for each in lists]
        return torch.tensor(filled, dtype=dtype, device=self.device).reshape(len(lists), longest)


def _minus_infinity_where(condition: Tensor) -> Tensor:
    return torch.where(condition, -torch.inf, 0.0)
