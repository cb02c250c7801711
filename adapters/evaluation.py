"""How many tokens a forward of verified decoding would give with a mask adapter, on answers of the base itself.

`T` tokens of an answer, `K` masks behind a token, `H` hidden size.
"""

from collections import Counter
from collections.abc import Iterable

import torch

from ..generation.state import keeps_state
from .distillation import MaskDistillation
from .layout import AnswerTokens

DRAFTS = (1, 2, 3, 4, 6, 8, 12, 16)
KINDS = ("chain", "branch")
Replay = tuple[str, int]  # kind and number of drafts


def measure_acceptance(distillation: MaskDistillation, answers: Iterable[AnswerTokens]) -> tuple[int, Counter[Replay]]:
    """Replays greedy verified decoding (docs/algorithm.md#verification) of the base's own greedy answers.

    Branches give each accepted token drafts; a chain has none after a rejection. A model that keeps a state decodes
    chains alone.

    Returns:
        The tokens of all answers, and the forwards that decoding them takes, the prompts' included, by kind (`chain`,
        `branch`) and number of drafts.
    """
    limits = [limit for limit in DRAFTS if limit <= distillation.num_masks]
    kinds = KINDS[:1] if keeps_state(distillation.model) else KINDS
    tokens, forwards = 0, Counter({(kind, limit): 0 for kind in kinds for limit in limits})
    for answer in answers:
        tokens += len(answer["response_ids"])
        accepted = accepted_runs(distillation, answer)
        for limit in limits:
            runs = accepted.clamp(max=limit).tolist()
            for kind in kinds:
                forwards[kind, limit] += _forwards(runs, limit, is_chain=kind == "chain")
    return tokens, forwards


@torch.no_grad()
def accepted_runs(distillation: MaskDistillation, answer: AnswerTokens) -> torch.Tensor:
    """How many drafts behind each token of an answer are what follows it, `(T,)` int64, at most K.

    The masks behind a token see the answer up to there. Each draft is chosen given the true tokens before it: behind
    a wrong one, none counts. A root head counts in the first, as in decoding.
    """
    model, depths = distillation.model, distillation.num_masks
    prompt, count = len(answer["prompt_ids"]), len(answer["response_ids"])
    ids = torch.tensor([*answer["prompt_ids"], *answer["response_ids"]], device=model.device)
    cuts = torch.arange(prompt - 1, prompt + count - 1, device=model.device)
    accepted = torch.zeros(count, dtype=torch.int64, device=model.device)
    memory = None
    roots = distillation.hidden(ids[None])[0] if model.drafts_from_root else None
    for part in cuts.split(32):  # portions: all scores on the memory at once are large
        memory = distillation.memory_of_part(ids[None], part[None], memory)
        hidden = distillation.masks(memory, part[None])[0]
        right = torch.arange(len(part), device=model.device)
        for depth in range(depths):
            places = part[right] + 2 + depth  # of the tokens to draft
            right, places = right[places < len(ids)], places[places < len(ids)]
            if not len(right):
                break
            before = torch.stack([ids[places - 2], ids[places - 1]], dim=1)
            root = None if depth or roots is None else roots[part[right]]
            right = right[distillation.drafts(hidden[right, depth], before, root) == ids[places]]
            accepted[part[right] - (prompt - 1)] += 1
    return accepted.cpu()


def _forwards(runs: list[int], limit: int, is_chain: bool) -> int:
    """Forwards until every token is decided; the prompt's own decides the first."""
    decided, forwards, has_drafts = 0, 1, True
    while decided < len(runs) - 1:
        accepted = runs[decided] if has_drafts else 0
        has_drafts = not is_chain or not has_drafts or accepted == limit
        decided += accepted + 1
        forwards += 1
    return forwards
