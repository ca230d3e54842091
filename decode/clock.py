"""How much time models spend in their forward passes."""

from collections import Counter
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .model import CachedModel


class ForwardClock:
    """Context manager that adds up the wall time of all passes of models with a cache.

    Attributes:
        seconds_of: in forward passes so far, by model.
    """

    def __init__(self) -> None:
        self.seconds_of: Counter[PreTrainedModel] = Counter()

    @property
    def seconds(self) -> float:
        """Of all models together."""
        return sum(self.seconds_of.values())

    def __enter__(self) -> None:
        self._feed = CachedModel._feed

        def timed(cached: CachedModel, *args: Any, **kwargs: Any) -> Tensor | None:
            began = perf_counter()
            logits = self._feed(cached, *args, **kwargs)
            self.seconds_of[cached.model] += perf_counter() - began  # type: ignore[assignment]
            return logits

        self._draft = CachedModel.draft

        def drafted(cached: CachedModel, *args: Any, **kwargs: Any) -> Tensor:
            tokens = self._draft(cached, *args, **kwargs)
            self.seconds_of[cached.model] += cached.seconds_of_passes  # type: ignore[assignment]
            return tokens

        CachedModel._feed = timed  # type: ignore[method-assign, assignment]
        CachedModel.draft = drafted  # type: ignore[method-assign, assignment]

    def __exit__(self, *exception: object) -> None:
        CachedModel._feed = self._feed  # type: ignore[method-assign]
        CachedModel.draft = self._draft  # type: ignore[method-assign]
