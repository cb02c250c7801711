"""Answers that follow a JSON schema, in AR and verified decoding alike: a logits processor that knows which tokens
come next. Not part of the code beside saved checkpoints (hub.py).

`R` rows, `L` tokens, `V` vocabulary.
"""

import json
import threading
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from itertools import pairwise, takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor

from .rows import CERTAIN

# Between the parts of an object or a list. Without a limit, a model may write spaces until its answer is full.
WHITESPACE = r"( |\n[ \t]{0,16})?"
MOST_STATES = 256  # prefixes whose state is kept
FEW = 8  # tokens, of which one that the answer has is likely

ONE_CALL = "make another for each call of `generate`."

_TOKENIZERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_LOCK = threading.Lock()


class Grammar:
    """A JSON schema, made ready for a tokenizer.

    Args:
        tokenizer: a fast tokenizer.
        schema: a JSON schema; default: any object.

    Raises:
        ImportError: where llguidance is not installed.
        ValueError: for a schema that is none, that nothing can fulfil, or that has a keyword which cannot be honoured.
    """

    def __init__(self, tokenizer: Any, schema: dict[str, Any] | None = None):
        if find_spec("llguidance") is None:
            raise ImportError("A JSON schema needs llguidance: pip install 'wedlm-hf[grammar]'.")
        from llguidance import LLMatcher

        schema = {"type": "object"} if schema is None else schema
        self.tokenizer = _prepared(tokenizer)
        text = json.dumps(schema)
        self.text = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
        if problem := LLMatcher.validate_grammar(self.text, self.tokenizer):
            raise ValueError(f"The JSON schema cannot be followed: {' '.join(problem.split())}")
        self._first = LLMatcher(self.tokenizer, self.text)  # making it takes long, a copy does not
        state = self.begin()
        state.compute_bitmask()
        if state.is_error():  # endless at its beginning, say
            raise ValueError(f"The JSON schema cannot be followed: {_reason(state)}")

    def begin(self) -> Any:
        """The state in front of the first token."""
        return self._first.deep_copy()


class Thoughts:
    """Thoughts in front of an answer: any text, up to what ends them.

    Args:
        tokenizer: a fast tokenizer.
        closing: what ends them, such as `</think>`.
    """

    def __init__(self, tokenizer: Any, closing: str):
        from llguidance import LLMatcher

        self.closing = tokenizer(closing, add_special_tokens=False).input_ids
        if self.closing[0] in tokenizer.all_special_ids:  # which is no text
            rules = f"start: /(.|\\n)*/ <[{self.closing[0]}]>"
        else:
            written = "".join(letter if letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in closing)
            rules = f"start[lazy]: /(.|\\n)*{written}/"
        self._first = LLMatcher(_prepared(tokenizer), LLMatcher.grammar_from_lark(rules))

    def begin(self) -> Any:
        """The state in front of the first token."""
        return self._first.deep_copy()


def _prepared(tokenizer: Any) -> Any:
    """The tokenizer in llguidance's form; making it takes a second where the vocabulary is large."""
    from llguidance.hf import from_tokenizer

    with _LOCK:
        if tokenizer not in _TOKENIZERS:
            _TOKENIZERS[tokenizer] = from_tokenizer(tokenizer)
        return _TOKENIZERS[tokenizer]


def _reason(state: Any) -> str:
    """The error of a state, without the parser's position."""
    return " ".join(str(state.get_error()).partition("<state>")[0].split())


class JSONConstraint(LogitsProcessor):
    """Allows only tokens that keep the answer within a grammar. For one call of `generate`: its first forward shows
    how long the prompt is.

    The allowed tokens depend on the answer alone. Verified decoding asks for the same prefixes as AR decoding, so the
    text is AR's under the same constraint. It checks only drafts that the grammar allows, and drafts the tokens that
    [`ahead`] expects.

    Args:
        grammar: what the answer must follow.
        end_tokens: end an answer; default: the tokenizer's.
        thoughts: what the prompt has opened: the answer follows the grammar behind their end. Where an end token is
            the likeliest to follow, the thoughts end instead.
    """

    needs_row = False

    def __init__(self, grammar: Grammar, end_tokens: Collection[int] = (), thoughts: Thoughts | None = None):
        self.grammar, self.thoughts = grammar, thoughts
        self.end_tokens = set(end_tokens) or {grammar.tokenizer.eos_token}
        self.prompt_length: int | None = None
        self.states: dict[tuple[int, ...], tuple[Any, bool]] = {}  # behind answers; whether thoughts come next
        self.ended: set[tuple[int, ...]] = set()  # prompts with thoughts that are made to end there

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The scores, −∞ where a token is not allowed.

        Args:
            input_ids: `(R, L)` int64, prompts and the answers so far.
            scores: `(R, V)` float.

        Raises:
            ValueError: for answers that do not follow the grammar.
        """
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        if input_ids.shape[1] < self.prompt_length:
            raise ValueError(f"This `JSONConstraint` began with {self.prompt_length} tokens: {ONE_CALL}")
        answers = input_ids[:, self.prompt_length :].tolist()
        masks = {answer: self._allowed(list(answer), scores.shape[1]) for answer in map(tuple, answers)}
        allowed = torch.stack([masks[tuple(answer)] for answer in answers])
        if self.thoughts is not None:
            likeliest = scores.argmax(-1).tolist()
            for mask, row, answer, token in zip(allowed, input_ids.tolist(), answers, likeliest, strict=True):
                self._end_thoughts(mask, row, answer, token)
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))  # type: ignore[return-value]

    def _end_thoughts(self, allowed: torch.Tensor, row: list[int], answer: list[int], likeliest: int) -> None:
        """Allows nothing but the next token of what ends the thoughts, where they are made to end.

        Args:
            allowed: `(V,)` bool.
            row: the prompt and the answer.
            answer: the answer.
            likeliest: token to follow.
        """
        closing = self.thoughts.closing  # type: ignore[union-attr]
        if not self._state(answer)[2] or self.end_tokens & {*answer}:
            return
        begun = (n for n in range(1, len(closing)) if row[-n:] == closing[:n] and tuple(row[:-n]) in self.ended)
        count = next(begun, 0)
        if count or (likeliest in self.end_tokens and allowed[closing[0]]):
            if not count:
                self.ended.add(tuple(row))
            allowed[:] = False
            allowed[closing[count]] = True

    def _allowed(self, answer: list[int], vocab_size: int) -> torch.Tensor:
        """`(V,)` bool."""
        ends = [place for place, token in enumerate(answer, 1) if token in self.end_tokens]
        if ends and len(set(answer[ends[0] :])) < 2:  # padding follows an end
            return torch.ones(vocab_size, dtype=torch.bool)
        state, done, _ = self._state(answer)
        if done < len(answer):
            if len(set(answer[done:])) == 1:  # ended by another criterion
                return torch.ones(vocab_size, dtype=torch.bool)
            raise ValueError(f"Token {done} of the answer, {answer[done]}, does not follow the grammar: {ONE_CALL}")
        bits = torch.frombuffer(bytearray(state.compute_bitmask()), dtype=torch.uint8)
        if state.is_error():
            raise ValueError(f"The JSON schema is too complex: {_reason(state)}")
        mask = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().bool()[:vocab_size]
        mask = torch.nn.functional.pad(mask, (0, vocab_size - len(mask)))  # rows that are no tokens
        mask[[self.grammar.tokenizer.eos_token, *self.end_tokens]] = False
        mask[list(self.end_tokens)] = state.is_accepting()
        return mask

    def allows(self, answer: Sequence[int]) -> bool:
        """Whether an answer may begin with these tokens, or end with the last of them."""
        if answer[-1] in self.end_tokens:
            state, done, _ = self._state(answer[:-1])
            return done == len(answer) - 1 and state.is_accepting()
        return self._state(answer)[1] == len(answer)

    def ahead(self, answer: Sequence[int], count: int) -> list[tuple[int, float | None]]:
        """Up to `count` expected tokens behind an answer, with their chances: 1 where the grammar allows no other
        token, `None` where the answer had the token before, such as `":` behind a key."""
        found: list[tuple[int, float | None]] = []
        text = [*answer]
        while len(found) < count:
            state, done, is_thinking = self._state(text)
            if done < len(text) or is_thinking:
                break
            forced = state.deep_copy().compute_ff_tokens() or [min(self.end_tokens)] * state.is_stopped()
            tokens = forced or self._as_before(text, state.deep_copy().compute_bitmask())
            if not tokens:
                break
            found += [(token, CERTAIN if forced else None) for token in tokens]
            text += tokens
        return found[:count]

    def _as_before(self, text: list[int], bits: bytes) -> list[int]:
        """A guess at the next token, or none: the allowed token that followed the last token earlier in the text.
        Where few tokens are allowed and the text has only one of them, that one."""
        before = [token for token in text if bits[token >> 3] >> (token & 7) & 1]
        same = [token for last, token in pairwise(text) if last == text[-1] and token in before]
        is_clear = len({*before}) == 1 and int.from_bytes(bits).bit_count() <= FEW
        return same[-1:] or before[:1] * is_clear

    def _state(self, answer: Sequence[int]) -> tuple[Any, int, bool]:
        """The state behind an answer, how many of the answer's tokens are allowed, and whether thoughts come next."""
        ends = range(len(answer), 0, -1)
        known = next((end for end in ends if tuple(answer[:end]) in self.states), 0)
        if known:
            state, is_thinking = self.states[tuple(answer[:known])]
        else:
            state, is_thinking = (self.thoughts or self.grammar).begin(), self.thoughts is not None
        # A model may have more rows than the tokenizer has tokens; after one of those, a state stays broken.
        count = self.grammar.tokenizer.vocab_size
        if behind := [*takewhile(lambda token: 0 <= token < count, answer[known:])]:
            state = state.deep_copy()  # `rollback` leaves traces: masks would depend on what else was asked for
            count = state.try_consume_tokens(behind)
            if is_thinking and state.is_stopped():
                state, is_thinking = self.grammar.begin(), False
                count += state.try_consume_tokens(behind[count:])
            known += count
            self.states[tuple(answer[:known])] = state, is_thinking
            if len(self.states) > MOST_STATES:
                del self.states[next(iter(self.states))]
        return state, known, is_thinking
