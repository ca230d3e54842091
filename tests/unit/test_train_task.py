"""A module under guard: what is not finite becomes a loss that every process can sum."""

import torch
from torch import nn

from train.task import Guarded, NonFinite, StepOutput


class Picky(nn.Module):
    """The sum of its outputs; negative inputs are not for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.unused = nn.Linear(2, 2)
        self.layer.bias.requires_grad_(False)

    def forward(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        if (batch["x"] < 0).any():
            raise NonFinite("x")
        return StepOutput(self.layer(batch["x"]).sum(), torch.tensor(len(batch["x"])), {"one": torch.tensor(1.0)})


def test_a_sound_output_passes_as_it_is() -> None:
    module = Picky()
    guarded = Guarded(module)
    batch = {"x": torch.ones(4, 2)}
    assert torch.equal(guarded(batch).loss_sum, module(batch).loss_sum)
    assert guarded(batch).metric_sums == {"one": torch.tensor(1.0)}
    assert guarded.fault is None


def test_a_fault_is_kept_and_reaches_every_gradient() -> None:
    module = Picky()
    guarded = Guarded(module)
    output = guarded({"x": -torch.ones(4, 2)})
    assert str(guarded.fault) == "x"
    assert output.loss_sum.isnan()
    assert (output.num_tokens, output.metric_sums) == (0, {})
    output.loss_sum.backward()
    trainable = [p for p in module.parameters() if p.requires_grad]
    assert len(trainable) == 3
    # another process waits for the gradient of each
    assert all(p.grad is not None and p.grad.isnan().all() for p in trainable)
    guarded({"x": torch.ones(4, 2)})
    assert guarded.fault is None
