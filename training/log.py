"""Loggers of training: on the first process alone, whose number is said only where there are others."""

import logging
from typing import Any

from accelerate import PartialState
from accelerate.logging import MultiProcessAdapter


class _Logger(MultiProcessAdapter):
    """accelerate's, except that a process alone has no number."""

    def process(self, msg: Any, kwargs: Any) -> Any:
        if PartialState().num_processes > 1:
            return super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)
        return msg, kwargs


def get_logger(name: str) -> MultiProcessAdapter:
    """The logger of a module."""
    return _Logger(logging.getLogger(name), {})
