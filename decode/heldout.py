"""Held-out prompts, and the target's texts that answer them where `spec-distill respond` saved some."""

import json
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from .decoder import SpeculativeDecoder
from .pair import refuse_other_target
from .params import SamplingParams
from .prompts import Prompt, load_prompts

Item = TypeVar("Item")
# what a greedy text does not depend on; and what no text's distribution depends on
ONLY_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
ANY_TEXT = ("seed", "logprobs")


class Text(NamedTuple):
    """Token ids of a prompt, from `start` on those of the answer, if there is one; and the prompt's category."""

    ids: list[int]
    start: int
    category: str | None = None

    @property
    def prompt(self) -> list[int]:
        return self.ids[: self.start]


def heldout_prompts(source: str) -> list[Prompt]:
    """The prompts of a set that are marked as held out; all of them when none is marked."""
    prompts = load_prompts(source)
    return [prompt for prompt in prompts if prompt.split == "heldout"] or prompts


def spread(items: list[Item], count: int) -> list[Item]:
    """`count` items evenly from a list, which may be sorted by category; all of them when there are fewer."""
    chosen = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[place] for place in chosen]


class SavedTexts:
    """What `spec-distill respond` wrote: held-out texts, sampled in one way, and greedy ones.

    Args:
        folder: where.
        decoder: whose target the texts must be of.
        prompts: the prompt set that they must answer.

    Raises:
        ValueError: they are not there, or not what they must be.
    """

    def __init__(self, folder: str, decoder: SpeculativeDecoder, prompts: str) -> None:
        self.folder = Path(folder)
        if not (self.folder / "respond.json").is_file():
            raise ValueError(f"responses {folder}: not there; give a folder that `spec-distill respond` finished")
        try:
            record = json.loads((self.folder / "respond.json").read_text())
            made_for = record["settings"]["prompts"]
            self.sampling = SamplingParams(**record["settings"]["sampling"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"responses {folder}: respond.json is damaged: {error}") from error
        refuse_other_target(record.get("target", {}), decoder.target_description, f"responses {folder}")
        if made_for != prompts:
            raise ValueError(f"prompts: {prompts!r} are not those of {folder}, made for {made_for!r}")

    def sampled(self) -> list[Text]:
        return self._split("heldout")

    def of(self, sampling: SamplingParams) -> list[Text]:
        """Those that were sampled so, whatever the seed.

        Raises:
            ValueError: there are none.
        """
        if (differs := self._difference(sampling, ANY_TEXT)) is None:
            return self.sampled()
        is_greedy = sampling.temperature == 0 and self._difference(sampling, (*ANY_TEXT, *ONLY_SAMPLED)) is None
        if is_greedy and (self.folder / "heldout_greedy").is_dir():
            return self._split("heldout_greedy")
        raise ValueError(
            f"sampling.{differs}: {getattr(sampling, differs)} differs from {getattr(self.sampling, differs)}, with "
            f"which {self.folder} was made: alpha belongs to text sampled as it will be served; leave responses out, "
            "or make them anew"
        )

    def _difference(self, sampling: SamplingParams, but_for: tuple[str, ...]) -> str | None:
        """The first field in which the texts were sampled otherwise."""
        names = (name for name in vars(sampling) if name not in but_for)
        return next((name for name in names if getattr(sampling, name) != getattr(self.sampling, name)), None)

    def _split(self, name: str) -> list[Text]:
        import datasets

        rows = datasets.load_from_disk(str(self.folder / name))
        columns = [each for each in ("input_ids", "response_mask", "category") if each in rows.column_names]
        return [
            Text(row["input_ids"], row["response_mask"].index(True), row.get("category"))
            for row in rows.select_columns(columns)
        ]
