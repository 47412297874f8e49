"""The demo's offload: streams that run on one server, and long prompts that arrive for it.

The server (D) is alone when the sessions begin, so all of them have their home there. Then an idle
server (P) joins. `never` computes the long prompts on D, between the steps of its streams; `always`
computes them on P, which sends their KV to D.
"""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

import orjson

from replayer.demo.fleet import Fleet, fetched

STREAMS, STREAM_TOKENS = 6, 500
PROMPTS, PROMPT_TOKENS, PROMPT_EVERY_MS = 4, 20_480, 1_000
BLOCK_TOKENS = 256
JOIN_S = 30.0
META = {"trace": {"version": 1, "block_size": BLOCK_TOKENS, "cumulative": True, "time_unit": "ms"}}


def write_scene(path: Path) -> Path:
    """Write the trace: the streams at once, a long prompt every second."""
    streams = [(f"stream{i}", 0, BLOCK_TOKENS, STREAM_TOKENS) for i in range(STREAMS)]
    prompts = [(f"prompt{i}", 500 + i * PROMPT_EVERY_MS, PROMPT_TOKENS, 8) for i in range(PROMPTS)]
    lines, block = [orjson.dumps(META)], 1
    for session, timestamp, tokens, output in (*streams, *prompts):
        blocks = tokens // BLOCK_TOKENS
        row = {"session_id": session, "turn": 0, "timestamp": timestamp}
        row |= {"input_length": tokens, "output_length": output, "hash_runs": [[block, blocks]]}
        lines.append(orjson.dumps(row))
        block += blocks
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def move_in(fleet: Fleet) -> None:
    """Begin every session on the first server, then let the second one join."""
    for session in (
        *(f"stream{i}" for i in range(STREAMS)),
        *(f"prompt{i}" for i in range(PROMPTS)),
    ):
        hello = {
            "model": "sim-8b",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "hi"}],
        }
        _post(f"{fleet.url}/v1/chat/completions", hello, {"X-Session-ID": session})
    _post(f"{fleet.url}/instances", {"instance": fleet.instances[1]}, {})
    deadline_s = time.monotonic() + JOIN_S
    while not all(one["is_up"] for one in _health(fleet).values()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the second server did not join; {fleet.engines[1].said()}")
        time.sleep(0.1)


def _health(fleet: Fleet) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = orjson.loads(fetched(f"{fleet.url}/health"))["instances"]
    return found


def _post(url: str, body: dict[str, object], headers: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, orjson.dumps(body), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
