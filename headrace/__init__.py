"""Headrace serves open-weight language models, and makes itself faster on the workload it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.core.version import __version__

if TYPE_CHECKING:
    from headrace.core.request import SamplingParams
    from headrace.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `headrace --help` must not wait for torch.
    if name == "LLM":
        from headrace.core.engine_environment import adopt_engine_environment

        adopt_engine_environment()
        from headrace.llm import LLM

        return LLM
    if name == "SamplingParams":
        from headrace.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
