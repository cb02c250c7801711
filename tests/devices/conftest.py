"""The pretend accelerator, for the tests of a file."""

import pytest
from pretend import accelerator


@pytest.fixture(scope="module")
def pretend():
    with accelerator() as device:
        yield device
