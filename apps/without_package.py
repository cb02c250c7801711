"""Run as a script: loads and generates with a folder as someone without this package does.

Reads a JSON object from standard input: `model`, a folder or Hub id; `adapter`, a folder or null; `calls`, keywords of
`generate`. The last line that it prints is the number of new tokens.
"""

import json
import sys
from typing import Any

PROMPT = "Count from 1 to 20: 1, 2, 3,"


class _Blocker:
    """Takes this package out of reach, however it is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "wedlm_hf":
            raise ModuleNotFoundError(f"No module named {name!r} (out of reach on purpose)", name=name)


def main() -> None:
    """See the top of the file."""
    sys.meta_path.insert(0, _Blocker())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(job["model"], trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(job["model"], trust_remote_code=True).eval()
    mask_ids = (tokenizer.mask_token_id, model.config.mask_token_id)
    if mask_ids[0] != mask_ids[1]:
        raise ValueError(f"the mask tokens of tokenizer and model differ: ids {mask_ids}")
    if job["adapter"] is not None:
        model.load_adapter(job["adapter"])
    inputs = tokenizer(PROMPT, return_tensors="pt")
    outputs = [model.generate(**inputs, **options, max_new_tokens=24, do_sample=False) for options in job["calls"]]
    print(sum(output.shape[1] - inputs["input_ids"].shape[1] for output in outputs))


if __name__ == "__main__":
    main()
