"""The command `wedlm`.

It stands beside the package, whose import loads torch and transformers: the words are read first, so that `--help` and
a wrong word are answered at once.
"""

import signal
import sys
from importlib.util import find_spec


def main() -> None:
    """Runs the command line. While it is imported there is nothing to clean up: Ctrl-C ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if missing := [name for name in ("rich", "typer") if find_spec(name) is None]:
        sys.exit(f"The command `wedlm` needs {', '.join(missing)}: pip install '.[cli]' in the clone")
    from wedlm_hf.cli import main as run

    run()
