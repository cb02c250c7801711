"""The built-in model and prompts, and the choice of a model and a machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

NANO = Path(__file__).parents[1] / "examples" / "wedlm-nano"

DEMO_PROMPTS = (
    "Count down from 97 to 61 by 4.",
    "Anna has 347 apples. Ben brings 85 more. Anna sells 218. How many apples does Anna have now?",
    "Sort from largest to smallest: 31, 7, 86, 12, 54, 23",
    "Turn this text into JSON: Clara is 34. She works as a pilot. She lives in Lisbon. Clara has a cat and a dog.",
    "Emma lives in Paris. Jack has a horse. Emma likes soup. Jack is 41 years old. Where does Emma live?",
    'Complete this Python code:\ndef count_equal(scores, limit):\n    """Count the scores equal to limit."""',
)


@dataclass(frozen=True)
class LoadingOptions:
    """Model and machine.

    Attributes:
        adapter: mask adapter or LoRA for the model: folder or Hub id.
        dtype: of the weights: fastest (on this CPU; elsewhere auto), packed (16-bit weights on a CPU), auto (the
            checkpoint's), float32, bfloat16 or float16.
        device: such as cpu or cuda; default: cuda if there is one.
        threads: CPU threads; default: as many as have work.

    Raises:
        ValueError: for fewer than one thread.
    """

    adapter: str | None = None
    dtype: Literal["fastest", "packed", "auto", "float32", "bfloat16", "float16"] = "fastest"
    device: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {self.threads}.")

    def load(self, checkpoint: str | None) -> tuple[Any, Any]:
        """Model, in evaluation mode, and tokenizer of a folder or Hub id, or of the folder of an adapter (see
        [`load_adapted`]); of wedlm-nano for None. Raises `OSError` or `ValueError` for what cannot be loaded, and
        `ValueError` for an unknown device."""
        import torch
        from transformers.utils.logging import disable_progress_bar

        from ..adapters.loading import load_adapted
        from ..checkpoints.loading import find_device
        from .measure import default_threads

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device = str(find_device(self.device, called="`--device {}`"))
        disable_progress_bar()
        source = str(NANO) if checkpoint is None else checkpoint
        model, tokenizer = load_adapted(source, self.adapter, dtype=self.dtype, device=device)
        if self.threads is None:
            torch.set_num_threads(default_threads(model))
        return model.eval(), tokenizer
