"""A load as the trace file that Dynamo's replay reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from replayer.loads.load import BLOCK_TOKENS, Load, Request


def trace_format(load: Load) -> str:
    """The replay's name for the form of the file."""
    return "agentic_mooncake" if load.has_sessions else "mooncake"


def write(load: Load, path: Path) -> None:
    """Write the trace file that the replay reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for line in _lines(load):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _lines(load: Load) -> Iterable[dict[str, Any]]:
    if load.has_sessions:
        yield {
            "schema": "dynamo.agentic_mooncake",
            "version": 2,
            "block_size": BLOCK_TOKENS,
            "hash_id_scope": "local",
            "source": {"format": "derived", "digest": f"{load.name}-{load.seed}"},
        }
    yield from map(_line, load.requests)


def _line(request: Request) -> dict[str, Any]:
    at_ms = round(1000 * request.at_s, 3)
    shape = {
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": list(request.blocks),
    }
    turn = request.turn
    if turn is None:
        return {"timestamp": at_ms, **shape}
    return {
        "request_id": turn.request,
        "play_id": turn.play,
        "session_id": turn.session,
        "model": "m",
        **shape,
        "not_before_ms": at_ms,
        "dependencies": [_dependency(name, delay_s) for name, delay_s in turn.after],
    }


def _dependency(name: str, delay_s: float) -> dict[str, Any]:
    delay_ms = round(1000 * delay_s, 3)
    return {
        "request_id": name,
        "trigger": "completion",
        "delay_ms": delay_ms,
        "relation": "sequence",
    }
