"""`python -m wedlm_hf.eval run …`: lm-evaluation-harness with the model `wedlm` (see [`harness`])."""

import os
import socket
import sys
from importlib.util import find_spec
from urllib.parse import urlsplit


def _is_online() -> bool:
    """Whether a connection to the Hub can be made; through a proxy that is not ours to find out."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), 5).close()
    except OSError:
        return False
    return True


def main() -> None:
    """Find out what there is to work with, then run the harness."""
    if find_spec("lm_eval") is None:
        sys.exit("`wedlm_hf.eval` runs lm-evaluation-harness, which is missing: pip install 'wedlm-hf[eval]'")
    if "run" in sys.argv and "HF_HUB_OFFLINE" not in os.environ and not _is_online():
        # Otherwise each file would be asked for, with retries, for half a minute.
        print("The Hub cannot be reached: working with what is cached (HF_HUB_OFFLINE=1).", file=sys.stderr)
        os.environ["HF_HUB_OFFLINE"] = "1"
    from .harness import main

    main()


if __name__ == "__main__":
    main()
