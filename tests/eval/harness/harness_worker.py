"""What `test_harness_processes.py` runs in one process and in two: `python harness_worker.py FOLDER`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from lm_eval.tasks import TaskManager

from wedlm_hf.eval.harness import WeDLMHarnessLM, evaluate
from wedlm_hf.eval.harness.run import TASKS_FOLDER
from wedlm_hf.eval.options import NANO

GENERATION = ["wedlm_nano_sorting", "wedlm_nano_chat"]
LIKELIHOOD = ["wedlm_nano_choice", "wedlm_nano_perplexity"]
WEDLM, ELBO = {"strategy": "wedlm"}, {"likelihood": "elbo", "elbo_samples": 2}


def spread_over_cpus() -> None:
    """Give models their rank, which the harness does on GPUs alone."""
    original = WeDLMHarnessLM.__init__

    def init(lm: Any, *args: Any, **kwargs: Any) -> None:
        original(lm, *args, **kwargs)
        lm.accelerator = Accelerator(cpu=True)
        lm._rank, lm._world_size = lm.accelerator.process_index, lm.accelerator.num_processes

    WeDLMHarnessLM.__init__ = init  # type: ignore[method-assign]


def main(folder: Path) -> None:
    """Writes the results of the runs, three documents a task: one for the second process, who repeats it."""
    manager = TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False)
    rank, found = int(os.environ.get("RANK", "0")), {}
    for name, tasks, model_args in (
        ("fresh", GENERATION, WEDLM),
        ("half cached", GENERATION, WEDLM),
        ("elbo", LIKELIHOOD, ELBO),
        ("elbo half cached", LIKELIHOOD, ELBO),
        ("ar", LIKELIHOOD, {}),
        ("ar half cached", LIKELIHOOD, {}),
    ):
        if "half" in name and rank == 0:  # the second process has all answers now, the first none
            for file in folder.glob("cache*_rank0.db"):
                file.unlink()
        results = evaluate(
            model="wedlm",
            model_args={"pretrained": str(NANO)} | model_args,
            tasks=tasks,
            task_manager=manager,
            limit=3,
            apply_chat_template=True,
            bootstrap_iters=0,
            device="cpu",
            use_cache=str(folder / "cache"),
        )
        found[name] = results and {"config": results["config"], "results": results["results"]}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    if "RANK" in os.environ:
        spread_over_cpus()
    main(Path(sys.argv[1]))
