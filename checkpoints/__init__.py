"""Reading, writing and formats of checkpoints, of models of any class."""

from pathlib import Path

NANO = Path(__file__).parents[1] / "examples" / "wedlm-nano"  # the built-in checkpoint
