"""`python -m wedlm_hf.eval run …`: lm-evaluation-harness with the model `wedlm` (see [`harness`])."""

import os
import sys
from importlib.util import find_spec


def main() -> None:
    """Find out what there is to work with, then run the harness."""
    if find_spec("lm_eval") is None:
        sys.exit("`wedlm_hf.eval` runs lm-evaluation-harness, which is missing: pip install '.[eval]' in the clone")
    if "run" in sys.argv and "HF_HUB_OFFLINE" not in os.environ:
        from huggingface_hub import constants

        from ..checkpoints.find import is_hub_reachable

        if not is_hub_reachable():  # each file of each dataset would be asked for, with retries, for half a minute
            print("The Hub cannot be reached: working with what is cached (HF_HUB_OFFLINE=1).", file=sys.stderr)
            os.environ["HF_HUB_OFFLINE"] = "1"  # for the libraries that are not imported yet
            constants.HF_HUB_OFFLINE = True
    from .harness.run import main

    main()


if __name__ == "__main__":
    main()
