"""Dual-stream masking, the collator and the loss."""
