"""The code that travels with a checkpoint, so that `trust_remote_code=True` needs only torch and transformers.

The Hub's loader reads one flat folder: it copies the file that `auto_map` names and follows its imports of siblings by
a regular expression. So the files that ship, `*_wedlm.py` of two folders, are written side by side, and an import
across folders becomes one of a sibling. Classes loaded *from* such files save them again by transformers' own means.
"""

import os
import re
from pathlib import Path

from .files_wedlm import write_text

AUTO_MAP = {
    "AutoConfig": "configuration_wedlm.WeDLMConfig",
    "AutoModel": "modeling_wedlm.WeDLMModel",
    "AutoModelForCausalLM": "modeling_wedlm.WeDLMForCausalLM",
}

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("generation", "modeling_wedlm")
_CROSS_FOLDER = re.compile(r"^from \.\.\w+\.(\w+_wedlm) import ", flags=re.MULTILINE)


def hub_files() -> dict[str, str]:
    """Name and text of every file that ships."""
    sources = sorted(path for folder in _FOLDERS for path in (_PACKAGE / folder).glob("*_wedlm.py"))
    return {path.name: _CROSS_FOLDER.sub(r"from .\1 import ", path.read_text(encoding="utf-8")) for path in sources}


def write_hub_files(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Writes the files that ship into `directory` (made if it is not there), each whole or not at all.

    Returns:
        The `auto_map` of the config.json beside them.
    """
    target = Path(directory)
    for name, text in hub_files().items():
        write_text(target / name, text)
    return dict(AUTO_MAP)
