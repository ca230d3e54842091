"""Whether training data is what it should be: asked before the first step."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import DataLimits

logger = logging.getLogger(__name__)

# Rows that are decoded and encoded again.
NUM_REENCODED = 64
# Where a row was cut, as many tokens may come from a character or word that is no longer whole.
NUM_UNCERTAIN = 4
# Of the sample that is shown: most characters of one stretch, and most stretches.
STRETCH_LENGTH = 200
NUM_STRETCHES = 8

# By field of DataLimits: what is wrong with the rows that count towards it, and the remedy.
RULES = {
    "max_truncated_share": ("are cut at max_length", "raise max_length"),
    "max_unlearnable_share": ("have no response token to learn", "mind response_mask, or raise max_length"),
    "max_unmasked_share": ("have a response_mask that is true throughout", "make it false on prompts"),
    "max_unended_share": ("have a whole response without a stop token", "mind the chat template and its stop token"),
    "max_reencoded_share": ("have a text that is encoded to other tokens", "use the tokenizer the data was made with"),
}


@dataclass
class _Tally:
    """Rows that a rule applies to, and the numbers, from 1, of those that break it."""

    num_rows: int = 0
    broken: list[int] = field(default_factory=list)

    def add(self, number: int, breaks: bool) -> None:
        self.num_rows += 1
        if breaks:
            self.broken.append(number)

    def share(self) -> float:
        return len(self.broken) / self.num_rows if self.num_rows else 0.0

    def __str__(self) -> str:
        return f"{len(self.broken)} of {self.num_rows}"


@dataclass
class _Counts:
    """What `_count` finds. Learnt are the tokens whose mask is true, but for the first, which nothing predicts."""

    tokens: int = 0
    learnt: int = 0
    covered: int = 0
    tallies: dict[str, _Tally] = field(default_factory=lambda: {limit: _Tally() for limit in RULES})

    @property
    def coverage(self) -> float:
        return self.covered / self.learnt if self.learnt else 0.0


def check_data(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    stop_ids: Iterable[int],
    token_ids: npt.ArrayLike | None = None,
    limits: DataLimits,
    name: str = "data",
) -> None:
    """Refuses rows that would teach something else than they seem to; logs a summary, and a row with ⟦what is learnt⟧.

    Args:
        rows: with input_ids and response_mask, [length]. Optional: truncated (default false), whether max_length cut
            the row; has_prompt (default true), whether a part of it should not be learnt; finish_reason, why the model
            that wrote the response stopped, "length" for a response that was cut on purpose.
        tokenizer: the transformers tokenizer of the rows.
        stop_ids: ids that end a text; without any, responses need none.
        token_ids: int [draft_vocab], a reduced output vocabulary; None for the whole.
        limits: how bad the rows may be.
        name: what to call them.

    Raises:
        ValueError: no rows, nothing to learn, or a limit that is passed.
    """
    if not len(rows):
        raise ValueError(f"{name}: there are no rows, so nothing to learn from; give another source")
    counts = _count(rows, frozenset(stop_ids), token_ids)
    tallies = counts.tallies
    for number in np.linspace(1, len(rows), min(len(rows), NUM_REENCODED)).astype(int).tolist():
        tallies["max_reencoded_share"].add(number, _is_reencoded(rows[number - 1], tokenizer))
    summary = [
        f"{len(rows)} rows",
        f"{counts.tokens} tokens, {counts.learnt / max(1, counts.tokens):.1%} of them learnt",
        f"{tallies['max_truncated_share']} rows cut at max_length",
        f"{tallies['max_unended_share']} whole responses without a stop token",
    ]
    if token_ids is not None:
        summary.append(f"{counts.coverage:.1%} of what is learnt in the reduced vocabulary")
    logger.info("%s: %s", name, "; ".join(summary))
    logger.info("%s: such as %s", name, _sample(rows, tallies["max_unlearnable_share"].broken, tokenizer))
    for limit, tally in tallies.items():
        _refuse_beyond(limit, getattr(limits, limit), tally, name)
    if not counts.learnt:
        raise ValueError(f"{name}: none of {len(rows)} rows has a response token to learn; mind response_mask")
    if token_ids is not None and counts.coverage < limits.min_coverage:
        raise ValueError(
            f"{name}: the reduced vocabulary holds {counts.coverage:.1%} of the response tokens; choose it on such "
            f"data, or larger, or lower data_limits.min_coverage below {limits.min_coverage}"
        )


def _count(rows: Sequence[Mapping[str, Any]], stop_ids: frozenset[int], token_ids: npt.ArrayLike | None) -> _Counts:
    counts = _Counts()
    known = None if token_ids is None else _lookup_table(token_ids)
    for number, row in enumerate(rows, start=1):
        ids, mask = _ids_and_mask(row)
        learnt = ids[1:][mask[1:]]
        counts.tokens += len(ids)
        counts.learnt += len(learnt)
        if known is not None:
            counts.covered += int(known[learnt[learnt < len(known)]].sum())
        counts.tallies["max_truncated_share"].add(number, row.get("truncated", False))
        counts.tallies["max_unlearnable_share"].add(number, not len(learnt))
        if row.get("has_prompt", True):
            counts.tallies["max_unmasked_share"].add(number, mask.all())
        is_cut = row.get("truncated", False) or row.get("finish_reason") == "length"
        if stop_ids and len(learnt) and not is_cut:
            counts.tallies["max_unended_share"].add(number, stop_ids.isdisjoint(_last_response(ids, mask)))
    return counts


def _refuse_beyond(limit: str, value: float, tally: _Tally, name: str) -> None:
    if tally.share() > value:
        fault, remedy = RULES[limit]
        raise ValueError(
            f"{name}: {tally} rows {fault}, the first is row {tally.broken[0]}; "
            f"{remedy}, or raise data_limits.{limit} above {value}"
        )


def _ids_and_mask(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return np.asarray(row["input_ids"]), np.asarray(row["response_mask"], np.bool_)


def _lookup_table(token_ids: npt.ArrayLike) -> Any:
    """Bool [largest id + 1], true for the ids given."""
    ids = np.asarray(token_ids)
    table = np.zeros(ids.max() + 1, np.bool_)
    table[ids] = True
    return table


def _last_response(ids: Any, mask: Any) -> list[int]:
    """The last run of tokens whose mask is true."""
    end = np.flatnonzero(mask)[-1] + 1
    masked = np.flatnonzero(~mask[:end])
    last: list[int] = ids[masked[-1] + 1 if len(masked) else 0 : end].tolist()
    return last


def _is_reencoded(row: Mapping[str, Any], tokenizer: Any) -> bool:
    """Whether the text of a row is encoded to other tokens than it was decoded from.

    Of a response that a model sampled only the prompt is compared: a model may write the same text in other tokens
    than the tokenizer would.
    """
    ids, mask = _ids_and_mask(row)
    if row.get("finish_reason") is not None and mask.any():
        ids = ids[: mask.argmax()]
    again = np.asarray(tokenizer(_decode(ids, tokenizer), add_special_tokens=False, verbose=False)["input_ids"])
    if row.get("truncated", False):
        certain = max(0, len(ids) - NUM_UNCERTAIN)
        ids, again = ids[:certain], again[:certain]
    return not np.array_equal(ids, again)


def _sample(rows: Sequence[Mapping[str, Any]], unlearnable: Sequence[int], tokenizer: Any) -> str:
    """The first row that teaches something, on one line."""
    skipped = set(unlearnable)
    first = next((number for number in range(1, len(rows) + 1) if number not in skipped), 1)
    ids, mask = _ids_and_mask(rows[first - 1])
    bounds = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1), len(ids)]
    stretches = []
    for start, end in list(pairwise(bounds))[:NUM_STRETCHES]:
        text = _shortened(_decode(ids[start:end], tokenizer)).replace("\n", "\\n")
        stretches.append(f"⟦{text}⟧" if mask[start] else text)
    return "".join(stretches) + ("…" if len(bounds) - 1 > NUM_STRETCHES else "")


def _shortened(text: str) -> str:
    half = STRETCH_LENGTH // 2
    return text if len(text) <= STRETCH_LENGTH else f"{text[:half]}…{text[-half:]}"


def _decode(ids: Any, tokenizer: Any) -> str:
    text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
