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
commits the accepted drafts too, so it waits until they are known. How many masks there are, and how bold the drafts,
is up to a [`WindowPacer`]. The loop knows nothing of the model but its `forward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .cache_wedlm import CacheWrite, WindowCache
from .pacing_wedlm import WindowPacer, default_slot_cost
from .sampling_wedlm import Choice, TokenSampler, is_typical
from .scores_wedlm import ScoreRecorder
from .selection_wedlm import select_masks, token_entropy
from .settings_wedlm import WeDLMGenerationSettings
from .stats_wedlm import DecodingStats, TraceStep
from .streaming_wedlm import TokenStream
from .window_wedlm import PhysicalOrder, Slide, Window

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
        recorder: keeps what each token was chosen from.
        prompt_embeds: `(B, P, hidden)`, instead of the prompt's tokens, which are -1 then; needs an empty cache.
        compiled: called instead of `model` after the first forward, always with the same shapes.
        go_on: asked before each step with whether this process has finished; as long as it says yes afterwards, dummy
            forwards keep other processes company that share the model's weights.

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
        recorder: ScoreRecorder | None = None,
        prompt_embeds: torch.Tensor | None = None,
        compiled: Callable[..., Any] | None = None,
        go_on: Callable[[bool], bool] | None = None,
    ):
        self.model = model
        self.settings = settings
        self.sampler = sampler
        self.prompt_ids = prompt_ids
        self.cache = cache
        self.pad_token_id = pad_token_id
        self.stopping_criteria = stopping_criteria
        self.recorder = recorder
        self.prompt_embeds = prompt_embeds
        self.compiled = compiled
        self.go_on = go_on or (lambda is_finished: not is_finished)
        batch_size = prompt_mask.shape[0]
        self.stream = TokenStream(streamer, batch_size, pad_token_id) if streamer is not None else None

        assert settings.mask_token_id is not None
        self.prompt_lengths = prompt_mask.sum(1).tolist()
        self.rows = list(range(batch_size))  # the call's row that each row in use is
        self.is_done = [False] * batch_size  # by the call's rows
        self.outputs = prompt_ids.new_full((batch_size, limit), pad_token_id)
        self.forwards, self.drafted, self.accepted = ([0] * batch_size for _ in range(3))
        self.new_tokens = [0] * batch_size
        self.trace: list[TraceStep] = []
        cache.open(batch_size, prompt_ids.device)
        self.cached_lengths = list(cache.lengths)
        remaining, remaining_lengths = self._uncached_prompt(prompt_mask)
        self.token_instances = [-length for length in remaining_lengths]  # the prompt itself does not count
        largest = min(settings.window_size, limit)
        slot_cost = default_slot_cost(prompt_ids.device.type) if settings.slot_cost is None else settings.slot_cost
        self.pacer = WindowPacer(
            largest=largest,
            threshold=settings.entropy_threshold,
            slot_cost=slot_cost,
            rows=batch_size,
            is_adaptive=settings.is_adaptive and compiled is None,
        )
        self.window = Window(
            prompt=remaining,
            prompt_lengths=remaining_lengths,
            cached_lengths=cache.lengths,
            limit=limit,
            largest=largest,
            first=self.pacer.window_size,
            mask_token_id=settings.mask_token_id,
            end_tokens=end_tokens,
            block=settings.strategy == "block",
            verified=settings.verification != "none",
            is_fixed=compiled is not None,
        )

    def run(self) -> torch.Tensor:
        """Decodes all rows to their end. Returns the new tokens, `(B, longest)` int64, padded after each row's end."""
        try:
            while self.go_on(all(self.is_done)):
                if all(self.is_done):
                    self._dummy_forward()
                else:
                    self._step()
        except BaseException:
            self.cache.restore()
            self.cache.lengths = self.cached_lengths  # so that the same call can be made again
            self.cache.clear_rest()
            raise
        self.cache.restore()
        if self.stream is not None:
            self.stream.end()
        return self.outputs[:, : max(self.new_tokens)]

    @property
    def stats(self) -> DecodingStats:
        """What it has taken."""
        counts = (self.new_tokens, self.forwards, self.token_instances, self.drafted, self.accepted)
        return DecodingStats(*map(torch.tensor, counts))

    def _step(self) -> None:
        window = self.window
        # 1. Order, and forward.
        order = window.order()
        logits = self._forward(order)
        entropy = token_entropy(logits)
        if self.recorder is not None:
            self.recorder.look(logits)
        # 3. Select and 4. fill, or verify and draft.
        outcome = (self._verify if window.verified else self._fill)(order, logits, entropy)
        # 5. Slide.
        before, ahead, masks = window.new_counts, window.ahead_counts, max(window.mask_counts)
        run, stopped = self._apply_stopping_criteria(outcome.run)
        slide = window.slide(run, stopped, outcome.is_broken)
        if any(slide.broken):
            raise ValueError(
                f"There is nothing to choose from in forward {max(self.forwards) + 1}, row "
                f"{self.rows[slide.broken.index(True)]}: the model's logits are NaN or infinite (the checkpoint is "
                "broken, or its dtype overflows), or the logits processors leave no token."
            )
        # 2. Commit: a length update.
        self.cache.commit(slide.committed)
        self._count(order, slide, before, ahead, masks)
        if self.recorder is not None:
            self.recorder.add(
                self.rows, outcome.offsets, outcome.decided, outcome.decided_tokens, outcome.choice, logits
            )
        if self.settings.output_trace:
            self._record(order, outcome, entropy, slide, before)
        if self.stream is not None:
            self._put(slide, before)
        # 6. Finish.
        if any(slide.finished):
            self._retire(slide.finished)
        if not all(self.is_done):
            window.refill(self.pacer.window_size)
            if self.stream is not None and self.stream.wants_drafts:
                draft = window.tokens[0, window.pending_counts[0] : window.extents[0]]
                if len(draft):
                    self.stream.put_draft(draft.cpu())

    def _forward(self, order: PhysicalOrder) -> torch.Tensor:
        """Logits `(A, M, V)` float32 of the last M physical rows."""
        write = self.cache.plan(order.counts, order.cache_slots, order.input_ids)
        inputs = {"input_ids": order.input_ids}
        if self.window.is_first and self.prompt_embeds is not None:
            inputs = {"inputs_embeds": self._embeds(order)}
        forward = self.model if self.compiled is None or self.window.is_first else self.compiled
        outputs = forward(
            **inputs,
            attention_mask=window_attention_mask(write, self.model.config._attn_implementation, self.model.dtype),
            position_ids=order.position_ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=order.logit_count,
            return_dict=True,
        )
        # MASK's are overwritten later: a copy where a compiled forward may own them.
        return outputs.logits.to(device=order.input_ids.device, dtype=torch.float32, copy=self.compiled is not None)

    def _embeds(self, order: PhysicalOrder) -> torch.Tensor:
        """The prompt's own embeddings, and those of the first window's masks, `(B, Q, hidden)`."""
        assert self.prompt_embeds is not None
        embeds = self.model.get_input_embeddings()(order.input_ids.clamp(min=0))
        lengths = torch.tensor(self.prompt_lengths, device=order.slots.device)[:, None]
        columns = (self.prompt_embeds.shape[1] - lengths + order.slots).clamp(max=self.prompt_embeds.shape[1] - 1)
        prompt = self.prompt_embeds.gather(1, columns[..., None].expand(-1, -1, embeds.shape[-1]))
        return torch.where((order.slots < lengths)[..., None], prompt.to(embeds), embeds)

    def _dummy_forward(self) -> None:
        """Keeps the other processes' collective operations company."""
        self.model(input_ids=self.outputs.new_full((1, 1), self.pad_token_id), use_cache=False)

    def _fill(self, order: PhysicalOrder, logits: torch.Tensor, entropy: torch.Tensor) -> "_Outcome":
        """The paper's rule: masks of low entropy are filled, and what has no gap to its left is final."""
        window, settings = self.window, self.settings
        slots, is_mask = window.masks(order)
        distance = slots - window.pending
        chosen = select_masks(
            entropy,
            distance,
            is_mask,
            settings.entropy_threshold,
            settings.distance_penalty,
            settings.entropy_budget,
        )
        offsets = window.new_tokens + distance
        choice = self.sampler.choose(logits, offsets, self.rows, window.new_counts)
        run = window.fill(slots, chosen, choice.tokens)
        is_broken = ((entropy.isnan() & is_mask) | (chosen & (choice.tokens < 0))).any(1, keepdim=True)
        return _Outcome(run, is_broken, is_mask, chosen, choice.tokens, offsets, chosen, choice.tokens, choice)

    def _verify(self, order: PhysicalOrder, logits: torch.Tensor, entropy: torch.Tensor) -> "_Outcome":
        """Drafts are final as long as the AR rows accept them; masks of low entropy are the next drafts."""
        window, settings = self.window, self.settings
        slots = order.logit_slots
        is_ar, is_mask = window.ar_rows(order)
        offsets = slots + (window.new_tokens - window.pending + 1)
        following = window.tokens_after(order)

        def accepts(choice: Choice) -> torch.Tensor:
            same = choice.tokens == following
            if settings.verification == "exact":
                return same
            return same | is_typical(choice.scores, following, settings.acceptance_epsilon, settings.acceptance_delta)

        choice = self.sampler.choose_in_order(
            logits, offsets, self.rows, window.new_counts, is_ar, window.output_with_drafts, accepts
        )
        tokens = choice.tokens
        proposals = tokens if self.sampler.is_argmax else logits.argmax(-1)
        proposed = is_mask & (entropy < self.pacer.threshold)
        run = window.verify(order, is_ar, tokens, accepts(choice), proposed, proposals)
        # Slots that pad a row are numbers wherever the others are.
        is_broken = entropy.isnan() | (is_ar & (tokens < 0))
        drafted = decided = is_ar
        if self.recorder is not None or settings.output_trace:
            drafted = is_mask & window.filled.gather(1, slots)
            decided = is_ar & (slots + 1 < run)
            tokens = window.tokens_after(order)
        is_broken = is_broken.any(1, keepdim=True)
        return _Outcome(run, is_broken, is_mask, drafted, proposals, offsets, decided, tokens, choice)

    def _apply_stopping_criteria(self, run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cuts each row's final run after the first token at which a criterion holds, and says which rows stop so."""
        stopped = torch.zeros_like(run, dtype=torch.bool)
        if not self.stopping_criteria:
            return run, stopped
        window, prompt_ids = self.window, self.sampler.prompt_ids
        for entry, (row, pending, end) in enumerate(
            zip(self.rows, window.pending_counts, run.flatten().tolist(), strict=True)
        ):
            generated = window.output[entry, : window.new_counts[entry]]
            sequence = torch.cat([prompt_ids[row], generated, window.tokens[entry, pending:end]])[None]
            known = sequence.shape[1] - (end - pending)
            # A criterion may tell rows apart by their index: it gets a batch in which this row is where it should be.
            sequence = sequence.expand(len(prompt_ids), -1)
            for length in range(known + 1, sequence.shape[1] + 1):
                if self._is_stopped(sequence[:, :length], row):
                    run[entry] = pending + length - known
                    stopped[entry] = True
                    break
        return run, stopped

    def _is_stopped(self, sequence: torch.Tensor, row: int) -> bool:
        """Whether a criterion holds for this row. Raises `ValueError` for one that answers for all rows at once."""
        is_stopped = False
        for criterion in self.stopping_criteria:
            answer = torch.as_tensor(criterion(sequence, None))
            if answer.ndim == 0 and len(sequence) > 1:
                raise ValueError(
                    f"{type(criterion).__name__} answers for all rows together, but here rows advance at paces of "
                    "their own: generate one prompt at a time, or use `stop_strings` or `strategy='ar'`."
                )
            is_stopped |= bool(answer.expand(len(sequence))[row])
        return is_stopped

    def _count(self, order: PhysicalOrder, slide: Slide, before: list[int], ahead: list[int], masks: int) -> None:
        """Statistics of a step, and what the pacer learns from it.

        Args:
            order: of the forward.
            slide: its outcome.
            before: new tokens of each row before the step.
            ahead: slots that were filled out of order before the step, or drafts that it checked.
            masks: of the widest row.
        """
        verified = self.window.verified
        new, found, checked = [], [], []
        for entry, row in enumerate(self.rows):
            if self.is_done[row]:
                continue
            self.forwards[row] += 1
            self.token_instances[row] += order.counts[entry]
            new.append(slide.new_tokens[entry] - before[entry])
            if verified:
                self.drafted[row] += ahead[entry]
                self.accepted[row] += slide.accepted[entry]
                if not self.window.are_ends_ahead[entry]:  # behind an end nobody looks for drafts
                    found.append(slide.ahead[entry])
                if ahead[entry] and not slide.finished[entry]:
                    checked.append((ahead[entry], slide.accepted[entry]))
            else:
                found.append(new[-1] + slide.ahead[entry] - ahead[entry] - 1)
        self.pacer.observe(masks, new, found, checked if verified else None)

    def _record(
        self,
        order: PhysicalOrder,
        outcome: "_Outcome",
        entropy: torch.Tensor,
        slide: Slide,
        before: list[int],
    ) -> None:
        """Adds a [`TraceStep`]."""
        if self.window.verified:
            positions = order.position_ids[:, -order.logit_count :].cpu()
            decided = [list(range(old, new)) for old, new in zip(before, slide.new_tokens, strict=True)]
        else:
            offsets = outcome.offsets.cpu()
            positions = offsets + torch.tensor([self.prompt_lengths[row] for row in self.rows])[:, None]
            decided = [offset[filled].tolist() for offset, filled in zip(offsets, outcome.filled.cpu(), strict=True)]
        self.trace.append(
            TraceStep(
                rows=list(self.rows),
                input_ids=order.input_ids.cpu(),
                position_ids=order.position_ids.cpu(),
                counts=list(order.counts),
                committed=slide.committed,
                logit_positions=positions,
                is_mask=outcome.is_mask.cpu(),
                entropy=entropy.cpu(),
                filled=outcome.filled.cpu(),
                tokens=outcome.tokens.cpu(),
                decided=decided,
            )
        )

    def _put(self, slide: Slide, before: list[int]) -> None:
        """Streams what this step made final."""
        assert self.stream is not None
        window = self.window
        for entry, row in enumerate(self.rows):
            if not self.is_done[row]:
                tokens = window.output[entry, before[entry] : slide.new_tokens[entry]].cpu()
                self.stream.put(row, tokens, slide.finished[entry])

    def _retire(self, finished: list[bool]) -> None:
        """Finished rows leave the batch: they cost nothing from here on. Where shapes are fixed, they stay, idle."""
        window = self.window
        for entry, row in enumerate(self.rows):
            if finished[entry] and not self.is_done[row]:
                count = window.new_counts[entry]
                self.outputs[row, :count] = window.output[entry, :count]
                self.new_tokens[row] = count
                self.is_done[row] = True
        if window.fixed_width is None:
            order = self.cache.retire(finished)
            self.rows = [self.rows[entry] for entry in order]
            if order:
                window.select(order)

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
            if cached == length and (self.settings.verification != "none" or self.settings.is_adaptive):
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
    `(A, M)` slots with logits: which are masks, which were filled (or drafted), and with what; how many new tokens lie
    before the one that is decided there, whether it is and which it is, and what it was chosen from."""

    run: torch.Tensor
    is_broken: torch.Tensor
    is_mask: torch.Tensor
    filled: torch.Tensor
    tokens: torch.Tensor
    offsets: torch.Tensor
    decided: torch.Tensor
    decided_tokens: torch.Tensor
    choice: Choice


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
