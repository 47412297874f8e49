"""Lines of a proxy's request log, as `analyze what-if` reads them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

UNIX_S = 1_700_000_000.0


def line(
    session: str | None,
    turn: int | None,
    at_s: float,
    prompt: int = 1600,
    output: int = 10,
    cached: int = 0,
    hit: int | None = None,
    reachable: int | None = None,
    end: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A request that came at `at_s`, was placed 10 ms later, and began to answer at 250 ms.

    `hit`: by default what was cached. `end`: when it ended, by default a second after it came.
    """
    hit = cached if hit is None else hit
    came_s = UNIX_S + at_s
    found: dict[str, Any] = {
        "request_id": f"{session}.{turn}",
        "session_id": session,
        "turn": turn,
        "model": "m",
        "policy": "cost",
        "outcome": "ok",
        "prefill_instance": None,
        "decode_instance": "a",
        "candidates": [],
        "isl_tokens": prompt,
        "hit_tokens": hit,
        "reachable_hit_tokens": hit if reachable is None else reachable,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "osl_tokens": output,
        "t_proxy_recv": came_s,
        "t_queued": None,
        "t_decided": came_s + 0.01,
        "t_prefill_sent": None,
        "t_prefill_done": None,
        "t_decode_sent": came_s + 0.01,
        "t_first_token": came_s + 0.25,
        "t_done": UNIX_S + (at_s + 1.0 if end is None else end),
        "retries": 0,
        "fallback": None,
    }
    return found | more


def write_log(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """Write lines as a log."""
    path.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in lines))
    return path


def write_options(path: Path, options: dict[str, Any]) -> Path:
    """Write options as `cache-proxy --print-config` does."""
    path.write_text("".join(f"{n} = {orjson.dumps(v).decode()}\n" for n, v in options.items()))
    return path
