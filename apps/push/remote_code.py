"""Run as a script, in a process of its own: generates with a checkpoint as someone without this package does.

Reads a JSON object from standard input: `model`, a folder or Hub id; `adapter`, a folder or null; `prompts`; `calls`,
keywords of `generate` by name; `threads`. Its last line holds the tokens of the prompts and of all answers.
"""

import json
import sys
from typing import Any

PACKAGE = "wedlm_hf"


class _Blocker:
    """Takes this package out of reach, however it is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"No module named {name!r} (out of reach on purpose)", name=name)


def main() -> None:
    """See the top of the file."""
    sys.meta_path.insert(0, _Blocker())
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(job["model"], trust_remote_code=True).eval()
    if job["adapter"] is not None:
        model.load_adapter(job["adapter"])
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in job["prompts"]]
    answers = {
        name: [model.generate(**each, **options)[0, each["input_ids"].shape[1] :].tolist() for each in inputs]
        for name, options in job["calls"].items()
    }
    print(json.dumps({"prompts": [each["input_ids"][0].tolist() for each in inputs], "answers": answers}))


if __name__ == "__main__":
    main()
