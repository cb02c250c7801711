import pytest


def test_vllm_is_installed_and_of_a_supported_version():
    why = "vLLM is not installed here: `make test-vllm` tests the plug-in"
    pytest.importorskip("vllm", reason=why, exc_type=ImportError)
    from wedlm_hf.serving.vllm.plugin import version_fault

    assert version_fault() is None
