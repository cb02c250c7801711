"""Which token to choose: logits processors, then argmax or a draw.

`A` rows in use, `M` slots of a row, `V` vocabulary, `B` rows of the call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as transformers_processors

# Processors that look at the scores alone.
SCORE_PROCESSORS = (
    "EpsilonLogitsWarper EtaLogitsWarper InfNanRemoveLogitsProcessor LogitNormalization MinPLogitsWarper "
    "SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper "
    "TypicalLogitsWarper"
).split()
# Those of them that need only the scores of the likeliest tokens.
SHORTLIST_PROCESSORS = "MinPLogitsWarper TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper".split()
# Processors that look at the scores and at how long the sequence is, not at what it holds.
LENGTH_PROCESSORS = (
    "ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor "
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor SuppressTokensAtBeginLogitsProcessor"
).split()
# Processors that need the tokens before the position they score, but not to know which row of the batch it is in.
PREFIX_PROCESSORS = "NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor".split()
# Processors that keep nothing from call to call.
STATELESS_PROCESSORS = [
    *SCORE_PROCESSORS,
    *LENGTH_PROCESSORS,
    *PREFIX_PROCESSORS,
    "EncoderRepetitionPenaltyLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
]
# Logits of which entropies are computed at a time.
CHUNK = 2**25
# How many of the likeliest tokens are looked at where the others do not matter, or matter little.
SHORTLIST = 64


def _is_any(processor: object, names: list[str]) -> bool:
    return type(processor) in {getattr(transformers_processors, name, None) for name in names}


Chosen = tuple[torch.Tensor, torch.Tensor]  # tokens and processed scores


class PositionNoise:
    """Exponential noise, a function of a row, a position of its answer and a token.

    argmax p / E with E ~ Exp(1) has the law p. A position has the same noise however often, in whatever order and
    beside whatever else it is asked for. So a seed gives the same text for every W.

    Args:
        batch_size: B.
        device: of the noise.
    """

    def __init__(self, batch_size: int, device: torch.device):
        self.seeds = torch.randint(2**63 - 1, (batch_size,)).to(device)  # from torch's global seed

    def at(self, rows: list[int], offsets: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Noise `(A, M, S)` float32.

        Args:
            rows: the call's row that each entry is.
            offsets: `(A, M)` int64, positions.
            tokens: `(A, M, S)` int64, or other numbers that have noise of their own.
        """
        seeds = self.seeds[torch.tensor(rows, device=offsets.device)]
        bits = _split_mix(_split_mix(seeds[:, None], offsets)[..., None], tokens)
        uniform = (bits >> 11).bitwise_and_(2**53 - 1).float().add_(0.5).mul_(2.0**-53)
        return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _split_mix(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Random bits, int64: number `index` of the sequence that SplitMix64 gives for `seed` (Steele, Lea and Flood,
    2014, Figure 17)."""
    bits = seed + (index + 1).mul_(0x9E3779B97F4A7C15 - 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # in place: memory is slow
        bits = bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor - 2**64)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(2**33 - 1))


@dataclass
class TokenSampler:
    """Chooses tokens: logits processors in transformers' order, then argmax or a draw."""

    processors: Any  # a `LogitsProcessorList`, as `generate` prepared it
    do_sample: bool  # draw from the processed distribution; otherwise its argmax
    mask_token_id: int | None  # never chosen: its logit counts as −∞; `None` where the vocabulary has no MASK
    prompt_ids: torch.Tensor  # `(B, P)` int64, the padded prompts, which processors see too

    def __post_init__(self) -> None:
        length = SCORE_PROCESSORS + LENGTH_PROCESSORS
        self.need_length = [p for p in self.processors if not _is_any(p, SCORE_PROCESSORS)]
        self.need_prefix = [p for p in self.processors if not _is_any(p, length)]
        # Another processor may state by its `needs_row` that it needs none.
        named = length + PREFIX_PROCESSORS
        self.need_row = [p for p in self.processors if not _is_any(p, named) and getattr(p, "needs_row", True)]
        self.top_k = self._top_k()
        # There shortlists save time; a GPU computes all scores sooner than the host would read which are needed.
        self.is_on_cpu = self.prompt_ids.device.type == "cpu"

    @property
    def filler(self) -> int:
        """The token of slots: MASK; any where an adapter embeds them."""
        return self.mask_token_id or 0

    @property
    def overwrites(self) -> bool:
        """Whether [`choose`] may change the logits that it gets."""
        return self.mask_token_id is not None or len(self.processors) > 0

    @property
    def device(self) -> torch.device:
        """Of tokens."""
        return self.prompt_ids.device

    @cached_property
    def noise(self) -> PositionNoise:
        """The noise of all draws of this call."""
        return PositionNoise(len(self.prompt_ids), self.prompt_ids.device)

    def check_out_of_order(self) -> None:
        """Raises `ValueError` for a processor that [`choose`] could not honour."""
        for processor in self.need_prefix:
            raise ValueError(
                f"{type(processor).__name__} needs the tokens before each position, but slots are filled before those "
                "are known. Use `verification='exact'` or `strategy='ar'`, or switch the option off "
                "(for example `repetition_penalty=1.0`)."
            )

    def choose(self, logits: torch.Tensor, offsets: list[list[int]], rows: list[int]) -> Chosen:
        """Chooses tokens for slots, where no processor needs the tokens before them.

        Args:
            logits: `(A, M, V)` float32, raw; they are overwritten where [`overwrites`] says so.
            offsets: `(A, M)`, new tokens in front of each slot; -1 where there is nothing to choose.
            rows: the call's row that each entry is.

        Returns:
            `(A, M)` int64, tokens, -1 where there was nothing to choose from; `(A, M, V)` float32, processed scores.
        """
        self.suppress(logits)
        size = min(SHORTLIST, logits.shape[-1])
        if self.do_sample and 0 < self.top_k < size and self.is_on_cpu:
            best, tokens = logits.topk(size)
            if bool((best[..., -1] < best[..., self.top_k - 1]).all()):  # else tokens behind are as likely as the k-th
                best = self.processors(tokens.flatten(0, 1), best.flatten(0, 1)).view_as(best)
                scores = torch.full_like(logits, float("-inf")).scatter(-1, tokens, best)
                return self._draw(best.softmax(-1), tokens, offsets, rows), scores
        if not self.processors:
            return self._choose(logits, offsets, rows), logits
        scores = logits.flatten(0, 1)
        if not self.need_length:
            scores = self.processors(self.prompt_ids.new_empty(len(scores), 0), scores)
        else:
            by_offset: dict[int, list[int]] = {}  # known to the host: it need not wait for the tensor
            for cell, offset in enumerate(chain.from_iterable(offsets)):
                by_offset.setdefault(offset, []).append(cell)
            scores = scores.clone()
            for offset, cells in by_offset.items():
                if offset >= 0:
                    index = self.prompt_ids.new_tensor(cells)
                    prefix = index.new_zeros(len(cells), self.prompt_ids.shape[1] + offset)
                    scores[index] = self.processors(prefix, scores[index])
        scores = scores.view_as(logits)
        return self._choose(scores, offsets, rows), scores

    def choose_in_order(
        self,
        logits: torch.Tensor,
        offsets: list[list[int]],
        rows: list[int],
        prefix: Callable[[int, int], list[int]],
        follow: Callable[[int, int, int], int | None],
    ) -> Chosen:
        """Chooses tokens for AR rows, where processors may need the tokens before them.

        Args:
            logits, offsets, rows: see [`choose`].
            prefix: from an entry and a row of it: the new tokens up to this row, its own included.
            follow: from an entry, a row of it and the token that this row chooses: the next row; `None` where the
                accepted path ends.
        """
        if not self.need_prefix:
            return self.choose(logits, offsets, rows)
        self.suppress(logits)
        chosen, processed = self.prompt_ids.new_zeros(logits.shape[:2]), logits.clone()
        # The host would wait to know which rows the path takes: a GPU scores all of them in less time. Processors that
        # keep a state must see the path alone.
        all_paths = not self.is_on_cpu and all(_is_any(p, STATELESS_PROCESSORS) for p in self.processors)
        for entry, (row, own) in enumerate(zip(rows, offsets, strict=True)):
            count = sum(offset >= 0 for offset in own)
            column: int | None = 0 if count else None
            while column is not None:
                cell = slice(entry, entry + 1), slice(column, column + 1)
                known = torch.cat([self.prompt_ids[row], self.prompt_ids.new_tensor(prefix(entry, column))])
                # Some distinguish sequences by their index: they get a batch with this one in its place.
                copies, place = (len(self.prompt_ids), row) if self.need_row else (1, 0)
                scores = logits[entry, column].expand(copies, -1).clone()
                processed[cell] = self.processors(known.expand(copies, -1), scores)[place]
                chosen[cell] = self._choose(processed[cell], [[own[column]]], [row])
                if all_paths:
                    column = column + 1 if column + 1 < count else None
                else:
                    column = follow(entry, column, int(chosen[cell]))
        return chosen, processed

    def draft(
        self, scores: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor, sequences: list[int], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Guesses what the AR head will choose for one position of each path.

        Where it will draw, it draws with the noise of that position, which the guess shares: two distributions that
        are alike then mostly give the same token. Processors that need more than scores are left out of the guess.

        Args:
            scores: `(A, B, S)` float32, raw scores of a shortlist, by the masks, for B paths of each sequence.
            tokens: `(A, S)` int64, the shortlist.
            offsets: `(A, 1)` int64, new tokens before the position.
            sequences: the place in the call of each entry's sequence.
            count: guesses wanted, C.

        Returns:
            `(A, B, C)` int64, tokens, the likeliest first, and float32, their probabilities on the shortlist.
        """
        probabilities = scores.softmax(-1, dtype=torch.float32)  # autocast gives scores of 16 bits
        ranked = scores
        if self.do_sample:
            flat = scores.flatten(0, 1)
            for processor in self.processors:
                if _is_any(processor, SHORTLIST_PROCESSORS):
                    flat = processor(tokens.repeat_interleave(scores.shape[1], 0), flat)
            ranked = flat.softmax(-1).view_as(scores) / self.noise.at(sequences, offsets, tokens[:, None])
        places = ranked.topk(min(count, scores.shape[-1]), dim=-1).indices
        return tokens[:, None].expand_as(scores).gather(2, places), probabilities.gather(2, places)

    def suppress(self, logits: torch.Tensor) -> None:
        """Takes MASK, if there is one, out of the choice, in place."""
        if self.mask_token_id is not None:
            logits[..., self.mask_token_id] = float("-inf")

    def _choose(self, scores: torch.Tensor, offsets: list[list[int]], rows: list[int]) -> torch.Tensor:
        if self.do_sample:
            tokens = torch.arange(scores.shape[-1]).to(scores.device)
            return self._draw(torch.softmax(scores, dim=-1), tokens, offsets, rows)
        if not self.is_on_cpu:
            best, tokens = scores.max(-1)
            return tokens.masked_fill(~best.isfinite(), -1)
        values = scores.numpy()  # whose argmax takes a fifth of the time of torch's
        chosen = values.argmax(-1)
        highest = values.reshape(-1, values.shape[-1])[np.arange(chosen.size), chosen.ravel()].reshape(chosen.shape)
        return torch.from_numpy(np.where(np.isfinite(highest), chosen, -1))

    def _draw(
        self, probabilities: torch.Tensor, tokens: torch.Tensor, offsets: list[list[int]], rows: list[int]
    ) -> torch.Tensor:
        """`(A, M)`: draws from `tokens`, `(A, M, S)` or `(S,)`, with `probabilities`, `(A, M, S)`; -1 where NaN."""
        tokens = tokens.expand_as(probabilities)
        if probabilities.numel() > CHUNK and len(rows) > 1:  # noise takes memory
            parts = zip(probabilities.split(1), tokens.split(1), offsets, rows, strict=True)
            return torch.cat([self._draw(each, ids, [own], [row]) for each, ids, own, row in parts])
        noise = self.noise.at(rows, torch.tensor(offsets, device=tokens.device), tokens)
        places = (probabilities / noise).argmax(-1, keepdim=True)
        return tokens.gather(-1, places)[..., 0].masked_fill(probabilities[..., 0].isnan(), -1)

    def _top_k(self) -> int:
        """K of top-k, if it comes first and no processor needs more than the likeliest tokens; 0 elsewhere."""
        for processor in self.processors:
            if _is_any(processor, ["TopKLogitsWarper"]):
                return processor.top_k if all(_is_any(p, SHORTLIST_PROCESSORS) for p in self.processors) else 0
            if not _is_any(processor, ["TemperatureLogitsWarper"]):
                break
        return 0


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """H = −Σ p log p of each distribution.

    Args:
        logits: `(..., V)`, raw; computed in float32, since in bfloat16 H is off by up to 0.06 nats near τ.

    Returns:
        `(...)` float32, nats.
    """
    if logits.numel() <= CHUNK:
        return _entropy(logits)
    # A few rows at a time: what this needs besides the logits stays small, whatever the batch.
    flat = logits.flatten(0, -2)
    return torch.cat([_entropy(rows) for rows in flat.split(max(1, CHUNK // flat.shape[1]))]).view(logits.shape[:-1])


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    # `entr` is −p log p, and 0 where p is.
    return torch.special.entr(torch.softmax(logits.float(), dim=-1)).sum(-1)
