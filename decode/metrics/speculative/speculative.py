"""A metric for Hugging Face's `evaluate`: how often a draft is accepted, and how many tokens a target pass gives.

`evaluate` copies this file out of the package before it imports it, so it imports nothing of draftsmith.
"""

from collections.abc import Callable
from operator import index
from typing import Any

import datasets
import evaluate
import numpy as np

DESCRIPTION = """\
Acceptance and block efficiency of speculative decoding, in one of two configurations.

"counts", the default, from what a decoder counted: acceptance_rate_of_drafted, accepted per drafted token, and
block_efficiency, tokens committed per target pass, the bonus token included.

"distributions", from the next-token distributions p of the target and q of the draft along texts of the target:
acceptance_rate_alpha, the mean of sum_v min(p, q) over positions, and predicted_block_efficiency,
1 + sum_{k=1..num_draft_tokens} alpha^k, which takes acceptance to be alpha at each position of a round, whatever came
before.

The two acceptance rates are different figures: a token drafted after the first that is rejected counts as drafted.
"""

INPUTS = """
Args, configuration "counts", a whole number per text each:
    drafted: tokens that the draft proposed, judged or not.
    accepted: those of them that the target accepted and that are part of the text.
    target_passes: passes of the target that committed tokens to the text.
    committed: tokens of the text: accepted ones, and at most one of the target's own a pass.

Args, configuration "distributions":
    p, q: an array [positions, vocab] of probabilities per text, after temperature, top-k and the like; q is zero for
        tokens that the draft lacks.
    num_draft_tokens: tokens proposed in a round, for predicted_block_efficiency; 4 unless given.

Returns:
    acceptance_rate_of_drafted: sum of accepted / sum of drafted; nan when nothing was drafted.
    block_efficiency: sum of committed / sum of target_passes.
or
    acceptance_rate_alpha: mean of sum_v min(p, q) over the positions of all texts.
    predicted_block_efficiency: 1 + sum_{k=1..num_draft_tokens} alpha^k.

Raises:
    ValueError: an input that is missing or cannot be, named with its text, counted from 0.

Examples:
    >>> counts = evaluate.load("decode/metrics/speculative", "counts")
    >>> counts.compute(drafted=[8, 4], accepted=[5, 1], target_passes=[3, 3], committed=[8, 4])
    {'acceptance_rate_of_drafted': 0.5, 'block_efficiency': 2.0}
    >>> distributions = evaluate.load("decode/metrics/speculative", "distributions")
    >>> distributions.compute(p=[[[0.5, 0.5]]], q=[[[1.0, 0.0]]], num_draft_tokens=2)
    {'acceptance_rate_alpha': 0.5, 'predicted_block_efficiency': 1.75}
"""

CITATION = """\
@inproceedings{leviathan2023fast,
  title = {Fast Inference from Transformers via Speculative Decoding},
  author = {Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle = {International Conference on Machine Learning},
  year = {2023}
}
"""

COUNT = datasets.Value("int64")
PROBABILITIES = datasets.List(datasets.List(datasets.Value("float32")))  # [positions, vocab]
FEATURES = {
    "counts": dict.fromkeys(("drafted", "accepted", "target_passes", "committed"), COUNT),
    "distributions": dict.fromkeys(("p", "q"), PROBABILITIES),
}
# how far from one the probabilities of a position may sum: rounding in half precision, but no logits
TOLERANCE = 1e-3


class Speculative(evaluate.Metric):  # type: ignore[misc]
    """The metric; what it is given is checked as it is added, so that nothing is kept of what is refused."""

    def _info(self) -> evaluate.MetricInfo:
        name = "counts" if self.config_name == "default" else self.config_name
        if name not in FEATURES:
            raise ValueError(f'config_name: there is no {name!r}; use "counts" or "distributions"')
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features(FEATURES[name]),
            reference_urls=["https://arxiv.org/abs/2211.17192"],
        )

    def add(self, **inputs: Any) -> None:
        """Adds one text.

        Args:
            inputs: of the text.
        """
        self.add_batch(**{name: None if value is None else [value] for name, value in inputs.items()})

    def add_batch(self, **inputs: Any) -> None:
        """Adds texts.

        Args:
            inputs: lists or arrays with an item per text.
        """
        names = self._feature_names()
        given = [name for name, value in inputs.items() if value is not None]
        if set(given) != set(names):
            raise ValueError(f"inputs: {', '.join(names)} are needed, {', '.join(given) or 'none'} given")
        lengths = {name: _num_texts(inputs[name], name) for name in names}
        if len(set(lengths.values())) > 1 or not lengths[names[0]]:
            found = ", ".join(f"{length} of {name}" for name, length in lengths.items())
            raise ValueError(f"inputs: {found}; give one of each per text, and at least one text")
        checked: Callable[[dict[str, Any], str], dict[str, Any]]
        checked = _checked_counts if "drafted" in names else _checked_distributions
        texts = [
            checked(dict(zip(names, values, strict=True)), f"text {number}")
            for number, values in enumerate(zip(*(inputs[name] for name in names), strict=True), start=len(self))
        ]
        super().add_batch(**{name: [text[name] for text in texts] for name in names})

    def _compute(self, *, num_draft_tokens: int = 4, **inputs: Any) -> dict[str, float]:
        # combined metrics hand each one the inputs of the others too
        if unknown := inputs.keys() - {name for features in FEATURES.values() for name in features}:
            raise ValueError(f"inputs: {', '.join(sorted(unknown))} not known; see inputs_description")
        if "drafted" in self._feature_names():
            return _figures_of_counts(inputs)
        if not isinstance(num_draft_tokens, int) or num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens: {num_draft_tokens!r} is not possible; give a whole number, 1 or more")
        return _figures_of_distributions(inputs, num_draft_tokens)


def _figures_of_counts(counts: dict[str, list[int]]) -> dict[str, float]:
    drafted = sum(counts["drafted"])
    return {
        "acceptance_rate_of_drafted": sum(counts["accepted"]) / drafted if drafted else float("nan"),
        "block_efficiency": sum(counts["committed"]) / sum(counts["target_passes"]),
    }


def _figures_of_distributions(texts: dict[str, Any], num_draft_tokens: int) -> dict[str, float]:
    overlaps = [np.minimum(p, q).sum(axis=1) for p, q in zip(texts["p"], texts["q"], strict=True)]
    alpha = float(np.minimum(np.concatenate(overlaps), 1.0).mean())  # a sum may be rounded to more than one
    return {
        "acceptance_rate_alpha": alpha,
        "predicted_block_efficiency": 1 + sum(alpha**k for k in range(1, num_draft_tokens + 1)),
    }


def _num_texts(values: Any, name: str) -> int:
    try:
        return len(values)
    except TypeError as error:
        raise ValueError(f"{name}: must be a list or array with an item per text") from error


def _checked_counts(text: dict[str, Any], where: str) -> dict[str, int]:
    counts = {}
    for name, value in text.items():
        try:
            counts[name] = index(value)
        except TypeError as error:
            raise ValueError(f"{name}, {where}: {value!r} is no whole number") from error
        if counts[name] < 0:
            raise ValueError(f"{name}, {where}: {value} is negative")
    drafted, accepted, passes, committed = counts.values()
    for wrong, what in (
        (passes < 1, "no target pass"),
        (accepted > drafted, "more accepted than drafted"),
        (committed < passes, "fewer committed than target passes, each of which commits at least one"),
        (committed < accepted, "fewer committed than accepted"),
        (committed > accepted + passes, "more committed than accepted and one more for each target pass"),
    ):
        if wrong:
            raise ValueError(f"{where}: {what} ({', '.join(f'{name} {count}' for name, count in counts.items())})")
    return counts


def _checked_distributions(text: dict[str, Any], where: str) -> dict[str, np.ndarray]:
    arrays = {name: _checked_probabilities(value, f"{name}, {where}") for name, value in text.items()}
    if arrays["p"].shape != arrays["q"].shape:
        shapes = " and ".join(f"{name} has the shape {list(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"{where}: {shapes}; give the same positions and tokens, zero for tokens that one lacks")
    return arrays


def _checked_probabilities(values: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: cannot be an array [positions, vocab] of float32 on the CPU") from error
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{where}: has the shape {list(array.shape)}; give [positions, vocab], at least one of each")
    for wrong, what in (
        (~np.isfinite(array).all(axis=1), "holds what is not finite"),
        ((array < 0).any(axis=1), "holds a negative number"),
        (abs(array.sum(axis=1, dtype=np.float64) - 1) > TOLERANCE, "does not sum to one"),
    ):
        if wrong.any():
            raise ValueError(f"{where}: position {wrong.argmax()} {what}; give probabilities, not logits")
    return array
