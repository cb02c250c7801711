"""Streaming parallel decoding: settings, window, selection, cache, statistics."""
