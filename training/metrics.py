"""What evaluation reports, as sums over tokens that are divided once. Pure functions on tensors.

`B` rows of the batch, `T` physical slots.
"""

from collections.abc import Mapping

import torch

# Masked fraction γ of the block: (0, ¼], (¼, ½], (½, ¾], (¾, 1].
_FRACTIONS = 4


def evaluation_sums(
    batch: Mapping[str, torch.Tensor],
    token_nll: torch.Tensor,
    correct: torch.Tensor,
    *,
    block_size: int,
    ar_weight: float,
    num_copies: int,
) -> dict[str, torch.Tensor]:
    """Sums over the tokens of each row; over rows, batches and processes they simply add up.

    Args:
        batch: a collated batch with `loss_weighting="ratio"`.
        token_nll: `(B, T)` float32, see `WeDLMCausalLMOutputWithPast`.
        correct: `(B, T)` bool, see there.
        block_size: B of the collator.
        ar_weight: a of the collator.
        num_copies: of the collator.

    Returns:
        Pairs of a sum and, under the same name and `/count`, of what to divide it by; every tensor is `(B,)` float64.
    """
    has_target = batch["targets"] != -100
    memory = has_target & (batch["stream_ids"] == 0)
    masked = has_target & (batch["stream_ids"] > 0)
    inverse_ratio = batch["loss_weights"].double() * (1 + ar_weight) * num_copies
    nll, correct = token_nll.double(), correct.double()
    supervised = (batch["labels"][..., 1:] != -100).sum(-1).double()

    sums: dict[str, torch.Tensor] = {}

    def add(name: str, values: torch.Tensor, where: torch.Tensor) -> None:
        sums[name] = (values * where).sum(-1)
        sums[f"{name}/count"] = where.sum(-1).double()

    add("ar_nll", nll, memory)
    add("ar_accuracy", correct, memory)
    sums["elbo_nll"] = (nll * inverse_ratio * masked).sum(-1) / num_copies
    sums["elbo_nll/count"] = supervised
    add("mask_accuracy", correct, masked)
    quarter = (_FRACTIONS / inverse_ratio.clamp(min=1)).sub(1e-4).ceil()
    for part in range(1, _FRACTIONS + 1):
        add(f"mask_nll_ratio_{part * 100 // _FRACTIONS}", nll, masked & (quarter == part))
    offset = _offsets(batch)
    first = 0
    while first < block_size:  # 0, 1, 2-3, 4-7, …
        last = min(max(2 * first, 1), block_size) - 1 if first else 0
        name = f"accuracy_offset_{first}" + (f"_{last}" if last > first else "")
        add(name, correct, masked & (offset >= first) & (offset <= last))
        first = last + 1
    return sums


def _offsets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Distance of each slot from the first position of its block, `(B, T)` int64, wherever blocks are aligned."""
    stride = int(batch["block_ids"].max()) + 2
    group = (batch["document_ids"] + 1) * stride + batch["block_ids"] + 1
    first = torch.full(
        (len(group), int(group.max()) + 1), torch.iinfo(torch.int64).max, device=group.device
    ).scatter_reduce(-1, group, batch["position_ids"], reduce="amin")
    return batch["position_ids"] - first.gather(-1, group)


def divide(sums: Mapping[str, float]) -> dict[str, float]:
    """Each sum over its count; a name without any token is left out."""
    names = [name for name in sums if not name.endswith("/count")]
    return {name: sums[name] / sums[f"{name}/count"] for name in names if sums[f"{name}/count"] > 0}
