"""gapless: large-language-model generation in which the GPU never waits for the CPU.

Importing this package is cheap: torch and transformers are imported when an engine is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapless.config import EngineConfig
from gapless.errors import (
    AdapterError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    UnsupportedModelError,
    WeightError,
)
from gapless.request.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from gapless.request.sampling_params import RequestOutputKind, SamplingParams
from gapless.request.structured import StructuredOutputsParams
from gapless.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from gapless.async_llm import AsyncLLM
    from gapless.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "FinishReason",
    "Logprob",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "UnsupportedModelError",
    "WeightError",
]

_LAZY = {"LLM": "gapless.llm", "AsyncLLM": "gapless.async_llm"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gapless' has no attribute {name!r}")
