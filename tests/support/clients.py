"""Requests that real clients sent, their shape only: see tests/clients/recordings/README.md."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from multidict import CIMultiDict

RECORDINGS = Path(__file__).parents[1] / "clients" / "recordings"
CLIENTS = sorted(path.name.removesuffix(".jsonl.gz") for path in RECORDINGS.glob("*.jsonl.gz"))
"""Each recorded client, with its version."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. `session` and `agent`: who asked, as the recorder knows it.

    `path` is without the query, which no dialect reads. `rendered_chars`: length of the prompt as
    the engine reads it; of them it finds `cached_chars`, if it served all earlier requests of the
    file. Both are 0 where no prompt is computed.
    """

    step: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    session: str
    agent: int
    rendered_chars: int
    cached_chars: int


def recorded(client: str) -> Iterator[Recorded]:
    """A client's requests, in the order in which they came."""
    lines = gzip.decompress((RECORDINGS / f"{client}.jsonl.gz").read_bytes()).splitlines()
    for row in map(orjson.loads, lines):
        yield Recorded(
            step=row["step"],
            path=row["path"].partition("?")[0],
            headers=CIMultiDict(row["headers"]),
            body=orjson.dumps(row["body"]),
            session=row["session"],
            agent=row["agent"],
            rendered_chars=row.get("rendered_chars", 0),
            cached_chars=row.get("expected_cached_chars", 0),
        )
