"""Which layers of a WeDLM the methods of PEFT take where none are named: those that they take of a Qwen3."""

from peft.utils import constants

for _table in vars(constants).copy().values():
    if isinstance(_table, dict) and "qwen3" in _table:
        _table.setdefault("wedlm", _table["qwen3"])
