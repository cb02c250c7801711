"""`benchmarks/gpu_hour.py` on this CPU, tiny: each piece runs, goes on where it was stopped, and has its table."""

import gpu_hour
import gpu_results
import pytest
import torch
from gpu_hour import NANO, PIECES

# What no CPU can do, in the words that the page would show.
REFUSED = {"flash_attention_2": "the package for FlashAttention2"}


def main(out, **options):
    """The command in this process."""
    defaults = {"model": str(NANO), "adapter": None, "device": "cpu", "tiny": True, "minutes": 25.0, "page": None}
    threads = torch.get_num_threads()
    gpu_hour.main(out, **defaults | {"pieces": ",".join(PIECES), "one": ""} | options)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "piece", [name if name == "forwards" else pytest.param(name, marks=pytest.mark.slow) for name in PIECES]
)
def test_a_piece_that_is_stopped_goes_on_and_has_its_table(tmp_path, monkeypatch, piece):
    written, write = [], gpu_results.write_text

    def write_and_stop(path, text):
        write(path, text)
        written.append(text)
        if len(written) == 2:  # the first says that a part has begun
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu_results, "write_text", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        main(tmp_path, one=piece)
    (first,) = gpu_results.read(tmp_path, piece)["parts"].items()
    main(tmp_path, one=piece)
    parts = gpu_results.read(tmp_path, piece)["parts"]
    assert first in parts.items() or "error" in first[1]  # what was done was not done again
    for name, part in parts.items():
        refused = any(key in name and words in part.get("error", "") for key, words in REFUSED.items())
        assert "error" not in part or refused, part
    main(tmp_path, page=tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    table = text.partition(f"## {piece}\n")[2].partition("\n## ")[0]
    assert table.count("\n|") >= 2 and "tiny: no measurement" in table
