"""How many tokens a forward of verified decoding would give with a mask adapter, on answers of the base itself.

`T` tokens of an answer, `K` masks behind a token, `H` hidden size.
"""

from collections import Counter
from collections.abc import Iterable

import torch

from .distillation import MaskDistillation
from .layout import Answer

DRAFTS = (1, 2, 3, 4, 6)
KINDS = ("chain", "branch")
Replay = tuple[str, int]  # kind and number of drafts


@torch.no_grad()
def measure_acceptance(distillation: MaskDistillation, answers: Iterable[Answer]) -> tuple[int, Counter[Replay]]:
    """Replays greedy verified decoding (ALGORITHM.md §4) of answers that the base itself chose greedily.

    The drafts behind every token are computed at once, from masks that see the answer up to there; a replay of the
    decoder then counts forwards. Branches give each accepted token drafts; a chain has none after a rejection.

    Returns:
        The tokens of all answers, and the forwards that decoding them takes, the prompts' included, by kind (`chain`,
        `branch`; `chain_plain` and `branch_plain` without the previous-token head) and number of drafts.
    """
    suffixes = ("",) if distillation.model.mask_adapter.head is None else ("", "_plain")
    limits = [limit for limit in DRAFTS if limit <= distillation.num_masks]
    tokens, forwards = 0, Counter({(kind + end, limit): 0 for kind in KINDS for end in suffixes for limit in limits})
    for answer in answers:
        truth = torch.tensor(answer["response_ids"])
        tokens += len(truth)
        for suffix, drafts in draft_everywhere(distillation, answer).items():
            accepted = _accepted_runs(drafts, truth)
            for limit in limits:
                runs = accepted.clamp(max=limit).tolist()
                for kind in KINDS:
                    forwards[kind + suffix, limit] += _forwards(runs, limit, is_chain=kind == "chain")
    return tokens, forwards


def draft_everywhere(distillation: MaskDistillation, answer: Answer) -> dict[str, torch.Tensor]:
    """The drafts behind each token of an answer.

    Returns:
        `(T, K)` int64: row t holds the drafts for the tokens t + 1, t + 2, …, chosen one after the other by the
        previous-token head from the true token t on; under `"_plain"`, each mask's own choice.
    """
    model = distillation.model
    prompt, response = list(answer["prompt_ids"]), list(answer["response_ids"])
    device = model.device
    input_ids = torch.tensor([prompt + response], device=device)
    _, memory = distillation._memory(input_ids)
    cuts = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1, device=device)
    # In portions: masks see only their own run, but the sum over the vocabulary is large.
    hidden = torch.cat([distillation._masks(memory, part[None])[0] for part in cuts.split(32)])
    plain = _choose(model, hidden)
    head = model.mask_adapter.head
    if head is None:
        return {"": plain}
    embed = model.get_input_embeddings()
    # The token at the cut, and the one behind it, which the base's own last row decides.
    before, previous = torch.tensor([prompt[-1:] + response[:-1], response], device=device)
    drafts = []
    for depth in range(hidden.shape[1]):
        states = head(hidden[:, depth], embed(torch.stack([before, previous], dim=1)))
        before, previous = previous, _choose(model, states)
        drafts.append(previous)
    return {"": torch.stack(drafts, dim=1).cpu(), "_plain": plain.cpu()}


def _choose(model, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """The likeliest token of each state, never the mask."""

    def portion(states: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(states)
        logits[:, model.config.mask_token_id] = float("-inf")
        return logits.argmax(-1)

    return torch.cat([portion(part) for part in hidden.flatten(0, -2).split(256)]).view(hidden.shape[:-1])


def _accepted_runs(drafts: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """How many drafts behind each token are what follows it, `(T,)`."""
    depths = drafts.shape[1]
    padded = torch.cat([truth, torch.full((depths,), -1)])
    following = torch.arange(len(truth))[:, None] + 1 + torch.arange(depths)
    return (drafts == padded[following]).long().cumprod(-1).sum(-1)


def _forwards(runs: list[int], limit: int, is_chain: bool) -> int:
    """Forwards until every token is decided; the prompt's own decides the first."""
    decided, forwards, has_drafts = 0, 1, True
    while decided < len(runs) - 1:
        accepted = runs[decided] if has_drafts else 0
        has_drafts = not is_chain or not has_drafts or accepted == limit
        decided += accepted + 1
        forwards += 1
    return forwards
