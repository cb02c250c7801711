"""The ways of decoding that are compared, under the names that tables, figures, files and commands have for them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..generation.settings import SETTING_NAMES, WINDOW_SETTINGS, WeDLMGenerationSettings

Options = Mapping[str, Any]  # keywords of `generate`

AR, BLOCK, WEDLM, EXACT = "ar", "block", "wedlm", "wedlm+exact"

DECODERS: dict[str, Options] = {
    AR: {"strategy": "ar"},
    BLOCK: {"strategy": "block", "verification": "none"},
    WEDLM: {"strategy": "wedlm", "verification": "none"},
    EXACT: {"strategy": "wedlm", "verification": "exact"},
}

LOOKUP = "ar+lookup"  # assisted decoding of transformers: drafts are copied from the text so far; one prompt a call

COMPARED: dict[str, Options] = {**DECODERS, LOOKUP: {"strategy": "ar", "prompt_lookup_num_tokens": 4}}
"""The [`DECODERS`] and what else there is to compare them with."""


def decoder_of(options: Options, model: Any) -> str:
    """Which of the [`DECODERS`] these keywords of `generate` mean, `strategy` among them; what they leave open is as
    the model's generation config says."""
    if options["strategy"] == AR:
        return AR
    stored = getattr(model.generation_config, "verification", None)
    verification = options.get("verification") or stored or "none"
    return str(options["strategy"] if verification == "none" else f"{options['strategy']}+{verification}")


def with_asked(settings: Options, asked: Options, model: Any) -> dict[str, Any]:
    """Settings of parallel decoding for one call, `strategy` among them: what is `asked` for goes first. Where that is
    another decoder, only this counts: `settings` were chosen for theirs."""
    if decoder_of({**settings, **asked}, model) != decoder_of(settings, model):
        settings = {"strategy": settings["strategy"]}
    return {**settings, **asked}


def candidates(
    decoders: Sequence[str],
    windows: Sequence[int] = (),
    thresholds: Sequence[float] = (),
    penalties: Sequence[float] = (),
) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by name, AR first. Unverified decoders are tried with all combinations of W (slots), τ
    (nats) and λ (nats per position); what is not given is left to the model. Raises `ValueError` for a decoder that is
    not among those [`COMPARED`], and for a value that is no setting."""
    if unknown := [name for name in decoders if name not in COMPARED]:
        raise ValueError(f"Unknown decoder {unknown[0]!r}: choose among {', '.join(COMPARED)}.")
    named = {AR: dict(COMPARED[AR])}
    for decoder in decoders:
        tried = (windows, thresholds, penalties) if decoder in (BLOCK, WEDLM) else ((), (), ())
        for values in itertools.product(*(each or [None] for each in tried)):
            given = [each for each in zip("Wτλ", WINDOW_SETTINGS, values, strict=True) if each[2] is not None]
            options = {**COMPARED[decoder], **{field: value for _, field, value in given}}
            WeDLMGenerationSettings(**{name: value for name, value in options.items() if name in SETTING_NAMES})
            shown = [f"{symbol}={value:g}" for symbol, _, value in given]
            named[" ".join([decoder, *shown])] = options  # such as `wedlm W=6 τ=0.4 λ=0.02`
    return named
