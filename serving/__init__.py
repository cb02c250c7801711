"""Serving: an OpenAI-compatible server on transformers' own, and a plug-in for vLLM."""
