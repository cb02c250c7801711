"""The windows of runner V2 without vLLM: a forward that recomputes everything stands in for an engine."""

import pytest
import torch
from oracle import causal_forward, decode
from tiny import tiny_model

from wedlm_hf.generation.sampling import token_entropy
from wedlm_hf.serving.vllm.window import Windows

PLACES = torch.tensor([2, 0])  # of three, in the order of a batch


def run(model, prompts, limits, windows):
    """What the windows make of prompts; `largest` rows of each request in each step, as vLLM gives them."""
    mask = model.config.mask_token_id
    texts = [list(prompt) for prompt in prompts]
    rows = windows.begin(PLACES, torch.tensor(limits))
    while any(len(text) - len(prompt) < limit for text, prompt, limit in zip(texts, prompts, limits, strict=True)):
        logits = []
        for place, text, tokens in zip(PLACES.tolist(), texts, rows.tolist(), strict=True):
            positions = [len(text) + slot for slot in windows.order[place].tolist()]
            logits.append(causal_forward(model, text + tokens, [*range(len(text)), *positions])[len(text) :])
        stacked = torch.stack(logits)
        entropies = token_entropy(stacked)
        stacked[..., mask] = -torch.inf
        counts = torch.full((2,), rows.shape[1])
        tokens, committed, rows = windows.advance(PLACES, counts, entropies, stacked.argmax(-1))
        for text, found, count in zip(texts, tokens.tolist(), committed.tolist(), strict=True):
            text += found[:count]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_each_request_decodes_by_its_own_settings_as_the_oracle_does(seed):
    model = tiny_model(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(5, 60, (length,), generator=generator).tolist() for length in (9, 4)]
    settings = [(6, 0.0, 0.02), (3, 2.5, 0.3)] if seed % 2 else [(5, 3.0, 0.1), (1, 0.4, 0.0)]
    limits, windows = [13, 7], Windows(3, 6, model.config.mask_token_id, torch.device("cpu"))
    for place, (size, tau, lam) in zip(PLACES, settings, strict=True):
        windows.window[place], windows.threshold[place], windows.penalty[place] = size, tau, lam
    found = run(model, prompts, limits, windows)
    for prompt, tokens, limit, (size, tau, lam) in zip(prompts, found, limits, settings, strict=True):
        mask = model.config.mask_token_id
        expected, _, _ = decode(
            model, prompt, window_size=size, tau=tau, lam=lam, limit=limit, mask_id=mask, eos_ids=()
        )
        assert tokens == expected
