"""The sample trace, and rows of every format."""

from pathlib import Path
from typing import Any

import orjson

SAMPLE = Path(__file__).parents[2] / "replayer" / "data" / "agentic_sample.trace.jsonl.gz"
EXAMPLES = {
    "mooncake": {"timestamp": 27482, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]},
    "superset": {
        "session_id": "s",
        "turn": 0,
        "timestamp": 27482,
        "input_length": 600,
        "output_length": 5,
        "hash_runs": [[46, 2]],
    },
}


def write(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    lines = [row if isinstance(row, bytes) else orjson.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


GOOD = {"session_id": "s", "input_length": 5, "output_length": 1, "hash_ids": [1], "timestamp": 0}
