"""The command `wedlm`; also `python -m wedlm_hf`."""

import signal


def main() -> None:
    """Runs the command line. While it is imported there is nothing to clean up: Ctrl-C ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
