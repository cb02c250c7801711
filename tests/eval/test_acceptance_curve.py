"""The acceptance curve of a training log, as a table and as a figure."""

import json

from wedlm_hf.adapters.model_card import acceptance_table, read_log
from wedlm_hf.eval.acceptance_curve import draw_acceptance


def test_the_curve_has_a_row_for_each_evaluation_and_is_drawn(tmp_path):
    lines = [{"step": 1, "loss": 3.0, "mask_rows": 10}]
    for rows in (1000, 5000):
        rates = {f"eval_tokens_per_forward_{kind}_{count}": 1 + rows / 10_000 + count / 100
                 for kind in ("branch", "chain") for count in (1, 2)}  # fmt: skip
        lines.append({"step": rows, "mask_rows": rows} | rates)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "los')
    table = acceptance_table(read_log(path))
    assert table["columns"] == ["mask rows", "1 draft", "2 drafts"]
    assert table["rows"] == [["1,000", "1.11", "1.12"], ["5,000", "1.51", "1.52"]]
    draw_acceptance(read_log(path), tmp_path)
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
