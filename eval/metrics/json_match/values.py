"""JSON values in texts. Needs the standard library alone: the metric beside it is loaded without this package."""

import json
from typing import Any


def read_value(text: str) -> Any:
    """The JSON value of a text: all of it, or else its first object or array. Raises `ValueError` if there is none,
    and for one that is nested too deep to be read."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    try:
        return decoder.decode(text.strip())
    except ValueError:
        pass
    except RecursionError:
        raise ValueError("The JSON value is nested too deep.") from None
    for place in (place for place, character in enumerate(text) if character in "{["):
        try:
            return decoder.raw_decode(text, place)[0]
        except ValueError:
            continue
        except RecursionError:
            break
    raise ValueError(f"There is no JSON value in {text[:80]!r}.")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON.")


def is_equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same. Unlike in Python, `true` is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def same_json(reply: str, answer: str) -> bool:
    """Whether a reply holds the JSON value of the answer; an answer without one is nobody's."""
    try:
        return is_equal(read_value(reply), read_value(answer))
    except (ValueError, RecursionError):
        return False
