"""The ways of decoding that are compared, under the names that tables, figures, files and commands have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Options = Mapping[str, Any]
"""Keywords of `generate`."""

AR, BLOCK, WEDLM, TYPICAL, EXACT = "ar", "block", "wedlm", "wedlm+typical", "wedlm+exact"

DECODERS: dict[str, Options] = {
    AR: {"strategy": "ar"},
    BLOCK: {"strategy": "block", "verification": "none"},
    WEDLM: {"strategy": "wedlm", "verification": "none"},
    TYPICAL: {"strategy": "wedlm", "verification": "typical"},
    EXACT: {"strategy": "wedlm", "verification": "exact"},
}

LOOKUP = "ar+lookup"
"""Assisted decoding of transformers, which needs no training: drafts are copied from the text so far. One prompt a
call."""

COMPARED: dict[str, Options] = {**DECODERS, LOOKUP: {"strategy": "ar", "prompt_lookup_num_tokens": 4}}
"""The [`DECODERS`] and what else there is to compare them with."""


def decoder_name(strategy: str, verification: str) -> str:
    """Of the [`DECODERS`], for these keywords of `generate`."""
    return strategy if verification == "none" else f"{strategy}+{verification}"


def with_asked(settings: Options, asked: Options) -> dict[str, Any]:
    """Settings of parallel decoding for one call.

    Args:
        settings: where nothing else is asked for, `strategy` among them.
        asked: what a call names. If that is another decoder, only this counts: `settings` were chosen for theirs.
    """
    decoder = {name: settings.get(name) for name in ("strategy", "verification")}
    if any(asked.get(name, value) != value for name, value in decoder.items()):
        settings = {"strategy": settings["strategy"]}
    return {**settings, **asked}
