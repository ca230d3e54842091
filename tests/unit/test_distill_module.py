"""What is computed for a batch, against plain passes over single texts and single branches in float64."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from decode.sampling import next_token_distribution
from distill.branches import Branches, draft_branches
from distill.config import BranchesConfig, ObjectiveConfig, RunConfig, Stage
from distill.losses import (
    acceptance,
    block_efficiency,
    cross_entropy,
    forward_kl,
    jsd,
    lk,
    negative_log_acceptance,
    reverse_kl,
    total_variation,
)
from distill.module import DistillModule, TokenScores
from distill.teacher import Batch, TeacherHead, collate, final_hidden_states
from train.config import TrainConfig
from train.loop import NonFinite

VOCAB = 40
TEMPERATURE = 0.7
REDUCED = torch.arange(1, VOCAB, 3)
VOCABULARIES = pytest.mark.parametrize("ids", [None, REDUCED], ids=["whole", "reduced"])
SINGLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "lk": lk,
}
MIXED = {"lk": 1.0, "cross_entropy": 0.3}

Row = dict[str, list[Any]]


def rows_of(*lengths: tuple[int, int], seed: int = 0) -> list[Row]:
    """Texts of so many tokens in prompt and response."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(3, VOCAB, (prompt + response,), generator=generator).tolist(),
            "response_mask": [False] * prompt + [True] * response,
        }
        for prompt, response in lengths
    ]


ROWS = rows_of((3, 6), (5, 2), (2, 9))


@pytest.fixture(scope="module")
def target(tiny_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return tiny_llama(vocab_size=VOCAB, hidden_size=16, initializer_range=0.4).requires_grad_(False)


@pytest.fixture
def draft(tiny_llama: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return tiny_llama(seed=1, num_layers=1, vocab_size=VOCAB, hidden_size=16, initializer_range=0.4)


@pytest.fixture
def make(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> Callable[..., DistillModule]:
    """A module that learns by these losses; what BranchesConfig knows goes there."""

    def make(
        losses: dict[str, float] | None = None,
        ids: Tensor | None = None,
        *,
        temperature: float = TEMPERATURE,
        chunk_size: int = 4,
        online: bool = True,
        stop_ids: frozenset[int] = frozenset(),
        reference: LlamaForCausalLM | None = None,
        selected_fraction: float = 1.0,
        alignment_weight: float = 0.0,
        **branches: Any,
    ) -> DistillModule:
        objective = ObjectiveConfig(
            stages=(Stage(losses=losses or {"forward_kl": 1.0}),),  # type: ignore[arg-type]
            selected_fraction=selected_fraction,
            reference=None if reference is None else "pair",
            alignment_weight=alignment_weight,
        )
        config = RunConfig(
            pair="pair",
            responses="responses",
            temperature=temperature,
            objective=objective,
            branches=BranchesConfig(**{"share": float(bool(branches)), **branches}),
            chunk_size=chunk_size,
            train=TrainConfig(output="run"),
        )
        teacher = TeacherHead(target, ids, temperature)
        module = DistillModule(draft, teacher, target if online else None, config, stop_ids, reference)
        module.branching = bool(branches)
        return module

    return make


@dataclass(frozen=True)
class Truth:
    """log p and log q [tokens, columns] of the draft's tokens, and the column of each token of the text."""

    log_p: Tensor
    log_q: Tensor
    own: Tensor


def log_probabilities(model: LlamaForCausalLM, ids: list[int], temperature: float) -> Tensor:
    return (model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double() / temperature).log_softmax(-1)


def compare(target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: list[int], of: Tensor | None, t: float) -> Truth:
    """For all tokens of one text but the first; q is the softmax over the draft's own tokens."""
    columns = torch.arange(VOCAB) if of is None else of
    logits = draft(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0, :, columns].double()
    own = [columns.tolist().index(token) if token in columns.tolist() else -1 for token in ids[1:]]
    log_p = log_probabilities(target, ids[:-1], t)[:, columns].detach()
    return Truth(log_p, (logits / t).log_softmax(-1), torch.tensor(own))


def truth_of(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    ids: Tensor | None = None,
    temperature: float = TEMPERATURE,
    rows: list[Row] = ROWS,
) -> Truth:
    """For all response tokens, row after row."""
    parts = []
    for row in rows:
        whole, wanted = (
            compare(target, draft, row["input_ids"], ids, temperature),
            torch.tensor(row["response_mask"][1:]),
        )
        parts.append(Truth(whole.log_p[wanted], whole.log_q[wanted], whole.own[wanted]))
    return Truth(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Truth)))


def losses_of(weights: dict[str, float], truth: Truth) -> Tensor:
    """Of each token."""
    of_all = {name: loss(truth.log_p, truth.log_q) for name, loss in SINGLE.items()}
    of_all["cross_entropy"] = cross_entropy(truth.log_q, truth.own)
    return torch.stack([weight * of_all[name] for name, weight in weights.items()]).sum(0)


def close(found: Tensor, expected: Tensor | float) -> None:
    torch.testing.assert_close(found.double(), torch.as_tensor(expected).double(), rtol=2e-4, atol=2e-4)


def own_tokens() -> Tensor:
    """The response tokens of the texts."""
    return torch.cat([torch.tensor(row["input_ids"])[torch.tensor(row["response_mask"])] for row in ROWS])


def likeliest(target: LlamaForCausalLM, k: int, batch: Batch) -> Batch:
    """The batch with what is kept of the teacher's likeliest tokens."""
    rows = [
        log_probabilities(target, row["input_ids"][:-1], TEMPERATURE)[torch.tensor(row["response_mask"][1:])]
        for row in ROWS
    ]
    log_p = torch.cat(rows)
    values, ids = log_p.topk(k, dim=-1)
    return batch | {
        "top_ids": ids,
        "top_log_p": values.float(),
        "log_tail": log_p.scatter(-1, ids, -torch.inf).logsumexp(-1).float(),
        "token_log_p": log_p.gather(1, own_tokens().unsqueeze(1)).squeeze(1).float(),
    }


# --- on text ----------------------------------------------------------------------------------------------


@VOCABULARIES
@pytest.mark.parametrize("chunk_size", [4, 100])
@pytest.mark.parametrize(
    "weights", [*({name: 1.0} for name in SINGLE), {"cross_entropy": 1.0}, MIXED], ids=lambda weights: "+".join(weights)
)
def test_on_text_it_is_the_sum_over_response_tokens(
    weights: dict[str, float],
    chunk_size: int,
    ids: Tensor | None,
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
) -> None:
    truth = truth_of(target, draft, ids)
    expected = losses_of(weights, truth).sum()
    true_gradients = torch.autograd.grad(expected, list(draft.parameters()), allow_unused=True)
    output = make(weights, ids, chunk_size=chunk_size)(collate(ROWS, 0))
    close(output.loss_sum.detach(), expected.detach())
    assert output.num_tokens == sum(sum(row["response_mask"]) for row in ROWS)
    close(output.metric_sums["alpha"], acceptance(truth.log_p, truth.log_q).sum().detach())
    output.loss_sum.backward()
    for parameter, true_gradient in zip(draft.parameters(), true_gradients, strict=True):
        assert parameter.grad is not None
        close(parameter.grad, true_gradient)


def test_the_reference_tells_wrong_settings(
    make: Callable[..., DistillModule], target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    """The controls of the equality above."""
    expected = losses_of(MIXED, truth_of(target, draft)).sum()
    batch = collate(ROWS, 0)
    for wrong in (make(MIXED, temperature=1.0), make(MIXED, REDUCED), make({"lk": 1.0, "cross_entropy": 0.4})):
        assert (wrong(batch).loss_sum - expected).abs() > 0.1
    assert (make(MIXED)(collate(ROWS[:2], 0)).loss_sum - expected).abs() > 0.1
    assert (make(MIXED)(batch).loss_sum - expected).abs() < 0.001


@pytest.mark.parametrize("branches", [{}, {"num_draft_tokens": 2, "per_text": 3}], ids=["text", "branches"])
def test_only_the_draft_learns(
    branches: dict[str, int],
    make: Callable[..., DistillModule],
    draft: LlamaForCausalLM,
    tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    reference = tiny_llama(seed=2, vocab_size=VOCAB, hidden_size=16)
    module = make(reference=reference, selected_fraction=0.5, **branches)
    assert {f"draft.{name}" for name in draft.state_dict()} == set(module.state_dict())
    assert {f"draft.{name}" for name, _ in draft.named_parameters()} == {name for name, _ in module.named_parameters()}
    module(collate(ROWS, 0)).loss_sum.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in draft.parameters())
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_no_response_tokens_are_nothing_and_no_error(make: Callable[..., DistillModule]) -> None:
    batch = collate([{"input_ids": [5, 6, 7], "response_mask": [False] * 3}], 0)
    module = make(MIXED)
    output = module(batch)
    assert (output.loss_sum.item(), output.num_tokens.item()) == (0.0, 0)
    output.loss_sum.backward()
    scores = module.score(batch)
    assert all(getattr(scores, field.name).shape == (0,) for field in fields(TokenScores))


def test_a_draft_with_fewer_rows_than_the_target(
    target: LlamaForCausalLM, tiny_llama: Callable[..., LlamaForCausalLM], make: Callable[..., DistillModule]
) -> None:
    """Heads that are padded to different sizes: columns are the tokens of both."""
    shared = VOCAB - 4
    narrow = tiny_llama(seed=1, num_layers=1, vocab_size=shared, hidden_size=16)
    config = make().config
    module = DistillModule(narrow, TeacherHead(target, torch.arange(shared), TEMPERATURE), target, config)
    rows = [{**row, "input_ids": [min(token, shared - 1) for token in row["input_ids"]]} for row in ROWS]
    truth = truth_of(target, narrow, torch.arange(shared), rows=rows)
    close(module(collate(rows, 0)).loss_sum.detach(), forward_kl(truth.log_p, truth.log_q).sum().detach())


def test_alignment_is_added(
    make: Callable[..., DistillModule], target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    batch = collate(ROWS, 0)
    plain, aligned = make()(batch), make(alignment_weight=2.5)(batch)
    states = [final_hidden_states(model, batch).double() for model in (draft, target)]
    cosines = (
        torch.nn.functional.normalize(states[0], dim=1).mul(torch.nn.functional.normalize(states[1], dim=1)).sum(1)
    )
    assert (1 - cosines).mean() > 0.1
    close((aligned.loss_sum - plain.loss_sum).detach(), 2.5 * (1 - cosines).sum().detach())
    gradients = [torch.autograd.grad(each.loss_sum, draft.model.norm.weight)[0] for each in (plain, aligned)]
    expected = torch.autograd.grad(2.5 * (1 - cosines).sum(), draft.model.norm.weight)[0]
    close(gradients[1] - gradients[0], expected)


# --- kept signals -----------------------------------------------------------------------------------------


@VOCABULARIES
@pytest.mark.parametrize("temperature", [TEMPERATURE, 1.0])
def test_kept_hidden_states_are_as_good_as_a_pass(
    temperature: float, ids: Tensor | None, make: Callable[..., DistillModule], target: LlamaForCausalLM
) -> None:
    batch = collate(ROWS, 0)
    hidden = final_hidden_states(target, batch)
    kept = batch | {"teacher_hidden": hidden, "log_normalizers": TeacherHead(target).log_normalizers(hidden)}
    online = make(MIXED, ids, temperature=temperature)
    cached = make(MIXED, ids, temperature=temperature, online=False)
    close(cached(kept).loss_sum.detach(), online(batch).loss_sum.detach())
    for field in fields(TokenScores):
        close(getattr(cached.score(kept), field.name), getattr(online.score(batch), field.name))
    kept["teacher_hidden"] = hidden.roll(1, 0)  # the control
    assert (cached(kept).loss_sum - online(batch).loss_sum).abs() > 0.1


@VOCABULARIES
@pytest.mark.parametrize("weights", [*({name: 1.0} for name in SINGLE), MIXED], ids=lambda weights: "+".join(weights))
def test_all_tokens_kept_are_as_good_as_a_pass(
    weights: dict[str, float],
    ids: Tensor | None,
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
) -> None:
    batch = collate(ROWS, 0)
    kept = likeliest(target, VOCAB, batch)
    online, cached = make(weights, ids), make(weights, ids, online=False)
    gradients = []
    for module, given in ((online, batch), (cached, kept)):
        output = module(given)
        gradients.append([output.loss_sum.detach(), *torch.autograd.grad(output.loss_sum, list(draft.parameters()))])
        close(output.metric_sums["alpha"], online(batch).metric_sums["alpha"])
    for found, expected in zip(*gradients, strict=True):
        close(found, expected)
    for field in fields(TokenScores):
        if field.name != "top1_agreement" or ids is None:  # the likeliest token of all, not of the draft's
            close(getattr(cached.score(kept), field.name), getattr(online.score(batch), field.name))


@VOCABULARIES
@pytest.mark.parametrize("k", [1, 3, 10])
def test_some_tokens_kept_leave_alpha_an_interval(
    k: int, ids: Tensor | None, make: Callable[..., DistillModule], target: LlamaForCausalLM
) -> None:
    batch = collate(ROWS, 0)
    kept = likeliest(target, k, batch)
    module = make({"tv": 1.0}, ids, online=False)
    true, found = make(None, ids).score(batch), module.score(kept)
    assert (found.alpha <= true.alpha + 1e-5).all()
    assert (true.alpha <= found.alpha_high + 1e-5).all()
    assert (found.alpha_high - found.alpha).mean() > 0.01
    for name in ("acceptance", "greedy_acceptance"):  # the text's own token is known whatever k
        close(getattr(found, name), getattr(true, name))
    if ids is None:
        assert torch.equal(found.top1_agreement, true.top1_agreement)
        assert (found.forward_kl <= true.forward_kl + 1e-5).all()
    # and if it was not kept, it counts for no more than it is, and as it is where it is one of the likeliest
    log_p = kept.pop("token_log_p")
    found = module.score(kept)
    known = (kept["top_ids"] == own_tokens().unsqueeze(1)).any(1)
    close(found.acceptance[known], true.acceptance[known])
    assert (found.acceptance <= true.acceptance + 1e-5).all()
    assert (found.acceptance[~known] < true.acceptance[~known] - 1e-3).any()
    for at_most in (
        kept["top_log_p"][:, -1],
        kept["log_tail"],
    ):  # no likelier than the last of them, nor than all others
        assert (found.acceptance >= true.acceptance * (log_p - at_most).exp() - 1e-5)[~known].all()
    # the upper end is what TV learns by, and the lower one is logged, as in evaluations
    output = module(kept)
    close(output.loss_sum.detach(), (1 - found.alpha_high).sum())
    close(output.metric_sums["alpha"], found.alpha.sum())


def test_cross_entropy_does_not_ask_the_teacher_of_the_likeliest(
    make: Callable[..., DistillModule], target: LlamaForCausalLM, draft: LlamaForCausalLM
) -> None:
    truth = truth_of(target, draft)
    output = make({"cross_entropy": 1.0}, online=False)(likeliest(target, 2, collate(ROWS, 0)))
    close(output.loss_sum.detach(), cross_entropy(truth.log_q, truth.own).sum().detach())


# --- scores -----------------------------------------------------------------------------------------------


@VOCABULARIES
@pytest.mark.parametrize("chunk_size", [4, 100])
@torch.no_grad()
def test_scores_are_what_the_decoder_goes_by(
    chunk_size: int,
    ids: Tensor | None,
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
) -> None:
    """p and q as sampling makes them, over the whole vocabulary; token by token."""
    scores = make(None, ids, chunk_size=chunk_size).score(collate(ROWS, 0))
    columns = torch.arange(VOCAB) if ids is None else ids
    expected: dict[str, list[float]] = {field.name: [] for field in fields(TokenScores)}
    for row in ROWS:
        tokens = row["input_ids"]
        logits = [model(input_ids=torch.tensor([tokens[:-1]])).logits[0] for model in (target, draft)]
        logits[1] = torch.full_like(logits[1], -torch.inf).index_copy_(1, columns, logits[1][:, columns])
        p_of, q_of = (next_token_distribution(each, TEMPERATURE).double() for each in logits)
        for place in range(row["response_mask"].index(True) - 1, len(tokens) - 1):
            p, q, token = p_of[place], q_of[place], tokens[place + 1]
            alpha = float(torch.minimum(p, q).sum())
            own_p, own_q = float(p[token]), float(q[token])
            expected["alpha"].append(alpha)
            expected["alpha_high"].append(alpha)
            expected["forward_kl"].append(float((p[columns] * (p[columns] / q[columns]).log()).sum()))
            expected["top1_agreement"].append(float(p[columns].argmax() == q[columns].argmax()))
            # it is proposed with q and then accepted with min(1, p / q); it is the text's next with p
            expected["acceptance"].append(own_q * min(1, own_p / own_q) / own_p if own_q else 0.0)
            expected["greedy_acceptance"].append(float(q.argmax() == token))
    for name, values in expected.items():
        close(getattr(scores, name), torch.tensor(values))
        assert getattr(scores, name).dtype == torch.float32
    assert 0.05 < scores.alpha.mean() < 0.95  # the control: neither end, where much would agree


@torch.no_grad()
def test_acceptance_of_the_texts_tokens_is_alpha_on_average(
    make: Callable[..., DistillModule], target: LlamaForCausalLM
) -> None:
    """On text that the target wrote, and there only: E_p[min(1, q / p)] = sum_v min(p, q)."""
    torch.manual_seed(0)
    prompts = texts = torch.full((300, 1), 1)
    for _ in range(12):
        p = next_token_distribution(target(input_ids=texts).logits[:, -1], TEMPERATURE)
        texts = torch.cat([texts, p.multinomial(1)], dim=1)

    def gap(ids: Tensor) -> float:
        """In standard errors."""
        rows = [{"input_ids": row, "response_mask": [False] + [True] * 12} for row in ids.tolist()]
        scores = make(None, REDUCED, chunk_size=1000).score(collate(rows, 0))
        gaps = scores.acceptance - scores.alpha
        return float(gaps.mean() / (gaps.std() / math.sqrt(len(gaps))))

    assert abs(gap(texts)) < 3.5
    assert abs(gap(torch.cat([prompts, torch.randint(3, VOCAB, (300, 12))], dim=1))) > 10  # the control


# --- on branches ------------------------------------------------------------------------------------------


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Branches]:
    """What the module under test has drafted."""
    found: list[Branches] = []

    def remember(*arguments: Any) -> Branches:
        found.append(draft_branches(*arguments))
        return found[-1]

    monkeypatch.setattr("distill.module.draft_branches", remember)
    return found


@dataclass(frozen=True)
class BranchTruth:
    """Of branches: log p and log q [branches, gamma, columns], and the probability that each position is reached."""

    log_p: Tensor
    log_q: Tensor
    reached: Tensor

    @property
    def alphas(self) -> Tensor:
        return torch.minimum(self.log_p.exp(), self.log_q.exp()).sum(-1).detach()

    def sum_of(self, loss: Callable[[Tensor, Tensor], Tensor], weights: Tensor | None = None) -> Tensor:
        of_positions = loss(self.log_p.flatten(0, 1), self.log_q.flatten(0, 1)).view(self.reached.shape)
        return ((self.reached if weights is None else weights) * of_positions).sum()


def truth_of_branches(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    branches: Branches,
    ids: Tensor | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> BranchTruth:
    """From a pass over each branch and the text before it; what is reached, coin by coin."""
    parts, reached = [], []
    for row, starts, of_row in zip(ROWS, branches.starts.tolist(), branches.tokens.tolist(), strict=True):
        for start, tokens in zip(starts, of_row, strict=True):
            whole = compare(target, draft, [*row["input_ids"][: start + 1], *tokens, 0], ids, TEMPERATURE)
            own = whole.own[start:]
            part = Truth(whole.log_p[start:], whole.log_q[start:], own)
            probabilities = [1.0]
            for place, token in enumerate(tokens):
                p, q = (float(each[place, own[place]].detach().exp()) for each in (part.log_p, part.log_q))
                probabilities.append(0.0 if token in stop_ids else probabilities[-1] * min(1.0, p / q))
            parts.append(part)
            reached.append(probabilities)
    log_p, log_q = (torch.stack([getattr(part, name) for part in parts]) for name in ("log_p", "log_q"))
    return BranchTruth(log_p, log_q, torch.tensor(reached, dtype=torch.float64))


@VOCABULARIES
@pytest.mark.parametrize("name", list(SINGLE))
def test_a_branch_of_one_position_is_the_text(
    name: str,
    ids: Tensor | None,
    drafted: list[Branches],
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
) -> None:
    """Nothing is drafted, all weights are 1."""
    torch.manual_seed(0)
    output = make({name: 1.0}, ids, num_draft_tokens=1, per_text=5)(collate(ROWS, 0))
    assert output.num_tokens == len(ROWS) * 5
    expected, alphas = 0.0, 0.0
    for row, starts in zip(ROWS, drafted[0].starts.tolist(), strict=True):
        whole = compare(target, draft, row["input_ids"], ids, TEMPERATURE)
        assert all(row["response_mask"][start + 1] for start in starts)
        expected += SINGLE[name](whole.log_p, whole.log_q)[starts].sum().detach()
        alphas += acceptance(whole.log_p, whole.log_q)[starts].sum().detach()
    close(output.loss_sum.detach(), expected)
    close(output.metric_sums["alpha"], alphas)


@VOCABULARIES
@pytest.mark.parametrize("chunk_size", [1, 7])
@pytest.mark.parametrize("stops", [frozenset(), frozenset(range(0, VOCAB, 4))], ids=["endless", "with stop tokens"])
@pytest.mark.parametrize("name", ["forward_kl", "lk"])
def test_positions_weigh_what_they_are_reached_with(
    name: str,
    stops: frozenset[int],
    chunk_size: int,
    ids: Tensor | None,
    drafted: list[Branches],
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
) -> None:
    torch.manual_seed(0)
    module = make({name: 0.5}, ids, stop_ids=stops, chunk_size=chunk_size, num_draft_tokens=3, per_text=6)
    output = module(collate(ROWS, 0))
    if ids is not None:
        assert torch.isin(drafted[0].tokens, ids).all()
    assert not stops or any(token in stops for token in drafted[0].tokens.flatten().tolist())
    truth = truth_of_branches(target, draft, drafted[0], ids, stops)
    expected = 0.5 * truth.sum_of(SINGLE[name])
    true_gradients = torch.autograd.grad(expected, list(draft.parameters()), allow_unused=True)
    close(output.loss_sum.detach(), expected.detach())
    close(output.num_tokens, truth.reached.sum())
    close(output.metric_sums["alpha"], (truth.reached * truth.alphas).sum())
    output.loss_sum.backward()
    for parameter, true_gradient in zip(draft.parameters(), true_gradients, strict=True):
        assert parameter.grad is not None
        close(parameter.grad, true_gradient)
    # the controls: neither all positions alike, nor the other stops
    assert (truth.sum_of(SINGLE[name], torch.ones_like(truth.reached)) * 0.5 - expected).abs() > 0.1
    other = truth_of_branches(target, draft, drafted[0], ids, frozenset() if stops else frozenset(range(0, VOCAB, 2)))
    assert (other.reached.sum() - truth.reached.sum()).abs() > 0.1


@VOCABULARIES
def test_a_second_position_is_reached_as_often_as_the_first_is_accepted(
    ids: Tensor | None,
    drafted: list[Branches],
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
) -> None:
    """E_q[min(1, p / q)] = sum_v min(p, q): so it is for tokens drawn from the draft, and from it alone."""
    torch.manual_seed(0)
    count = 300
    output = make(None, ids, num_draft_tokens=2, per_text=count)(collate(ROWS, 0))
    alphas = []
    for row, starts in zip(ROWS, drafted[0].starts.tolist(), strict=True):
        whole = compare(target, draft, row["input_ids"], ids, TEMPERATURE)
        alphas.append(acceptance(whole.log_p, whole.log_q)[starts].detach())
    expected = float(torch.cat(alphas).sum())
    # a number from 0 to 1 deviates by less than a coin does
    error = math.sqrt(sum(float((alpha * (1 - alpha)).sum()) for alpha in alphas))
    assert abs(float(output.num_tokens) - len(ROWS) * count - expected) < 3.5 * error
    assert 8 * error < expected < len(ROWS) * count - 8 * error  # the control


@pytest.mark.parametrize("rejected_weight", [0.25, 4.0])
def test_positions_that_are_rejected_weigh_more_or_less(
    rejected_weight: float,
    drafted: list[Branches],
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
) -> None:
    torch.manual_seed(0)
    output = make(num_draft_tokens=3, per_text=4, rejected_weight=rejected_weight)(collate(ROWS, 0))
    truth = truth_of_branches(target, draft, drafted[0])
    # from 1 where all is accepted to rejected_weight where nothing is
    weights = truth.reached * (truth.alphas + rejected_weight * (1 - truth.alphas))
    expected = truth.sum_of(forward_kl, weights)
    close(output.loss_sum.detach(), expected.detach())
    close(output.num_tokens, weights.sum())
    gradients = [torch.autograd.grad(loss, draft.lm_head.weight)[0] for loss in (output.loss_sum, expected)]
    close(*gradients)  # the weights are constants to it
    assert (weights.sum() - truth.reached.sum()).abs() > 1  # the control


@pytest.mark.parametrize("beside", [{}, {"tv": 0.5}], ids=["alone", "beside another"])
def test_block_efficiency_is_learnt_branch_by_branch(
    beside: dict[str, float],
    drafted: list[Branches],
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
) -> None:
    torch.manual_seed(0)
    weights = {"block_efficiency": 2.0, **beside}
    output = make(weights, chunk_size=7, num_draft_tokens=3, per_text=4)(collate(ROWS, 0))
    truth = truth_of_branches(target, draft, drafted[0])
    alphas = torch.minimum(truth.log_p.exp(), truth.log_q.exp()).sum(-1)
    expected = 2 * (truth.reached.sum(1) * block_efficiency(alphas)).sum()
    if beside:
        expected = expected + 0.5 * truth.sum_of(total_variation)
    true_gradients = torch.autograd.grad(expected, list(draft.parameters()), allow_unused=True)
    close(output.loss_sum.detach(), expected.detach())
    output.loss_sum.backward()
    for parameter, true_gradient in zip(draft.parameters(), true_gradients, strict=True):
        assert parameter.grad is not None
        close(parameter.grad, true_gradient)


# --- selected tokens --------------------------------------------------------------------------------------


@VOCABULARIES
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_tokens_are_selected_where_the_reference_is_furthest_ahead(
    fraction: float,
    ids: Tensor | None,
    make: Callable[..., DistillModule],
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tiny_llama: Callable[..., LlamaForCausalLM],
) -> None:
    reference = tiny_llama(seed=2, vocab_size=VOCAB, hidden_size=16, initializer_range=0.3)
    ours, theirs = truth_of(target, draft, ids), truth_of(target, reference, ids)
    gaps = (forward_kl(ours.log_p, ours.log_q) - forward_kl(theirs.log_p, theirs.log_q)).detach()
    count = max(1, round(fraction * len(gaps)))
    chosen = sorted(range(len(gaps)), key=lambda place: -float(gaps[place]))[:count]
    losses = losses_of(MIXED, ours)
    output = make(MIXED, ids, reference=reference, selected_fraction=fraction)(collate(ROWS, 0))
    # as many tokens as there are, each chosen one for as many as it stands for
    close(output.loss_sum.detach(), losses[chosen].sum().detach() * len(gaps) / count)
    assert output.num_tokens == len(gaps)
    close(output.metric_sums["alpha"], acceptance(ours.log_p, ours.log_q).sum().detach())  # of all of them
    # the controls: all of them, and those on which it is least ahead
    others = sorted(range(len(gaps)), key=lambda place: float(gaps[place]))[:count]
    assert (losses[others].mean() - losses[chosen].mean()).abs() > 0.01
    assert (losses.mean() - losses[chosen].mean()).abs() > 0.001


# --- what no teacher says ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("branches", [{}, {"num_draft_tokens": 2, "per_text": 3}], ids=["text", "branches"])
def test_a_teacher_that_breaks_down_is_named(
    value: float, branches: dict[str, int], target: LlamaForCausalLM, make: Callable[..., DistillModule]
) -> None:
    module, batch = make(**branches), collate(ROWS, 0)
    module(batch)  # the control
    broken = copy.deepcopy(target)
    broken.model.norm.weight[3] = value
    module = DistillModule(module.draft, module.teacher, broken, module.config)
    module.branching = bool(branches)
    with pytest.raises(NonFinite, match="the teacher's output"):
        module(batch)


def test_a_draft_that_breaks_down_is_named_before_it_is_drawn_from(make: Callable[..., DistillModule]) -> None:
    module, batch = make(num_draft_tokens=2, per_text=3), collate(ROWS, 0)
    module.branching = True
    module(batch)  # the control
    with torch.no_grad():
        module.draft.get_decoder().norm.weight[3] = torch.nan
    with pytest.raises(NonFinite, match="the draft's output"):
        module(batch)


@pytest.mark.parametrize("name", ["teacher_hidden", "top_log_p"])
def test_a_kept_signal_with_nan_is_named(
    name: str, make: Callable[..., DistillModule], target: LlamaForCausalLM
) -> None:
    batch = collate(ROWS, 0)
    hidden = final_hidden_states(target, batch)
    kept = {
        "teacher_hidden": batch
        | {"teacher_hidden": hidden, "log_normalizers": TeacherHead(target).log_normalizers(hidden)},
        "top_log_p": likeliest(target, 3, batch),
    }[name]
    module = make(online=False)
    module(kept)  # the control
    kept[name][2, 1] = torch.nan
    with pytest.raises(NonFinite, match="the teacher's output"):
        module(kept)
