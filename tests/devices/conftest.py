"""The pretend accelerator, where a test asks for it."""

from collections.abc import Iterator

import pytest
from pretend import Accelerator, accelerator


@pytest.fixture
def pretend() -> Iterator[Accelerator]:
    """A device of its own."""
    with accelerator() as device:
        yield device
