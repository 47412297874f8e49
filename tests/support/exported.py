"""Every sample that the proxy, the planner and vLLM export, with its labels."""

from __future__ import annotations

from functools import cache
from itertools import chain
from pathlib import Path

import orjson

from planner.telemetry.metrics import Metrics as PlannerMetrics
from proxy.core.accounts.engine_reports import EngineKv, EngineStats
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.router import Router
from proxy.core.types import Instance, RouterConfig, Thresholds
from proxy.fleet.discovery.discovery import DiscoveryCollector
from proxy.fleet.gauges import FleetCollector
from proxy.net.bus.form import BatchForm
from proxy.net.bus.memory import MemoryBus
from proxy.net.timeouts import Clock
from proxy.state.replicas import Replicas
from proxy.telemetry.instruments import Counts, Spreads
from proxy.telemetry.metrics import Metrics
from tests.support.gpus import gpu_collector
from tests.support.heat import known_heat


@cache
def exported() -> dict[str, set[str]]:
    """Every sample name of the proxy's /metrics with its labels, one child of each metric made."""
    metrics = Metrics()
    for metric in vars(metrics).values():
        if isinstance(metric, Counts | Spreads) and metric.label_names:
            metric.labels(*("x" for _ in metric.label_names))
    thresholds = Thresholds(active_prefill_tokens_threshold=1)
    router = Router(FleetState(RouterConfig(prefill_throughput=20000, thresholds=thresholds)))
    router.known.add(Instance("a", "http://a:1"))
    router.known.gate.observe_engine("a", EngineKv(1000, 0.5), 0.0)
    for _ in range(8):
        router.known.latency.calibration.observe("WARM", 1.0, 1.0, queued=False)
    stats = EngineStats(
        kv_used_ratio=0.5, looked_up_tokens=4, local_hit_tokens=2, external_hit_tokens=1
    )
    published = router.known.published.open("a", 0)
    published.heard_s = published.lag_s = 0.0
    metrics.registry.register(FleetCollector(router.known, {"a": stats}, known_heat("a")))
    metrics.registry.register(gpu_collector())
    metrics.backlog.read = lambda: {"m": 0.0}
    metrics.registry.register(DiscoveryCollector(lambda: {"dns://engines:8000": 0.0}))
    metrics.registry.register(Replicas(MemoryBus("", ""), BatchForm(), router, Clock()))
    planner = PlannerMetrics()
    for metric in vars(planner).values():
        if getattr(metric, "_labelnames", ()):
            metric.labels(*("x" for _ in metric._labelnames))
    labels: dict[str, set[str]] = {}
    for family in chain(metrics.registry.collect(), planner.registry.collect()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@cache
def with_engines() -> dict[str, set[str]]:
    """The same, and what a vLLM was recorded to export."""
    contract = Path(__file__).with_name("vllm_contract.json").read_bytes()
    recorded = {name: set(labels) for name, labels in orjson.loads(contract)["metrics"].items()}
    return exported() | recorded
