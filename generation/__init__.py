"""Decoding: settings, the window and its loop, cache, sampling, statistics, and the `GenerationMixin` on top."""

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
