"""Which masks to fill: entropies and the selection rule. Pure functions on tensors.

`B` rows, `M` masks of a row's window (ascending logical position), `V` vocabulary.
"""

import torch

CHUNK = 2**25  # logits


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


def select_masks(
    entropy: torch.Tensor,
    distance: torch.Tensor,
    is_mask: torch.Tensor,
    entropy_threshold: float | torch.Tensor,
    distance_penalty: float | torch.Tensor,
) -> torch.Tensor:
    """Every mask with H + λ·d < τ; where a row has none, its mask with the least (ties: the leftmost).

    Args:
        entropy: `(B, M)` float32, H in nats.
        distance: `(B, M)` int64, d: logical distance to the row's leftmost mask.
        is_mask: `(B, M)` bool; False where a row has fewer than M masks.
        entropy_threshold: τ, nats; or `(B, 1)`, of each row.
        distance_penalty: λ, nats per position; likewise.

    Returns:
        `(B, M)` bool, at least one True in each row that has a mask (paper §5.3, Algorithm 1).
    """
    adjusted = (entropy + distance_penalty * distance).masked_fill(~is_mask, float("inf"))
    chosen = adjusted < entropy_threshold
    least = torch.zeros_like(chosen).scatter_(1, adjusted.argmin(1, keepdim=True), True)
    return torch.where(chosen.any(1, keepdim=True), chosen, least) & is_mask
