"""Factors of a target's matrices: the least that can be lost, within a budget, and that C++ multiplies the same."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from decode.low_rank import LowRankLinear, low_rank_linears
from decode.model import CachedModel
from decode.params import SamplingParams
from decode.self_draft import SelfDraft, self_draft
from decode.self_proposer import self_draft_proposer
from distill.config import RespondConfig
from distill.layers import Calibration
from distill.low_rank import _factorised, choose_ranks, factorise
from distill.responses import respond

Build = Callable[..., LlamaForCausalLM]


def test_no_other_factors_lose_less() -> None:
    """Eckart and Young, for inputs that are not white: what is lost is the squares of the singular values cut off."""
    torch.manual_seed(0)
    mixing = torch.randn(40, 40) * torch.logspace(0, -2, 40)
    inputs = torch.randn(4000, 40) @ mixing.T
    weight = torch.randn(60, 40)
    found = _factorised(weight, inputs.T @ inputs)
    whole = (inputs @ weight.T).square().sum()
    up, values, down = torch.linalg.svd(weight, full_matrices=False)
    for rank in (4, 8, 20):
        product = found.up[:, :rank] @ found.down[:rank]
        lost = float((inputs @ (weight - product).T).square().sum() / whole)
        assert lost == pytest.approx(float(found.losses[rank:].sum()), abs=2e-3)
        unaware = up[:, :rank] * values[:rank] @ down[:rank]
        assert lost < 0.8 * float((inputs @ (weight - unaware).T).square().sum() / whole)
    torch.testing.assert_close(found.up @ found.down, weight, atol=1e-3, rtol=1e-3)


def test_ranks_go_where_they_save_most() -> None:
    steep, flat = torch.tensor([0.9, *[0.1 / 127] * 127]), torch.full((128,), 1 / 128)
    sizes = {("steep",): (128, 128), ("flat",): (128, 128)}
    ranks = choose_ranks({("steep",): steep, ("flat",): flat}, sizes, 0.75)
    assert ranks == {("steep",): 32, ("flat",): 64}
    assert sum(rank * 256 for rank in ranks.values()) <= 0.75 * 2 * 128 * 128
    # never nothing at all
    assert min(choose_ranks({("steep",): steep, ("flat",): flat}, sizes, 0.01).values()) == 32


@pytest.fixture(scope="module")
def target_folder(tiny_model_folder: Callable[..., Path]) -> Path:
    shape: dict[str, Any] = dict(num_layers=3, hidden_size=128, intermediate_size=192, head_dim=32)
    return tiny_model_folder(**shape, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def calibration(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    folder = tmp_path_factory.mktemp("responses")
    (folder / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(24)))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24, seed=0)
    prompts, output = str(folder / "prompts.txt"), str(folder / "responses")
    respond(RespondConfig(target=str(target_folder), prompts=prompts, output=output, sampling=sampling))
    target = LlamaForCausalLM.from_pretrained(target_folder)
    return Calibration(target.eval(), output, 400)


def test_the_more_weights_the_more_is_accepted(calibration: Calibration) -> None:
    target = calibration.target
    alphas = []
    for share in (0.25, 0.5, 0.9):
        factors = factorise(target, calibration, share)
        draft = self_draft(target, SelfDraft(low_rank=True), tensors=factors)
        assert any(isinstance(module, LowRankLinear) for module in draft.modules())
        alphas.append(calibration.alpha(draft))
    assert alphas == sorted(alphas)
    assert alphas[0] < alphas[-1] - 0.02
    assert not any(module._forward_pre_hooks for module in target.modules())
    assert calibration.alpha() == pytest.approx(1.0)


@torch.inference_mode()
def test_every_way_multiplies_the_same(calibration: Calibration) -> None:
    factors = factorise(calibration.target, calibration, 0.5)
    tokens = torch.tensor([[5, 9, 30, 31, 32, 7], [5, 9, 77, 3, 2, 1]])
    rounded = copy.deepcopy(calibration.target).bfloat16()
    logits = {}
    for name, model in (("precise", calibration.target), ("rounded", rounded)):
        proposer = self_draft_proposer(model, SelfDraft(low_rank=True), tensors=factors)
        target = CachedModel(model, 2, 10)
        cached = proposer._begin([[1], [1]], target)
        for way in ("fast", "own"):
            if way == "own":
                cached = target.through(proposer.model, None)
            logits[name, way] = cached.forward(tokens).float()
            cached.rollback([0, 0])
    truth = logits["precise", "own"]
    for each in logits.values():
        assert float((each - truth).square().mean().sqrt()) < 0.05 * float(truth.std())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda factors: factors.clear(), "factors: there are none"),
        (
            lambda factors: factors.update({"model.layers.9.mlp.up_proj.up": torch.ones(1, 1)}),
            "no layer model.layers.9",
        ),
        (lambda factors: factors.pop("model.layers.0.self_attn.o_proj.down"), "o_proj are not of its shape"),
        (lambda factors: factors.update({"model.layers.0.mlp.down_proj.up": torch.ones(1, 1)}), "are not of its shape"),
    ],
)
def test_factors_of_another_model(calibration: Calibration, change: Callable[[Any], None], said: str) -> None:
    factors = factorise(calibration.target, calibration, 0.3)
    change(factors)
    with pytest.raises(ValueError, match=said):
        low_rank_linears(calibration.target, factors)
