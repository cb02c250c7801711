"""Numbers in texts. Needs the standard library alone: the metric beside it is loaded without this package."""

import re
from decimal import Decimal

# A sign counts where nothing is subtracted: "-3", "= -3", but not "7-3". Commas count between groups of three digits.
NUMBER = re.compile(r"((?<![\w.)])[-−])?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(\.\d+)?(?:[eE]([-+]?\d{1,3})(?!\w))?")


def final_number(text: str) -> Decimal | None:
    """The last number of a text, such as 1,200 or -3.50 or 1e3; `None` if there is none."""
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    sign, whole, fraction, exponent = found[-1].groups(default="")
    number = Decimal(f"{whole.replace(',', '')}{fraction}{'e' * bool(exponent)}{exponent}")
    return -number if sign else number


def same_number(reply: str, answer: str) -> bool:
    """Whether the last number of a reply is that of the answer; an answer without one is nobody's."""
    wanted = final_number(answer)
    return wanted is not None and final_number(reply) == wanted
