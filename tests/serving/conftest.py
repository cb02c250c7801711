import pytest


@pytest.fixture(scope="module")
def server(nano):
    """A server of wedlm-nano, unverified where a request does not say."""
    from served import Server  # what it needs is not there in the environment of vLLM

    with Server(*nano, {"strategy": "wedlm"}) as server:
        yield server
