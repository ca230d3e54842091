"""What is made of the runs that were timed."""

import io
import json
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from decode.baselines import Assistance
from decode.bench import BEST_ASSISTED, Timing, _take_turns, _time, lengthened
from decode.costs import Costs
from decode.decoder import SpeculativeDecoder
from decode.latency import Arrival, OnTokens, Run
from decode.memory import Memory
from decode.params import SamplingParams, SpeculationParams
from decode.progress import ProgressBar
from decode.proposer import DraftModelProposer
from decode.roofline import Weights
from decode.tables import bench_tables
from decode.trace import Round, Seconds, Trace

CPU = torch.device("cpu")


def timing(sweep: dict[Assistance, float] | None = None, trace: Trace | None = None, **runs: list[Run]) -> Timing:
    return Timing(
        sampling=SamplingParams(),
        num_draft_tokens=2,
        runs=runs,
        sweep=sweep or {},
        trace=trace or Trace(),
        share_outside_models=0.05,
        costs=Costs(1.0, 0.1, [1.0, 1.0, 1.0]),
        predicted_speedup=2.5,
        weights=Weights(target_bytes=1000, draft_bytes=100),
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
    second = json.loads(json.dumps(figures))["runs"]["plain"][1]
    assert (second["num_tokens"], second["seconds"]) == (10, 2.0)
    spread = figures["tokens_per_second"]["speculative"]
    assert list(spread.values()) == pytest.approx([9, 14.5, 20, 20, 20])
    # nobody noted when tokens came, nor what was held
    assert figures["latency"] == figures["memory"] == {"plain": None, "speculative": None}


def test_the_best_of_transformers_is_what_we_are_measured_against() -> None:
    slow = [Run(5, 1.0), Run(5, 1.0), Run(5, 1.0)]
    sweep = {Assistance(1): 4.0, Assistance(2): 6.0, Assistance(3): 5.0}
    figures = timing(sweep, plain=PLAIN, speculative=FAST, transformers_assisted_best=slow).figures()
    assert figures["best_assistance"] == "2"
    assert figures["ratio_to_best_assisted"] == 4.0
    assert figures["median_ratios_to_plain"]["transformers_assisted_best"] == 0.5


def test_longer_prompts_have_answered_ones_before_them() -> None:
    prompts, turns = [[1, 2], [3], [4, 5, 6]], [[1, 2, 10], [3, 11, 12], [4, 5, 6, 13]]
    assert lengthened(prompts, turns, 5) == [
        [3, 11, 12, 1, 2],
        [4, 5, 6, 13, 3],
        [1, 2, 10, 4, 5, 6],
    ]
    assert lengthened(prompts, turns, 9)[1] == [4, 5, 6, 13, 1, 2, 10, 4, 5, 6, 13, 3]
    assert lengthened(prompts, turns, 1) == prompts
    assert lengthened([[7]], [[7, 8]], 4) == [[7, 8, 7, 8, 7]]  # where there is no other


def test_weights_read_for_a_token() -> None:
    # 2 passes of the target and 5 of the draft, for 4 tokens
    trace = Trace([Round(3, 2, 3), Round(2, 0, 1)])
    found = timing(plain=PLAIN, speculative=FAST, trace=trace).figures()["weight_bytes_per_token"]
    assert found == {"plain": 1000, "speculative": (2 * 1000 + 5 * 100) / 4}


def test_the_table_tells_latency_and_memory_in_80_columns() -> None:
    arrivals = (Arrival(0.123, 1), Arrival(0.145, 3), Arrival(0.167, 2))
    run = Run(6, 0.17, arrivals, Memory(1_234_000_000, 56_000_000))
    modes = ("plain", "speculative", "transformers_plain", BEST_ASSISTED, "transformers_assisted_default")
    trace = Trace([Round(2, 2, 3)], Seconds(0.2, 0.7, 0.1))
    one = timing({Assistance(3): 6.0}, trace, **dict.fromkeys(modes, [run] * 5))
    out = io.StringIO()
    Console(file=out, width=80).print(bench_tables([one, one]))
    (told,) = {line for line in out.getvalue().splitlines() if "assisted, default" in line}
    assert [cell.strip() for cell in told.strip("│").split("│")] == [
        "assisted, default",
        "123 (123 to 123)",
        "8.8",
        "22.0 22.0 22.0",
        "1234, 56",
    ]
    assert "20% 70% 10%" in out.getvalue()


def test_a_decoder_is_timed_token_by_token(
    tiny_llama: Callable[..., LlamaForCausalLM], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    target, draft = tiny_llama(seed=0), tiny_llama(seed=1, num_layers=1)
    speculation = SpeculationParams(num_draft_tokens=2, never_slower=False)
    decoder = SpeculativeDecoder(target, byte_tokenizer, DraftModelProposer(draft, 259), speculation)
    prompts = [[1, 40 + number, 50] for number in range(5)]
    found = _time(decoder, prompts, SamplingParams(max_new_tokens=12), ProgressBar("timing", 10), None, [])
    # fp32, untied: everything that a pass multiplies with, and not the table of embeddings
    passed = [
        4 * sum(weight.numel() for name, weight in model.named_parameters() if "embed_tokens" not in name)
        for model in (target, draft)
    ]
    assert found.weights == Weights(*passed)
    trace = found.trace
    read = trace.num_target_passes * passed[0] + trace.num_drafted * passed[1]
    assert found.weight_bytes_per_token == {"plain": passed[0], "speculative": read / trace.num_committed}
    for mode, runs in found.runs.items():
        for run in runs:
            assert sum(arrival.num_tokens for arrival in run.arrivals) == run.num_tokens
            assert len(run.token_gaps) == run.num_tokens - 1
            assert run.first_token_seconds is not None
            assert 0 < run.first_token_seconds < run.arrivals[-1].seconds <= run.seconds
            assert run.first_token_seconds + sum(run.token_gaps) == pytest.approx(run.arrivals[-1].seconds)
        assert mode == "speculative" or all(arrival.num_tokens == 1 for run in runs for arrival in run.arrivals)
    assert sum(len(run.arrivals) for run in found.runs["speculative"]) == trace.num_target_passes


def test_everybody_goes_first_in_turn() -> None:
    calls: list[tuple[str, int, int]] = []

    def mode(name: str) -> Callable[..., list[int]]:
        def decode(prompt: list[int], params: SamplingParams, /, *, on_tokens: OnTokens) -> list[int]:
            calls.append((name, prompt[0], torch.initial_seed()))
            on_tokens(2)
            on_tokens(prompt[0] - 2)
            return [0] * prompt[0]

        return decode

    bar = ProgressBar("turns", 12)
    runs = _take_turns({name: mode(name) for name in "abc"}, [[5], [6], [7], [8]], SamplingParams(), bar, CPU)
    assert "".join(name for name, _, _ in calls) == "abcbcacababc"
    assert [seed for _, _, seed in calls] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    for name in "abc":
        assert [run.num_tokens for run in runs[name]] == [5, 6, 7, 8]
        assert [[each.num_tokens for each in run.arrivals] for run in runs[name]] == [[2, 3], [2, 4], [2, 5], [2, 6]]
    assert bar.done == bar.total
