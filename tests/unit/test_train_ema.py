"""The moving average of the weights: its values, and that it leaves the weights alone."""

import pytest
import torch
from torch import nn

from train.ema import WeightAverage


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    layers[1].bias.requires_grad_(False)
    return layers.to(dtype)


def perturb(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_it_covers_what_is_trainable_in_fp32() -> None:
    average = WeightAverage(model(torch.bfloat16), 0.9)
    assert set(average.tensors) == {"0.weight", "0.bias", "1.weight"}
    assert {tensor.dtype for tensor in average.tensors.values()} == {torch.float32}


def test_the_decay_rises_to_its_value() -> None:
    module = model()
    average = WeightAverage(module, 0.5)
    expected = module[0].weight.detach().double()
    for step, decay in enumerate([1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, 0.5, 0.5]):
        perturb(module)
        average.update(step)
        expected = decay * expected + (1 - decay) * module[0].weight.detach().double()
        torch.testing.assert_close(average.tensors["0.weight"].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_the_block_the_module_has_the_average_and_after_it_its_own_bits(dtype: torch.dtype) -> None:
    module = model(dtype)
    average = WeightAverage(module, 0.9)
    perturb(module)
    average.update(100)
    own = [p.clone() for p in module.parameters()]
    kept = {name: tensor.clone() for name, tensor in average.tensors.items()}
    with pytest.raises(KeyError), average.installed():
        assert torch.equal(module[0].weight, kept["0.weight"].to(dtype))
        assert not torch.equal(module[0].weight, own[0])
        raise KeyError  # an evaluation that fails must not leave the average behind
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), own, strict=True))
    assert all(torch.equal(average.tensors[name], kept[name]) for name in kept)
