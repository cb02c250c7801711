"""What is expected to fail, and why: expected.toml. A failure beside it is one, and so is a success in spite of it."""

import inspect
import os
import tomllib
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
FILE = Path(__file__).with_name("expected.toml")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    expected: dict[str, dict[str, str]] = tomllib.loads(FILE.read_text("utf-8"))
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        own = expected["wedlm"] if "wedlm" in item.nodeid.lower() else expected["qwen3"]
        reasons = expected["both"] | own
        fitting = (key for key in reasons if key == name or ("[" in key and item.name.startswith(key)))
        if reason := reasons.get(next(fitting, "")):
            has_parts = "self.subTest(" in inspect.getsource(item.function)  # which fail, and it passes
            item.add_marker(pytest.mark.xfail(reason=reason, strict=not has_parts))
