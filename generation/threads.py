"""How threads of torch wait for each other: beside other programs they sleep, on a quiet machine they spin.

Between two products a thread of libgomp, torch's OpenMP on Linux, spins for up to milliseconds, which takes the core
from whatever else runs, the thread that is waited for included. It spins for microseconds alone while OpenMP has more
threads than there are cores. So a team of threads that do nothing is kept while others need the cores. Waking a thread
takes as long as a small product on some virtual machines: on a quiet machine there is no such team.

The environment variables of OpenMP do the same, but for good, and are read as torch loads.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

SAID = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # variables by which people decide themselves
# Seconds between two looks at what others use, the least that one looks back, and how long none is needed before the
# watching ends.
PAUSE, LEAST, LINGER = 0.25, 0.1, 5.0
# Of the cores that our threads want, how many others may use without making them wait.
MARGIN = 0.5


@contextmanager
def sleeping_beside_others() -> Iterator[None]:
    """Within it, waiting threads of torch sleep while other programs use the cores that they need. Where OpenMP is not
    libgomp, or the environment says how threads wait, nothing changes."""
    begin = _starter()
    if begin is None:
        yield
        return
    _watch.enter(begin, torch.get_num_threads())
    try:
        yield
    finally:
        _watch.leave()


@lru_cache
def _starter() -> Callable[[int], None] | None:
    """What starts a team of so many idle threads, which belongs to the thread that calls it and ends with it."""
    if set(SAID) & set(os.environ) or not hasattr(os, "sched_getaffinity"):
        return None
    try:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
        paths = sorted(loaded, key=lambda path: "torch" not in path)
        run, idle = ctypes.CDLL(paths[0]).GOMP_parallel, ctypes.CDLL(None).abs
    except (OSError, IndexError, AttributeError):
        return None
    return lambda size: run(ctypes.cast(idle, ctypes.c_void_p), None, ctypes.c_uint(size), ctypes.c_uint(0))


class _Usage:
    """How much of the cores that this process may use others take."""

    def __init__(self) -> None:
        self.cores = 0.0  # in use by others, at the last look
        self._last = self._read()

    def look(self) -> float:
        """The cores that others have used since the last look, or as then if that was just now."""
        now = self._read()
        seconds, busy, own = (new - old for new, old in zip(now, self._last, strict=True))
        if seconds >= LEAST:
            self.cores, self._last = max(0.0, busy - own) / seconds, now
        return self.cores

    def _read(self) -> tuple[float, float, float]:
        """Seconds: on the clock, of all programs on these cores, of this process."""
        ticks = 0
        try:
            names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
            for line in Path("/proc/stat").read_text().splitlines():
                name, *counts = line.split()
                if name in names:  # user, nice, system, idle, iowait, irq, softirq, steal, and guests in them
                    ticks += sum(map(int, counts[:3])) + sum(map(int, counts[5:8]))
            return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()
        except (OSError, AttributeError):
            return time.monotonic(), 0.0, 0.0


class _Watch:
    """Keeps the team while it is needed; a thread of its own looks, as long as there is anyone inside."""

    def __init__(self) -> None:
        self.usage = _Usage()
        self._lock, self._inside, self._threads = threading.Lock(), 0, 1
        self._watching: threading.Thread | None = None

    def enter(self, begin: Callable[[int], None], threads: int) -> None:
        with self._lock:
            self._inside, self._threads = self._inside + 1, threads
            if self._watching is None or not self._watching.is_alive():  # none is left after a fork
                self._watching = threading.Thread(target=self._run, args=(begin,), daemon=True)
                self._watching.start()

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1

    def _run(self, begin: Callable[[int], None]) -> None:
        team: _Team | None = None
        cores, left = len(os.sched_getaffinity(0)), LINGER
        while left > 0:
            is_needed = self._threads > 1 and self._threads + self.usage.look() > cores + MARGIN
            if is_needed and team is None:
                team = _Team(begin, cores + 1)
            elif not is_needed and team is not None:
                team.end()
                team = None
            time.sleep(PAUSE)
            with self._lock:
                left = LINGER if self._inside else left - PAUSE
                if left <= 0:
                    self._watching = None
        if team is not None:
            team.end()


class _Team(threading.Thread):
    """Idle threads of OpenMP, one more than there are cores."""

    def __init__(self, begin: Callable[[int], None], size: int):
        super().__init__(daemon=True)
        self._begin, self._size, self._is_over = begin, size, threading.Event()
        self.start()

    def run(self) -> None:
        """Has them until the end."""
        self._begin(self._size)
        self._is_over.wait()

    def end(self) -> None:
        """Lets them go."""
        self._is_over.set()


_watch: Any = _Watch()
