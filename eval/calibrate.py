"""The work of `wedlm calibrate`: the fastest decoding settings that agree with AR well enough on given prompts.

*Agreement* is the share of new tokens that AR decoding would have chosen after the same prefix, the decoder's own. It
is 1 exactly where the whole answer is AR's. It counts the places where the decoder chose otherwise; a comparison with
AR's answer token by token would count all that follows the first of them, whether it says the same or not.

*Speed* follows from counts, so that it does not depend on what else the machine does: a forward of Q slots takes the
time 1 + c·Q, and the slot cost c is measured first. Settings are picked on every other prompt and must hold on the
rest; only the outcome is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ..generation.settings_wedlm import WeDLMGenerationSettings
from ..modeling_wedlm import WeDLMForCausalLM
from .measure import Decoding, ForwardCounter, Options, Score, decode, endless, take_turns, typical
from .sweep import Setting

AR = "AR"
TIMED_REPEATS = 5
# How the slot cost is measured: so many tokens, one a step, with windows of these sizes.
COST_WINDOWS, COST_TOKENS, COST_REPEATS = (1, 4, 8, 16, 24), 32, 3


@dataclass(frozen=True)
class Grid:
    """Values to try, in all combinations.

    Attributes:
        windows: W.
        thresholds: τ, nats.
        penalties: λ, nats per position.
        budgets: of entropy, in place of τ, nats.
        verified_thresholds: τ of the drafts of verified decoding, nats.

    Raises:
        ValueError: for a value that is no setting.
    """

    windows: Sequence[int] = (4, 8, 16)
    thresholds: Sequence[float] = (0.1, 0.2, 0.4, 0.8)
    penalties: Sequence[float] = (0.02, 0.1)
    budgets: Sequence[float] = (0.1, 0.4, 1.6)
    verified_thresholds: Sequence[float] = (0.4, 1.0)

    def __post_init__(self) -> None:
        for options in self.candidates().values():
            WeDLMGenerationSettings(**options)

    def candidates(self) -> dict[str, dict[str, Any]]:
        """Keywords of `generate` by name."""
        named: dict[str, dict[str, Any]] = {}
        for values in itertools.product(self.windows, self.thresholds, self.penalties):
            setting = Setting(*values)
            named[str(setting)] = {**setting.options, "entropy_budget": None}
        for window, budget, penalty in itertools.product(self.windows, self.budgets, self.penalties):
            name = f"W={window} budget={budget:g} λ={penalty:g}"
            named[name] = {**Setting(window, 0.0, penalty).options, "entropy_budget": budget}
            del named[name]["entropy_threshold"]
        for window, threshold in itertools.product(self.windows, self.verified_thresholds):
            name = f"verified W={window} τ={threshold:g}"
            named[name] = {**Setting(window, threshold, 0.0).options, "entropy_budget": None, "verification": "exact"}
            del named[name]["distance_penalty"]
        return named


@dataclass(frozen=True)
class SlotCost:
    """A step of Q slots takes `fixed` + `slot` · Q seconds."""

    fixed: float
    slot: float

    @classmethod
    def fit(cls, seconds: Mapping[int, Sequence[float]]) -> SlotCost:
        """A line through the medians of the steps of each width, which weigh as much as they have steps."""
        slots = torch.tensor(list(seconds), dtype=torch.float64)
        times = torch.tensor([median(values) for values in seconds.values()], dtype=torch.float64)
        weights = torch.tensor([len(values) for values in seconds.values()], dtype=torch.float64).sqrt()[:, None]
        columns = torch.stack([torch.ones_like(slots), slots], 1)
        fixed, slot = torch.linalg.lstsq(weights * columns, weights * times[:, None]).solution.flatten().tolist()
        return cls(max(fixed, 1e-9), max(slot, 0.0))

    @property
    def relative(self) -> float:
        """c, the setting `slot_cost`."""
        return self.slot / self.fixed

    def of(self, decodings: Sequence[Decoding]) -> float:
        """Time per new token, relative to `fixed`."""
        forwards, slots, tokens = (
            sum(values)
            for values in zip(*((d.forwards, d.token_instances, len(d.tokens)) for d in decodings), strict=True)
        )
        return (forwards + self.relative * slots) / tokens


@dataclass(frozen=True)
class Trial:
    """One setting on one part of the prompts.

    Attributes:
        options: keywords of `generate`.
        agreement: share of new tokens that AR would have chosen after the same prefix.
        identical: share of answers that are AR's.
        tokens_per_forward: of the pooled counts.
        speed: against AR's, by counts and slot cost.
        kept: agreement on the other prompts, where it was asked for.
    """

    options: Options
    agreement: float
    identical: float
    tokens_per_forward: float
    speed: float
    kept: float | None = None


@dataclass(frozen=True)
class Calibration:
    """What [`run_calibration`] found.

    Attributes:
        cost: of forwards.
        trials: by name, AR first.
        chosen: name of the fastest that is good enough on both parts; `None` if there is none.
        tokens_per_second: of AR and of the chosen one on the prompts that it was not picked on, taking turns.
    """

    cost: SlotCost
    trials: Mapping[str, Trial]
    chosen: str | None
    tokens_per_second: Mapping[str, float]

    def settings(self) -> dict[str, Any]:
        """The fields of the generation config that the choice decides; those that are None are to be removed."""
        assert self.chosen is not None
        options = self.trials[self.chosen].options
        return {name: value for name, value in options.items() if name != "strategy"} | {
            "slot_cost": float(f"{self.cost.relative:.2g}")
        }


def measure_slot_cost(model: WeDLMForCausalLM, prompt: list[int]) -> SlotCost:
    """Time the steps of decoding with several window sizes, in turn.

    What a slot costs outside the forward (its entropy, the choice of its token) counts as well.
    """
    seconds: dict[int, list[float]] = {}
    with endless(model):
        for repeat, window in itertools.product(range(COST_REPEATS + 1), COST_WINDOWS):
            options = {**Setting(window, 0.0, 0.0).options, "entropy_budget": None, "adaptive_window": False}
            with ForwardCounter(model) as counter:
                decode(model, None, [prompt], {**options, "max_new_tokens": COST_TOKENS, "do_sample": False})
            if repeat == 0:
                continue  # a warm-up
            starts, widths = counter.starts[1:], [width for _, width in counter.shapes[1:]]  # without the prefill
            for width, start, end in zip(widths, starts, starts[1:], strict=False):
                seconds.setdefault(width, []).append(end - start)
    return SlotCost.fit(seconds)


@torch.no_grad()
def agreeing_tokens(model: WeDLMForCausalLM, prompt: list[int], answer: list[int]) -> int:
    """How many tokens of an answer greedy AR decoding would have chosen after the tokens before them, by one forward.

    The mask token and the tokens that the generation config suppresses count as impossible.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
    impossible = [model.config.mask_token_id, *(model.generation_config.suppress_tokens or ())]
    logits[:, [token for token in impossible if token is not None]] = float("-inf")
    return int((logits.argmax(-1) == torch.tensor(answer, device=model.device)).sum())


def check_request(prompts: int, agreement: float) -> None:
    """Raises `ValueError` for fewer than two prompts, and for a wanted agreement that is out of range."""
    if prompts < 2:
        raise ValueError(f"Calibration needs at least 2 prompts, to pick settings on and to check, got {prompts}.")
    if not 0 < agreement <= 1:
        raise ValueError(f"The wanted agreement must be above 0 and at most 1, got {agreement}.")


def run_calibration(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    *,
    agreement: float,
    grid: Grid,
    max_new_tokens: int,
    batch_size: int = 8,
    title: str = "",
) -> Calibration:
    """Find the fastest settings of greedy decoding whose agreement with AR is wide enough.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        prompts: tokens of each; those with even indices are for picking, the others for checking.
        agreement: wanted, above 0, at most 1.
        grid: settings to try.
        max_new_tokens: of each answer.
        batch_size: prompts decoded together where settings are compared: unverified ones take the same steps in any
            batch, verified ones are decoded one at a time.
        title: shown with a progress bar on standard error, if any.

    Raises:
        ValueError: for fewer than two prompts, and for a wanted agreement that is out of range.
    """
    check_request(len(prompts), agreement)
    room = model.config.max_position_embeddings - max(map(len, prompts))
    picking, checking = prompts[::2], prompts[1::2]
    cost = measure_slot_cost(model, prompts[0])
    limits: Options = {"max_new_tokens": max(1, min(max_new_tokens, room)), "do_sample": False}
    ar_options: Options = {"strategy": "ar", **limits}
    references = {
        id(part): _decode_all(model, tokenizer, part, ar_options, batch_size) for part in (picking, checking)
    }

    def attempt(options: Options, part: Sequence[list[int]]) -> Trial:
        is_verified = options.get("verification") == "exact"
        keywords: dict[str, Any] = {**options, **limits}
        if is_verified:
            keywords["slot_cost"] = cost.relative
        reference = references[id(part)]
        answers = _decode_all(model, tokenizer, part, keywords, 1 if is_verified else batch_size)
        return _trial(model, part, options, answers, reference, cost)

    trials = {AR: attempt(ar_options, picking)}
    candidates = grid.candidates()
    for name in track(candidates, title, console=Console(stderr=True), disable=not title):
        trials[name] = attempt(candidates[name], picking)
    chosen = None
    good = [name for name in candidates if trials[name].agreement >= agreement]
    for name in sorted(good, key=lambda name: -trials[name].speed):
        trials[name] = replace(trials[name], kept=attempt(candidates[name], checking).agreement)
        if trials[name].kept >= agreement:  # type: ignore[operator]
            chosen = name
            break
    speeds = {}
    if chosen is not None:
        timed = {AR: ar_options, chosen: {**candidates[chosen], **limits, "slot_cost": cost.relative}}
        decoders = {name: partial(decode, model, tokenizer, options=options) for name, options in timed.items()}
        runs = list(take_turns(decoders, [[prompt] for prompt in checking], repeats=TIMED_REPEATS))
        for name in timed:
            scores = (Score.of(typical([run[name] for run in prompt_runs])[0]) for prompt_runs in runs)
            speeds[name] = sum(scores, Score()).tokens_per_second
    return Calibration(cost, trials, chosen, speeds)


def _decode_all(
    model: WeDLMForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    options: Options,
    batch_size: int,
) -> list[Decoding]:
    batches = (prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size))
    return [decoding for batch in batches for decoding in decode(model, tokenizer, batch, options)]


def _trial(
    model: WeDLMForCausalLM,
    prompts: Sequence[list[int]],
    options: Options,
    answers: Sequence[Decoding],
    reference: Sequence[Decoding],
    cost: SlotCost,
) -> Trial:
    pairs = list(zip(answers, reference, strict=True))
    same = sum(agreeing_tokens(model, p, answer.tokens) for p, answer in zip(prompts, answers, strict=True))
    total = sum((Score.of(answer, agrees=answer.tokens == wanted.tokens) for answer, wanted in pairs), Score())
    return Trial(
        options=options,
        agreement=same / total.new_tokens,
        identical=total.agreement,
        tokens_per_forward=total.tokens_per_forward,
        speed=cost.of(reference) / cost.of(answers),
    )


def table(found: Calibration, agreement: float) -> Table:
    """AR, the settings that no other one beats in both agreement and speed, and those that were checked."""
    trials = found.trials
    best = {
        name
        for name, trial in trials.items()
        if not any(
            (other.agreement, other.speed) != (trial.agreement, trial.speed)
            and other.agreement >= trial.agreement
            and other.speed >= trial.speed
            for other in trials.values()
        )
    }
    rows = Table("setting", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("agreement", "checked", "identical", "tok/fwd", "speed to AR"):
        rows.add_column(name, justify="right", no_wrap=True)
    shown = [name for name in trials if name in best or name in (AR, found.chosen) or trials[name].kept is not None]
    for name in sorted(shown, key=lambda name: (name != AR, -trials[name].speed)):
        trial = trials[name]
        style = "bold" if name == found.chosen else "" if trial.agreement >= agreement else "dim"
        rows.add_row(
            name,
            f"{100 * trial.agreement:.2f} %",
            "" if trial.kept is None else f"{100 * trial.kept:.2f} %",
            f"{100 * trial.identical:.0f} %",
            f"{trial.tokens_per_forward:.2f}",
            f"{trial.speed:.2f}×",
            style=style,
        )
    return rows


def show(found: Calibration, agreement: float, console: Console) -> None:
    """Print what was found."""
    cost = found.cost
    console.print(
        f"A step takes {1000 * cost.fixed:.3f} ms and {1000 * cost.slot:.4f} ms for each slot: "
        f"slot_cost = {cost.relative:.2g}.",
        highlight=False,
    )
    console.print(table(found, agreement))
    if found.chosen is None:
        console.print(f"No setting agrees with AR on {100 * agreement:g} % of the tokens.", highlight=False)
        return
    chosen, ar = (found.tokens_per_second[name] for name in (found.chosen, AR))
    console.print(
        f"Chosen: {found.chosen}. On the prompts that it was not picked on: {chosen:,.0f} tokens/s, AR {ar:,.0f}, "
        f"{chosen / ar:.2f}×.",
        highlight=False,
    )
