"""Measuring: prompts, decoders, metrics, the report, the harness, the replay, and the work of `wedlm generate`."""
