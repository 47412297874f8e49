"""`replay` and `analyze report` on a fleet that offloads: where its time went, what caches held."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from analysis.cli import main as analyze
from tests.support.harness import proxied
from tests.support.replays import run, session
from tests.support.serving_thread import in_thread

ALWAYS: dict[str, Any] = {"warm_threshold": 100, "heavy_threshold": 500, "offload_policy": "always"}
LEGS = ("prefill_leg", "transfer")


def test_times_and_hits_of_a_run_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [*session("big", 2, block=1024), *session("small", 2, block=64)]
    trace.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    log = tmp_path / "log.jsonl"
    with in_thread(proxied(tmp_path, **ALWAYS)) as (proxy, fleet):
        target = SimpleNamespace(url=proxy.server.url)
        status, summary, sent = run(trace, target, tmp_path, "--proxy-log", str(log))
        counters = [engine.driver.engine.counters for engine in fleet.engines]
    assert status == 0

    logged = {r["request_id"]: r for r in map(orjson.loads, log.read_bytes().splitlines())}
    for row in sent.values():
        record = logged[row["sent_as"]]
        whole_s = record["t_done"] - record["t_proxy_recv"]
        assert sum(row["phases_s"].values()) == pytest.approx(whole_s)
    moved = summary["phases"]["HEAVY_P2P"]
    assert all(moved["time_s"][name]["mean"] > 0 for name in LEGS)
    assert moved["predicted"].keys() == {"ttft", *LEGS}
    assert summary["phases"]["WARM"]["predicted"].keys() == {"ttft", "first_token"}
    assert len(summary["slowest"]) == 4

    cache = summary["engine_cache"]
    assert (cache["source"], cache["unread"], cache["engines_counted"]) == ("engines", {}, 2)
    # On D the whole prompt is in place; P looks its prompt up as well.
    assert cache["looked_up_tokens"] == sum(one.prefix_queries for one in counters)
    assert cache["during"]["external_in_place"] == sum(one.prompt_external for one in counters) > 0
    ratios = [cache[f"{name}_hit_ratio"] for name in ("combined", "local", "external")]
    assert ratios[0] == pytest.approx(ratios[1] + ratios[2])

    capsys.readouterr()
    assert analyze(["report", str(log), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert f"written: {tmp_path}/page.html" in printed
    assert "requests: 4 sent, 4 ok" in printed
    assert "HEAVY_P2P transfer" in printed
