"""The command `wedlm`: what each command is called and takes; the work is done in the sub-packages.

Imports of torch and of what needs it stand inside the functions: they take seconds, and `wedlm --help` needs none.
"""

from . import decoding, models  # adds their commands
from .application import app, main

__all__ = ["app", "decoding", "main", "models"]
