"""The sample trace, and rows of every format."""

import gzip
from pathlib import Path
from typing import Any

import orjson

SAMPLE = Path(__file__).parents[2] / "replayer" / "data" / "agentic_sample.trace.jsonl.gz"
EXAMPLES: dict[str, dict[str, Any]] = {
    "mooncake": {"timestamp": 27482, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]},
    "superset": {
        "session_id": "s",
        "turn": 0,
        "timestamp": 27482,
        "input_length": 600,
        "output_length": 5,
        "hash_runs": [[46, 2]],
    },
    "azure": {
        "TIMESTAMP": "2023-11-16 18:17:03.9799600",
        "ContextTokens": 600,
        "GeneratedTokens": 5,
    },
    "burstgpt": {"Timestamp": 27.482, "Request tokens": 600, "Response tokens": 5},
    "bailian": {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 27.482,
        "input_length": 600,
        "output_length": 5,
        "hash_ids": list(range(46, 84)),
    },
    "vidur": {"num_prefill_tokens": 600, "num_decode_tokens": 5, "num_total_tokens": 605},
}


def write(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    lines = [row if isinstance(row, bytes) else orjson.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def sample_in_blocks_of(tokens: int, folder: Path) -> Path:
    """The sample trace's prompts, cut into larger blocks: a model of them has less to count."""
    head, *lines = map(orjson.loads, gzip.decompress(SAMPLE.read_bytes()).splitlines())
    merged = tokens // head["trace"]["block_size"]
    head["trace"]["block_size"] = tokens
    ids: dict[int, int] = {}
    for row in lines:
        runs = row.pop("hash_runs")
        blocks = [block for start, count in runs for block in range(start, start + count)]
        # A block's id stands for the whole prompt up to its end: the last one's names them all.
        row["hash_ids"] = [ids.setdefault(one, len(ids)) for one in blocks[merged - 1 :: merged]]
    return write(folder / "trace.jsonl", head, *lines)


GOOD = {"session_id": "s", "input_length": 5, "output_length": 1, "hash_ids": [1], "timestamp": 0}
