"""Cut the demo's trace sample from the whole trace: `make_sample.py SOURCE OUT`.

The sample keeps token lengths and block ids as recorded. For a short demonstration, sessions start
one after another instead of all at once and end after MAX_TURNS turns or before a prompt of more
than MAX_INPUT_TOKENS, and pauses and answers are shortened. The same source gives the same bytes.
"""

import gzip
import sys
from pathlib import Path
from typing import Any

import orjson

SESSIONS = (
    "cc0002 cc0048 cc0108 cc0166 cc0228 cc0251 cc0254 cc0259 cc0272 cc0274 cc0282 cc0373 "
    "cc0426 cc0438 cc0471 cc0482 cc0505 cc0606 cc0616 cc0646 cc0676 cc0704 cc0277/agent_003 "
    "cc0282/agent_001"
)
MAX_TURNS = 10
MAX_INPUT_TOKENS = 60_000
MAX_OUTPUT_TOKENS = 800
MAX_DELAY_MS = 6_000.0
PAIR_GAP_MS = 20_000.0  # two sessions start together, so that two prefills meet on some engine
WITHIN_PAIR_MS = 500.0
META = {
    "trace": {
        "version": 1,
        "block_size": 64,
        "hash_scope": "global",
        "cumulative": True,
        "time_unit": "ms",
        "source": "github.com/callanjfox/kv-cache-tester, traces/ (94f6046d)",
        "license": "Apache-2.0",
    }
}


def runs(ids: list[int]) -> list[list[int]]:
    """Compress block ids to [first, count] runs."""
    found: list[list[int]] = []
    for block in ids:
        if found and sum(found[-1]) == block:
            found[-1][1] += 1
        else:
            found.append([block, 1])
    return found


def sampled(row: dict[str, Any], turn: int, start_ms: float) -> dict[str, Any]:
    """Make one row of the sample; a later turn has no timestamp, only its delay."""
    kept: dict[str, Any] = {"session_id": row["session_id"], "turn": turn}
    if turn == 0:
        kept["timestamp"] = start_ms
    else:
        kept["delay"] = min(row.get("delay", 0.0), MAX_DELAY_MS)
    return kept | {
        "input_length": row["input_length"],
        "output_length": min(row["output_length"], MAX_OUTPUT_TOKENS),
        "hash_runs": runs(row["hash_ids"]),
    }


def main(source: Path, out: Path) -> None:
    """Read the whole trace and write the sample."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for line in gzip.decompress(source.read_bytes()).splitlines():
        row = orjson.loads(line)
        sessions.setdefault(row["session_id"], []).append(row)
    lines = [META]
    for index, name in enumerate(SESSIONS.split()):
        start_ms = index // 2 * PAIR_GAP_MS + index % 2 * WITHIN_PAIR_MS
        for turn, row in enumerate(sessions[name][:MAX_TURNS]):
            if row["input_length"] > MAX_INPUT_TOKENS:
                break
            lines.append(sampled(row, turn, start_ms))
    text = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    out.write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
