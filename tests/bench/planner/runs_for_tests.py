"""A small engine, and snapshots of Dynamo's replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.planner.engine import Engine
from bench.planner.rules.policy import Context

ENGINE = Engine(
    arguments="nowhere",
    kv_tokens=100_000,
    step_tokens=8192,
    max_seqs=256,
    prefill_base_s=0.004,
    prefill_tps=20_000.0,
    step_base_s=0.01,
    step_s_per_kv_token=3e-8,
)
CONTEXT = Context(
    slo_ttft_ms=2000.0,
    slo_itl_ms=50.0,
    min_replicas=1,
    max_replicas=10,
    initial_replicas=3,
    startup_s=120.0,
    kv_tokens=ENGINE.kv_tokens,
    max_batched_tokens=ENGINE.step_tokens,
    max_seqs=ENGINE.max_seqs,
    prefill_tps=ENGINE.prefill_tps,
    engine={},
    timing=ENGINE,
)


def engine_row(name: int = 0, **given: int) -> dict[str, Any]:
    names = (
        *("num_prefill_requests", "num_decode_requests", "num_queued_prefill"),
        *("num_queued_decode", "sum_decode_kv_tokens", "sum_prefill_kv_tokens"),
        *("sum_prefill_tokens", "sum_queued_prefill_tokens"),
    )
    return {"worker_id": name, **dict.fromkeys(names, 0), **given}


def snapshot(*rows: dict[str, Any], starting: int = 0, **traffic: Any) -> dict[str, Any]:
    return {
        "active_decode_ids": [row["worker_id"] for row in rows],
        "active_decode_count": len(rows),
        "starting_decode_count": starting,
        "non_draining_decode_count": len(rows) + starting,
        "decode_fpm_snapshots": list(rows),
        "traffic": traffic or None,
    }


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
