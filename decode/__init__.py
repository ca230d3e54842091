"""Speculative decoding with an unchanged output distribution."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoder import SpeculativeDecoder
    from .params import SamplingParams

__all__ = ["SamplingParams", "SpeculativeDecoder"]


def __getattr__(name: str) -> Any:
    """Import on first use: `spec-decode --help` should not wait for torch."""
    if name == "SpeculativeDecoder":
        from .decoder import SpeculativeDecoder

        return SpeculativeDecoder
    if name == "SamplingParams":
        from .params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
