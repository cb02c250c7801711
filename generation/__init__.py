"""Decoding: settings, the window and its loop, cache, sampling, statistics, and the `GenerationMixin` on top."""

from .cache_wedlm import WindowCache
from .mixin_wedlm import WeDLMGenerationMixin
from .settings_wedlm import WeDLMGenerationSettings
from .stats_wedlm import DecodingStats, TraceStep, WeDLMGenerateOutput

__all__ = [
    "DecodingStats",
    "TraceStep",
    "WeDLMGenerateOutput",
    "WeDLMGenerationMixin",
    "WeDLMGenerationSettings",
    "WindowCache",
]
