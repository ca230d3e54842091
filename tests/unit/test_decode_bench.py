"""What is made of the runs that were timed."""

import json

import pytest
import torch

from decode.baselines import Assistance
from decode.bench import Run, Timing, _take_turns, lengthened
from decode.costs import Costs
from decode.params import SamplingParams
from decode.progress import ProgressBar
from decode.trace import Trace


def timing(sweep: dict[Assistance, float] | None = None, **runs: list[Run]) -> Timing:
    return Timing(
        sampling=SamplingParams(),
        num_draft_tokens=2,
        runs=runs,
        sweep=sweep or {},
        trace=Trace(),
        share_outside_models=0.05,
        costs=Costs(1.0, 0.1, [1.0, 1.0, 1.0]),
        predicted_speedup=2.5,
    )


PLAIN = [Run(10, 1.0), Run(10, 2.0), Run(10, 1.0)]
FAST = [Run(20, 1.0), Run(20, 1.0), Run(9, 1.0)]  # twice, four times, 0.9 times as fast


def test_ratios_are_taken_prompt_by_prompt() -> None:
    figures = timing(plain=PLAIN, speculative=FAST).figures()
    assert figures["ratios"] == pytest.approx([2.0, 4.0, 0.9])
    assert figures["ratio"] == 2.0
    assert figures["median_tokens_per_second"] == {"plain": 10.0, "speculative": 20.0}
    assert figures["realised_over_predicted"] == pytest.approx(0.8)
    assert figures["best_assistance"] is figures["ratio_to_best_assisted"] is None
    assert figures["trace"]["committed"] == 0
    assert json.loads(json.dumps(figures))["runs"]["plain"][1] == {"num_tokens": 10, "seconds": 2.0}


def test_the_best_of_transformers_is_what_we_are_measured_against() -> None:
    slow = [Run(5, 1.0), Run(5, 1.0), Run(5, 1.0)]
    sweep = {Assistance(1): 4.0, Assistance(2): 6.0, Assistance(3): 5.0}
    figures = timing(sweep, plain=PLAIN, speculative=FAST, transformers_assisted_best=slow).figures()
    assert figures["best_assistance"] == "2"
    assert figures["ratio_to_best_assisted"] == 4.0
    assert figures["median_ratios_to_plain"]["transformers_assisted_best"] == 0.5


def test_longer_prompts_have_others_before_them() -> None:
    prompts = [[1, 2], [3], [4, 5, 6]]
    assert lengthened(prompts, 4) == [[4, 5, 6, 3, 1, 2], [4, 5, 6, 3], [1, 2, 4, 5, 6]]
    assert lengthened(prompts, 1) == prompts
    assert lengthened([[7]], 3) == [[7, 7, 7]]


def test_everybody_goes_first_in_turn() -> None:
    calls: list[tuple[str, int, int]] = []
    modes = {
        name: lambda prompt, params, name=name: calls.append((name, prompt[0], torch.initial_seed())) or [0] * prompt[0]
        for name in "abc"
    }
    bar = ProgressBar("turns", 12)
    runs = _take_turns(modes, [[5], [6], [7], [8]], SamplingParams(), bar)
    assert "".join(name for name, _, _ in calls) == "abcbcacababc"
    assert [seed for _, _, seed in calls] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    for name in "abc":
        assert [run.num_tokens for run in runs[name]] == [5, 6, 7, 8]
    assert bar.done == bar.total
