"""Traces and runs of `replay` for its tests."""

import orjson

from replayer.replay.cli import main


def session(name, turns, *, block=4, **fields):
    """Make a session whose prompt grows by one block a turn."""
    return [
        {
            "session_id": name,
            "turn": turn,
            "input_length": block * (turn + 1),
            "output_length": 3,
            "block_size": block,
            "hash_runs": [[sum(map(ord, name)) * 1000, turn + 1]],
            **fields,
        }
        for turn in range(turns)
    ]


def run(trace, engine, tmp_path, *more):
    out = tmp_path / "out"
    arguments = [str(trace), "--target", engine.url, "--out", str(out), "--no-progress", *more]
    status = main([*arguments, "--no-html"])
    summary = orjson.loads((out / "summary.json").read_bytes())
    rows = [orjson.loads(line) for line in (out / "requests.jsonl").read_bytes().splitlines()]
    return status, summary, {row["request_id"]: row for row in rows}
