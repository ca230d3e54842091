"""What a draft is taught: the loss and its metrics, from which signal, which weights, and that it learns."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from decode.pair import Pair, load_draft_vocab, load_model, save_draft_vocab
from decode.params import SamplingParams
from distill import run
from distill.build import build
from distill.config import BuildConfig, RespondConfig, RunConfig
from distill.responses import load_responses, respond
from distill.run import DistillModule, DistillTask, distill
from distill.teacher import TeacherHead, collate
from train.config import TrainConfig
from train.loop import FitResult, StepOutput

NUM_LAYERS = 3
DRAFT_VOCAB = 120
METRICS = ("forward_kl", "alpha", "top1_agreement")


@pytest.fixture(scope="module")
def folders(tiny_model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, its responses, and two pairs of it: with all output tokens ("whole") and with some ("reduced")."""
    folder = tmp_path_factory.mktemp("distill")
    target = tiny_model_folder(num_layers=NUM_LAYERS, hidden_size=16, tie_word_embeddings=True)
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(40)))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24, seed=0)
    found = {"target": target, "responses": folder / "responses"}
    respond(
        RespondConfig(
            target=str(target),
            prompts=str(folder / "prompts.txt"),
            output=str(found["responses"]),
            sampling=sampling,
            keep_hidden_states=True,
        )
    )
    for name, vocab_size in (("whole", None), ("reduced", DRAFT_VOCAB)):
        found[name] = build(
            BuildConfig(
                target=str(target),
                output=str(folder / name),
                layers=2,
                vocab_size=vocab_size,
                responses=str(found["responses"]),
            )
        )
    return found


@pytest.fixture
def configure(folders: dict[str, Path], tmp_path: Path) -> Callable[..., RunConfig]:
    """A run on the reduced pair; what TrainConfig knows goes there, the rest into RunConfig."""

    def configure(**changes: Any) -> RunConfig:
        train = {"output": str(tmp_path / "run"), "batch_size": 8, "log_every_steps": 5}
        train |= {key: changes.pop(key) for key in list(changes) if key in TrainConfig.__dataclass_fields__}
        values = {"pair": str(folders["reduced"]), "responses": str(folders["responses"]), **changes}
        return RunConfig(**values, train=TrainConfig(**train))

    return configure


class Fitted:
    """What `distill` hands to the training loop."""

    def __init__(self, task: DistillTask, rows: Any, lengths: list[int], *rest: Any, **keywords: Any) -> None:
        self.task, self.rows, self.lengths = task, rows, lengths
        self.module: DistillModule = task.module
        self.draft: PreTrainedModel = task.module.draft

    def batch(self, num_rows: int = 6) -> dict[str, Tensor]:
        return self.task.collate([self.rows[i] for i in range(num_rows)])


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunConfig], Fitted]:
    """Everything that `distill` does before the first step."""

    def prepare(config: RunConfig) -> Fitted:
        with monkeypatch.context() as patch:
            patch.setattr(run, "fit", Fitted)
            fitted = distill(config)
        assert isinstance(fitted, Fitted)
        return fitted

    return prepare


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


def true_sums(log_p: Tensor, log_q: Tensor) -> dict[str, Tensor]:
    """The loss and the metrics from the formulas, summed over tokens."""
    kept = log_q[0] > -torch.inf
    log_p, log_q = log_p[:, kept], log_q[:, kept]
    return {
        "forward_kl": (log_p.exp() * (log_p - log_q)).sum(),
        "alpha": torch.minimum(log_p.exp(), log_q.exp()).sum(),
        "top1_agreement": (log_p.argmax(-1) == log_q.argmax(-1)).sum(),
    }


# --- loss and metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7, 10_000])
@pytest.mark.parametrize("pair", ["whole", "reduced"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("teacher", ["online", "hidden_states"])
def test_loss_metrics_and_gradient_are_those_of_the_formulas(
    teacher: str,
    temperature: float,
    pair: str,
    chunk_size: int,
    folders: dict[str, Path],
    configure: Callable[..., RunConfig],
    prepare: Callable[[RunConfig], Fitted],
) -> None:
    config = configure(
        teacher=teacher,
        temperature=temperature,
        pair=str(folders[pair]),
        chunk_size=chunk_size,
        train_embeddings=True,
    )
    fitted = prepare(config)
    batch = fitted.batch()
    assert ("teacher_hidden" in batch) == (teacher == "hidden_states")
    output: StepOutput = fitted.module(batch)
    output.loss_sum.backward()
    gradient = {name: p.grad for name, p in fitted.draft.named_parameters()}
    fitted.draft.zero_grad()
    rows = [fitted.rows[i] for i in range(6)]
    target, token_ids = load_model(str(folders["target"])), load_draft_vocab(folders[pair])
    expected = true_sums(*true_log_probabilities(target, fitted.draft, rows, temperature, token_ids))
    assert output.num_tokens == sum(sum(row["response_mask"]) for row in rows) > 100
    for name in METRICS:
        assert output.metric_sums[name].item() == pytest.approx(expected[name].item(), rel=1e-4, abs=2e-3)
        assert not output.metric_sums[name].requires_grad
    assert output.loss_sum.item() == pytest.approx(expected["forward_kl"].item(), rel=1e-4, abs=2e-3)
    expected["forward_kl"].backward()
    for name, parameter in fitted.draft.named_parameters():
        assert parameter.grad is not None
        assert gradient[name] is not None
        assert (gradient[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm()


def test_kept_states_and_a_pass_give_the_same_loss(
    configure: Callable[..., RunConfig], prepare: Callable[[RunConfig], Fitted]
) -> None:
    online, kept = (prepare(configure(teacher=teacher)) for teacher in ("online", "hidden_states"))
    one, other = (fitted.module(fitted.batch()) for fitted in (online, kept))
    assert one.num_tokens == other.num_tokens
    torch.testing.assert_close(one.loss_sum, other.loss_sum, rtol=1e-5, atol=1e-4)
    for name in METRICS:
        torch.testing.assert_close(one.metric_sums[name], other.metric_sums[name], rtol=1e-5, atol=1e-4)
    # the control: with the states of other rows the loss is another
    batch = kept.batch()
    batch["teacher_hidden"], batch["log_normalizers"] = (
        batch[name].roll(24, 0) for name in ("teacher_hidden", "log_normalizers")
    )
    assert (kept.module(batch).loss_sum - one.loss_sum).abs() > 1


@pytest.mark.parametrize("teacher", ["online", "hidden_states"])
def test_alignment_adds_one_minus_the_cosine(
    teacher: str, folders: dict[str, Path], configure: Callable[..., RunConfig], prepare: Callable[[RunConfig], Fitted]
) -> None:
    plain = prepare(configure(teacher=teacher))
    aligned = prepare(configure(teacher=teacher, alignment_weight=0.5))
    target = load_model(str(folders["target"]))
    distance = 0.0
    for row in (plain.rows[i] for i in range(6)):
        ids, start = torch.tensor([row["input_ids"][:-1]]), row["response_mask"].index(True)
        with torch.no_grad():
            ours, theirs = (model.model(ids).last_hidden_state[0, start - 1 :] for model in (plain.draft, target))
        distance += (1 - (ours * theirs).sum(-1) / ours.norm(dim=-1) / theirs.norm(dim=-1)).sum().item()
    assert distance > 10
    before, after = plain.module(plain.batch()), aligned.module(aligned.batch())
    assert (after.loss_sum - before.loss_sum).item() == pytest.approx(0.5 * distance, rel=1e-4)
    assert after.metric_sums["forward_kl"] == before.metric_sums["forward_kl"]


def test_a_batch_without_response_tokens_teaches_nothing_and_is_no_error(
    configure: Callable[..., RunConfig], prepare: Callable[[RunConfig], Fitted]
) -> None:
    fitted = prepare(configure(alignment_weight=0.5))
    output = fitted.module(collate([{"input_ids": [1, 5, 6], "response_mask": [False] * 3}], 0, None))
    assert (output.loss_sum.item(), output.num_tokens.item()) == (0, 0)
    assert [output.metric_sums[name].item() for name in METRICS] == [0, 0, 0]
    output.loss_sum.backward()
    gradients = [parameter.grad for parameter in fitted.draft.parameters() if parameter.requires_grad]
    assert gradients
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_evaluation_is_the_mean_over_all_heldout_tokens(
    folders: dict[str, Path], configure: Callable[..., RunConfig], prepare: Callable[[RunConfig], Fitted]
) -> None:
    target, token_ids = load_model(str(folders["target"])), load_draft_vocab(folders["reduced"])
    rows = list(load_responses(str(folders["responses"]), "heldout"))
    assert len(rows) == 4
    for size in (1, 3, 16):
        fitted = prepare(configure(micro_batch_size=size))
        with torch.no_grad():
            metrics = fitted.task.evaluate(fitted.module)
            expected = true_sums(*true_log_probabilities(target, fitted.draft, rows, 1.0, token_ids))
        num_tokens = sum(sum(row["response_mask"]) for row in rows)
        assert set(metrics) == set(METRICS)
        for name in METRICS:
            assert metrics[name] == pytest.approx(expected[name].item() / num_tokens, rel=1e-4, abs=1e-5)


def test_lengths_are_those_of_the_rows(
    configure: Callable[..., RunConfig], prepare: Callable[[RunConfig], Fitted]
) -> None:
    fitted = prepare(configure())
    assert fitted.lengths == [len(row["input_ids"]) for row in fitted.rows]
    assert len(fitted.rows) == 36


# --- which weights ----------------------------------------------------------------------------------------


def trainable(fitted: Fitted) -> set[str]:
    return {name for name, parameter in fitted.module.named_parameters() if parameter.requires_grad}


def test_the_target_is_no_part_of_the_module(
    folders: dict[str, Path], configure: Callable[..., RunConfig], prepare: Callable[[RunConfig], Fitted]
) -> None:
    fitted = prepare(configure(train_embeddings=True))
    (target,) = fitted.module._target
    assert target is not None
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert not {id(p) for p in target.parameters()} & {id(p) for p in fitted.module.parameters()}
    assert all(name.startswith("draft.") for name in fitted.module.state_dict())
    fitted.module(fitted.batch()).loss_sum.backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    original = AutoModelForCausalLM.from_pretrained(folders["target"]).state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in target.state_dict().items())
    assert prepare(configure(teacher="hidden_states")).module._target == [None]


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
    folders: dict[str, Path],
    tiny_model_folder: Callable[..., Path],
    byte_tokenizer: PreTrainedTokenizerFast,
    configure: Callable[..., RunConfig],
    prepare: Callable[[RunConfig], Fitted],
    tmp_path: Path,
) -> None:
    """A trainable parameter without gradient makes several processes wait for each other for ever."""
    pair = folders["reduced"]
    if kind != "tied":
        target = (
            tiny_model_folder(num_layers=2, hidden_size=16) if kind == "untied" else with_bias(byte_tokenizer, tmp_path)
        )
        pair = build(BuildConfig(target=str(target), output=str(tmp_path / "pair"), layers=1))
        save_draft_vocab(pair, torch.arange(0, 259, 2))
    fitted = prepare(configure(pair=str(pair), train_embeddings=train_embeddings))
    embeddings = {"draft.model.embed_tokens.weight"} | (set() if kind == "tied" else {"draft.lm_head.weight"})
    others = {name for name, _ in fitted.module.named_parameters()} - embeddings - {"draft.lm_head.bias"}
    assert trainable(fitted) == others | (embeddings if train_embeddings else set())
    fitted.module(fitted.batch()).loss_sum.backward()
    for name, parameter in fitted.module.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert not parameter.requires_grad or parameter.grad.abs().max() > 0, name


# --- the result -------------------------------------------------------------------------------------------


def alpha_of(pair: Path, folders: dict[str, Path]) -> float:
    """Mean of sum_v min(p, q) over the held-out responses' tokens, from the folder as it was saved."""
    target = AutoModelForCausalLM.from_pretrained(folders["target"])
    draft = AutoModelForCausalLM.from_pretrained(pair / "draft")
    rows = list(load_responses(str(folders["responses"]), "heldout"))
    with torch.no_grad():
        log_p, log_q = true_log_probabilities(target, draft, rows, 1.0, load_draft_vocab(pair))
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1).mean().item()


@pytest.fixture(scope="module")
def learnt(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, FitResult]:
    """Thirty steps on each kind of pair."""
    results = {}
    for name in ("whole", "reduced"):
        output = tmp_path_factory.mktemp("run") / name
        train = TrainConfig(output=str(output), max_steps=30, batch_size=8, learning_rate=1e-2, log_every_steps=5)
        results[name] = distill(
            RunConfig(pair=str(folders[name]), responses=str(folders["responses"]), chunk_size=50, train=train)
        )
    return results


@pytest.mark.parametrize("pair", ["whole", "reduced"])
def test_training_raises_alpha_and_reports_that_of_the_saved_pair(
    pair: str, folders: dict[str, Path], learnt: dict[str, FitResult]
) -> None:
    result = learnt[pair]
    assert result.result.name == "pair"
    assert result.metrics["eval/alpha"] == pytest.approx(alpha_of(result.result, folders), abs=2e-6)
    # from 0.54 to 0.77 with all tokens, from 0.44 to 0.62 with some; another order of the data moves these by 0.003
    assert result.metrics["eval/alpha"] > alpha_of(folders[pair], folders) + 0.1


def test_next_to_no_learning_rate_leaves_alpha_where_it_was(
    folders: dict[str, Path], configure: Callable[..., RunConfig]
) -> None:
    """The control of the test above: it is the training that raises alpha."""
    result = distill(configure(max_steps=30, learning_rate=1e-12))
    before = alpha_of(folders["reduced"], folders)
    assert result.metrics["eval/alpha"] == pytest.approx(before, abs=1e-5)
    assert alpha_of(result.result, folders) == pytest.approx(before, abs=1e-5)


def test_the_result_is_a_pair(folders: dict[str, Path], learnt: dict[str, FitResult]) -> None:
    built, trained = folders["reduced"], learnt["reduced"].result
    assert sorted(path.name for path in trained.iterdir()) == ["draft", "draft_vocab.safetensors", "pair.json"]
    assert torch.equal(load_draft_vocab(trained), load_draft_vocab(built))
    pair = Pair.load(trained)
    assert pair.target == Pair.load(built).target
    assert pair.sampling == {"temperature": 1.0}
    assert pair.provenance["resolved_config"]["pair"] == str(built)
    assert AutoTokenizer.from_pretrained(trained / "draft").chat_template
    before, after = (AutoModelForCausalLM.from_pretrained(folder / "draft") for folder in (built, trained))
    assert torch.equal(before.lm_head.weight, after.lm_head.weight)  # frozen: the target's
    assert after.lm_head.weight is after.model.embed_tokens.weight
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert sum(changed) == len(changed) - 1
    assert not (learnt["whole"].result / "draft_vocab.safetensors").exists()


def test_trained_embeddings_stay_tied_and_whole(folders: dict[str, Path], configure: Callable[..., RunConfig]) -> None:
    result = distill(configure(train_embeddings=True, max_steps=3, learning_rate=1e-2, weight_decay=0.0))
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder / "draft") for folder in (folders["reduced"], result.result)
    )
    assert after.lm_head.weight is after.model.embed_tokens.weight
    assert after.lm_head.weight.shape == before.lm_head.weight.shape
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)


def test_the_draft_is_saved_in_the_targets_dtype_and_trained_in_fp32(
    folders: dict[str, Path], configure: Callable[..., RunConfig], tmp_path: Path, prepare: Callable[..., Fitted]
) -> None:
    target = load_model(str(folders["target"])).bfloat16()
    target.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(folders["target"]).save_pretrained(tmp_path / "target")
    pair = build(BuildConfig(target=str(tmp_path / "target"), output=str(tmp_path / "pair"), layers=2))
    fitted = prepare(configure(pair=str(pair)))
    assert {parameter.dtype for parameter in fitted.draft.parameters()} == {torch.float32}
    distilled = distill(configure(pair=str(pair), max_steps=1)).result
    assert json.loads((distilled / "draft" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(distilled / "draft").dtype == torch.bfloat16


def test_what_was_measured_of_the_draft_before_is_forgotten(
    folders: dict[str, Path], configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    shutil.copytree(folders["reduced"], tmp_path / "pair")
    pair = Pair.load(tmp_path / "pair")
    pair.measured = {"alpha": 0.1}
    pair.save(tmp_path / "pair")
    result = distill(configure(pair=str(tmp_path / "pair"), max_steps=1))
    assert Pair.load(result.result).measured == {}


def test_a_target_that_moved_is_named_where_it_is_now(
    folders: dict[str, Path], configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    shutil.copytree(folders["target"], tmp_path / "moved")
    result = distill(configure(target=str(tmp_path / "moved"), max_steps=1))
    pair, before = Pair.load(result.result), Pair.load(folders["reduced"])
    assert pair.target_id() == str(tmp_path / "moved")
    assert {**pair.target, "id": None} == {**before.target, "id": None}


def test_a_finished_run_is_left_alone(configure: Callable[..., RunConfig]) -> None:
    config = configure(max_steps=2)
    first = distill(config)
    before = {path: path.stat().st_mtime_ns for path in first.result.parent.rglob("*")}
    again = distill(config)
    assert (first.resumed_from, again.resumed_from) == (0, 2)
    assert again.metrics == first.metrics
    assert {path: path.stat().st_mtime_ns for path in first.result.parent.rglob("*")} == before
    with pytest.raises(ValueError, match=r"^temperature: 0.5 differs from 1.0, with which .* was begun"):
        distill(configure(max_steps=2, temperature=0.5))


# --- refusals: nothing is written -------------------------------------------------------------------------


def test_kept_states_that_were_not_kept(
    folders: dict[str, Path], configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    shutil.copytree(folders["responses"], tmp_path / "responses")
    for split in ("train", "heldout"):
        rows = load_responses(str(folders["responses"]), split).remove_columns(["hidden_states", "log_normalizers"])
        shutil.rmtree(tmp_path / "responses" / split)
        rows.save_to_disk(str(tmp_path / "responses" / split))
    config = configure(responses=str(tmp_path / "responses"), teacher="hidden_states", max_steps=1)
    with pytest.raises(ValueError, match=r"^teacher: responses .* keep no hidden states; .* or use teacher online$"):
        distill(config)
    assert not Path(config.train.output).exists()
    distill(configure(responses=str(tmp_path / "responses"), max_steps=1))  # the control: a pass needs none


@pytest.mark.parametrize("hidden_size", [16, 32])
def test_kept_states_of_another_target(
    hidden_size: int, tiny_model_folder: Callable[..., Path], configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    other = tiny_model_folder(num_layers=2, hidden_size=hidden_size, seed=5)
    pair = build(BuildConfig(target=str(other), output=str(tmp_path / "pair"), layers=1))
    config = configure(pair=str(pair), teacher="hidden_states")
    with pytest.raises(ValueError, match=r"^teacher: the hidden states in .* are not of this target; make them anew"):
        distill(config)
    assert not Path(config.train.output).exists()


def test_a_draft_with_another_tokenizer(
    folders: dict[str, Path],
    byte_tokenizer: PreTrainedTokenizerFast,
    configure: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    shutil.copytree(folders["whole"], tmp_path / "pair")
    file = tmp_path / "pair" / "draft" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = (next(token for token, index in vocab.items() if index == wanted) for wanted in (50, 60))
    vocab[one], vocab[other] = 60, 50
    file.write_text(json.dumps(tokenizer))
    config = configure(pair=str(tmp_path / "pair"))
    with pytest.raises(ValueError, match=r"^draft .*: its tokenizer is not that of target .*: id 50 is "):
        distill(config)
    assert not Path(config.train.output).exists()


def test_alignment_needs_states_of_one_size(
    folders: dict[str, Path], tiny_llama: Callable[..., LlamaForCausalLM], configure: Callable[..., Any], tmp_path: Path
) -> None:
    shutil.copytree(folders["whole"], tmp_path / "pair")
    tiny_llama(hidden_size=32).save_pretrained(tmp_path / "pair" / "draft")
    with pytest.raises(ValueError, match=r"^alignment_weight: draft and target differ in hidden size; use 0$"):
        distill(configure(pair=str(tmp_path / "pair"), alignment_weight=0.1))
    result = distill(configure(pair=str(tmp_path / "pair"), max_steps=1))  # without, such a draft learns too
    assert 0 < result.metrics["eval/alpha"] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "^temperature: 0.0 is not possible"),
        ({"temperature": math.nan}, "^temperature: nan is not possible"),
        ({"chunk_size": 0}, "^chunk_size: 0 is not possible"),
        ({"alignment_weight": -0.1}, "^alignment_weight: -0.1 is not possible"),
    ],
)
def test_values_that_cannot_be_meant(changes: dict[str, Any], message: str, configure: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=message):
        configure(**changes)


def test_the_teachers_head_is_that_of_the_temperature_and_vocabulary(
    folders: dict[str, Path], configure: Callable[..., RunConfig], prepare: Callable[[RunConfig], Fitted]
) -> None:
    head = prepare(configure(temperature=0.7)).module.head
    assert isinstance(head, TeacherHead)
    assert head.temperature == 0.7
    assert torch.equal(head.token_ids, load_draft_vocab(folders["reduced"]))
