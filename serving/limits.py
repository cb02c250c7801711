"""Bounds on work that depends on what a client sends: what takes more is refused, and nobody waits for it."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MOST_OBJECTS = 2**16  # and lists in a body: each takes a kilobyte or two until it is read
OPENING = re.compile(rb'(?:[^"\[{]++|"(?:[^"\\]++|\\.)*+"?+)*+[\[{]', re.DOTALL)  # in JSON, behind texts and all else
MOST_LINES = 2**20  # that a chat template may run for a request: about a second
MOST_SECONDS = 5  # of a processor for it: a line may copy all texts
TEMPLATE = "<template>"  # Jinja's name for the file of a template
LINES_IN_A_ROW = 256  # then other threads have their turn, which else would wait 5 ms for each of theirs
PATIENCE = 30  # seconds for a trial on a machine that is busy
TRIALS = 4  # at a time

# Making a grammar may take minutes and gigabytes, and no thread can be ended: it is tried where that is possible. All
# else waits while it is made here. The numbers are seconds and bytes; there is no `resource` on Windows.
TRIAL = """
import os, sys, time
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    os.nice(10)
except ImportError:
    pass
from llguidance import LLMatcher, LLTokenizer
grammar = LLMatcher.grammar_from_json_schema(sys.stdin.buffer.read().decode())
begin = time.process_time()
LLMatcher(LLTokenizer("byte"), grammar, log_level=0).compute_bitmask()
sys.exit(100 * (time.process_time() - begin > 0.25))
"""
TOOK_LONG = 100

LONGEST_PART = 2**16  # characters of a text that is read in parts
# They end behind a word where it is not too far, as most tokens do.
PARTS = re.compile(rf".{{1,{LONGEST_PART}}}\S{{0,256}}", re.DOTALL)

_turns = threading.BoundedSemaphore(TRIALS)


class LineCounter:
    """Ends templates by `TimeoutError` once they have run too many lines or for too long, all those of a request
    together, which are rendered on one thread."""

    def __init__(self) -> None:
        self.left = MOST_LINES
        self.end = time.thread_time() + MOST_SECONDS

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts lines of templates that are rendered inside."""
        before = sys.gettrace()

        def count(frame: Any, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename != TEMPLATE:
                return None
            self.left -= 1
            if self.left <= 0 or time.thread_time() > self.end:
                raise TimeoutError("it takes too long")
            if self.left % LINES_IN_A_ROW == 0:
                time.sleep(0)
            return count

        sys.settrace(count)
        try:
            yield
        finally:
            sys.settrace(before)


def objects_in(body: bytes) -> int:
    """Objects and lists in JSON, as far as they are allowed and one more, before it is read; texts may hold many of
    their signs."""
    count = place = 0
    while count <= MOST_OBJECTS and (found := OPENING.match(body, place)):
        count, place = count + 1, found.end()
    return count


def may_have_tokens(text: str, most: int, count: Callable[[str], int]) -> bool:
    """Whether a text may have so many tokens at most, without memory for more of them than those of a part of it:
    each takes half a kilobyte. `count` says how many a part has.

    Between parts, a text has a few tokens fewer than they have; they have hundreds each, and twice as many together
    are never a matter of where they begin.
    """
    left = 2 * most
    return len(text) <= LONGEST_PART or all((left := left - count(part[0])) >= 0 for part in PARTS.finditer(text))


def can_be_built(schema: str) -> bool:
    """Whether llguidance makes the grammar of a JSON schema within a quarter of a second and a gigabyte. A schema that
    is wrong can be refused as fast."""
    try:
        command = [sys.executable, "-I", "-c", TRIAL]
        with _turns:
            done = subprocess.run(command, input=schema.encode(), capture_output=True, timeout=PATIENCE)
        return done.returncode >= 0 and done.returncode != TOOK_LONG
    except subprocess.TimeoutExpired:
        return False
