"""Cut the packaged agentic traces from the whole one: `sample.py demo|sessions SOURCE OUT`.

Both keep token lengths and block ids as recorded, and at most the first turns of a session. `demo`
is for a short demonstration. 24 sessions start one after another instead of all at once, and end
before a prompt of more than 60,000 tokens. Pauses and answers are shortened. `sessions` has every
session with its pauses and answers as recorded. The same source gives the same bytes.
"""

import gzip
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

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


@dataclass(frozen=True)
class Cut:
    """The part of the trace that is kept; None: all, or as recorded."""

    max_turns: int
    sessions: tuple[str, ...] | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_delay_ms: float | None = None
    in_pairs: bool = False


CUTS = {
    "demo": Cut(
        max_turns=10,
        sessions=(
            *("cc0002", "cc0048", "cc0108", "cc0166", "cc0228", "cc0251", "cc0254", "cc0259"),
            *("cc0272", "cc0274", "cc0282", "cc0373", "cc0426", "cc0438", "cc0471", "cc0482"),
            *("cc0505", "cc0606", "cc0616", "cc0646", "cc0676", "cc0704"),
            *("cc0277/agent_003", "cc0282/agent_001"),
        ),
        max_input_tokens=60_000,
        max_output_tokens=800,
        max_delay_ms=6_000.0,
        in_pairs=True,
    ),
    "sessions": Cut(max_turns=12),
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


def kept(cut: Cut, row: dict[str, Any], turn: int, start_ms: float) -> dict[str, Any]:
    """Make one row of the cut; a later turn has no timestamp, only its delay."""
    made: dict[str, Any] = {"session_id": row["session_id"], "turn": turn}
    if turn == 0:
        made["timestamp"] = start_ms
    else:
        made["delay"] = _at_most(row.get("delay", 0.0), cut.max_delay_ms)
    return made | {
        "input_length": row["input_length"],
        "output_length": _at_most(row["output_length"], cut.max_output_tokens),
        "hash_runs": runs(row["hash_ids"]),
    }


def _at_most(value: Any, most: float | None) -> Any:
    return value if most is None else min(value, most)


def main(cut: Cut, source: Path, out: Path) -> None:
    """Read the whole trace and write the cut."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for line in gzip.decompress(source.read_bytes()).splitlines():
        row = orjson.loads(line)
        sessions.setdefault(row["session_id"], []).append(row)
    lines = [META]
    for index, name in enumerate(cut.sessions or sessions):
        start_ms = index // 2 * PAIR_GAP_MS + index % 2 * WITHIN_PAIR_MS if cut.in_pairs else 0.0
        for turn, row in enumerate(sessions[name][: cut.max_turns]):
            if cut.max_input_tokens is not None and row["input_length"] > cut.max_input_tokens:
                break
            lines.append(kept(cut, row, turn, start_ms))
    text = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    out.write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    main(CUTS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
