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
    from . import plugin  # noqa: F401  # which says what to install where vLLM is missing
    from .proposer import Proposer

    return Proposer
