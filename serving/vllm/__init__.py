"""WeDLM checkpoints on vLLM, as a plug-in that vLLM finds by itself (entry point `vllm.general_plugins`). They decode
like any AR model or, with `speculative_config`, by verified parallel decoding; docs/serve.md has every option."""

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
