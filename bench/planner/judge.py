"""Dynamo's replay of a load with a policy. Only its environment can call what imports Dynamo."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from analysis.plan.measured import STATIC, Name, Played, measured
from bench.planner.engine import Engine
from bench.planner.results import fleet_of, record_of
from bench.planner.rules.policy import Answer, Context, Policy, Snapshot, Static
from bench.planner.trace_file import trace_format, write
from replayer.loads.load import BLOCK_TOKENS, Load

ROUTERS = ("kv_router", "kv_router_queue", "round_robin")
"""Dynamo's default; the same that holds requests back while engines are busy; none."""


class Recorder:
    """Stands between the replay and a policy: keeps the fleet's size, changes nothing."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._next_ms = 0.0
        self.ready: list[tuple[float, int]] = []
        """Since when so many engines serve."""
        self.changes = 0

    def initial_tick_ms(self) -> float:
        """The policy's first tick."""
        self._next_ms = float(self._policy.initial_tick_ms())
        return self._next_ms

    def on_tick(self, snapshot: Snapshot) -> Answer:
        """The policy's answer."""
        answer = self._policy.on_tick(snapshot)
        ready = snapshot["active_decode_count"]
        if not self.ready or self.ready[-1][1] != ready:
            self.ready.append((self._next_ms / 1000, ready))
        wanted = answer.get("target_decode")
        self.changes += wanted not in (None, snapshot["non_draining_decode_count"])
        self._next_ms = answer.get("next_tick_ms") or self._next_ms
        return answer


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy to be played. `initial` None: the load's own number of engines at the start."""

    policy: str
    make: Callable[..., Policy]
    settings: Mapping[str, Any] = field(default_factory=dict)
    initial: int | None = None


class Judge:
    """Plays policies on one load."""

    def __init__(self, load: Load, engine: Engine, trace: Path, router: str) -> None:
        self.load, self.engine = load, engine
        self._trace, self._router = trace, router
        self._static: dict[int, Played] = {}
        write(load, trace)

    def play(self, entry: Entry, startup_s: float) -> Played:
        """Play a policy."""
        context = Context.of(self.load, self.engine, startup_s)
        policy = entry.make(context, **entry.settings)
        recorder = Recorder(policy)
        initial = self.load.initial_replicas if entry.initial is None else entry.initial
        try:
            result = self._replay(recorder, context, initial)
        finally:
            if hasattr(policy, "close"):
                policy.close()
        records = [record_of(row) for row in result.per_request]
        fleet = fleet_of(result.summary, result.lifecycle_operations, recorder.changes)
        name = Name(entry.policy, json.dumps(dict(entry.settings), sort_keys=True), startup_s)
        return Played(measured(name, self.load, records, fleet), records, recorder.ready)

    def static(self, replicas: int, startup_s: float) -> Played:
        """Play a fixed fleet, once: no engine starts, so the delay is of no matter."""
        if replicas not in self._static:
            make = partial(Static, replicas=replicas)
            entry = Entry(f"{STATIC}:{replicas}", make, initial=replicas)
            self._static[replicas] = self.play(entry, startup_s)
        played = self._static[replicas]
        return replace(played, run=replace(played.run, startup_s=startup_s))

    def _replay(self, recorder: Recorder, context: Context, initial: int) -> Any:
        from dynamo._core import run_mocker_trace_replay

        load = self.load
        return run_mocker_trace_replay(
            [str(self._trace)],
            extra_engine_args=dict(context.engine),
            num_workers=initial,
            trace_format=trace_format(load),
            sla_ttft_ms=context.slo_ttft_ms,
            sla_itl_ms=context.slo_itl_ms,
            capture_per_request=True,
            capture_planner_details=True,
            scaling_policy=recorder,
            **_of_router(self._router),
            **({"execution_model": "m"} if load.has_sessions else _BLOCKS),
        )


_BLOCKS = {"trace_block_size": BLOCK_TOKENS}


def _of_router(name: str) -> dict[str, Any]:
    from dynamo._core import KvRouterConfig

    if name == "round_robin":
        return {"router_mode": name}
    waits = {"router_queue_threshold": 1.0} if name == "kv_router_queue" else {}
    return {"router_mode": "kv_router", "router_config": KvRouterConfig(**waits)}
