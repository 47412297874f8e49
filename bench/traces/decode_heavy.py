"""Write a trace of long answers beside bursts of long prompts: `decode_heavy.py OUT`.

Three of four sessions are chats that think aloud: short prompts, answers of 1,000 to 3,000 tokens.
Every fourth fans out: a short request, and then at once three documents of 16,000 to 40,000 tokens,
each with an answer of 800 to 2,000. No block is shared between sessions. All of it is invented, by
a fixed seed: the same bytes each time.
"""

import gzip
import random
import sys
from pathlib import Path
from typing import Any

import orjson

SESSIONS = 40
BURST_EVERY = 4
DOCUMENTS = 3
BLOCK_TOKENS = 256
META = {"trace": {"version": 1, "block_size": BLOCK_TOKENS, "cumulative": True, "time_unit": "ms"}}
Row = dict[str, Any]


class Trace:
    """The rows, and the next block id that no row has."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._next_block = 1

    def add(self, session: str, turn: int, tokens: int, output: int, **rest: Any) -> Row:
        """Add a request; a later turn continues the prompt of its session's last one."""
        before = [row for row in self.rows if row["session_id"] == session]
        kept = before[-1]["hash_runs"] if before else []
        have = sum(length for _first, length in kept)
        blocks = -(-tokens // BLOCK_TOKENS) - have
        row = {
            "session_id": session,
            "turn": turn,
            "input_length": tokens,
            "output_length": output,
            "hash_runs": [*kept, [self._next_block, blocks]],
            **rest,
        }
        self._next_block += blocks
        self.rows.append(row)
        return row


def chat(trace: Trace, name: str, draw: random.Random) -> None:
    """A session of one to three turns with long answers."""
    tokens = BLOCK_TOKENS * draw.randint(2, 12)
    for turn in range(draw.randint(1, 3)):
        when = {"delay": draw.uniform(1_000, 8_000)} if turn else {"timestamp": 0}
        output = draw.randint(1_000, 3_000)
        trace.add(name, turn, tokens, output, **when)
        tokens += -(-output // BLOCK_TOKENS) * BLOCK_TOKENS + BLOCK_TOKENS * draw.randint(1, 4)


def burst(trace: Trace, name: str, draw: random.Random) -> None:
    """A short request, then documents at the same time, each a session of its own."""
    trace.add(name, 0, BLOCK_TOKENS * 4, 100, timestamp=0)
    for number in range(DOCUMENTS):
        trace.add(
            f"{name}/{number}",
            0,
            BLOCK_TOKENS * draw.randint(64, 160),
            draw.randint(800, 2_000),
            parent_session_id=name,
            wait_for=[f"{name}:0"],
            delay=draw.uniform(100, 500),
        )


def main(out: Path) -> None:
    """Write the trace."""
    draw, trace = random.Random("decode heavy"), Trace()
    for number in range(SESSIONS):
        kind = burst if number % BURST_EVERY == BURST_EVERY - 1 else chat
        kind(trace, f"s{number:02}", draw)
    text = b"".join(
        orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in (META, *trace.rows)
    )
    out.write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
