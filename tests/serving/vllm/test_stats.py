"""Whether drafts gain is in the log."""

from wedlm_hf.generation.step_times import StepTimes
from wedlm_hf.serving.vllm import proposer


def test_an_engine_says_when_drafting_begins_and_ends_and_why(start, prompts, complete, monkeypatch):
    lines = []
    monkeypatch.setattr(proposer.logger, "info", lambda text, *words: lines.append(text % words))
    monkeypatch.setattr(proposer, "PAUSE", 0.0)
    llm = start(tokens=12, num_gpu_blocks_override=64)
    drafter = llm.llm_engine.model_executor.driver_worker.model_runner.drafter
    for slot_cost in (0.02, 9.0):
        drafter.planner.times = StepTimes(slot_cost)
        complete(llm, prompts[:8])
    assert [line.split(":")[0] for line in lines] == ["Parallel decoding", "AR steps"]
    assert " tokens a step more than AR steps" in lines[0] and " fewer than AR steps" in lines[1]
