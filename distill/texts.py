"""The texts a draft learns from and is judged on: responses of the target, or data from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase as Tokenizer

from train.data import learnable, read_rows

from .config import RunConfig
from .responses import GREEDY, RECORD, has_split, heldout_places, load_responses

Rows = Sequence[Any]


@dataclass(frozen=True)
class Texts:
    """Rows with input_ids and response_mask.

    Attributes:
        train: to learn from.
        heldout: to judge by, sampled as the draft will be served.
        heldout_greedy: the target's greedy answers to the held-out prompts, if there are any.
        by_target: whether the target wrote them, as `spec-distill respond` lets it.
    """

    train: Rows
    heldout: Rows
    heldout_greedy: Rows | None
    by_target: bool

    def learnable(self) -> "Texts":
        """Without the rows that have no response token; the target's own have one.

        Raises:
            ValueError: none is left that was held out.
        """
        if self.by_target:
            return self
        heldout = learnable(self.heldout)
        if not heldout:
            raise ValueError("responses: no row that was held out has a response token; raise heldout_fraction")
        return replace(self, train=learnable(self.train), heldout=heldout)


def load_texts(config: RunConfig, tokenizer: Tokenizer) -> Texts:
    """What `config.responses` holds; of data that has no held-out part, rows evenly spaced are held out.

    Raises:
        ValueError: nothing that can be read, or too few rows to hold any out.
    """
    if (Path(config.responses) / RECORD).is_file():
        greedy = load_responses(config.responses, GREEDY) if has_split(config.responses, GREEDY) else None
        train, heldout = (load_responses(config.responses, split) for split in ("train", "heldout"))
        if config.teacher == "online":  # a signal that may be there would be read for nothing
            train, heldout, greedy = without_signal(train), without_signal(heldout), greedy and without_signal(greedy)
        return Texts(train, heldout, greedy, by_target=True)
    rows = read_rows(config.responses, tokenizer, config.max_length)
    if len(rows) < 2:
        raise ValueError(f"responses {config.responses}: one row cannot be learnt from and held out; give more")
    places = heldout_places(len(rows), config.heldout_fraction)
    heldout = [row for place, row in enumerate(rows) if place in places]
    train = [row for place, row in enumerate(rows) if place not in places]
    return Texts(train, heldout, None, by_target=False)


def column(rows: Rows, name: str) -> list[Any]:
    """One column of rows: of a dataset without reading the others."""
    return list(rows[name]) if isinstance(rows, datasets.Dataset) else [row[name] for row in rows]


def without_signal(rows: Rows) -> Rows:
    """Rows to look at the text of."""
    if not isinstance(rows, datasets.Dataset):
        return rows
    names = [name for name in ("input_ids", "response_mask", "finish_reason") if name in rows.features]
    without: Rows = rows.select_columns(names)
    return without
