"""Loads from public traces: Azure's functions for code and chat, Mooncake, coding agents.

Arrivals are as recorded, where nothing else is said. The seed shifts each by half a second at most,
and lengths by 2 %: three seeds are three close copies of one day.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replayer.loads.load import BLOCK_TOKENS, Blocks, Load, Request, Turn
from replayer.loads.synthetic import DAY_S

AZURE_CODE = "AzureLLMInferenceTrace_code.csv"
AZURE_CHAT = "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = "conversation_trace.jsonl"
AGENTIC = "agentic_cc_56.trace.jsonl"
CLOCK_S = 2.999
"""Mooncake's clock ticks every 3 s: requests are spread over the seconds that follow."""
MOONCAKE_S, MOONCAKE_SPEED = 3540.0, 1.5
AGENT_COPIES, AGENT_TOKENS, AGENT_OUTPUT_TOKENS = 4, 110_000, 1_000
AGENT_STARTS_S, AGENT_WAVE_S, AGENT_WAIT_S = 2100, 1500, 20.0
Row = dict[str, Any]
Clock = Callable[[float], float]


def found(traces: Path | None, name: str) -> Path | None:
    """A trace's file in a folder or below it, packed or not; None where there is none."""
    if traces is None:
        return None
    files = (*traces.rglob(name), *traces.rglob(f"{name}.gz"))
    return min(files, default=None)


def _lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from file


@dataclass(frozen=True, slots=True)
class Azure:
    """A part of a trace of Azure; lengths are scaled, since prompts have grown since 2023."""

    begin_s: float
    end_s: float
    scale: float

    def requests(self, path: Path, seed: int) -> list[Request]:
        """The requests; nothing is shared."""
        # The name with its ending draws: packed or not, a seed gives the same requests.
        draw = random.Random(f"azure{path.name.removesuffix('.gz')}.gz{seed}")
        rows, zero_s = [], None
        for stamp, tokens, output in list(csv.reader(_lines(path)))[1:]:
            at_s = datetime.fromisoformat(stamp[:26]).replace(tzinfo=UTC).timestamp()
            zero_s = at_s if zero_s is None else zero_s
            if self.begin_s <= at_s - zero_s < self.end_s:
                scaled = max(1, int(int(tokens) * self.scale * draw.uniform(0.98, 1.02)))
                answer = max(2, int(int(output) * self.scale * draw.uniform(0.98, 1.02)))
                after_s = at_s - zero_s - self.begin_s
                rows.append((after_s + draw.uniform(0, 0.5), scaled, answer))
        blocks = Blocks()
        return [Request(*row, blocks.take(row[1])) for row in sorted(rows)]


def azure_code(path: Path, seed: int) -> Load:
    """46 minutes of code completion: bursts of minutes, and silences."""
    part = Azure(0.0, 2760.0, 3)
    return Load(
        name="azure-code",
        seed=seed,
        requests=part.requests(path, seed),
        end_s=part.end_s,
        slo_ttft_s=4.0,
        slo_itl_s=0.1,
        initial_replicas=2,
    )


def azure_conv(path: Path, seed: int) -> Load:
    """40 minutes of chat, 4.7 to 8 requests per second: one hump."""
    part = Azure(480.0, 2880.0, 5)
    requests = part.requests(path, seed)
    return Load(name="azure-conv", seed=seed, requests=requests, end_s=part.end_s - part.begin_s)


def mooncake(path: Path, seed: int) -> Load:
    """The whole hour 1.5 times as fast: nearly flat, long prompts, shared prefixes."""
    return _mooncake("mooncake", path, seed, (lambda at_s: at_s / MOONCAKE_SPEED, 2360.0))


def mooncake_day(path: Path, seed: int) -> Load:
    """The same requests in a day of 48 minutes: 1.2 to 7.2 requests per second and back."""
    return _mooncake("mooncake-day", path, seed, (day_clock(MOONCAKE_S), DAY_S))


def day_clock(recorded_s: float) -> Clock:
    """From a time of the record to the time of a day whose speed is a raised cosine."""
    n = int(DAY_S)
    speeds = [0.35 + 1.76 * (0.5 - 0.5 * math.cos(2 * math.pi * (i + 0.5) / n)) for i in range(n)]
    total, table = sum(speeds), [0.0]
    for speed in speeds:
        table.append(table[-1] + speed * recorded_s / total)

    def clock(at_s: float) -> float:
        low = min(n - 1, max(0, bisect.bisect_right(table, at_s) - 1))
        return (low + (at_s - table[low]) / (table[low + 1] - table[low])) * DAY_S / n

    return clock


def _mooncake(name: str, path: Path, seed: int, when: tuple[Clock, float]) -> Load:
    clock, end_s = when
    draw, requests = random.Random(f"mooncake{seed}"), []
    for line in _lines(path):
        row = json.loads(line)
        at_s = clock(row["timestamp"] / 1000 + draw.uniform(0, CLOCK_S))
        output = max(2, int(row["output_length"] * draw.uniform(0.98, 1.02)))
        requests.append(Request(at_s, row["input_length"], output, row["hash_ids"]))
    requests.sort(key=lambda one: one.at_s)
    kept = [one for one in requests if one.at_s < end_s]
    return Load(name=name, seed=seed, requests=kept, end_s=end_s, slo_ttft_s=5.0)


def agentic(path: Path, seed: int) -> Load:
    """Coding agents: a closed loop inside a session, two waves of session starts.

    Four copies of each session have their own blocks. Sessions with a prompt of more than 110,000
    tokens are left out. An agent waits for its tools 20 s at most.
    """
    draw, sessions = random.Random(f"agentic{seed}"), _sessions(path)
    names = [(copy, name) for copy in range(AGENT_COPIES) for name in sorted(sessions)]
    draw.shuffle(names)
    copies = Copies()
    requests = [
        copies.request(row, copy, name, at_s)
        for (copy, name), at_s in zip(names, _starts(draw, len(names)), strict=True)
        for row in sessions[name]
    ]
    return Load(
        name="agentic",
        seed=seed,
        requests=requests,
        end_s=float(AGENT_STARTS_S),
        slo_ttft_s=5.0,
        initial_replicas=2,
    )


def _sessions(path: Path) -> dict[str, list[Row]]:
    """The rows of each session, with those of its subagents."""
    sessions: dict[str, list[Row]] = {}
    for line in _lines(path):
        row = json.loads(line)
        sessions.setdefault(row["session_id"].split("/")[0], []).append(row)
    return {
        name: rows
        for name, rows in sessions.items()
        if max(row["input_length"] for row in rows) <= AGENT_TOKENS
    }


def _starts(draw: random.Random, n: int) -> list[float]:
    starts_s: list[float] = []
    while len(starts_s) < n:
        at_s = draw.uniform(0, AGENT_STARTS_S)
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * at_s / AGENT_WAVE_S)
        if draw.random() < 0.12 + 0.88 * wave:
            starts_s.append(at_s)
    return sorted(starts_s)


class Copies:
    """Makes requests of copied sessions; only the copies of one number share blocks."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def request(self, row: Row, copy: int, name: str, at_s: float) -> Request:
        """A request of a copy whose session begins at `at_s`."""
        delay_s = min(AGENT_WAIT_S, (row.get("delay") or 0.0) / 1000)
        turn = Turn(
            request=f"{copy}:{row['request_id']}",
            play=f"{copy}:{name}",
            session=f"{copy}:{row['session_id']}",
            after=tuple((f"{copy}:{one}", delay_s) for one in row.get("wait_for") or ()),
        )
        output = max(2, min(AGENT_OUTPUT_TOKENS, row["output_length"]))
        return Request(at_s, row["input_length"], output, self._blocks(row, copy), turn)

    def _blocks(self, row: Row, copy: int) -> list[int]:
        """Ids of blocks of BLOCK_TOKENS: that of the last small block in each."""
        chain, size = row["hash_ids"], BLOCK_TOKENS // row["block_size"]
        coarse = [chain[min(i + size - 1, len(chain) - 1)] for i in range(0, len(chain), size)]
        return [self._ids.setdefault((copy, block), len(self._ids)) for block in coarse]
