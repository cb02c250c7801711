"""Decoding: settings, the window and its loop, cache, sampling, statistics, and the `GenerationMixin` on top."""

from .versions import TESTED  # noqa: F401  # first: it says so where transformers is too old

# isort: split

from .cache import WindowCache
from .mixin import WeDLMGenerationMixin
from .settings import WeDLMGenerationSettings
from .stats import DecodingStats, WeDLMGenerateOutput
from .trace import TraceRecorder, TraceStep

WeDLMGenerationMixin.trace_recorder = TraceRecorder

__all__ = [
    "DecodingStats",
    "TraceStep",
    "WeDLMGenerateOutput",
    "WeDLMGenerationMixin",
    "WeDLMGenerationSettings",
    "WindowCache",
]
