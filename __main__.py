"""`python -m wedlm_hf`: the command `wedlm`."""

from .cli import main

if __name__ == "__main__":
    main()
