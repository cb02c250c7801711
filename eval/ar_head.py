"""What the AR head says of an answer, whoever gave it: one forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..modeling_wedlm import WeDLMForCausalLM


@torch.no_grad()
def ar_logits(model: WeDLMForCausalLM, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Logits of the AR head after the prompt and after each token of an answer but the last, by one forward:
    `(len(answer), V)` float32."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    return model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()


def answer_entropy(model: WeDLMForCausalLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Entropy of the AR head's next-token distribution, mean over the tokens of an answer, nats."""
    return float(torch.distributions.Categorical(logits=ar_logits(model, prompt, answer)).entropy().mean())


def agreeing_tokens(model: WeDLMForCausalLM, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens of an answer greedy AR decoding would have chosen after the tokens before them.

    The mask token and the tokens that the generation config suppresses count as impossible.
    """
    logits = ar_logits(model, prompt, answer)
    impossible = [model.config.mask_token_id, *(model.generation_config.suppress_tokens or ())]
    logits[:, [token for token in impossible if token is not None]] = float("-inf")
    return int((logits.argmax(-1) == torch.tensor(answer, device=model.device)).sum())
