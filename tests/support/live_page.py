"""A look at a proxy that has no instance and has had no request, for tests of the live page."""

from __future__ import annotations

from proxy.admin.page.snapshot import Json, moves

SEEN: Json = {
    "at": 0.0,
    "version": "1",
    "verdict": {"state": "ok", "fleet": "f", "load": "l", "warnings": ["w"]},
    "numbers": {
        **dict.fromkeys(("requests", "in_flight", "offloads", "refused", "failed"), 0),
        **dict.fromkeys(("ttft_s", "ttft_p90_s", "hit_ratio", "engine_hit_ratio")),
        "seconds": 60.0,
        "refused_seconds": 10,
    },
    "instances": [],
    "moves": moves([]),
    "decisions": [],
    "queue": {"count": 0, "longest_s": None, "tokens": 0, "waiting": [], "last": []},
    "predictions": [],
}
