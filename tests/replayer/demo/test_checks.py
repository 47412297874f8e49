"""What the demo's checks make of its evidence."""

from __future__ import annotations

from pathlib import Path

import orjson

from replayer.demo.checks import Evidence, checks

ID = "r-0123456789ab"
"""A request's id as an engine gets it."""


def test_a_killed_engines_book_is_not_added_up(tmp_path: Path) -> None:
    def book(name: str, *rows: dict[str, object]) -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        return path

    moved = {"route_class": "HEAVY_P2P", "decode_instance": "engine0", "request_id": "r"}
    exposition = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 7.0'
    evidence = Evidence(
        proxy_log=book("proxy", moved | {"retries": 1, "fallback": None, "outcome": "ok"}),
        client_log=book("client", {"outcome": "ok"}),
        proxy_metrics="cache_proxy_live_leases 0.0",
        engine_metrics={"engine0": exposition},
        engine_logs={"engine0": book("engine0", {"request_id": ID, "external_tokens": 7})},
        killed=True,
        offloads_expected=True,
        wait=lambda condition: None,
    )
    [(held, claim)] = [one for one in checks(evidence) if "external KV" in one[1]]
    assert held
    assert "received 7 (live engines; the killed one's book is lost)" in claim
    assert "sent" not in claim
