"""The metric for `evaluate`: what it computes, what it refuses, and that it loads from its folder alone."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest
import torch

from decode.costs import block_efficiency
from decode.trace import Round, Trace

FOLDER = Path(str(files("decode"))) / "metrics" / "speculative"
COUNTS = {"drafted": [8, 4], "accepted": [5, 1], "target_passes": [3, 3], "committed": [8, 4]}
P = [[[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]], [[1.0, 0.0, 0.0]]]
Q = [[[0.75, 0.25, 0.0], [0.5, 0.5, 0.0]], [[0.0, 0.5, 0.5]]]
ALPHA = (0.75 + 0.5 + 0.0) / 3  # every position of every text counts the same

EXACT_MATCH = """\
import datasets
import evaluate


class Exact(evaluate.Metric):
    def _info(self):
        features = datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("string")))
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"exact": sum(map(str.__eq__, predictions, references)) / len(references)}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """evaluate.load, which keeps its copies and inputs in this test's folder."""
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "inputs")
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which evaluate adds the folder of its copies
    for name in [name for name in sys.modules if name.startswith("evaluate_modules")]:
        monkeypatch.delitem(sys.modules, name)
    return evaluate.load


def test_counts_give_what_was_counted(load: Callable[..., Any]) -> None:
    expected = {"acceptance_rate_of_drafted": 6 / 12, "block_efficiency": 12 / 6}
    metric = load(str(FOLDER), "counts")
    assert metric.compute(**COUNTS) == expected
    assert metric.compute(**{name: np.array(values) for name, values in COUNTS.items()}) == expected
    assert metric.compute(**{name: torch.tensor(values) for name, values in COUNTS.items()}) == expected
    assert load(str(FOLDER)).compute(**COUNTS) == expected  # what it is unless told


def test_counts_are_those_of_a_trace(load: Callable[..., Any]) -> None:
    traces = [
        Trace([Round(3, 1, 2), Round(3, 3, 4), Round(3, 0, 1)]),
        Trace([Round(3, 3, 2), Round(0, 0, 1)]),  # a text that ended inside a block
    ]
    figures = [trace.figures() for trace in traces]
    found = load(str(FOLDER), "counts").compute(**{name: [each[name] for each in figures] for name in COUNTS})
    assert found == {"acceptance_rate_of_drafted": 6 / 12, "block_efficiency": sum(traces, Trace()).block_efficiency}


def test_nothing_drafted_has_no_acceptance(load: Callable[..., Any]) -> None:
    found = load(str(FOLDER), "counts").compute(drafted=[0], accepted=[0], target_passes=[4], committed=[4])
    assert math.isnan(found["acceptance_rate_of_drafted"])
    assert found["block_efficiency"] == 1


@pytest.mark.parametrize("as_array", [list, lambda values: [np.array(each) for each in values]], ids=["lists", "numpy"])
def test_distributions_give_alpha_and_what_it_predicts(
    as_array: Callable[[Any], Any], load: Callable[..., Any]
) -> None:
    metric = load(str(FOLDER), "distributions")
    for given, num_draft_tokens in (({}, 4), ({"num_draft_tokens": 1}, 1), ({"num_draft_tokens": 7}, 7)):
        found = metric.compute(p=as_array(P), q=as_array(Q), **given)
        assert found["acceptance_rate_alpha"] == pytest.approx(ALPHA, abs=1e-12)
        geometric = (1 - ALPHA ** (num_draft_tokens + 1)) / (1 - ALPHA)
        assert found["predicted_block_efficiency"] == pytest.approx(geometric, abs=1e-12)
        assert geometric == pytest.approx(block_efficiency([ALPHA], num_draft_tokens))  # as the decoder predicts it


def test_distributions_of_models_are_as_torch_has_them(load: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = ([torch.randn(length, 300, generator=generator).softmax(dim=-1) for length in (5, 9, 1)] for _ in range(2))
    alpha = torch.cat([torch.minimum(*each).sum(dim=-1) for each in zip(p, q, strict=True)]).mean().item()
    assert 0.1 < alpha < 0.9
    found = load(str(FOLDER), "distributions").compute(p=p, q=q)
    assert found["acceptance_rate_alpha"] == pytest.approx(alpha, abs=1e-6)
    same = load(str(FOLDER), "distributions").compute(p=p, q=p, num_draft_tokens=3)
    assert same["acceptance_rate_alpha"] == pytest.approx(1, abs=1e-6)
    assert same["acceptance_rate_alpha"] <= 1
    assert same["predicted_block_efficiency"] == pytest.approx(4, abs=1e-5)


@pytest.mark.parametrize("keep_in_memory", [False, True])
def test_texts_may_be_added_one_by_one(keep_in_memory: bool, load: Callable[..., Any]) -> None:
    counts = load(str(FOLDER), "counts", keep_in_memory=keep_in_memory)
    distributions = load(str(FOLDER), "distributions", keep_in_memory=keep_in_memory)
    for place in range(2):
        counts.add(**{name: values[place] for name, values in COUNTS.items()})
        distributions.add(p=P[place], q=Q[place])
    assert counts.compute()["block_efficiency"] == 2
    assert distributions.compute(num_draft_tokens=1)["predicted_block_efficiency"] == pytest.approx(1 + ALPHA)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"accepted": [5, 5]},
            r"text 1: more accepted than drafted \(drafted 4, accepted 5, target_passes 3, committed 4",
        ),
        ({"committed": [8, 2]}, "text 1: fewer committed than target passes, each of which commits at least one "),
        ({"committed": [4, 4]}, r"text 0: fewer committed than accepted \(drafted 8, accepted 5, target_passes 3"),
        ({"committed": [9, 4]}, "text 0: more committed than accepted and one more for each target pass "),
        ({"target_passes": [0, 3]}, "text 0: no target pass "),
        ({"drafted": [8, -4]}, "drafted, text 1: -4 is negative$"),
        ({"drafted": [8, 4.0]}, r"drafted, text 1: 4\.0 is no whole number$"),
        ({"drafted": [8, "4"]}, "drafted, text 1: '4' is no whole number$"),
        ({"drafted": [8, None]}, "drafted, text 1: None is no whole number$"),
        ({"drafted": 8}, "drafted: must be a list or array with an item per text$"),
        ({"drafted": [8]}, "inputs: 1 of drafted, 2 of accepted, .*; give one of each per text"),
        ({name: [] for name in COUNTS}, "inputs: 0 of drafted, .* and at least one text$"),
        ({"drafted": None}, "inputs: drafted, accepted, target_passes, committed are needed, accepted, .* given$"),
        ({"draftd": [8, 4]}, "inputs: draftd not known; see inputs_description$"),
    ],
)
def test_counts_that_cannot_be_are_refused(changes: dict[str, Any], reason: str, load: Callable[..., Any]) -> None:
    metric = load(str(FOLDER), "counts")
    with pytest.raises(ValueError, match=f"^{reason}") as caught:
        metric.compute(**{**COUNTS, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("p", "q", "reason"),
    [
        ([[[0.5, 0.5]]], [[[1.0, 0.0, 0.0]]], r"text 0: p has the shape \[1, 2\] and q has the shape \[1, 3\]; give "),
        ([[[0.5, 0.5]]], [2 * [[0.5, 0.5]]], r"text 0: p has the shape \[1, 2\] and q has the shape \[2, 2\]; give "),
        ([[0.5, 0.5]], [[0.5, 0.5]], r"p, text 0: has the shape \[2\]; give \[positions, vocab\]"),
        ([[]], [[]], r"p, text 0: has the shape \[0\]; give \[positions, vocab\]"),
        ([[[0.5, 0.5], [1.0]]], [2 * [[0.5, 0.5]]], r"p, text 0: cannot be an array \[positions, vocab\] of float32"),
        ([[["x", "y"]]], [[[0.5, 0.5]]], "p, text 0: cannot be an array"),
        ([None], [[[0.5, 0.5]]], r"p, text 0: has the shape \[\]; give"),
        (
            [[[0.5, 0.5]]],
            [[[0.5, 0.498]]],
            "q, text 0: position 0 does not sum to one; give probabilities, not logits$",
        ),
        ([[[0.5, 0.5]]], [[[1.5, -0.5]]], "q, text 0: position 0 holds a negative number; "),
        ([[[0.5, 0.5]]], [[[math.nan, 1.0]]], "q, text 0: position 0 holds what is not finite; "),
        (P, [Q[0], [[0.0, 0.5, 0.4]]], "q, text 1: position 0 does not sum to one; "),
        (P, [[Q[0][0], [2.0, 1.0, 3.0]], Q[1]], "q, text 0: position 1 does not sum to one; "),
        (P, Q[:1], "inputs: 2 of p, 1 of q; give one of each per text"),
        (P, None, "inputs: p, q are needed, p given$"),
    ],
)
def test_distributions_that_cannot_be_are_refused(p: Any, q: Any, reason: str, load: Callable[..., Any]) -> None:
    metric = load(str(FOLDER), "distributions")
    with pytest.raises(ValueError, match=f"^{reason}") as caught:
        metric.compute(p=p, q=q)
    assert "\n" not in str(caught.value)


def test_half_precision_sums_to_one_well_enough(load: Callable[..., Any]) -> None:
    p = torch.randn(20, 500, generator=torch.Generator().manual_seed(0)).softmax(dim=-1).half()
    assert (p.float().sum(dim=-1) != 1).any()
    found = load(str(FOLDER), "distributions").compute(p=[p], q=[p])
    assert found["acceptance_rate_alpha"] == pytest.approx(1, abs=1e-3)


def test_what_is_refused_is_not_kept(load: Callable[..., Any]) -> None:
    metric = load(str(FOLDER), "counts")
    metric.add(drafted=8, accepted=5, target_passes=3, committed=8)
    for committed in (2, 5):
        with pytest.raises(ValueError, match=r"^text 1: "):
            metric.add(drafted=4, accepted=1, target_passes=3, committed=committed)
    metric.add(drafted=4, accepted=1, target_passes=3, committed=4)
    assert metric.compute() == {"acceptance_rate_of_drafted": 6 / 12, "block_efficiency": 2}


@pytest.mark.parametrize("number", [0, -1, 2.5, "4", None])
def test_a_number_of_draft_tokens_that_cannot_be_is_refused(number: Any, load: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^num_draft_tokens: .* is not possible; give a whole number, 1 or more$"):
        load(str(FOLDER), "distributions").compute(p=P, q=Q, num_draft_tokens=number)


def test_another_configuration_is_refused(load: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^config_name: there is no 'count'; use .counts. or .distributions.$"):
        load(str(FOLDER), "count")


def test_both_configurations_combine(load: Callable[..., Any]) -> None:
    combined = evaluate.combine([load(str(FOLDER), name) for name in ("counts", "distributions")])
    found = combined.compute(**COUNTS, p=P, q=Q, num_draft_tokens=1)
    assert found == pytest.approx(
        {
            "acceptance_rate_of_drafted": 0.5,
            "block_efficiency": 2,
            "acceptance_rate_alpha": ALPHA,
            "predicted_block_efficiency": 1 + ALPHA,
        }
    )


def test_it_combines_with_another_metric(tmp_path: Path, load: Callable[..., Any]) -> None:
    (tmp_path / "exact").mkdir()
    (tmp_path / "exact" / "exact.py").write_text(EXACT_MATCH)
    texts = {"predictions": ["a", "b"], "references": ["a", "c"]}
    for force_prefix, prefixes in ((False, ("", "")), (True, ("speculative_", "exact_"))):
        combined = evaluate.combine([load(str(FOLDER), "counts"), load(str(tmp_path / "exact"))], force_prefix)
        combined.add_batch(**COUNTS, **texts)
        ours, other = prefixes
        expected = {f"{ours}acceptance_rate_of_drafted": 0.5, f"{ours}block_efficiency": 2.0, f"{other}exact": 0.5}
        assert combined.compute() == expected


def test_it_says_what_it_is(load: Callable[..., Any]) -> None:
    metric = load(str(FOLDER), "distributions")
    assert (metric.name, metric.module_type) == ("speculative", "metric")
    assert "acceptance_rate_alpha" in metric.description and "num_draft_tokens" in metric.inputs_description
    assert metric.citation.startswith("@inproceedings{leviathan2023fast,")


@pytest.mark.slow
def test_its_card_is_true_without_a_network(tmp_path: Path) -> None:
    """The programs of the card print what they say; the examples of the metric too."""
    card = "".join(re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL))
    example = re.findall(r">>> (.*)\n(?:    (\{.*))?", (FOLDER / "speculative.py").read_text())
    program = card + "".join(f"print({call})\n# {told}\n" if told else f"{call}\n" for call, told in example)
    program = program.replace('"decode/metrics/speculative"', "folder")
    offline = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **offline, "PYTHONPATH": str(FOLDER.parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^# (.*)$", program, re.MULTILINE)
    assert len(told) == 5
    assert done.stdout.splitlines() == told
