"""Speculative decoding with an unchanged output distribution."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoder import SpeculativeDecoder
    from .params import SamplingParams, SpeculationParams

__all__ = ["SamplingParams", "SpeculationParams", "SpeculativeDecoder"]


def __getattr__(name: str) -> Any:
    """Import on first use: `spec-decode --help` should not wait for torch."""
    if name == "SpeculativeDecoder":
        from .decoder import SpeculativeDecoder

        return SpeculativeDecoder
    if name in ("SamplingParams", "SpeculationParams"):
        from . import params

        return getattr(params, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
