"""An average of the weights over the steps of training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WeightAverage:
    """Exponential moving average of a module's trainable parameters, fp32.

    The decay starts low and rises to its final value, as in TensorFlow's ExponentialMovingAverage: with a fixed
    one, the weights that training began with would outweigh what was learnt for some 1 / (1 - decay) steps.

    Args:
        module: its parameters as they are now begin the average.
        decay: share of the old average in the new one, in the long run.

    Attributes:
        tensors: the average, by name of the parameter, on its device.
    """

    def __init__(self, module: torch.nn.Module, decay: float) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._decay = decay
        self.tensors = {name: p.detach().to(torch.float32, copy=True) for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the weights of the step before which `step` steps were done."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, parameter in self._parameters.items():
            self.tensors[name].lerp_(parameter.float(), 1 - decay)

    @torch.no_grad()
    def install(self) -> None:
        """Replaces the module's weights by the average."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.tensors[name])

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it the module has the averaged weights; after it, its own again, bit for bit."""
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self.install()
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(own[name])
