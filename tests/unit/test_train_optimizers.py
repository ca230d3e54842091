"""Which parameter gets which optimiser and decay, and the learning rate over the steps."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from train.config import TrainConfig
from train.optimizers import Muon, build_optimizers, learning_rate_factor, set_learning_rates


class Model(nn.Module):
    """Every kind of parameter a language model has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 11, bias=False)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


def names(model: nn.Module, group: dict[str, list[nn.Parameter]]) -> set[str]:
    ids = {id(p) for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in ids}


def config(**changes: object) -> TrainConfig:
    return TrainConfig(output="unused", **changes)  # type: ignore[arg-type]


def test_adamw_decays_matrices_only() -> None:
    model = Model()
    (adamw,) = build_optimizers(model, config(weight_decay=0.2))
    decayed, plain = adamw.param_groups
    assert names(model, decayed) == {"hidden.weight", "lm_head.weight"}
    assert names(model, plain) == {"embed.weight", "hidden.bias", "norm.weight", "norm.bias"}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)


def test_muon_takes_hidden_matrices_and_neither_embedding_nor_head() -> None:
    model = Model()
    muon, adamw = build_optimizers(model, config(optimizer="muon", muon_learning_rate=0.5, learning_rate=0.1))
    assert isinstance(muon, torch.optim.Muon)
    assert names(model, muon.param_groups[0]) == {"hidden.weight"}
    assert [names(model, group) for group in adamw.param_groups] == [
        {"lm_head.weight"},
        {"embed.weight", "hidden.bias", "norm.weight", "norm.bias"},
    ]
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.5, 0.1)


class Dtypes(TorchFunctionMode):
    """Of what torch's functions return."""

    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add(result.dtype)
        return result


def test_muon_orthogonalises_in_what_the_machine_multiplies_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    for has_products in (True, False):
        monkeypatch.setattr("train.optimizers.has_bf16_products", lambda here=has_products: here)
        weight = nn.Parameter(torch.zeros(6, 4))
        weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        with Dtypes() as dtypes:
            Muon([weight], lr=1.0, weight_decay=0.0).step()
        assert (torch.bfloat16 in dtypes.seen) == has_products
        assert torch.equal(weight.grad, torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
        updates.append(weight.detach())
    rounded, precise = updates
    torch.testing.assert_close(rounded, precise, atol=0.02, rtol=0.02)
    assert not torch.equal(rounded, precise)
    # torch's iteration leaves singular values about 1
    assert torch.linalg.svdvals(precise / precise.norm() * 2).sub(1).abs().max() < 0.4


def test_a_tied_head_counts_as_an_embedding() -> None:
    model = Model()
    model.lm_head = nn.Linear(4, 11, bias=False)
    model.lm_head.weight = model.embed.weight
    (adamw,) = build_optimizers(model, config())
    assert names(model, adamw.param_groups[0]) == {"hidden.weight"}
    assert sum(len(group["params"]) for group in adamw.param_groups) == 5


def test_frozen_parameters_stay_out_and_a_frozen_model_is_refused() -> None:
    model = Model()
    held = {id(p) for o in build_optimizers(model, config()) for g in o.param_groups for p in g["params"]}
    assert id(model.frozen.weight) not in held
    with pytest.raises(ValueError, match="no parameter is trainable"):
        build_optimizers(model.requires_grad_(False), config())


def factors(num_steps: int, **changes: object) -> list[float]:
    return [learning_rate_factor(step, num_steps, config(**changes)) for step in range(num_steps)]


def test_cosine_warms_up_then_falls_to_the_final_fraction() -> None:
    cosine = factors(100, warmup_fraction=0.1, final_learning_rate_fraction=0.25)
    assert cosine[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert cosine[10] == 1.0
    assert cosine[-1] == pytest.approx(0.25)
    assert all(a > b for a, b in itertools.pairwise(cosine[10:]))
    # halfway down a cosine is the mean of its ends; a straight line would pass the quarter mark higher
    assert cosine[10 + 22] > 1 - 0.75 * 22 / 89


def test_wsd_warms_up_stays_and_falls_along_a_straight_line() -> None:
    wsd = factors(100, schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2, final_learning_rate_fraction=0.25)
    assert wsd[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert wsd[10:80] == [1.0] * 70
    assert wsd[80:] == pytest.approx([1 - 0.75 * (i + 1) / 20 for i in range(20)])


def test_wsd_without_a_decay_stays_to_the_end() -> None:
    assert factors(10, schedule="wsd", warmup_fraction=0.0, decay_fraction=0.0) == [1.0] * 10


def test_decay_fraction_is_of_wsd_alone() -> None:
    assert factors(20, decay_fraction=0.2) == factors(20, decay_fraction=0.7)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedule_of_very_short_runs_is_positive(schedule: str, num_steps: int) -> None:
    for warmup in (0.0, 0.5, 1.0):
        fractions = {"warmup_fraction": warmup, "decay_fraction": 1 - warmup}
        assert all(0 < factor <= 1 for factor in factors(num_steps, schedule=schedule, **fractions))


def test_learning_rates_scale_each_groups_own_peak() -> None:
    optimizers = build_optimizers(Model(), config(optimizer="muon", muon_learning_rate=0.5, learning_rate=0.1))
    set_learning_rates(optimizers, 0.5)
    set_learning_rates(optimizers, 0.5)  # a second call must not compound
    assert [g["lr"] for o in optimizers for g in o.param_groups] == [0.25, 0.05, 0.05]
