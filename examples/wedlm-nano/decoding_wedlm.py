"""Streaming parallel decoding: the loop (paper §5, Algorithm 1, Figure 3).

State of each row: *committed* tokens (their keys and values are cached), *pending* tokens (final, not cached yet) and
a *window* of slots, filled or masked. One step:

    1. order    pending, filled slots, masks: one causal forward on top of the cache, at logical positions
    2. commit   the pending tokens' keys and values; the rest of this forward is overwritten by the next
    3. select   masks with H + λ·d < τ, or the best one
    4. fill     them: argmax, or a draw from the processed distribution
    5. slide    what is filled from the left without a gap becomes pending; the window is refilled
    6. finish   rows whose pending run holds an end token, meets a stopping criterion or reaches the limit

Under verification steps 3 and 4 are: *verify* the drafts by the AR rows of the same forward, then draft anew; step 2
commits the accepted drafts too, so it waits until they are known. The loop knows nothing of the model but its
`forward`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .cache_wedlm import CacheWrite, WindowCache
from .sampling_wedlm import TokenSampler
from .selection_wedlm import select_masks, token_entropy
from .settings_wedlm import WeDLMGenerationSettings
from .stats_wedlm import DecodingStats, TraceStep
from .streaming_wedlm import TokenStream
from .window_wedlm import PhysicalOrder, Window

# Attention implementations that take any mask as a tensor.
DENSE_MASK_ATTENTION = ("sdpa", "eager")


class ParallelDecoder:
    """One `generate` call.

    Args:
        model: called as `model(input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep)`.
        settings: how to decode.
        sampler: which token fills a slot.
        prompt_ids: `(B, P)` int64, left-padded.
        prompt_mask: `(B, P)` bool, True on tokens.
        cache: empty, or holding a prefix of every prompt.
        limit: new tokens allowed, at least 1.
        end_tokens: `(E,)` int64, tokens that end a row.
        pad_token_id: what follows a row's end in the output.
        stopping_criteria: those beyond end tokens and length; asked after each token, as if they had come one by one.
        streamer: gets final tokens as soon as they are, and drafts if it has `put_draft`.

    Raises:
        ValueError: if the cache does not hold a prefix of the prompt, or if there is nothing to choose from because
            the model's logits are NaN or the processors leave no token.
    """

    def __init__(
        self,
        model: Any,
        settings: WeDLMGenerationSettings,
        sampler: TokenSampler,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        cache: WindowCache,
        limit: int,
        end_tokens: torch.Tensor,
        pad_token_id: int,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
    ):
        self.model = model
        self.settings = settings
        self.sampler = sampler
        self.prompt_ids = prompt_ids
        self.cache = cache
        self.stopping_criteria = stopping_criteria
        self.stream = TokenStream(streamer, prompt_ids.shape[0], pad_token_id) if streamer is not None else None

        assert settings.mask_token_id is not None
        batch_size = prompt_ids.shape[0]
        self.prompt_lengths = prompt_mask.sum(1).tolist()
        self.rows = list(range(batch_size))  # the call's row that each row in use is
        self.outputs = prompt_ids.new_full((batch_size, limit), pad_token_id)
        self.stats = DecodingStats.zeros(batch_size)
        self.forwards = [0] * batch_size
        self.trace: list[TraceStep] = []
        cache.open(batch_size, prompt_ids.device)
        remaining, remaining_lengths = self._uncached_prompt(prompt_mask)
        self.token_instances = [-length for length in remaining_lengths]  # the prompt itself does not count
        self.window = Window(
            prompt=remaining,
            prompt_lengths=remaining_lengths,
            cached_lengths=cache.lengths,
            limit=limit,
            window_size=settings.window_size,
            mask_token_id=settings.mask_token_id,
            end_tokens=end_tokens,
            block=settings.strategy == "block",
            verified=settings.verification != "none",
        )

    def run(self) -> torch.Tensor:
        """Decodes all rows to their end. Returns the new tokens, `(B, longest)` int64, padded after each row's end."""
        try:
            while self.rows:
                self._step()
        finally:
            self.cache.restore()
        if self.stream is not None:
            self.stream.end()
        return self.outputs[:, : int(self.stats.new_tokens.max())]

    def _step(self) -> None:
        # 1. Order, and forward.
        order = self.window.order()
        logits = self._forward(order)
        entropy = token_entropy(logits)
        # 3. Select and 4. fill, or verify and draft.
        outcome = (self._verify if self.window.verified else self._fill)(order, logits, entropy)
        # 5. Slide.
        before = self.window.new_tokens
        run, stopped = self._apply_stopping_criteria(outcome.run)
        committed, finished, is_broken = self.window.slide(run, stopped, outcome.is_broken)
        if any(is_broken):
            raise ValueError(
                f"There is nothing to choose from in forward {max(self.forwards) + 1}, row "
                f"{self.rows[is_broken.index(True)]}: the model's logits are NaN or infinite (the checkpoint is "
                "broken, or its dtype overflows), or the logits processors leave no token."
            )
        # 2. Commit: a length update.
        self.cache.commit(committed)
        for row, count in zip(self.rows, order.counts, strict=True):
            self.forwards[row] += 1
            self.token_instances[row] += count
        if self.settings.output_trace:
            self._record(order, outcome, entropy, committed, before)
        if self.stream is not None:
            self._put(before, finished)
        # 6. Finish.
        if any(finished):
            self._retire(finished)

    def _forward(self, order: PhysicalOrder) -> torch.Tensor:
        """Logits `(A, M, V)` float32 of the last M physical rows."""
        write = self.cache.plan(order.counts, order.cache_slots, order.input_ids)
        outputs = self.model(
            input_ids=order.input_ids,
            attention_mask=window_attention_mask(write, self.model.config._attn_implementation, self.model.dtype),
            position_ids=order.position_ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=order.logit_count,
            return_dict=True,
        )
        return outputs.logits.to(device=order.input_ids.device, dtype=torch.float32, copy=True)

    def _fill(self, order: PhysicalOrder, logits: torch.Tensor, entropy: torch.Tensor) -> "_Outcome":
        """The paper's rule: masks of low entropy are filled, and what has no gap to its left is final."""
        is_mask, distance = self.window.masks(order)
        chosen = select_masks(
            entropy, distance, is_mask, self.settings.entropy_threshold, self.settings.distance_penalty
        )
        tokens = self.sampler.fill_slots(logits, self.window.new_tokens + distance)
        self.window.fill(order, chosen, tokens)
        is_broken = ((entropy.isnan() & is_mask) | (chosen & (tokens < 0))).any(1, keepdim=True)
        return _Outcome(self.window.final_run(), is_broken, is_mask, chosen, tokens)

    def _verify(self, order: PhysicalOrder, logits: torch.Tensor, entropy: torch.Tensor) -> "_Outcome":
        """Drafts are final as long as they are the AR rows' choice; masks of low entropy are the next drafts."""
        window = self.window
        is_mask, _ = window.masks(order)
        is_ar, offsets = window.next_tokens(order)
        proposed = is_mask & (entropy < self.settings.entropy_threshold)
        logits[..., window.mask_token_id] = float("-inf")
        proposals = logits.argmax(-1)
        following = window.tokens_after(order)
        tokens = self.sampler.next_tokens(logits, offsets, is_ar, following, self.rows, window.output_with_drafts)
        run = window.verify(order, is_ar, tokens, proposed, proposals)
        drafted = window.is_filled(order) & is_mask
        is_broken = ((entropy.isnan() & (is_mask | is_ar)) | (is_ar & (tokens < 0))).any(1, keepdim=True)
        return _Outcome(run, is_broken, is_mask, drafted, proposals)

    def _apply_stopping_criteria(self, run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cuts each row's final run after the first token at which a criterion holds, and says which rows stop so."""
        stopped = torch.zeros_like(run, dtype=torch.bool)
        if not self.stopping_criteria:
            return run, stopped
        window = self.window
        for entry, (row, pending, end) in enumerate(
            zip(self.rows, window.pending_counts, run.flatten().tolist(), strict=True)
        ):
            generated = window.output[entry, : int(window.new_tokens[entry])]
            sequence = torch.cat([self.prompt_ids[row], generated, window.tokens[entry, pending:end]])[None]
            known = sequence.shape[1] - (end - pending)
            # A criterion may tell rows apart by their index: it gets a batch in which this row is where it should be.
            sequence = sequence.expand(self.prompt_ids.shape[0], -1)
            for length in range(known + 1, sequence.shape[1] + 1):
                if self.stopping_criteria(sequence[:, :length], None)[row]:
                    run[entry] = pending + length - known
                    stopped[entry] = True
                    break
        return run, stopped

    def _record(
        self,
        order: PhysicalOrder,
        outcome: "_Outcome",
        entropy: torch.Tensor,
        committed: list[int],
        before: torch.Tensor,
    ) -> None:
        """Adds a [`TraceStep`]."""
        positions = order.position_ids[:, -order.logit_count :]
        first = torch.tensor([self.prompt_lengths[row] for row in self.rows])
        if self.window.verified:
            totals = zip(before.flatten().tolist(), self.window.new_tokens.flatten().tolist(), strict=True)
            decided = [list(range(old, new)) for old, new in totals]
        else:
            offsets = positions.cpu() - first[:, None]
            decided = [offset[filled].tolist() for offset, filled in zip(offsets, outcome.filled.cpu(), strict=True)]
        self.trace.append(
            TraceStep(
                rows=list(self.rows),
                input_ids=order.input_ids.cpu(),
                position_ids=order.position_ids.cpu(),
                counts=list(order.counts),
                committed=committed,
                logit_positions=positions.cpu(),
                is_mask=outcome.is_mask.cpu(),
                entropy=entropy.cpu(),
                filled=outcome.filled.cpu(),
                tokens=outcome.tokens.cpu(),
                decided=decided,
            )
        )

    def _put(self, before: torch.Tensor, finished: list[bool]) -> None:
        """Streams what this step made final, and the window behind it as a draft."""
        assert self.stream is not None
        window = self.window
        totals = zip(self.rows, before.flatten().tolist(), window.new_tokens.flatten().tolist(), finished, strict=True)
        for entry, (row, old, new, is_finished) in enumerate(totals):
            self.stream.put(row, window.output[entry, old:new].cpu(), is_finished)
        if self.stream.wants_drafts and not finished[0]:
            self.stream.put_draft(window.tokens[0, window.pending_counts[0] : window.extents[0]].cpu())

    def _retire(self, finished: list[bool]) -> None:
        """Finished rows leave the batch: they cost nothing from here on."""
        for entry, row in enumerate(self.rows):
            if finished[entry]:
                count = int(self.window.new_tokens[entry])
                self.outputs[row, :count] = self.window.output[entry, :count]
                self.stats.new_tokens[row] = count
                self.stats.forwards[row] = self.forwards[row]
                self.stats.token_instances[row] = self.token_instances[row]
                self.stats.drafted[row] = self.window.drafted[entry]
                self.stats.accepted[row] = self.window.accepted[entry]
        order = self.cache.retire(finished)
        self.rows = [self.rows[entry] for entry in order]
        if order:
            self.window.select(order)

    def _uncached_prompt(self, prompt_mask: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """The prompt tokens that are not in the cache, `(B, P)` int64 left-aligned, and how many each row has."""
        prompt_width = self.prompt_ids.shape[1]
        remaining = []
        for row, (length, cached) in enumerate(zip(self.prompt_lengths, self.cache.lengths, strict=True)):
            tokens = self.prompt_ids[row, prompt_width - length :][:cached]
            known = self.cache.token_ids[row, :cached]
            if cached > length or not bool(((tokens == known) | (known < 0)).all()):
                raise ValueError(
                    f"The cache does not belong to the prompt: row {row} of `past_key_values` holds {cached} tokens "
                    "that are not the first ones of that prompt."
                )
            if cached == length and self.settings.verification != "none":
                # The AR head of the prompt's last token gives the first new one.
                self.cache.lengths[row] -= 1
            remaining.append(length - self.cache.lengths[row])
        width = max(remaining)
        first = prompt_width - torch.tensor(remaining, device=self.prompt_ids.device)[:, None]
        columns = first + torch.arange(width, device=self.prompt_ids.device)
        return self.prompt_ids.gather(1, columns.clamp(max=prompt_width - 1)), remaining


@dataclass(frozen=True)
class _Outcome:
    """What steps 3 and 4 decided: the final run and whether there was nothing to choose from, `(A, 1)`; and for the
    `(A, M)` slots with logits: which are masks, which were filled (or drafted), and with what."""

    run: torch.Tensor
    is_broken: torch.Tensor
    is_mask: torch.Tensor
    filled: torch.Tensor
    tokens: torch.Tensor


def window_attention_mask(write: CacheWrite, implementation: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Plain causal attention in physical order: a row sees the slots up to its own.

    Row with 3 cached slots, 1 pending token p, a filled slot f and two masks; a second row with nothing pending:

            cached  p f M M                 cached  · f M M
        p   ■ ■ ■   ■ · · ·             ·                       (padding: written behind the others, seen by none)
        f   ■ ■ ■   ■ ■ · ·             f   ■ ■ ■     ■ · ·
        M   ■ ■ ■   ■ ■ ■ ·             M   ■ ■ ■     ■ ■ ·
        M   ■ ■ ■   ■ ■ ■ ■             M   ■ ■ ■     ■ ■ ■

    Args:
        write: where the forward writes.
        implementation: the model's attention implementation.
        dtype: the model's.

    Returns:
        `None` where the implementation's own causal mask is this one; otherwise `(A or 1, 1, Q, end)`, boolean for
        sdpa and additive for eager attention. Other implementations take no such mask, and get one row at a time.
    """
    width = write.slots.shape[1]
    if write.start is not None and (write.start == 0 or width == 1 or implementation not in DENSE_MASK_ATTENTION):
        return None
    slots = write.slots if write.start is None else write.slots[:1]
    visible = torch.arange(write.end, device=slots.device) <= slots[:, None, :, None]
    if implementation == "sdpa":
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
