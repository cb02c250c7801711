"""The harness in two processes gives the results and the statistics of one, also where a cache has answers of some."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = str(Path(__file__).with_name("harness_worker.py"))
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of all runs, by one process and by two."""
    results = {}
    for processes, launch in ((1, []), (2, TWO)):
        folder = tmp_path_factory.mktemp("harness")
        environment = os.environ | {"ACCELERATE_USE_CPU": "true", "HF_DATASETS_CACHE": str(folder / "datasets")}
        done = subprocess.run(
            [sys.executable, *launch, WORKER, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,  # where one process waits for another that never comes
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results[processes] = json.loads((folder / "found.json").read_text())
    return results


@pytest.mark.slow
def test_statistics_are_those_of_all_processes_without_the_requests_that_fill_up(found):
    for runs in found.values():
        decoded, scored = runs["fresh"]["config"]["decoding_statistics"], runs["elbo"]["config"]["likelihood"]
        assert {task: numbers["prompts"] for task, numbers in decoded["tasks"].items()} == {
            "wedlm_nano_sorting": 3,
            "wedlm_nano_chat": 3,
        }
        assert {task: numbers["requests"] for task, numbers in scored["tasks"].items()} == {
            "wedlm_nano_choice": 12,
            "wedlm_nano_perplexity": 3,
        }
    one, two = (runs["fresh"]["config"]["decoding_statistics"]["pooled"] for runs in found.values())
    for name in ("prompts", "new_tokens", "forwards", "token_instances"):
        assert one[name] == two[name]
    one, two = (runs["elbo"]["config"]["likelihood"]["pooled"] for runs in found.values())
    assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.slow
def test_a_process_whose_answers_are_cached_keeps_no_other_waiting(found):
    assert found[1]["half cached"]["config"]["decoding_statistics"]["pooled"]["prompts"] == 6
    assert found[2]["half cached"]["config"]["decoding_statistics"]["pooled"]["prompts"] == 4  # those decoded anew
    for runs in found.values():
        for fresh, cached in (("fresh", "half cached"), ("elbo", "elbo half cached"), ("ar", "ar half cached")):
            assert values(runs[cached]) == pytest.approx(values(runs[fresh]), rel=1e-5)
    for name in found[1]:
        assert values(found[1][name]) == pytest.approx(values(found[2][name]), rel=1e-5)


def values(run):
    """Every metric of every task."""
    metrics = {(task, name): value for task, row in run["results"].items() for name, value in row.items()}
    return {key: value for key, value in metrics.items() if isinstance(value, float)}
