"""N-grams of a model's own answers, and what followed them: drafts that need no mask.

A mask costs a row of a forward, and its updates; such a draft costs a row alone. Where rows are dear, as on a CPU, it
is often the better one.

`N` n-grams.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from heapq import heappop, heappush
from sys import maxsize
from typing import Any

import numpy as np
import torch
from torch import nn

from ..generation.drafter import CERTAIN, CHANCE, MOST_DRAFTS, UNIT
from ..generation.rows import Row

LONGEST = 3  # tokens of an n-gram
FOLLOWERS = 3  # tokens that are kept behind an n-gram, the most frequent ones
MOST = 2**17  # n-grams that are kept, the most frequent ones
LEAST = 2  # times that an n-gram must occur
LEAST_REACH = 0.1  # of a draft
# Of the chance of a draft from the root's state. By 0.1 to 0.25 the first three hold what follows about as often.
SHARE = 0.2
_BITS = 21  # of a token in a key


class NGrams(nn.Module):
    """N-grams and their followers, as a mask adapter holds them.

    Attributes:
        keys: `(N,)` int64, ascending: the tokens of each n-gram, plus 1, in 21 bits each, the last one lowest.
        tokens: `(N, 3)` int32, those that followed most often, the most frequent first; -1 for none.
        counts: `(N, 4)` int32, how often each of these did, and how often the n-gram occurred.
    """

    keys: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dtype=torch.int64, device="cpu"))
        self.register_buffer("tokens", torch.full((size, FOLLOWERS), -1, dtype=torch.int32, device="cpu"))
        self.register_buffer("counts", torch.zeros(size, FOLLOWERS + 1, dtype=torch.int32, device="cpu"))

    def check(self, vocab_size: int) -> None:
        """Raises `ValueError` for a table that is damaged, or that has tokens which a model does not have."""
        if not bool((self.keys > 0).all() and (self.keys.diff() > 0).all() and (self.counts >= 0).all()):
            raise ValueError("its n-grams are damaged.")
        known = self.tokens.flatten(), self.frequent(len(self.keys), maxsize)
        if (largest := max(int(each.max()) for each in known if len(each))) >= vocab_size:
            raise ValueError(f"its n-grams have token {largest}, and the model {vocab_size} tokens.")

    def frequent(self, most: int, vocab_size: int) -> torch.Tensor:
        """`(S,)` int64, the tokens of a vocabulary that occur most often, at most so many."""
        is_single = (self.keys > 0) & (self.keys <= min(vocab_size, 2**_BITS - 1))
        order = self.counts[is_single, -1].argsort(descending=True, stable=True)[:most]
        return self.keys[is_single][order] - 1

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]], before: "NGrams | None" = None) -> "NGrams":
        """Counts those of answers (`prompt_ids` and `response_ids`), and adds what was counted `before`."""
        keys, followers, weights = _counted(answers)
        others = np.zeros(0)
        if before is not None:
            known, tokens, counts = (each.cpu().numpy() for each in (before.keys, before.tokens, before.counts))
            entries, places = np.nonzero(tokens >= 0)
            keys = np.concatenate([keys, known[entries], known])
            followers = np.concatenate([followers, tokens[entries, places].astype(np.int64)])
            weights = np.concatenate([weights, counts[entries, places]])
            others = counts[:, -1] - counts[:, :-1].sum(1)
        kinds, homes = np.unique(keys, return_inverse=True)
        totals = np.bincount(homes, np.concatenate([weights, others]), len(kinds))
        pairs, inverse = np.unique((homes[: len(followers)] << _BITS) | followers, return_inverse=True)
        counts, homes = np.bincount(inverse, weights, len(pairs)), pairs >> _BITS
        order = np.lexsort((-counts, homes))  # of each n-gram, the most frequent follower first
        places = np.arange(len(order)) - np.searchsorted(homes, homes)
        kept = np.sort(np.argsort(-totals, kind="stable")[: min(MOST, int((totals >= LEAST).sum()))])
        numbers = np.full(len(kinds), -1)
        numbers[kept] = np.arange(len(kept))
        chosen = (places < FOLLOWERS) & (numbers[homes] >= 0)
        found, where = cls(len(kept)), (numbers[homes[chosen]], places[chosen])
        found.keys.copy_(torch.from_numpy(kinds[kept]))
        found.tokens[where] = torch.from_numpy(pairs[order][chosen] & (2**_BITS - 1)).int()
        found.counts[where] = torch.from_numpy(counts[order][chosen]).int()
        found.counts[:, -1] = torch.from_numpy(totals[kept]).int()
        return found


def _counted(answers: Sequence[Mapping[str, Any]]) -> tuple[Any, Any, Any]:
    """The n-gram of 1 to 3 tokens before each token of the answers, that token, and 1: int64 arrays."""
    texts, is_answer = [], []
    for answer in answers:
        prompt, response = answer["prompt_ids"], answer["response_ids"]
        texts += [[-1] * LONGEST, prompt, response]
        is_answer += [np.zeros(LONGEST + len(prompt), bool), np.ones(len(response), bool)]
    tokens = 1 + np.concatenate([np.zeros(0, np.int64), *(np.array(text, np.int64) for text in texts)])
    places = np.flatnonzero(np.concatenate([np.zeros(0, bool), *is_answer]))
    keys, key = [], np.zeros(len(places), np.int64)
    for back in range(LONGEST):
        before = tokens[places - 1 - back]
        key = key | (before << (_BITS * back))
        keys.append(np.where(before > 0, key, 0))  # 0: not all of it is text
    followers = np.tile(tokens[places] - 1, LONGEST)
    found = np.concatenate(keys)
    return found[found > 0], followers[found > 0], np.ones(int((found > 0).sum()))


class NGramDrafter:
    """Drafts what often followed, of the tokens that the model has by now. Its arrays are the host's."""

    def __init__(self, ngrams: NGrams, vocab_size: int):
        self.vocab_size = vocab_size
        self.keys = ngrams.keys.cpu().numpy().data  # a search takes less time in it than in an array
        self.tokens, self.counts = (each.cpu().numpy() for each in (ngrams.tokens, ngrams.counts))

    def followers(self, text: Sequence[int]) -> list[tuple[int, float]]:
        """What may follow a text, by its longest n-gram that is known, with its chances."""
        key, found = 0, -1
        for back, token in enumerate(reversed(text[-LONGEST:])):
            key |= (token + 1) << (_BITS * back)
            place = bisect_left(self.keys, key)
            if place == len(self.keys) or self.keys[place] != key:
                break  # longer ones were not met either
            found = place
        if found < 0:
            return []
        *counts, total = self.counts[found].tolist()
        pairs = zip(self.tokens[found].tolist(), counts, strict=True)
        return [(token, count / (total + 1)) for token, count in pairs if count > 0 and 0 <= token < self.vocab_size]

    def mixed(self, drafts: Sequence[Row], text: Sequence[int]) -> list[Row]:
        """What may follow a text, by drafts of the next token and by what followed its last tokens."""
        if not (followers := self.followers(text)):
            return list(drafts)
        chances = {draft.token: (1 - SHARE) * (draft.chance or 0.0) for draft in drafts}
        for token, share in followers:
            chances[token] = chances.get(token, 0.0) + SHARE * share
        ranked = sorted(chances, key=lambda token: -chances[token])
        return [Row(token, 1, -1, min(chances[token], CERTAIN - UNIT), rank > 0) for rank, token in enumerate(ranked)]

    def extend(self, drafts: list[Row], text: Sequence[int], end_tokens: Collection[int]) -> None:
        """Adds the likeliest drafts behind a text and behind the drafts that are there, where they reach far enough.
        A sibling's chance is what the drafts before it leave."""
        tails, reaches = {-1: [*text[-LONGEST:]]}, {-1: 1.0}
        left: dict[int, float] = {}  # of each row, the chance that none of its children passes
        heap = [(-1.0, -1)]
        for place, draft in enumerate(drafts):
            chance = CHANCE if draft.chance is None else draft.chance
            tails[place] = [*tails[draft.parent], int(draft.token or 0)][-LONGEST:]
            reaches[place] = reaches[draft.parent] * chance
            left[draft.parent] = max(0.0, left.get(draft.parent, 1.0) - chance)
            heappush(heap, (-reaches[place], place))
        most = len(drafts) + MOST_DRAFTS
        while heap and len(drafts) < most:
            place = heappop(heap)[1]
            if reaches[place] < LEAST_REACH:
                break  # so do all others
            if place >= 0 and drafts[place].token in end_tokens:
                continue
            depth = 1 + (drafts[place].position if place >= 0 else 0)
            children = [draft.token for draft in drafts if draft.parent == place]
            for token, share in self.followers(tails[place]):
                chance = share * left.get(place, 1.0)
                if token in children or reaches[place] * chance < LEAST_REACH or len(drafts) == most:
                    continue
                child = len(drafts)
                drafts.append(Row(token, depth, place, min(chance, CERTAIN - UNIT), bool(children)))
                children.append(token)
                tails[child], reaches[child] = [*tails[place], token][-LONGEST:], reaches[place] * chance
                heappush(heap, (-reaches[child], child))
