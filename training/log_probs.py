"""Log-probabilities of responses, for preference optimisation and reinforcement learning.

`B` examples, `L` tokens of the longest, `K` blocks, `T` physical rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .collator import DataCollatorForDualStreamMasking
from .streams import IGNORE_INDEX


@dataclass(frozen=True)
class ResponseLogProbs:
    """What [`response_log_probs`] returns; all float32, in nats, with the graph, and 0 outside responses.

    A token's part of the block-wise bound is its log-probability at its mask, times 1/γ of its block, over the number
    of prediction copies; 0 where no copy masks it. Their sum over a response is an unbiased estimate of a lower bound
    on its log-probability. Where a conversation has several responses, blocks of the same number count together.
    """

    ar_tokens: torch.Tensor  # (B, L), log p(x[t] | x[<t]) of the next-token head: exact
    mask_tokens: torch.Tensor  # (B, L), each token's part of the block-wise bound
    ar_blocks: torch.Tensor  # (B, K), sums over each block
    mask_blocks: torch.Tensor  # (B, K), likewise


def response_log_probs(
    model: Any, examples: Sequence[Mapping[str, Any]], collator: DataCollatorForDualStreamMasking
) -> ResponseLogProbs:
    """Log-probabilities of the supervised tokens of each example, in one forward (paper Eq. 10, token by token).

    The masks are a function of the collator's seed and epoch and of the example's tokens: a policy, its reference and
    its older self see the same ones, and their ratios are free of most of the masks' noise. Several `num_copies` and
    `ratio_sampler="stratified"` lower what is left of it.

    The model, or what DDP, FSDP or PEFT made of it, is *called*, so that their hooks fire; dropout follows its mode.
    Examples are tokenised, one conversation each. Of the collator, end tokens beyond the response's own and loss
    weights are not used. Position t of the result is token t of its example. Raises `ValueError` for no examples,
    packed ones, and whatever the collator refuses.
    """
    if not examples:
        raise ValueError("`examples` must hold at least one example, got none.")
    for example in examples:
        if packed := [name for name in ("seq_lengths", "document_ids") if example.get(name) is not None]:
            raise ValueError(f"Examples must hold one conversation each, got a packed one with {packed}.")
    collator_used = replace(collator, num_eos=1, ar_weight=1.0)
    collator_used.set_epoch(collator.epoch)
    batch = collator_used(examples)
    device = next(model.parameters()).device
    batch = {name: column.to(device) for name, column in batch.items()}
    nll = model(**batch).token_nll

    log_probs = -2 * batch["loss_weights"] * nll  # each of both losses weighs one half
    in_memory = batch["stream_ids"] == 0
    has_target = batch["targets"] != IGNORE_INDEX
    # A memory row's target is the next token, which lies in the next row.
    token = torch.where(has_target, batch["position_ids"] + in_memory, 0)
    block = torch.where(in_memory, batch["block_ids"].roll(-1, dims=1), batch["block_ids"]).where(has_target, 0)

    def summed(index: torch.Tensor, size: int, where: torch.Tensor) -> torch.Tensor:
        return log_probs.new_zeros(len(index), size).scatter_add(1, index, log_probs * where)

    tokens, blocks = max(len(example["input_ids"]) for example in examples), int(block.max()) + 1
    return ResponseLogProbs(
        ar_tokens=summed(token, tokens, in_memory),
        mask_tokens=summed(token, tokens, ~in_memory),
        ar_blocks=summed(block, blocks, in_memory),
        mask_blocks=summed(block, blocks, ~in_memory),
    )
