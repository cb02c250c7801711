"""The command `wedlm`; also `python -m wedlm_hf`."""

import os
import signal
import sys
from importlib.util import find_spec

# Turns that an OpenMP thread waits by spinning. Torch's default, some milliseconds after each product, takes the cores
# from the threads that are waited for as soon as other programs run.
SPINS = "1000"


def wait_without_spinning() -> None:
    """Lets the threads of torch sleep while they wait, unless the environment says how. Call it before torch loads."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def main() -> None:
    """Runs the command line. While it is imported there is nothing to clean up: Ctrl-C ends the process at once."""
    wait_without_spinning()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if missing := [name for name in ("rich", "typer") if find_spec(name) is None]:
        sys.exit(f"The command `wedlm` needs {', '.join(missing)}: pip install 'wedlm-hf[cli]'")
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
