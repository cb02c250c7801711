"""The harness without what only costs time here."""

import pytest


@pytest.fixture(autouse=True)
def undescribed(monkeypatch):
    """The harness asks pip and the system for everything that is installed, 3 s for each run."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
