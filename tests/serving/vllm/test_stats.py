"""Which plan is in force: in the log, and where Prometheus reads it."""

from prometheus_client import REGISTRY

from wedlm_hf.generation.step_times import StepTimes
from wedlm_hf.serving.vllm import stats


def value_of(name):
    return REGISTRY.get_sample_value(name, {"engine": "7"})


def test_an_engine_says_what_it_plans_and_why(start, prompts, complete, monkeypatch):
    lines = []
    monkeypatch.setattr(stats.logger, "info", lambda text, *words: lines.append(text % words))
    monkeypatch.setattr(stats, "PAUSE", 0.0)
    llm = start(tokens=12, num_gpu_blocks_override=64)
    engine = llm.llm_engine
    drafter = engine.model_executor.driver_worker.model_runner.drafter
    scheduler, gauges = engine.engine_core.engine_core.scheduler, stats.PlanGauges(engine.vllm_config, 7)
    found = []
    for slot_cost in (0.02, 9.0):
        drafter.planner.times = StepTimes(slot_cost)
        complete(llm, prompts[:8])
        gauges.record(scheduler.make_stats(), None)
        found.append([value_of(name) for name in stats.GAUGES])
    (drafts, masks, gain), (fewer, no_masks, loss) = found
    assert drafts > fewer >= 0 and masks > no_masks >= 0 and gain > 0 > loss
    assert [line.split(":")[0] for line in lines] == ["Parallel decoding", "AR steps"]
    assert " tokens a step more than AR steps" in lines[0] and " fewer than AR steps" in lines[1]
