"""`generate(strategy=...)`."""

from transformers import GenerationMixin


class WeDLMGenerationMixin(GenerationMixin):
    """placeholder while the engine is written"""
