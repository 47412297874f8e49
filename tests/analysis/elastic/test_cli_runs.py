"""Runs through sockets as rows of the experiment."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from analysis.elastic.cli import read_runs
from analysis.runs import RunError
from tests.support.runs import failed, row, run, skipped


def _folder(path: Path, *rows: dict[str, Any], **facts: Any) -> Path:
    path.mkdir()
    told = {"mode": "sessions", "concurrency": 8, "time_scale": 2.0, **facts}
    (path / "summary.json").write_bytes(orjson.dumps(run(*rows, **told)))
    (path / "requests.jsonl").write_bytes(b"\n".join(orjson.dumps(one) for one in rows))
    return path


def _heavy(name: str, route_class: str, reason: str) -> dict[str, Any]:
    logged = {"offload_decision_reason": reason, "policy": "seed-heuristic"}
    heavy: dict[str, Any] = row(name, route_class=route_class, **logged)
    return heavy


def test_runs_are_read_in_the_targets_time(tmp_path: Path) -> None:
    rows = (
        _heavy("x", "HEAVY_P2P", "p_idle_d_busy"),
        _heavy("y", "HEAVY_COLO", "d_idle"),
        failed("z", policy="seed-heuristic"),
        skipped("never sent"),
    )
    first, second = read_runs([_folder(tmp_path / name, *rows) for name in "ab"])
    assert (first["rule"], first["sessions"]) == ("seed-heuristic", 8)
    assert (first["seed"], second["seed"]) == (0, 1)
    assert (first["requests"], first["success_ratio"]) == (3, 2 / 3)
    assert first["ttft_ok_s"] == {"p50": 2.0, "p90": 2.0}
    assert first["ttft_s"] == {"p50": 2.0, "p90": None}
    assert first["tpot_s"]["p90"] == 2.0
    assert (first["heavy"], first["heavy_offloaded"]) == (2, 1)
    assert first["heavy_reasons"] == {"d_idle": 1}
    assert first["goodput_ratio"] is None


@pytest.mark.parametrize(
    ("facts", "fields", "told"),
    [
        ({"concurrency": None}, {"policy": "cost"}, "must be a run of replay --mode sessions"),
        ({}, {}, "must name one offload policy; was --proxy-log given"),
    ],
)
def test_other_runs_are_refused(
    tmp_path: Path, facts: dict[str, Any], fields: dict[str, Any], told: str
) -> None:
    folder = _folder(tmp_path / "run", row("x", **fields), **facts)
    with pytest.raises(RunError, match=told):
        read_runs([folder])
    with pytest.raises(RunError, match=r"cannot be read"):
        read_runs([tmp_path / "absent"])
