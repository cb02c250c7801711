"""Which token to choose: logits processors, then argmax or a draw.

`A` rows in use, `M` slots of a row, `V` vocabulary, `B` rows of the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation import logits_process as transformers_processors
from transformers.generation.logits_process import LogitsProcessorList

# Processors that look at the scores alone.
SCORE_PROCESSORS = (
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
# Processors that look at the scores and at how long the sequence is, not at what it holds.
LENGTH_PROCESSORS = (
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
)


# Processors that need the tokens before the position they score, but not to know which row of the batch it is in.
PREFIX_PROCESSORS = (
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
)


def _is_any(processor: object, names: tuple[str, ...]) -> bool:
    return type(processor) in {getattr(transformers_processors, name, None) for name in names}


class TokenSampler:
    """Chooses tokens: logits processors in transformers' order, then argmax or a draw.

    Args:
        processors: as `generate` prepared them.
        do_sample: draw from the processed distribution; otherwise its argmax.
        mask_token_id: never chosen: its logit counts as −∞.
        prompt_ids: `(B, P)` int64, the padded prompts, which processors see too.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, mask_token_id: int, prompt_ids: torch.Tensor):
        self.processors: Any = processors
        length = SCORE_PROCESSORS + LENGTH_PROCESSORS
        self.need_length = [p for p in processors if not _is_any(p, SCORE_PROCESSORS)]
        self.need_prefix = [p for p in processors if not _is_any(p, length)]
        self.need_row = [p for p in processors if not _is_any(p, length + PREFIX_PROCESSORS)]
        self.do_sample = do_sample
        self.mask_token_id = mask_token_id
        self.prompt_ids = prompt_ids

    def check_out_of_order(self) -> None:
        """Raises `ValueError` for a processor that [`fill_slots`] could not honour."""
        for processor in self.need_prefix:
            raise ValueError(
                f"{type(processor).__name__} needs the tokens before each position, but slots are filled before those "
                "are known. Use `verification='exact'` or `strategy='ar'`, or switch the option off "
                "(for example `repetition_penalty=1.0`)."
            )

    def fill_slots(self, logits: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Tokens for slots whose left context may hold masks.

        Args:
            logits: `(A, M, V)` float32, raw; overwritten.
            offsets: `(A, M)` int64, how many new tokens lie before each slot.

        Returns:
            `(A, M)` int64; -1 where a draw has nothing to choose from.
        """
        logits[..., self.mask_token_id] = float("-inf")
        scores, offsets_flat = logits.flatten(0, 1), offsets.flatten()
        if not self.need_length:
            scores = self.processors(offsets.new_empty(len(scores), 0), scores)
        else:
            for offset in offsets_flat.unique().tolist():
                slots = offsets_flat == offset
                length = self.prompt_ids.shape[1] + max(0, offset)
                scores[slots] = self.processors(offsets.new_zeros(int(slots.sum()), length), scores[slots])
        return self._choose(scores).view(offsets.shape)

    def next_tokens(
        self,
        logits: torch.Tensor,
        offsets: torch.Tensor,
        is_ar: torch.Tensor,
        following: torch.Tensor,
        rows: list[int],
        output: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Tokens of AR rows, each after its own, true prefix.

        Args:
            logits: `(A, M, V)` float32, raw; overwritten.
            offsets: `(A, M)` int64, how many new tokens lie before the one to choose.
            is_ar: `(A, M)` bool, the AR rows, each row's in logical order.
            following: `(A, M)` int64, the draft in the slot that each AR row predicts. Once a choice differs from it,
                the later prefixes are not true any more and are left alone.
            rows: the call's row that each entry is.
            output: gives `(A, N)` int64, new tokens so far, drafts included.

        Returns:
            `(A, M)` int64, arbitrary where nothing was to choose.
        """
        logits[..., self.mask_token_id] = float("-inf")
        if not self.need_prefix:
            return self.fill_slots(logits, offsets)
        tokens = torch.zeros_like(offsets)
        new_tokens = output()
        for entry, row in enumerate(rows):
            for column in is_ar[entry].nonzero().flatten().tolist():
                prefix = torch.cat([self.prompt_ids[row], new_tokens[entry, : int(offsets[entry, column])]])
                tokens[entry, column] = self._choose(self._process_one(row, prefix, logits[entry, column]))
                if tokens[entry, column] != following[entry, column]:
                    break
        return tokens

    def _process_one(self, row: int, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Processed scores `(1, V)` of one position of the call's row `row`."""
        if not self.need_row:
            return self.processors(prefix[None], scores[None])
        # Others may tell rows apart by their index, so they get a batch in which this row is where it should be.
        batch_size = self.prompt_ids.shape[0]
        processed = self.processors(prefix.expand(batch_size, -1), scores.expand(batch_size, -1).clone())
        return processed[row : row + 1]

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        if not self.do_sample:
            return scores.argmax(-1)
        probabilities = torch.softmax(scores, dim=-1)
        # argmax p / E with E ~ Exp(1) has the law p: `torch.multinomial` without its checks, which synchronise.
        tokens = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)
        return tokens.masked_fill(probabilities[..., 0].isnan(), -1)
