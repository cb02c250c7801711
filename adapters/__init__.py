"""Mask adapters: any AR model writes its own text in fewer forwards (ALGORITHM.md §5)."""
