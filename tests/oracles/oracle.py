"""Slow, obviously right decoders: every step recomputed from scratch, one prompt at a time, explicit dense masks.

They follow the method's description step by step and share nothing with the engine but the model's weights.
"""

import torch


def causal_forward(model, token_ids, positions):
    """Logits `(T, V)` of tokens in physical order at logical positions: no cache, explicit additive causal mask."""
    length = len(token_ids)
    mask = torch.full((1, 1, length, length), torch.finfo(model.dtype).min, dtype=model.dtype).triu(1)
    with torch.no_grad():
        outputs = model(
            input_ids=torch.tensor([token_ids]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask,
            use_cache=False,
        )
    return outputs.logits[0].float()


def entropy_of(logits):
    log_probs = torch.log_softmax(logits, dim=-1)
    return float(-(log_probs.exp() * log_probs).sum())


def choice(logits, mask_id):
    """The likeliest token but MASK."""
    scores = logits.clone()
    scores[mask_id] = -torch.inf
    return int(scores.argmax())


def decode(model, prompt, *, window_size, tau, lam, limit, mask_id, eos_ids, block=False):
    """Greedy streaming (or block-wise) parallel decoding. Returns (new tokens, forwards, token instances)."""
    generated = []  # committed and pending tokens
    committed = 0  # how many of them are committed
    slots = {}  # offset from the prompt's end -> token, or None for a mask
    forwards = instances = 0
    while True:
        if not block or not any(token is None for token in slots.values()):
            for offset in range(len(generated), min(len(generated) + window_size, limit)):
                slots.setdefault(offset, None)
        filled = [offset for offset in sorted(slots) if slots[offset] is not None]
        masks = [offset for offset in sorted(slots) if slots[offset] is None]
        order = list(range(len(generated))) + filled + masks
        tokens = generated + [slots[o] for o in filled] + [mask_id] * len(masks)
        logits = causal_forward(model, prompt + tokens, list(range(len(prompt))) + [len(prompt) + o for o in order])
        forwards += 1
        instances += len(order) - committed
        committed = len(generated)

        mask_logits = dict(zip(masks, logits[len(prompt) + len(generated) + len(filled) :], strict=True))
        adjusted = {o: entropy_of(mask_logits[o]) + lam * (o - masks[0]) for o in masks}
        ascending = sorted(masks, key=lambda o: (adjusted[o], o))
        choices = {o: choice(mask_logits[o], mask_id) for o in masks}
        ends = [o for o in filled if slots[o] in eos_ids]
        useful = [o for o in ascending if o == masks[0] or (choices[o] not in eos_ids and o < min([*ends, limit]))]
        chosen = [o for o in masks if adjusted[o] < tau]
        if not set(chosen) & set(useful):
            chosen.append(useful[0])
        for offset in chosen:
            slots[offset] = choices[offset]
        while slots.get(len(generated)) is not None:
            token = slots.pop(len(generated))
            generated.append(token)
            if token in eos_ids or len(generated) == limit:
                return generated, forwards, instances


def decode_ar(model, prompt, *, limit, mask_id, eos_ids):
    """Greedy left-to-right decoding by the next-token head, MASK suppressed."""
    generated = []
    while len(generated) < limit:
        sequence = prompt + generated
        scores = causal_forward(model, sequence, list(range(len(sequence))))[-1]
        scores[mask_id] = -torch.inf
        generated.append(int(scores.argmax()))
        if generated[-1] in eos_ids:
            break
    return generated
