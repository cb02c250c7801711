"""Serving: an OpenAI-compatible server on transformers' own."""
