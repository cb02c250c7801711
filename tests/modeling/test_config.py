"""The config: both dialects of config.json, defaults, the RoPE base, the mask token, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import MASK, PUBLISHED, edit, tiny_config
from transformers import AutoConfig

from wedlm_hf import WeDLMConfig
from wedlm_hf.modeling_wedlm.hub import AUTO_MAP


def read(folder: Path, reader: Any = AutoConfig, **changes: Any) -> WeDLMConfig:
    """Writes the published dialect, changed, as a config.json, and reads it as a user would."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    edit(folder / "config.json", **changes)
    return reader.from_pretrained(folder)


def test_the_published_dialect_is_read_without_remote_code_and_saved_in_the_newer_one(tmp_path):
    published = read(tmp_path, auto_map={"AutoConfig": "configuration_other.OtherConfig"})
    assert type(published) is WeDLMConfig
    assert (published.head_dim, published.qk_norm, published.attention_bias) == (16, True, False)
    published.save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again")
    assert again.to_diff_dict() == published.to_diff_dict()
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 1_000_000}
    assert written["mask_token_id"] == 151665
    assert "rope_theta" not in written and written["auto_map"] == AUTO_MAP


@pytest.mark.parametrize("stated", [
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"rope_theta": ..., "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    # Scaling added by hand to a file of the newer dialect: the base stands in what the parent throws away.
    {"rope_theta": ..., "rope_scaling": {"type": "yarn", "factor": 4.0},
     "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
])  # fmt: skip
def test_the_rope_base_is_the_stated_one_wherever_it_stands(tmp_path, stated):
    config = read(tmp_path, **stated)
    assert config.rope_parameters["rope_theta"] == 5e5
    scaling = stated.get("rope_scaling") or stated.get("rope_parameters") or {}
    assert config.rope_parameters["rope_type"] == scaling.get("type", scaling.get("rope_type", "default"))
    config.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").rope_parameters == config.rope_parameters


NO_BASE = r"states no RoPE base: expected `rope_theta`.*got keys \['architectures'"
TWO_BASES = r"states different RoPE bases: \{'rope_theta': 1000000, 'rope_parameters': 10000\.0\}"


@pytest.mark.parametrize(("stated", "message"), [
    ({"rope_theta": ...}, NO_BASE),
    ({"rope_theta": ..., "rope_scaling": {"type": "yarn", "factor": 4.0}}, NO_BASE),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}, TWO_BASES),
    ({"model_type": "qwen3"}, r"type 'qwen3', not a WeDLM checkpoint: .*--adapter.*wedlm adapt.*wedlm convert"),
    ({"mask_token_id": 5, "eos_token_id": [2, 5]}, r"must differ from the end token, got 5 for both\."),
    ({"layer_types": ["full_attention", "linear_attention"]}, "needs full attention in every layer, got"),
    ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
     r"layer_types=\['full_attention', 'sliding_attention'\] \(use_sliding_window=True, sliding_window=64\)"),
])  # fmt: skip
def test_a_config_file_without_one_rope_base_or_with_what_a_wedlm_cannot_have_is_refused(tmp_path, stated, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, WeDLMConfig, **stated)


def test_overrides_at_loading_and_changes_before_saving_are_checked_too(tmp_path):
    config = tiny_config()
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, mask_token_id=9).mask_token_id == 9
    with pytest.raises(ValueError, match=r"must lie in the vocabulary \(0 to 319\), got 999\."):
        AutoConfig.from_pretrained(tmp_path, mask_token_id=999)
    config.eos_token_id = MASK
    with pytest.raises(ValueError, match=r"must differ from the end token, got 3 for both\."):
        config.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_not_stated_follows_from_what_is_or_is_qwen3s(tmp_path):
    widths = {stated: read(tmp_path, head_dim=stated).head_dim for stated in (..., None, 16)}
    assert widths == {...: 8, None: 8, 16: 16}
    sizes = ((151665, None), (151666, None), (151936, 7))  # the published mask row, only where it exists
    masks = [tiny_config(vocab_size=size, mask_token_id=stated).mask_token_id for size, stated in sizes]
    assert masks == [None, 151665, 7]
    unused = tiny_config(use_sliding_window=True, sliding_window=64, max_window_layers=2)
    assert unused.layer_types == ["full_attention", "full_attention"]
    config = WeDLMConfig()
    assert (config.qk_norm, config.attention_bias, config.rope_parameters["rope_theta"]) == (True, False, 10_000.0)
    assert AutoConfig.for_model("wedlm").to_dict() == config.to_dict()
