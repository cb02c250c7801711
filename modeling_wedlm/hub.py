"""The code that travels with a checkpoint, so that `trust_remote_code=True` needs only torch and transformers.

The Hub's loader reads one flat folder: it copies the file that `auto_map` names and follows its imports of siblings by
a regular expression. So the files that ship are written side by side under names that end in `_wedlm.py`, and an
import across folders becomes one of a sibling.

A model is Hub-ready wherever a person saves it, as with every custom model of transformers: `hf upload FOLDER` is then
enough. What nobody publishes has no code: an untrained copy (`wedlm convert`), and the checkpoints of a run. Classes
loaded *from* such files save them again by transformers' own means.
"""

import json
import os
import re
from pathlib import Path

from ..checkpoints.files import write_text

AUTO_MAP = {
    "AutoConfig": "configuration_wedlm.WeDLMConfig",
    "AutoModel": "modeling_wedlm.WeDLMModel",
    "AutoModelForCausalLM": "modeling_wedlm.WeDLMForCausalLM",
}

# What `forward` and `generate` need. A file ships as `NAME_wedlm.py`.
SHIPPED = (
    "generation/attention.py", "generation/cache.py", "generation/commits.py", "generation/decoding.py",
    "generation/drafter.py", "generation/fixed_plan.py", "generation/forward.py", "generation/lookup.py",
    "generation/mixin.py", "generation/planner.py",
    "generation/request.py", "generation/rows.py", "generation/rules.py", "generation/sampling.py",
    "generation/settings.py", "generation/state.py", "generation/stats.py", "generation/step_times.py",
    "generation/streaming.py", "generation/threads.py", "generation/verify.py", "generation/versions.py",
    "modeling_wedlm/configuration_wedlm.py", "modeling_wedlm/dual_stream.py", "modeling_wedlm/modeling_wedlm.py",
)  # fmt: skip

_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(r"^from (?:\.|\.\.\w+\.)(\w+?)(?:_wedlm)? import ", flags=re.MULTILINE)


def hub_files() -> dict[str, str]:
    """Name and text of every file that ships."""
    files = {}
    for path in SHIPPED:
        text = (_PACKAGE / path).read_text(encoding="utf-8")
        files[f"{Path(path).stem.removesuffix('_wedlm')}_wedlm.py"] = _IMPORT.sub(r"from .\1_wedlm import ", text)
    return files


def write_hub_files(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Writes the files that ship into `directory` (made if it is not there), each whole or not at all. Returns the
    `auto_map` of the config.json beside them."""
    target = Path(directory)
    for name, text in hub_files().items():
        write_text(target / name, text)
    return dict(AUTO_MAP)


def remove_hub_files(directory: str | os.PathLike[str]) -> None:
    """Undoes [`write_hub_files`]: for a folder that is loaded only where the package is. Without an `auto_map`,
    transformers does not ask whether the code is to be run."""
    for path in Path(directory).glob("*_wedlm.py"):
        path.unlink()
    file = Path(directory, "config.json")
    if file.is_file():
        stated = json.loads(file.read_bytes())
        stated.pop("auto_map", None)
        write_text(file, json.dumps(stated, indent=2, sort_keys=True) + "\n")
