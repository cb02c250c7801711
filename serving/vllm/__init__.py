r"""WeDLM checkpoints on vLLM, as a plug-in: nothing of vLLM is forked.

Installed beside vLLM, it is found by itself (entry point `vllm.general_plugins`), and `vllm serve CHECKPOINT` or
`LLM(CHECKPOINT)` loads WeDLM checkpoints. They decode like any AR model. One flag makes it verified parallel decoding,
whose output is the same in fewer forwards:

    vllm serve CHECKPOINT --dtype float32 \
        --speculative-config '{"model": "wedlm_hf.serving.vllm.Proposer", "num_speculative_tokens": 16}'

docs/serving.md goes through every option.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .proposer import Proposer

__all__ = ["Proposer"]


def __getattr__(name: str) -> Any:
    """Imports [`Proposer`], and with it vLLM, on first use."""
    if name != "Proposer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .options import NEEDS_VLLM

    try:
        from .proposer import Proposer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "vllm":
            raise
        raise ImportError(NEEDS_VLLM) from error
    return Proposer
