"""The ways of decoding that are compared, under the names that tables, figures, files and commands have for them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..generation.settings import WeDLMGenerationSettings

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

FIELDS = ("window_size", "entropy_threshold", "distance_penalty")  # the settings that are tried
DRAFT_THRESHOLD = "draft_threshold"  # in the place of the second one, where drafts are verified


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
    windows: Sequence[int],
    thresholds: Sequence[float],
    penalties: Sequence[float],
    draft_thresholds: Sequence[float] = (),
    decoders: Sequence[str] = tuple(DECODERS),
) -> dict[str, dict[str, Any]]:
    """Keywords of `generate` by name, for all combinations of W (slots), τ (nats) and λ (nats per position; block-wise
    decoding is tried with the middle one), AR first. The drafts of verified decoding have τ of their own, and no λ.
    Raises `ValueError` for a decoder that is not among those [`COMPARED`], and for a value that is no setting."""
    if unknown := [name for name in decoders if name not in COMPARED]:
        raise ValueError(f"Unknown decoder {unknown[0]!r}: choose among {', '.join(COMPARED)}.")
    middle = sorted(penalties)[len(penalties) // 2]
    values: dict[str, tuple[Sequence[float], Sequence[float | None]]] = {
        BLOCK: (thresholds, [middle]),
        WEDLM: (thresholds, penalties),
        EXACT: (draft_thresholds, [None]),
    }
    named = {name: dict(COMPARED[name]) for name in COMPARED if name == AR or (name == LOOKUP and name in decoders)}
    for decoder in values:
        for setting in itertools.product(windows, *values[decoder]) if decoder in decoders else ():
            options = configured(decoder, *setting)
            WeDLMGenerationSettings(**options)  # refuses what is out of range
            shown = [f"{symbol}={value:g}" for symbol, value in zip("Wτλ", setting, strict=True) if value is not None]
            named[" ".join([decoder, *shown])] = options  # such as `wedlm W=6 τ=0.4 λ=0.02`
    return named


def configured(decoder: str, window: int, threshold: float, penalty: float | None = None) -> dict[str, Any]:
    """Keywords of `generate` of a decoder other than AR."""
    window_size, tau, distance = FIELDS
    tau = DRAFT_THRESHOLD if decoder == EXACT else tau
    settings = {window_size: window, tau: threshold, distance: penalty}
    return {**DECODERS[decoder], **{name: value for name, value in settings.items() if value is not None}}
