"""The finished pair accepts what was predicted for it, or the run fails."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decode.params import SamplingParams
from distill import parity
from distill.cache import cache
from distill.config import CacheConfig, RespondConfig, RunConfig
from distill.module import TokenScores
from distill.parity import difference_interval, prove_parity, students_quantile, why_unprovable
from distill.responses import respond
from distill.run import distill, prepare
from distill.task import DistillTask
from distill.texts import Rows
from train.config import TrainConfig
from train.loop import FitResult

Configure = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def responses(distill_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of more held-out prompts than the shared ones have."""
    folder = tmp_path_factory.mktemp("responses")
    rows = [{"prompt": f"Say {n}.", "split": "heldout" if n % 3 else "train"} for n in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return respond(respond_config(distill_folders["target"], folder, temperature=1.0))


def respond_config(target: Path, folder: Path, **sampling: float) -> RespondConfig:
    return RespondConfig(
        target=str(target),
        prompts=str(folder / "prompts.jsonl"),
        output=str(folder / "responses"),
        sampling=SamplingParams(max_new_tokens=48, seed=0, **sampling),
    )


@pytest.fixture(scope="module")
def run(
    distill_folders: dict[str, Path], responses: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FitResult, DistillTask, RunConfig]:
    """One that passed, and what it was of."""
    train = TrainConfig(
        output=str(tmp_path_factory.mktemp("run") / "run"), max_steps=20, batch_size=8, learning_rate=1e-2
    )
    config = RunConfig(pair=str(distill_folders["reduced"]), responses=str(responses), measure_speed=False, train=train)
    return distill(config), prepare(config).task, config


@pytest.fixture
def trained(run: tuple[FitResult, DistillTask, RunConfig], tmp_path: Path) -> tuple[DistillTask, Path, RunConfig]:
    """A pair that learnt something, and what its parity is proved with; not proved yet."""
    shutil.copytree(run[0].result, tmp_path / "trained" / "pair")
    return run[1], tmp_path / "trained" / "pair", run[2]


def test_a_sound_pair_passes_and_says_so(run: tuple[FitResult, DistillTask, RunConfig]) -> None:
    result = run[0]
    found = json.loads((result.result.parent / "parity.json").read_text())
    assert set(found) == {"sampled", "greedy"}
    for kind in found.values():
        low, high = kind["difference_interval"]
        difference = kind["measured_block_efficiency"] - kind["predicted_block_efficiency"]
        assert low <= 0 <= high
        assert low <= difference <= high
        assert kind["num_prompts"] == 40
    assert found["sampled"]["predicted_block_efficiency"] > 1.2
    # of all held-out texts, whose draft was not yet rounded to the target's dtype
    evaluated = result.metrics["eval/block_efficiency"]
    assert found["sampled"]["predicted_block_efficiency"] == pytest.approx(evaluated, rel=1e-4)
    evaluated = result.metrics["eval/greedy_block_efficiency"]
    assert found["greedy"]["predicted_block_efficiency"] == pytest.approx(evaluated, rel=1e-4)


def test_greedy_decoding_accepts_exactly_what_was_predicted(trained: tuple[DistillTask, Path, RunConfig]) -> None:
    """Nothing is left to chance: the texts are those that will be decoded."""
    prove_parity(*trained)
    found = json.loads((trained[1].parent / "parity.json").read_text())["greedy"]
    assert found["measured_block_efficiency"] == pytest.approx(found["predicted_block_efficiency"], rel=1e-9)


@pytest.mark.parametrize(("name", "change"), [("acceptance", 0.2), ("acceptance", -0.2), ("greedy_acceptance", 0.2)])
def test_another_acceptance_than_predicted_fails(
    name: str, change: float, trained: tuple[DistillTask, Path, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_of = DistillTask.scores

    def off(self: DistillTask, rows: Rows) -> list[TokenScores]:
        return [
            replace(each, **{name: (getattr(each, name) + change).clamp(0, 1)})  # type: ignore[arg-type]
            for each in scores_of(self, rows)
        ]

    task, pair, config = trained
    with monkeypatch.context() as patch:
        patch.setattr(DistillTask, "scores", off)
        with pytest.raises(ValueError, match=r"^parity: \d.\d+ tokens per target pass were predicted for .*, and it "):
            prove_parity(task, pair, config)
    assert not (pair.parent / "parity.json").exists()
    prove_parity(task, pair, config)  # the control
    assert (pair.parent / "parity.json").is_file()


def test_a_decoder_that_drafts_something_else_fails(
    trained: tuple[DistillTask, Path, RunConfig], distill_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with another draft than the pair's."""
    task, pair, config = trained
    decoder_of = parity.SpeculativeDecoder.from_pretrained
    untrained = str(distill_folders["reduced"])
    monkeypatch.setattr(
        parity.SpeculativeDecoder, "from_pretrained", lambda target, _, *more: decoder_of(target, untrained, *more)
    )
    with pytest.raises(ValueError, match=r"training and serving disagree, do not use this pair$"):
        prove_parity(task, pair, config)


def test_a_run_whose_parity_fails_fails_again(
    configure_run: Configure, responses: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure_run(responses=responses, max_steps=2, parity_prompts=8)
    with monkeypatch.context() as patch:
        patch.setattr(parity, "difference_interval", lambda *_: (0.1, 0.2))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^parity: "):
                distill(config)
    proofs: list[Path] = []
    monkeypatch.setattr(
        "distill.run.prove_parity", lambda task, pair, _: proofs.append(prove_parity(task, pair, config))
    )
    distill(config)
    file = Path(config.train.output) / "parity.json"
    written = file.stat().st_mtime_ns
    distill(config)
    assert len(proofs) == 2
    assert file.stat().st_mtime_ns == written  # it was proved already


def test_a_kept_signal_of_few_tokens_promises_the_same(
    trained: tuple[DistillTask, Path, RunConfig], responses: Path, tmp_path: Path
) -> None:
    """alpha is an interval then, but what decoding accepts depends on the texts' own tokens alone."""
    task, pair, config = trained
    folder = cache(CacheConfig(responses=str(responses), output=str(tmp_path / "cache"), top_k=2))
    config = replace(config, responses=str(folder), teacher="cached")
    config = replace(config, train=replace(config.train, output=str(tmp_path / "other")))
    kept = prepare(config).task
    kept.module.draft.load_state_dict(task.module.draft.state_dict())
    figures, exact = kept.evaluate(kept.module), task.evaluate(task.module)
    assert figures["alpha"] < exact["alpha"] - 0.01 < exact["alpha"] + 0.01 < figures["alpha_high"]
    for name in ("block_efficiency", "beta_1", "greedy_block_efficiency"):
        assert figures[name] == pytest.approx(exact[name], rel=1e-4)
    assert why_unprovable(kept, config) is None
    prove_parity(kept, pair, config)


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.9}])
def test_texts_sampled_otherwise_prove_nothing(
    sampling: dict[str, float],
    distill_folders: dict[str, Path],
    responses: Path,
    configure_run: Configure,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    shutil.copy(responses.parent / "prompts.jsonl", tmp_path)
    others = respond(respond_config(distill_folders["target"], tmp_path, **sampling))
    config = configure_run(responses=others, max_steps=1, parity_prompts=8)
    result = distill(config)
    reason = f"{others} was not sampled at temperature 1.0 and nothing else"
    assert f"parity is not proved: {reason}" in caplog.messages
    assert not (result.result.parent / "parity.json").exists()
    assert why_unprovable(prepare(config).task, config) == reason
    config = configure_run(responses=responses, max_steps=1, parity_prompts=8, output=str(tmp_path / "other"))
    assert why_unprovable(prepare(config).task, config) is None


# --- the interval -----------------------------------------------------------------------------------------


def test_the_interval_of_two_prompts_by_hand() -> None:
    """Drawn anew, two prompts are the first twice, the second twice, or both: 1/4, 1/4 and 1/2 of the time."""
    predicted = [(10.0, 5.0), (30.0, 10.0)]  # 2, 3, and 40 / 15 of both
    measured = [(12.0, 4.0), (20.0, 10.0)]  # 3, 2, and 32 / 14
    difference = 32 / 14 - 40 / 15
    mean = 0.25 * 1 + 0.25 * -1 + 0.5 * difference
    variance = 0.25 * (1 - mean) ** 2 + 0.25 * (-1 - mean) ** 2 + 0.5 * (difference - mean) ** 2
    reach = students_quantile(1) * math.sqrt(2 * variance)
    low, high = difference_interval(predicted, measured)
    assert low + high == pytest.approx(2 * difference)
    assert high - low == pytest.approx(2 * reach, rel=0.02)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(5, 6.869), (9, 4.781), (20, 3.850), (40, 3.551), (120, 3.373), (10**6, 3.2905)]
)
def test_the_quantile_is_that_of_a_table(freedom: int, quantile: float) -> None:
    """For 0.9995."""
    assert students_quantile(freedom) == pytest.approx(quantile, rel=0.03 if freedom < 9 else 0.003)


@pytest.mark.parametrize("count", [4, 8, 40])
def test_a_sound_pair_passes_whatever_the_number_of_prompts(count: int) -> None:
    generator, failed = np.random.default_rng(0), 0
    for seed in range(150):
        passes = generator.uniform(20, 35, count)
        predicted = [(48.0, float(number)) for number in passes + generator.normal(0, 1.5, count)]
        measured = [(48.0, float(number)) for number in passes + generator.normal(0, 3, count)]
        low, high = difference_interval(predicted, measured, seed)
        failed += not low <= 0 <= high
    assert failed <= 1


@pytest.mark.parametrize("accepted", [1e-4, 0.02, 0.2])
@pytest.mark.parametrize("count", [4, 40])
def test_a_draft_that_is_hardly_ever_right_passes(count: int, accepted: float) -> None:
    """Of most prompts nothing is accepted, be it from many or from all of them."""
    generator, failed = np.random.default_rng(0), 0
    for seed in range(100):
        measured = [(48.0, 48.0 - number) for number in generator.poisson(accepted, count)]
        low, high = difference_interval([(48.0, 48.0 - accepted)] * count, measured, seed)
        failed += not low <= 0 <= high
    assert failed <= 1


def test_the_interval_is_of_ratios_of_sums_and_paired() -> None:
    """Prompts that differ more from each other than the two sides do: resampled together, that cancels."""
    generator = np.random.default_rng(0)
    passes = generator.integers(5, 50, 100).astype(float)
    tokens = passes * generator.uniform(1, 8, 100)
    noisy = tokens * (1 + 0.2 * generator.standard_normal(100))
    predicted, measured = (list(zip(each, passes, strict=True)) for each in (tokens, noisy))
    low, high = difference_interval(predicted, measured)
    # a normal approximation: the difference of the sums, over the passes
    error = (noisy - tokens).std() * 10 / passes.sum()
    assert high - low == pytest.approx(2 * students_quantile(99) * error, rel=0.1)
    # the control: the passes could have been another prompt's, and nothing would cancel
    shuffled = list(zip(noisy, generator.permutation(passes), strict=True))
    other = difference_interval(predicted, shuffled)
    assert other[1] - other[0] > 1.5 * (high - low)
    assert difference_interval(predicted, measured) == (low, high)
    assert difference_interval(predicted, measured, seed=1) != (low, high)
