"""From a configuration to a trained pair: which loss, from which signal, which weights, and that it learns."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from decode.costs import Costs
from decode.decoder import SpeculativeDecoder
from decode.pair import Pair, load_draft_vocab, load_model, save_draft_vocab
from decode.params import SamplingParams
from distill import run
from distill.build import build
from distill.cache import cache
from distill.config import BranchesConfig, BuildConfig, CacheConfig, FreshConfig, ObjectiveConfig, RunConfig, Stage
from distill.module import DistillModule
from distill.responses import load_responses
from distill.run import Prepared, distill, prepare
from distill.teacher import Batch, TeacherHead
from train.config import DataLimits, TrainConfig
from train.loop import FitResult, StepOutput

Configure = Callable[..., RunConfig]
KINDS = ("hidden_states", "top_k")


def batch_of(prepared: Prepared, num_rows: int = 6) -> Batch:
    return prepared.task.collate([prepared.rows[place] for place in range(num_rows)])


def draft_of(prepared: Prepared) -> PreTrainedModel:
    return prepared.task.module.draft


def draft_in(pair: Path) -> PreTrainedModel:
    draft: PreTrainedModel = AutoModelForCausalLM.from_pretrained(pair / "draft")
    return draft


def weights_of(result: FitResult) -> dict[str, Tensor]:
    return draft_in(result.result).state_dict()


def difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """The largest of the tensors' relative differences, in the Euclidean norm."""
    return max(((one[name] - two[name]).norm() / one[name].norm()).item() for name in one)


def true_log_probabilities(
    target: PreTrainedModel, draft: PreTrainedModel, rows: Any, temperature: float, token_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """log p and log q over the whole vocabulary before each response token, float64 [tokens, vocab].

    Row by row, from the models' own logits; q is nothing outside the draft's output vocabulary.
    """
    log_p, log_q = [], []
    for row in rows:
        start = row["response_mask"].index(True)
        ids = torch.tensor([row["input_ids"][:-1]])
        with torch.no_grad():
            p_logits = target(input_ids=ids).logits[0, start - 1 :]
            q_logits = draft(input_ids=ids).logits[0, start - 1 :]
        if token_ids is not None:
            kept = torch.zeros(q_logits.shape[1], dtype=torch.bool).index_fill(0, token_ids, True)
            q_logits = q_logits.masked_fill(~kept, -torch.inf)
        log_p.append((p_logits.double() / temperature).log_softmax(-1))
        log_q.append((q_logits.double() / temperature).log_softmax(-1))
    return torch.cat(log_p), torch.cat(log_q)


def alpha_of(pair: Path, folders: dict[str, Path]) -> float:
    """Mean of sum_v min(p, q) over the held-out responses' tokens, from the folder as it was saved."""
    target = AutoModelForCausalLM.from_pretrained(folders["target"])
    rows = list(load_responses(str(folders["responses"]), "heldout"))
    draft, token_ids = draft_in(pair), load_draft_vocab(pair)
    width = min(model.get_output_embeddings().weight.shape[0] for model in (target, draft))
    # beyond the target's tokens there is nothing to draft
    token_ids = torch.arange(width) if token_ids is None else token_ids
    log_p, log_q = true_log_probabilities(target, draft, rows, 1.0, token_ids)
    return torch.minimum(log_p.exp()[:, :width], log_q.exp()[:, :width]).sum(-1).mean().item()


# --- the loss, whatever brings the signal and the texts ---------------------------------------------------


@pytest.mark.parametrize("pair", ["whole", "reduced"])
@pytest.mark.parametrize(("responses", "temperature"), [("responses", 0.7), ("hidden_states", 0.7), ("top_k", 1.0)])
def test_the_loss_is_that_of_the_wanted_signal_temperature_and_vocabulary(
    responses: str, temperature: float, pair: str, distill_folders: dict[str, Path], configure_run: Configure
) -> None:
    config = configure_run(
        pair=distill_folders[pair],
        responses=distill_folders[responses],
        teacher="online" if responses == "responses" else "cached",
        temperature=temperature,
        chunk_size=50,
    )
    prepared = prepare(config)
    batch = batch_of(prepared)
    assert ("teacher_hidden" in batch, "top_ids" in batch) == (responses == "hidden_states", responses == "top_k")
    output: StepOutput = prepared.task.module(batch)
    target, token_ids = load_model(str(distill_folders["target"])), load_draft_vocab(distill_folders[pair])
    rows = [prepared.rows[place] for place in range(6)]
    log_p, log_q = true_log_probabilities(target, draft_of(prepared), rows, temperature, token_ids)
    kept = log_q[0] > -torch.inf
    log_p, log_q = log_p[:, kept], log_q[:, kept]
    # the likeliest tokens are kept in fp16
    tolerance = {"rel": 1e-3, "abs": 0.05} if responses == "top_k" else {"rel": 1e-4, "abs": 2e-3}
    assert output.num_tokens == len(log_p) > 100
    assert output.loss_sum.item() == pytest.approx((log_p.exp() * (log_p - log_q)).sum().item(), **tolerance)
    alpha = torch.minimum(log_p.exp(), log_q.exp()).sum().item()
    assert output.metric_sums["alpha"].item() == pytest.approx(alpha, **tolerance)


STEPS = {"max_steps": 4, "log_every_steps": 1, "learning_rate": 1e-2, "train_embeddings": True}


@pytest.fixture
def train(configure_run: Configure, tmp_path: Path) -> Callable[..., FitResult]:
    """A few steps, each of which is logged, in a folder of their own."""
    runs: list[FitResult] = []

    def train(**changes: Any) -> FitResult:
        output = str(tmp_path / f"run-{len(runs)}")
        runs.append(distill(configure_run(**STEPS | {"output": output} | changes)))
        return runs[-1]

    return train


def losses(result: FitResult) -> list[float]:
    lines = (result.result.parent / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_signal_teaches_what_a_pass_does(
    kind: str, train: Callable[..., FitResult], distill_folders: dict[str, Path]
) -> None:
    one, other = train(), train(responses=distill_folders[kind], teacher="cached")
    tolerance = 1e-6 if kind == "hidden_states" else 1e-3
    assert losses(other) == pytest.approx(losses(one), rel=tolerance)
    assert difference(weights_of(one), weights_of(other)) < (1e-5 if kind == "hidden_states" else 0.005)
    assert difference(weights_of(one), weights_of(train(seed=1))) > 0.03  # the control


@pytest.mark.parametrize("teacher", ["online", "cached"])
def test_packed_texts_teach_what_padded_ones_do(
    teacher: str, train: Callable[..., FitResult], distill_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    forward = DistillModule.forward

    def look(self: DistillModule, batch: Batch) -> StepOutput:
        shapes.append(tuple(batch["input_ids"].shape))
        return forward(self, batch)

    monkeypatch.setattr(DistillModule, "forward", look)
    given = {"teacher": teacher, "responses": distill_folders["responses" if teacher == "online" else "hidden_states"]}
    padded, packed = train(**given), train(**given, packing_length=160)
    # fewer sequences of more tokens
    pairs = list(zip(shapes[:4], shapes[4:], strict=True))
    assert all(packed[0] < padded[0] and padded[1] < packed[1] <= 160 for padded, packed in pairs)
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-5)
    assert difference(weights_of(padded), weights_of(packed)) < 1e-4


def test_compiling_needs_a_compiler(configure_run: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"^compile: true needs .* there is no no-such-compiler; install one, or use"):
        prepare(configure_run(compile=True))


def test_a_batch_of_eight_is_eight_of_one(train: Callable[..., FitResult]) -> None:
    together, one_by_one = train(micro_batch_size=8), train(micro_batch_size=1)
    assert losses(one_by_one) == pytest.approx(losses(together), rel=1e-5)
    assert difference(weights_of(together), weights_of(one_by_one)) < 1e-4


# --- stages and branches ----------------------------------------------------------------------------------


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """By which losses each training step learnt, and whether from branches."""
    found: list[tuple[str, bool]] = []
    forward = DistillModule.forward

    def look(self: DistillModule, batch: Batch) -> StepOutput:
        found.append(("+".join(self.objective.weights), self.branching))
        return forward(self, batch)

    monkeypatch.setattr(DistillModule, "forward", look)
    return found


STAGES = (
    Stage(losses={"forward_kl": 1.0}, share=0.25),
    Stage(losses={"lk": 0.5, "tv": 0.5}, share=0.5),
    Stage(losses={"tv": 1.0}),
)


def test_stages_last_their_share_of_the_steps(
    train: Callable[..., FitResult], steps_taken: list[tuple[str, bool]]
) -> None:
    train(max_steps=12, objective=ObjectiveConfig(stages=STAGES))
    assert [losses for losses, _ in steps_taken] == ["forward_kl"] * 3 + ["lk+tv"] * 6 + ["tv"] * 3
    assert not any(branching for _, branching in steps_taken)


def test_a_stage_ends_when_it_no_longer_helps(
    train: Callable[..., FitResult], steps_taken: list[tuple[str, bool]]
) -> None:
    """Next to no learning rate: the first evaluation is the best there will be, give or take a rounding."""
    stages = (Stage(losses={"forward_kl": 1.0}, plateau_evals=2), Stage(losses={"tv": 1.0}))
    train(max_steps=10, eval_every_steps=2, learning_rate=1e-20, objective=ObjectiveConfig(stages=stages))
    assert [losses for losses, _ in steps_taken] == ["forward_kl"] * 6 + ["tv"] * 4


def test_branches_have_their_share_of_the_steps(
    train: Callable[..., FitResult], steps_taken: list[tuple[str, bool]]
) -> None:
    changes = {"max_steps": 40, "branches": BranchesConfig(share=0.5, per_text=2)}
    changes |= {"batch_size": 4, "micro_batch_size": 2}  # of 36 rows
    train(**changes)
    first = [branching for _, branching in steps_taken[::2]]
    assert first == [branching for _, branching in steps_taken[1::2]]  # a step is one thing or the other
    assert 10 < sum(first) < 30
    steps_taken.clear()
    train(**changes, seed=5)
    assert [branching for _, branching in steps_taken[::2]] != first


class Killed(Exception):
    """As by a signal, between two steps."""


@pytest.mark.parametrize("at", [3, 8])
def test_stages_and_branches_go_on_where_they_were(
    at: int, train: Callable[..., FitResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bit for bit; the checkpoints are after steps 2, 4, …, so that one step is taken again."""
    changes = {
        "max_steps": 12,
        "checkpoint_every_steps": 2,
        "eval_every_steps": 3,
        "objective": ObjectiveConfig(stages=(STAGES[0], Stage(losses={"tv": 1.0}, plateau_evals=1), STAGES[2])),
        "branches": BranchesConfig(share=0.5, per_text=3),
    }
    whole = train(**changes)
    forward, taken = DistillModule.forward, 0

    def killed(self: DistillModule, batch: Batch) -> StepOutput:
        nonlocal taken
        taken += 1
        if taken == at + 1:
            raise Killed
        return forward(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(DistillModule, "forward", killed)
        with pytest.raises(Killed):
            train(**changes, output=str(tmp_path / "parts"))
    parts = train(**changes, output=str(tmp_path / "parts"))
    assert parts.resumed_from == at - at % 2
    ours, theirs = weights_of(parts), weights_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(parts) == losses(whole)


# --- which weights ----------------------------------------------------------------------------------------


def test_the_target_is_no_part_of_the_module(distill_folders: dict[str, Path], configure_run: Configure) -> None:
    prepared = prepare(configure_run(train_embeddings=True))
    module = prepared.task.module
    target = module._frozen[0]
    assert target is not None
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert not {id(p) for p in target.parameters()} & {id(p) for p in module.parameters()}
    assert all(name.startswith("draft.") for name in module.state_dict())
    module(batch_of(prepared)).loss_sum.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    original = AutoModelForCausalLM.from_pretrained(distill_folders["target"]).state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in target.state_dict().items())
    for kind in KINDS:  # a kept signal needs none
        assert prepare(configure_run(teacher="cached", responses=distill_folders[kind])).task.module._frozen[0] is None


def test_of_a_kept_signal_the_targets_layers_are_not_loaded(
    distill_folders: dict[str, Path], configure_run: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: dict[str, int] = {}

    def look(*arguments: Any, **options: Any) -> PreTrainedModel:
        model = load_model(*arguments, **options)
        loaded[options.get("role", "draft")] = len(model.get_decoder().layers)
        return model

    monkeypatch.setattr(run, "load_model", look)
    for kind in KINDS:
        prepare(configure_run(responses=distill_folders[kind], teacher="cached"))
        assert loaded["target"] == 0
    prepare(configure_run())
    assert loaded["target"] > 0  # the control: a pass of the target needs them


def test_rows_and_their_lengths(configure_run: Configure) -> None:
    prepared = prepare(configure_run())
    assert prepared.lengths == [len(row["input_ids"]) for row in prepared.rows]
    assert (len(prepared.rows), len(prepared.task.texts.heldout)) == (36, 4)


def test_the_teachers_head_is_that_of_the_temperature_and_vocabulary(
    distill_folders: dict[str, Path], configure_run: Configure
) -> None:
    head = prepare(configure_run(temperature=0.7)).task.module.teacher
    assert isinstance(head, TeacherHead)
    assert head.temperature == 0.7
    assert torch.equal(head.token_ids, load_draft_vocab(distill_folders["reduced"]))


def with_bias(byte_tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """A target whose head has a bias."""
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, eos_token_id=2
    )
    model = PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder / "phi")
    byte_tokenizer.save_pretrained(folder / "phi")
    return folder / "phi"


@pytest.mark.parametrize("kind", ["tied", "untied", "with a bias"])
@pytest.mark.parametrize("train_embeddings", [False, True])
def test_what_is_trained_and_that_all_of_it_gets_a_gradient(
    train_embeddings: bool,
    kind: str,
    distill_folders: dict[str, Path],
    tiny_model_folder: Callable[..., Path],
    byte_tokenizer: PreTrainedTokenizerFast,
    configure_run: Configure,
    tmp_path: Path,
) -> None:
    """A trainable parameter without gradient makes several processes wait for each other for ever."""
    pair = distill_folders["reduced"]
    if kind != "tied":
        target = (
            tiny_model_folder(num_layers=2, hidden_size=16) if kind == "untied" else with_bias(byte_tokenizer, tmp_path)
        )
        pair = build(BuildConfig(target=str(target), output=str(tmp_path / "pair"), layers=1))
        save_draft_vocab(pair, torch.arange(0, 259, 2))
    prepared = prepare(
        configure_run(pair=pair, train_embeddings=train_embeddings, data_limits=DataLimits(min_coverage=0.0))
    )
    embeddings = {"draft.model.embed_tokens.weight"} | (set() if kind == "tied" else {"draft.lm_head.weight"})
    module = prepared.task.module
    others = {name for name, _ in module.named_parameters()} - embeddings - {"draft.lm_head.bias"}
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trainable == others | (embeddings if train_embeddings else set())
    module(batch_of(prepared)).loss_sum.backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert not parameter.requires_grad or parameter.grad.abs().max() > 0, name


# --- the result -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(distill_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, FitResult]:
    """Thirty steps on each kind of pair."""
    results = {}
    for name in ("whole", "reduced"):
        output = tmp_path_factory.mktemp("run") / name
        train = TrainConfig(output=str(output), max_steps=30, batch_size=8, learning_rate=1e-2, log_every_steps=5)
        results[name] = distill(
            RunConfig(
                pair=str(distill_folders[name]),
                responses=str(distill_folders["responses"]),
                chunk_size=50,
                measure_speed=False,
                train=train,
            )
        )
    return results


@pytest.mark.parametrize("pair", ["whole", "reduced"])
def test_training_raises_alpha_and_reports_that_of_the_saved_pair(
    pair: str, distill_folders: dict[str, Path], learnt: dict[str, FitResult]
) -> None:
    result = learnt[pair]
    assert result.result.name == "pair"
    assert result.metrics["eval/alpha"] == pytest.approx(alpha_of(result.result, distill_folders), abs=2e-6)
    assert result.metrics["eval/alpha"] > alpha_of(distill_folders[pair], distill_folders) + 0.1


def test_next_to_no_learning_rate_leaves_alpha_where_it_was(
    distill_folders: dict[str, Path], configure_run: Configure
) -> None:
    """The control of the test above: it is the training that raises alpha."""
    result = distill(configure_run(max_steps=30, learning_rate=1e-12))
    before = alpha_of(distill_folders["reduced"], distill_folders)
    assert result.metrics["eval/alpha"] == pytest.approx(before, abs=1e-5)
    assert alpha_of(result.result, distill_folders) == pytest.approx(before, abs=1e-5)


def test_tokens_are_selected_by_a_pair_trained_before(
    distill_folders: dict[str, Path], learnt: dict[str, FitResult], configure_run: Configure
) -> None:
    """AdaSPEC: only the half of the tokens is learnt on which the trained draft is furthest ahead."""
    reference = str(learnt["reduced"].result)
    objective = ObjectiveConfig(selected_fraction=0.5, reference=reference)
    config = configure_run(objective=objective, chunk_size=50, max_steps=30, learning_rate=1e-2)
    prepared = prepare(config)
    rows = [prepared.rows[place] for place in range(6)]
    target, token_ids = load_model(str(distill_folders["target"])), load_draft_vocab(distill_folders["reduced"])
    assert token_ids is not None
    divergences = []
    for draft in (draft_of(prepared), draft_in(learnt["reduced"].result)):
        log_p, log_q = (each[:, token_ids] for each in true_log_probabilities(target, draft, rows, 1.0, token_ids))
        divergences.append((log_p.exp() * (log_p - log_q)).sum(dim=1))
    ours, theirs = divergences
    count = round(0.5 * len(ours))
    expected = ours[(ours - theirs).topk(count).indices].mean().item()
    output: StepOutput = prepared.task.module(batch_of(prepared))
    assert output.loss_sum.item() / output.num_tokens == pytest.approx(expected, rel=1e-3)
    assert abs(expected - ours.mean().item()) > 0.01  # the control
    before = alpha_of(distill_folders["reduced"], distill_folders)
    assert alpha_of(distill(config).result, distill_folders) > before + 0.05


def test_the_result_is_a_pair(distill_folders: dict[str, Path], learnt: dict[str, FitResult]) -> None:
    built, trained = distill_folders["reduced"], learnt["reduced"].result
    assert sorted(path.name for path in trained.iterdir()) == ["draft", "draft_vocab.safetensors", "pair.json"]
    assert torch.equal(load_draft_vocab(trained), load_draft_vocab(built))
    pair = Pair.load(trained)
    assert pair.target == Pair.load(built).target
    assert pair.sampling == {"temperature": 1.0}
    assert pair.provenance["resolved_config"]["pair"] == str(built)
    assert AutoTokenizer.from_pretrained(trained / "draft").chat_template
    before, after = draft_in(built), draft_in(trained)
    assert torch.equal(before.lm_head.weight, after.lm_head.weight)  # frozen: the target's
    assert after.lm_head.weight is after.model.embed_tokens.weight
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert sum(changed) == len(changed) - 1
    assert not (learnt["whole"].result / "draft_vocab.safetensors").exists()


def test_trained_embeddings_stay_tied_and_whole(distill_folders: dict[str, Path], configure_run: Configure) -> None:
    result = distill(configure_run(train_embeddings=True, max_steps=3, learning_rate=1e-2, weight_decay=0.0))
    before, after = draft_in(distill_folders["reduced"]), draft_in(result.result)
    assert after.lm_head.weight is after.model.embed_tokens.weight
    assert after.lm_head.weight.shape == before.lm_head.weight.shape
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)


@pytest.mark.parametrize(
    ("mixed_precision", "of_target"), [("bf16", torch.bfloat16), ("no", torch.float32), ("auto", torch.float32)]
)
def test_the_draft_is_saved_in_the_targets_dtype_and_trained_in_fp32(
    mixed_precision: str,
    of_target: torch.dtype,
    distill_folders: dict[str, Path],
    configure_run: Configure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine that multiplies bf16 slowly, where the target's passes are in fp32 too."""
    for module in ("train.engine", "distill.teacher"):
        monkeypatch.setattr(f"{module}.has_bf16_products", lambda: False)
    target = load_model(str(distill_folders["target"])).bfloat16()
    target.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(distill_folders["target"]).save_pretrained(tmp_path / "target")
    pair = build(BuildConfig(target=str(tmp_path / "target"), output=str(tmp_path / "pair"), layers=2))
    prepared = prepare(configure_run(pair=pair, mixed_precision=mixed_precision))
    assert {parameter.dtype for parameter in draft_of(prepared).parameters()} == {torch.float32}
    assert prepared.task.module.teacher.weight.dtype == of_target
    distilled = distill(configure_run(pair=pair, mixed_precision=mixed_precision, max_steps=1)).result
    assert json.loads((distilled / "draft" / "config.json").read_text())["dtype"] == "bfloat16"
    assert draft_in(distilled).dtype == torch.bfloat16


def test_what_was_measured_of_the_draft_before_is_forgotten(
    distill_folders: dict[str, Path], configure_run: Configure, tmp_path: Path
) -> None:
    shutil.copytree(distill_folders["reduced"], tmp_path / "pair")
    pair = Pair.load(tmp_path / "pair")
    pair.measured = {"alpha": 0.1}
    pair.save(tmp_path / "pair")
    result = distill(configure_run(pair=tmp_path / "pair", max_steps=1))
    assert Pair.load(result.result).measured == {}


def test_a_target_that_moved_is_named_where_it_is_now(
    distill_folders: dict[str, Path], configure_run: Configure, tmp_path: Path
) -> None:
    shutil.copytree(distill_folders["target"], tmp_path / "moved")
    result = distill(configure_run(target=tmp_path / "moved", max_steps=1))
    pair, before = Pair.load(result.result), Pair.load(distill_folders["reduced"])
    assert pair.target_id() == str(tmp_path / "moved")
    assert {**pair.target, "id": None} == {**before.target, "id": None}


def test_a_finished_run_is_left_alone(configure_run: Configure) -> None:
    config = configure_run(max_steps=2)
    first = distill(config)
    before = {path: path.stat().st_mtime_ns for path in first.result.parent.rglob("*")}
    again = distill(config)
    assert (first.resumed_from, again.resumed_from) == (0, 2)
    assert again.metrics == first.metrics
    assert {path: path.stat().st_mtime_ns for path in first.result.parent.rglob("*")} == before
    with pytest.raises(ValueError, match=r"^temperature: 0.5 differs from 1.0, with which .* was begun"):
        distill(configure_run(max_steps=2, temperature=0.5))


# --- costs ------------------------------------------------------------------------------------------------


def test_costs_are_measured_once_and_then_read(configure_run: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine at hand; another process, or another start, must predict the same."""
    measured: list[tuple[Any, SamplingParams]] = []

    def measure(decoder: SpeculativeDecoder, params: SamplingParams) -> Costs:
        measured.append((decoder.draft, params))
        return Costs(seconds_per_token=0.1, draft_step=0.25, target_pass=[1.0 + 0.1 * n for n in range(9)])

    monkeypatch.setattr(run, "measure_costs", measure)
    config = configure_run(max_steps=1, measure_speed=True, temperature=0.7)
    first = distill(config)
    file = first.result.parent / "costs.json"
    assert json.loads(file.read_text())["draft_step"] == 0.25
    gamma = int(first.metrics["eval/best_num_draft_tokens"])
    assert 1 <= gamma <= 8
    if gamma == 3:  # the pair's own
        cost = 3 * 0.25 + 1.3
        assert first.metrics["eval/predicted_speedup"] == pytest.approx(first.metrics["eval/block_efficiency"] / cost)
    assert len(measured) == 1
    assert measured[0][0] is not None
    assert measured[0][1].temperature == 0.7
    file.write_text(file.read_text().replace("0.25", "0.5"))
    assert prepare(config).task.costs.draft_step == 0.5
    assert len(measured) == 1


def test_costs_that_a_run_left_which_came_to_nothing_are_measured_anew(
    configure_run: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    costs = Costs(seconds_per_token=0.1, draft_step=0.25, target_pass=[1.0] * 9)
    monkeypatch.setattr(run, "measure_costs", lambda decoder, params: costs)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "costs.json").write_text(json.dumps(asdict(replace(costs, draft_step=0.5))))
    assert prepare(configure_run(max_steps=1, measure_speed=True)).task.costs == costs


def test_other_inputs_of_the_same_name_are_refused(
    configure_run: Configure, distill_folders: dict[str, Path], tmp_path: Path
) -> None:
    responses, pair = tmp_path / "responses", tmp_path / "pair"
    shutil.copytree(distill_folders["responses"], responses)
    shutil.copytree(distill_folders["reduced"], pair)
    config = configure_run(max_steps=2, responses=responses, pair=pair)
    kept = json.loads(json.dumps(prepare(config).task.state))

    def go_on() -> None:
        task = prepare(config).task
        task.state.update(kept)
        task.begin_step(1, 2)

    go_on()
    record = json.loads((responses / "respond.json").read_text())
    record["settings"]["samples_per_prompt"] = 17
    (responses / "respond.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"^responses: .* is not what it was when .* was begun; restore it"):
        go_on()
    shutil.copy(distill_folders["responses"] / "respond.json", responses)
    go_on()
    ids = load_draft_vocab(pair)
    assert ids is not None
    ids[-1] += 1
    save_draft_vocab(pair, ids)
    with pytest.raises(ValueError, match=r"^pair: .* is not what it was"):
        go_on()


def test_texts_that_a_stop_string_ended_need_no_stop_token(
    configure_run: Configure, distill_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[frozenset[int]] = []
    monkeypatch.setattr(run, "check_data", lambda *arguments, **named: given.append(frozenset(named["stop_ids"])))
    responses = tmp_path / "responses"
    shutil.copytree(distill_folders["responses"], responses)
    path = responses / "respond.json"
    record = json.loads(path.read_text())
    for changes in ({}, {"stop_token_ids": [77]}, {"stop": ["."]}):
        record["settings"]["sampling"] |= changes
        path.write_text(json.dumps(record))
        prepare(configure_run(max_steps=1, responses=responses))
    assert given[0] and given[1] == given[0] | {77}
    assert given[2] == frozenset()


def test_the_best_weights_are_those_of_the_largest_predicted_speedup(configure_run: Configure) -> None:
    """With costs as they are, and so many steps that too high a learning rate ruins it now and then."""
    config = configure_run(
        max_steps=12, eval_every_steps=2, learning_rate=0.3, select_by="predicted_speedup", measure_speed=True
    )
    result = distill(config)
    lines = [json.loads(line) for line in (result.result.parent / "metrics.jsonl").read_text().splitlines()]
    speedups = {line["step"]: line["eval/predicted_speedup"] for line in lines if "eval/predicted_speedup" in line}
    assert sorted(speedups) == [2, 4, 6, 8, 10, 12]
    assert result.best_step == max(speedups, key=lambda step: speedups[step])
    again = prepare(config)
    again.task.module.draft.load_state_dict(draft_in(result.result).state_dict())
    figures = again.task.evaluate(again.task.module.eval())
    assert figures["predicted_speedup"] == pytest.approx(speedups[result.best_step], rel=1e-6)


# --- drafts of other shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fresh, narrower", "another model, wider"])
def test_a_draft_of_another_width_learns_with_its_embeddings(
    kind: str,
    distill_folders: dict[str, Path],
    tiny_model_folder: Callable[..., Path],
    configure_run: Configure,
    tmp_path: Path,
) -> None:
    made_of: dict[str, Any] = {"draft": str(tiny_model_folder(num_layers=1, hidden_size=32, seed=9))}
    if kind == "fresh, narrower":
        made_of = {"fresh": FreshConfig(num_layers=1, hidden_size=8)}
    target, output = str(distill_folders["target"]), tmp_path / "pair"
    build(BuildConfig(target=target, output=str(output), **made_of))
    assert draft_in(output).config.hidden_size == (8 if "fresh" in kind else 32)
    result = distill(configure_run(pair=output, train_embeddings=True, max_steps=25, learning_rate=2e-2))
    alpha = alpha_of(result.result, distill_folders)
    assert alpha > alpha_of(output, distill_folders) + 0.1
    assert result.metrics["eval/alpha"] == pytest.approx(alpha, abs=2e-6)
    with pytest.raises(ValueError, match=r"^alignment_weight: draft and target differ in hidden size; use 0$"):
        prepare(configure_run(pair=output, objective=ObjectiveConfig(alignment_weight=0.1), output="run"))


@pytest.mark.parametrize(("of_target", "of_draft"), [(272, 259), (259, 272), (320, 272)])
def test_vocabularies_that_are_padded_to_different_sizes(
    of_target: int,
    of_draft: int,
    tiny_model_folder: Callable[..., Path],
    distill_folders: dict[str, Path],
    configure_run: Configure,
    tmp_path: Path,
) -> None:
    """They train, are scored, and what is exported decodes as predicted."""
    target = tiny_model_folder(num_layers=3, hidden_size=16, vocab_size=of_target)
    draft = tiny_model_folder(num_layers=1, hidden_size=16, vocab_size=of_draft, seed=7)
    pair = build(BuildConfig(target=str(target), output=str(tmp_path / "pair"), draft=str(draft)))
    responses = {"online": distill_folders["responses"], "cached": tmp_path / "cache"}
    cache(
        CacheConfig(
            responses=str(distill_folders["responses"]),
            output=str(tmp_path / "cache"),
            target=str(target),
            kind="top_k",
            top_k=of_target,
        )
    )
    results = [
        distill(
            configure_run(
                pair=pair,
                responses=responses[teacher],
                teacher=teacher,
                train_embeddings=True,
                max_steps=8,
                learning_rate=1e-2,
                log_every_steps=1,
                output=str(tmp_path / teacher),
            )
        )
        for teacher in ("online", "cached")
    ]
    alpha = alpha_of(results[0].result, {**distill_folders, "target": target})
    assert results[0].metrics["eval/alpha"] == pytest.approx(alpha, abs=2e-6)
    assert alpha > alpha_of(pair, {**distill_folders, "target": target})
    assert losses(results[1]) == pytest.approx(losses(results[0]), rel=2e-3)
    assert draft_in(results[0].result).get_output_embeddings().weight.shape[0] == of_draft
    decoder = SpeculativeDecoder.from_pretrained(None, str(results[0].result))
    assert len(decoder.generate(["Say 1."], SamplingParams(temperature=1.0, seed=0, max_new_tokens=8))[0].ids) <= 8


# --- other data -------------------------------------------------------------------------------------------


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "conversations.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}, {n}."}]}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_other_data_is_learnt_and_a_share_of_it_held_out(
    conversations: Path,
    distill_folders: dict[str, Path],
    configure_run: Configure,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    config = configure_run(
        pair=distill_folders["whole"],
        responses=conversations,
        heldout_fraction=0.2,
        max_steps=8,
        learning_rate=1e-2,
        log_every_steps=1,
        parity_prompts=4,
    )
    result = distill(config)
    assert losses(result)[-1] < losses(result)[0]
    assert 0 < result.metrics["eval/alpha"] < 1
    assert not any(name.startswith("eval/greedy_") for name in result.metrics)
    assert f"parity is not proved: {conversations} is not text of the target" in caplog.messages
    assert not (result.result.parent / "parity.json").exists()
    prepared = prepare(config)
    assert (len(prepared.rows), len(prepared.task.texts.heldout)) == (32, 8)
    with pytest.raises(ValueError, match=r"^teacher: responses .* keep no signal; make it with `spec-distill cache`"):
        prepare(configure_run(responses=conversations, teacher="cached"))


def write_tokens(path: Path, rows: list[tuple[list[int], list[bool]]]) -> Path:
    path.write_text("".join(json.dumps({"input_ids": ids, "response_mask": mask}) + "\n" for ids, mask in rows))
    return path


IDS = [1, 50, 51, 52, 53, 54, 55, 2]
RESPONSE = [False] * 4 + [True] * 4


@pytest.mark.parametrize(
    ("row", "limits", "message"),
    [
        ((IDS, [False] * 8), {}, "^responses: 38 of 38 rows have no response token to learn, the first is row 1; "),
        ((IDS, [False] * 8), {"max_unlearnable_share": 1.0}, "^responses: none of 38 rows has a response token"),
        ((IDS, [True] * 8), {}, "^responses: 38 of 38 rows have a response_mask that is true throughout"),
        ((IDS[:-1], RESPONSE[:-1]), {}, "^responses: 38 of 38 rows have a whole response without a stop token"),
        ((IDS, RESPONSE), {"min_coverage": 1.0}, "^responses: the reduced vocabulary holds .*% of the response tokens"),
        (
            ([*IDS[:-1], 300, 2], [*RESPONSE, True]),
            {},
            "^responses: token id 300 is beyond the 259 of target and draft",
        ),
    ],
)
def test_data_that_would_teach_something_else_stops_the_run(
    row: tuple[list[int], list[bool]],
    limits: dict[str, float],
    message: str,
    distill_folders: dict[str, Path],
    configure_run: Configure,
    tmp_path: Path,
) -> None:
    token_ids = load_draft_vocab(distill_folders["reduced"])
    assert token_ids is not None
    strange = next(token for token in range(3, 259) if token not in token_ids)
    ids = [strange if token == 55 else token for token in row[0]]
    responses = write_tokens(tmp_path / "rows.jsonl", [(ids, row[1])] * 40)
    config = configure_run(responses=responses, data_limits=DataLimits(**limits))
    with pytest.raises(ValueError, match=message):
        distill(config)
    assert not Path(config.train.output).exists()
    # the control: without these limits, and with something to learn, it runs
    if row == (IDS, RESPONSE):
        distill(configure_run(responses=responses, max_steps=1, data_limits=DataLimits(min_coverage=0.0)))


# --- refusals: nothing is written -------------------------------------------------------------------------


def test_a_signal_that_was_not_kept(configure_run: Configure) -> None:
    config = configure_run(teacher="cached")
    with pytest.raises(ValueError, match=r"^teacher: responses .* keep no signal; .*, or use teacher online$"):
        distill(config)
    assert not Path(config.train.output).exists()


def test_a_signal_at_another_temperature(distill_folders: dict[str, Path], configure_run: Configure) -> None:
    with pytest.raises(ValueError, match=r"^temperature: 0.7 differs from 1.0, at which the teacher's likeliest "):
        distill(configure_run(teacher="cached", responses=distill_folders["top_k"], temperature=0.7))
    prepare(configure_run(teacher="cached", responses=distill_folders["hidden_states"], temperature=0.7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden_size", [16, 32])
def test_a_signal_of_another_target(
    hidden_size: int,
    kind: str,
    tiny_model_folder: Callable[..., Path],
    distill_folders: dict[str, Path],
    configure_run: Configure,
    tmp_path: Path,
) -> None:
    other = tiny_model_folder(num_layers=2, hidden_size=hidden_size, seed=5)
    pair = build(BuildConfig(target=str(other), output=str(tmp_path / "pair"), layers=1))
    config = configure_run(pair=pair, teacher="cached", responses=distill_folders[kind])
    with pytest.raises(ValueError, match=r"^teacher's signal in .*: made for target .*, whose config is not that of "):
        distill(config)
    assert not Path(config.train.output).exists()


def test_text_of_another_target_teaches(
    tiny_model_folder: Callable[..., Path],
    configure_run: Configure,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """But it does not tell what will be accepted of its own."""
    caplog.set_level("INFO")
    other = tiny_model_folder(num_layers=2, hidden_size=16, seed=5)
    pair = build(BuildConfig(target=str(other), output=str(tmp_path / "pair"), layers=1))
    result = distill(configure_run(pair=pair, max_steps=1, parity_prompts=4))
    assert 0 < result.metrics["eval/alpha"] < 1
    assert any("parity is not proved: " in line and "is text of another target" in line for line in caplog.messages)


def test_alignment_needs_hidden_states(distill_folders: dict[str, Path], configure_run: Configure) -> None:
    objective = ObjectiveConfig(alignment_weight=0.5)
    with pytest.raises(ValueError, match=r"^alignment_weight: the responses keep the teacher's likeliest tokens"):
        prepare(configure_run(teacher="cached", responses=distill_folders["top_k"], objective=objective))
    aligned = prepare(configure_run(teacher="cached", responses=distill_folders["hidden_states"], objective=objective))
    plain = prepare(configure_run())
    losses = [each.task.module(batch_of(each)).loss_sum for each in (plain, aligned)]
    assert losses[1] > losses[0] + 1


def test_a_draft_with_another_tokenizer(
    distill_folders: dict[str, Path], configure_run: Configure, tmp_path: Path
) -> None:
    shutil.copytree(distill_folders["whole"], tmp_path / "pair")
    file = tmp_path / "pair" / "draft" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = (next(token for token, index in vocab.items() if index == wanted) for wanted in (50, 60))
    vocab[one], vocab[other] = 60, 50
    file.write_text(json.dumps(tokenizer))
    config = configure_run(pair=tmp_path / "pair")
    with pytest.raises(ValueError, match=r"^draft .*: its tokenizer is not that of target .*: id 50 is "):
        distill(config)
    assert not Path(config.train.output).exists()


def test_texts_longer_than_what_they_are_packed_into(configure_run: Configure) -> None:
    longest = max(prepare(configure_run()).lengths)
    with pytest.raises(ValueError, match=rf"^packing_length: {longest - 1} is not possible; a text has {longest} "):
        prepare(configure_run(packing_length=longest - 1))
    prepare(configure_run(packing_length=longest))


def test_models_are_asked_whether_they_can_read_branches(
    configure_run: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run, "refuse_unbranchable", lambda model, role: asked.append(role))
    prepare(configure_run())
    assert asked == []
    prepare(configure_run(branches=BranchesConfig(share=0.1)))
    assert asked == ["target", "draft"]


def test_a_folder_of_something_else_is_left_as_it_is(configure_run: Configure) -> None:
    config = configure_run(measure_speed=True)
    checkpoints = Path(config.train.output) / "checkpoints"
    checkpoints.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^output: .* holds files of something else; give another folder$"):
        distill(config)
    assert list(Path(config.train.output).rglob("*")) == [checkpoints]
