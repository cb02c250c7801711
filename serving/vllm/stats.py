"""Which plan is in force, and why: in vLLM's log, and at /metrics.

The proposer notes it; with its drafts and with vLLM's own statistics it reaches the server's process.
"""

from time import monotonic
from typing import Any

from prometheus_client import REGISTRY, Gauge
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

# Not `vllm:…`, which each new engine of a process deletes.
GAUGES = {
    "wedlm:planned_drafts": "Drafts of a request's step, mean of the last steps",
    "wedlm:planned_masks": "Masks of a request's step, mean of the last steps",
    "wedlm:plan_gain": "Tokens that drafts and masks bring a request's step beyond an AR step of the time that they "
    "take, as estimated; below 0, AR steps are best",
}
SCALE = 1000  # vLLM hands on whole numbers
PAUSE = 10.0  # seconds between two lines in the log
RATE = 0.05  # of a step in the means

logger = init_logger("vllm.wedlm")


class PlanInForce:
    """What an engine plans: means over its requests and the last steps."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._told: tuple[bool | None, float] = None, -PAUSE

    @property
    def numbers(self) -> dict[str, int]:
        """By the names of [`GAUGES`], times [`SCALE`]; empty before the first plan."""
        return {name: round(SCALE * mean) for name, mean in zip(GAUGES, self._means, strict=False)}

    def note(self, drafts: float, masks: float, gain: float) -> None:
        """Takes in a plan. The log has a line where drafting begins or ends."""
        new = drafts, masks, gain
        self._means = [mean + (one - mean) * RATE for mean, one in zip(self._means or new, new, strict=True)]
        is_better, (was_better, when) = self._means[-1] > 0, self._told
        if is_better != was_better and monotonic() > when + PAUSE:
            self._told = is_better, monotonic()
            what, sign = ("Parallel decoding", "more") if is_better else ("AR steps", "fewer")
            why = "drafts and masks bring %.2f tokens a step %s than AR steps in the same time, as measured so far"
            logger.info(f"{what}: {why}.", abs(self._means[-1]), sign)


class PlanGauges(StatLoggerBase):
    """Found by vLLM's server (entry point `vllm.stat_logger_plugins`)."""

    def __init__(self, vllm_config: Any, engine_index: int = 0):
        self._engine = str(engine_index)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Sets the gauges."""
        for name, number in (scheduler_stats.running_lora_adapters if scheduler_stats else {}).items():
            if name in GAUGES:
                gauge = REGISTRY._names_to_collectors.get(name) or Gauge(name, GAUGES[name], ["engine"])
                gauge.labels(self._engine).set(number / SCALE)

    def log_engine_initialized(self) -> None:
        """Nothing."""
