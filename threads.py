"""How the threads of torch wait for each other. It must be said before torch loads."""

import os
import time
from pathlib import Path

# Turns that an OpenMP thread waits by spinning beside other programs. Torch's default, some milliseconds after each
# product, takes the cores from the threads that are waited for.
SPINS = "1000"
# Looks at what runs, and seconds between two of them.
LOOKS, PAUSE = 10, 0.005


def wait_without_spinning() -> None:
    """Lets the threads of torch sleep while they wait, where other programs run and the environment does not say how.

    Call it before torch loads, as `import wedlm_hf` does. Waking a thread up takes as long as a small product on some
    virtual machines, so that threads spin, as torch has it, where nothing else runs.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ) and is_busy():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def is_busy() -> bool:
    """Whether something else runs on this machine most of the time; so it is taken to be where Linux does not say."""
    found = 0
    for _ in range(LOOKS):
        time.sleep(PAUSE)
        try:
            running = Path("/proc/loadavg").read_text().split()[3]  # "2/345": this process and another one, of 345
        except OSError:
            return True
        found += int(running.split("/")[0]) > 1
    return found > LOOKS / 2
