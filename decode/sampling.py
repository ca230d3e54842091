"""What temperature, top-k, top-p and min-p mean, in one place: logits in, distributions out, tokens from noise.

Pure torch, fp32 arithmetic, in the order of transformers: temperature, top-k, top-p, min-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# columns beyond the k-th, for tokens that tie with it: transformers keeps them all, and bf16 logits often tie
SPARE_COLUMNS = 14
# a nucleus is looked for among so many tokens before the whole vocabulary is sorted
NUCLEUS_COLUMNS = (128, 1024, 8192)
DRAFT_NUCLEUS_COLUMNS = 128


@dataclass(frozen=True)
class Distribution:
    """Distributions over a vocabulary, or weights: what is not among their columns is zero.

    Attributes:
        probabilities: fp32 [*batch, columns].
        token_ids: int64 [*batch, columns], the token of each column, none twice, or a number below 0 where there is
            none; [columns] where all rows share them; None where column i is token i.
    """

    probabilities: Float[Tensor, "*batch columns"]
    token_ids: Int[Tensor, "*#batch columns"] | None = None

    def __getitem__(self, index: object) -> "Distribution":
        """Some of the batch, indexed as a tensor is; columns are left alone."""
        ids = self.token_ids
        return Distribution(self.probabilities[index], ids if ids is None or ids.ndim == 1 else ids[index])  # type: ignore[index]

    def at(self, positions: Int[Tensor, " rows"]) -> "Distribution":
        """One position of each row: [rows, positions, columns] to [rows, columns]."""
        return self[torch.arange(len(positions), device=positions.device), positions]

    def of(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The probability of one token each."""
        wanted = tokens.unsqueeze(-1)
        if self.token_ids is not None:
            return torch.where(self.token_ids == wanted, self.probabilities, 0.0).sum(dim=-1)
        width = self.probabilities.shape[-1]
        found = self.probabilities.gather(-1, wanted.clamp_max(width - 1))
        return torch.where(wanted < width, found, 0.0).squeeze(-1)

    def tokens(self, columns: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """The token of one column each."""
        if self.token_ids is None:
            return columns
        if self.token_ids.ndim == 1:
            return self.token_ids[columns]
        return self.token_ids.gather(-1, columns.unsqueeze(-1)).squeeze(-1)

    def renamed(self, token_ids: Int[Tensor, " names"]) -> "Distribution":
        """The same distributions where token i of this one is called token_ids[i]."""
        return Distribution(self.probabilities, token_ids if self.token_ids is None else token_ids[self.token_ids])

    def dense(self, vocab_size: int) -> Float[Tensor, "*batch vocab"]:
        """Over the whole vocabulary; tokens beyond it are dropped."""
        if self.token_ids is None:
            missing = vocab_size - self.probabilities.shape[-1]
            return torch.nn.functional.pad(self.probabilities, (0, missing))
        shape = self.probabilities.shape
        ids, zeros = self.token_ids.expand(shape), self.probabilities.new_zeros(*shape[:-1], vocab_size)
        inside = torch.where((ids >= 0) & (ids < vocab_size), self.probabilities, 0.0)
        return zeros.scatter_add_(-1, ids.clamp(0, vocab_size - 1), inside)

    def excess(
        self, other: "Distribution", scale: Float[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch columns"]:
        """(scale * self - other)+ on the columns of self, where alone it can be positive; scale is 1 by default."""
        ours = self.probabilities if scale is None else self.probabilities * scale.unsqueeze(-1)
        return (ours - self._aligned(other)).clamp_min_(0)

    def excess_mass(
        self, other: "Distribution", scale: Float[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch"]:
        """The sum of `excess` over the columns."""
        if self.token_ids is not None or other.token_ids is None:
            return self.excess(other, scale).sum(dim=-1)
        # of a whole vocabulary only what the other has, too, needs a look: of the rest, all is left
        shared = Distribution(other._aligned(self), other.token_ids)
        of_rest = (self.probabilities.sum(dim=-1) - shared.probabilities.sum(dim=-1)).clamp_min_(0)
        return shared.excess(other, scale).sum(dim=-1) + (of_rest if scale is None else scale * of_rest)

    def _aligned(self, other: "Distribution") -> Float[Tensor, "*batch columns"]:
        """The other's probabilities of this one's columns."""
        shape = self.probabilities.shape
        if self.token_ids is None:
            return other.dense(shape[-1])
        if other.token_ids is self.token_ids:
            return other.probabilities
        wanted = self.token_ids.expand(shape)
        if other.token_ids is None:
            width = other.probabilities.shape[-1]
            found = other.probabilities.gather(-1, wanted.clamp_max(width - 1))
            return torch.where(wanted < width, found, 0.0)
        theirs, order = other.token_ids.expand(other.probabilities.shape).sort(dim=-1)
        places = torch.searchsorted(theirs, wanted.contiguous()).clamp_max_(theirs.shape[-1] - 1)
        found = other.probabilities.gather(-1, order.gather(-1, places))
        return torch.where(theirs.gather(-1, places) == wanted, found, 0.0)


class LogitsWarper:
    """Turns logits into the distributions that tokens are sampled from; each row of a batch has its own parameters.

    Args:
        temperature: 0 gives all mass to the first argmax; then the others change nothing.
        top_k: keep the k largest logits, and those that tie with the k-th, as transformers does; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p (Holtzman et al. 2020, section
            3.1), and those that tie with its last; 1 keeps all.
        min_p: keep tokens at least min_p times as probable as the most probable one (Nguyen et al. 2024); 0 keeps all.
        exact: False spares the look at what lies beyond the columns selected first: ties with the k-th token, the tail
            of a flat nucleus. Good for a draft, whose q is whatever it samples from.
    """

    def __init__(
        self,
        temperature: Sequence[float | int],
        top_k: Sequence[int],
        top_p: Sequence[float | int],
        min_p: Sequence[float | int],
        device: torch.device,
        exact: bool = True,
    ) -> None:
        rows_by_kind: dict[type[_Whole], list[int]] = {}
        for row, (t, k, p) in enumerate(zip(temperature, top_k, top_p, strict=True)):
            kind = _Argmax if t == 0 else _TopK if k else _Nucleus if p < 1 else _Whole
            rows_by_kind.setdefault(kind, []).append(row)
        numbers = [list(temperature), list(top_k), list(top_p), list(min_p)]
        parameters = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self.parameters, self.exact = parameters, exact
        self.parts = [(rows, kind(parameters[:, rows].to(device), exact)) for kind, rows in rows_by_kind.items()]
        self.is_greedy = set(rows_by_kind) == {_Argmax}
        self.some_keep_all = _Whole in rows_by_kind
        # of all rows, where nothing else changes their distributions
        self.temperatures = list(temperature) if set(rows_by_kind) == {_Whole} and not any(min_p) else None

    def __call__(self, logits: Float[Tensor, "rows positions vocab"]) -> Distribution:
        """Distributions [rows, positions, columns]; over few columns where all rows allow it."""
        if len(self.parts) == 1:
            return self.parts[0][1](logits)
        probabilities = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        for rows, warp in self.parts:
            probabilities[rows] = warp(logits[rows]).dense(logits.shape[-1])
        return Distribution(probabilities)


class _Whole:
    """Temperature and min-p over the whole vocabulary; what the other kinds of rows share with it."""

    def __init__(self, parameters: Float[Tensor, "4 rows"], exact: bool) -> None:
        temperature, top_k, top_p, min_p = parameters[:, :, None, None]
        self.exact = exact
        # None where a parameter changes nothing
        self.temperature = None if bool((temperature == 1).all()) else temperature.float()
        self.top_k = top_k.long()
        self.top_p = None if bool((top_p == 1).all()) else top_p.float()
        self.some_keep_all = bool((top_p == 1).any())
        self.min_p = None if bool((min_p == 0).all()) else min_p.float()

    def __call__(self, logits: Tensor) -> Distribution:
        probabilities = self.scaled(logits).softmax(dim=-1)
        return Distribution(probabilities if self.min_p is None else self.truncated(probabilities))

    def scaled(self, logits: Tensor) -> Tensor:
        return logits.float() if self.temperature is None else logits.float() / self.temperature

    def truncated(self, probabilities: Tensor) -> Tensor:
        """Top-p, of probabilities that descend if it is there, and min-p; normalised."""
        if self.top_p is not None:
            cumulative = probabilities.cumsum(dim=-1)
            last = (cumulative < self.top_p).sum(dim=-1, keepdim=True).clamp_max(probabilities.shape[-1] - 1)
            outside = probabilities < probabilities.gather(-1, last)
            if self.some_keep_all:
                outside &= self.top_p < 1
            probabilities = probabilities.masked_fill(outside, 0.0)
        if self.min_p is not None:
            outside = probabilities < self.min_p * probabilities.amax(dim=-1, keepdim=True)
            probabilities = probabilities.masked_fill(outside, 0.0)
        return probabilities / probabilities.sum(dim=-1, keepdim=True)


class _Argmax(_Whole):
    def __call__(self, logits: Tensor) -> Distribution:
        # torch documents the first maximum on every device; `max` finds it in bf16 sooner than `argmax` does
        ids = logits.max(dim=-1, keepdim=True).indices
        return Distribution(torch.ones(ids.shape, device=ids.device), ids)


class _TopK(_Whole):
    def __init__(self, parameters: Float[Tensor, "4 rows"], exact: bool) -> None:
        super().__init__(parameters, exact)
        self.largest = int(self.top_k.max())

    def __call__(self, logits: Tensor) -> Distribution:
        vocab_size = logits.shape[-1]
        num_columns = min(self.largest + SPARE_COLUMNS * self.exact, vocab_size)
        places = self.top_k.clamp_max(vocab_size) - 1
        while True:
            values, ids = _largest(logits, num_columns)
            scores = self.scaled(values)
            kth = scores.gather(-1, places.expand(*scores.shape[:-1], 1))
            # a last column that ties with the k-th may have more like it outside
            if not self.exact or num_columns == vocab_size or not bool((scores[..., -1:] == kth).any()):
                break
            num_columns = min(4 * num_columns, vocab_size)
        probabilities = scores.masked_fill(scores < kth, -torch.inf).softmax(dim=-1)
        if self.top_p is None and self.min_p is None:
            return Distribution(probabilities, ids)
        return Distribution(self.truncated(probabilities), ids)


class _Nucleus(_Whole):
    def __call__(self, logits: Tensor) -> Distribution:
        assert self.top_p is not None
        vocab_size = logits.shape[-1]
        if not self.exact:
            values, ids = _largest(logits, min(DRAFT_NUCLEUS_COLUMNS, vocab_size))
            return Distribution(self.truncated(self.scaled(values).softmax(dim=-1)), ids)
        everything = self.scaled(logits).softmax(dim=-1)
        for num_columns in (*NUCLEUS_COLUMNS, vocab_size):
            probabilities, ids = _largest(everything, min(num_columns, vocab_size))
            # the nucleus must end before the tokens that tie with the last column, which may have more like it outside
            inside = torch.where(probabilities > probabilities[..., -1:], probabilities, 0.0).sum(dim=-1, keepdim=True)
            if probabilities.shape[-1] == vocab_size or bool((inside >= self.top_p).all()):
                break
        return Distribution(self.truncated(probabilities), ids)


def next_token_distribution(
    logits: Float[Tensor, "*batch vocab"],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Float[Tensor, "*batch vocab"]:
    """`LogitsWarper` with one setting for all, over the whole vocabulary: fp32 probabilities that sum to 1."""
    warper = LogitsWarper([temperature], [top_k], [top_p], [min_p], logits.device)
    vocab_size = logits.shape[-1]
    return warper(logits.reshape(1, -1, vocab_size)).dense(vocab_size).reshape(logits.shape)


def sample(weights: Distribution, exponentials: Float[Tensor, "*batch columns"]) -> Int[Tensor, "*batch"]:
    """Draw one token per row: the first to arrive when token x arrives after a time exponential with rate weights[x].

    argmax of weights / exponentials, which is the Gumbel-max trick without logarithms. Noise that belongs to tokens
    and not to columns makes two similar distributions draw the same token as often as they can without being told of
    each other: with probability at least (1 - TV) / (1 + TV) (Daliri et al. 2024, theorem 3).

    Args:
        weights: each row with a positive sum, which no subnormal number is; need not be normalised.
        exponentials: exponential noise for every column, positive and finite.

    Returns:
        token ids; a token of weight 0 is never drawn.
    """
    return weights.tokens((weights.probabilities / exponentials).max(dim=-1).indices)


def _largest(
    values: Float[Tensor, "*batch vocab"], num_columns: int
) -> tuple[Float[Tensor, "*batch columns"], Int[Tensor, "*batch columns"]]:
    """`topk`, reading the vocabulary once: the k largest are in the k strips of largest maximum.

    Of values that tie with the last column, which are among the columns is open, as it is with `topk`.
    """
    vocab_size = values.shape[-1]
    # as many strips as there are values in the strips looked into
    depth = int((vocab_size / num_columns) ** 0.5)
    if depth < 4:
        return values.topk(num_columns, dim=-1)
    width = vocab_size // depth
    ordered = depth * width
    maxima = values[..., :ordered].view(*values.shape[:-1], depth, width).amax(dim=-2)
    strips = maxima.topk(min(num_columns, width), dim=-1).indices
    steps = torch.arange(0, ordered, width, device=values.device)
    candidates = (strips.unsqueeze(-2) + steps.unsqueeze(-1)).flatten(-2)
    if ordered < vocab_size:
        rest = torch.arange(ordered, vocab_size, device=values.device).expand(*candidates.shape[:-1], -1)
        candidates = torch.cat([candidates, rest], dim=-1)
    found, places = values.gather(-1, candidates).topk(num_columns, dim=-1)
    return found, candidates.gather(-1, places)
