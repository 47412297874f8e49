"""Dynamo's own planner, through Dynamo's own adapter for its replay.

It needs more packages than the replay: those of `requirements-presets.txt`. Without them making a
policy raises ImportError.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

from bench.planner.engine import Engine
from bench.planner.rules.policy import Answer, Context, Snapshot

EASY = ("throughput", "latency")
"""Presets with thresholds of KV and queues, which know no SLO."""
SLA = ("load_180_10", "hybrid_180_5", "throughput_180_5")
"""Presets with the load's SLO as target."""
UNUSED = {
    "prophet": ("Prophet",),
    "prometheus_api_client": ("PrometheusApiClientException", "PrometheusConnect"),
}
"""Packages that Dynamo's planner imports and these runs never call."""
PREFILL_TOKENS = range(256, 8193, 992)
CONTEXT_TOKENS, BATCH_STEP = (500, 2000, 4000, 8000), 32


def stand_in() -> None:
    """Put empty modules in the place of packages that are not there and not needed."""
    for name, members in UNUSED.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            for member in members:
                setattr(module, member, type(member, (Exception,), {}))
            sys.modules[name] = module


class Preset:
    """One preset. With the SLO as target it gets iterations of the engine's own timing.

    Those are better data than it would have in a replay otherwise: only load scaling without them.
    """

    def __init__(self, context: Context, preset: str) -> None:
        stand_in()
        from dynamo.replay.planner import prepare_planner_replay

        config = json.dumps(_config(context, preset))
        self._adapter = prepare_planner_replay(
            dict(context.engine), None, None, config, capture_details=False
        )
        if preset in SLA:
            self._adapter.install_benchmark_fpms(agg_fpms=list(_iterations(context)))

    def initial_tick_ms(self) -> float:
        """The time of the first tick."""
        return float(self._adapter.initial_tick_ms())

    def on_tick(self, snapshot: Snapshot) -> Answer:
        """Dynamo's answer."""
        answer: Answer = self._adapter.on_tick(snapshot)
        return answer

    def close(self) -> None:
        """Let Dynamo clean up."""
        self._adapter.close()


def _config(context: Context, preset: str) -> dict[str, Any]:
    """The planner's configuration, in Dynamo's names."""
    config: dict[str, Any] = {
        "mode": "agg",
        "optimization_target": preset if preset in EASY else "sla",
        "report_interval_hours": None,
        "live_dashboard_port": 0,
        "decode_engine_num_gpu": 1,
        "max_gpu_budget": context.max_replicas,
        "min_endpoint": context.min_replicas,
        "model_name": "m",
    }
    if preset in EASY:
        return config
    from dynamo.planner.simulation.presets import scaling_fields

    fields = {name: value for name, value in scaling_fields(preset).items() if value is not None}
    slo = {"ttft_ms": context.slo_ttft_ms, "itl_ms": context.slo_itl_ms}
    return config | fields | slo


def points(context: Context) -> tuple[list[int], list[tuple[int, int]]]:
    """Where an engine's benchmark would look: prefill tokens, and (decodes, KV tokens)."""
    prefill = [tokens for tokens in PREFILL_TOKENS if tokens <= context.max_batched_tokens]
    decode = [
        (batch, batch * tokens)
        for tokens in CONTEXT_TOKENS
        for batch in range(1, context.max_seqs + 1, BATCH_STEP)
        if batch * tokens <= context.kv_tokens
    ]
    return prefill, decode


def _iterations(context: Context) -> Iterator[Any]:
    """Iterations as a benchmark of the engine by itself would record them."""
    from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics

    engine: Engine = context.timing
    prefill, decode = points(context)
    for tokens in prefill:
        asked = ScheduledRequestMetrics(num_prefill_requests=1, sum_prefill_tokens=tokens)
        yield ForwardPassMetrics(wall_time=engine.prefill_s(tokens), scheduled_requests=asked)
    for batch, kv_tokens in decode:
        asked = ScheduledRequestMetrics(num_decode_requests=batch, sum_decode_kv_tokens=kv_tokens)
        yield ForwardPassMetrics(wall_time=engine.step_s(kv_tokens), scheduled_requests=asked)
