"""Fixtures that several files share."""

import orjson
import pytest

from tests.support.replays import session


@pytest.fixture
def trace(tmp_path):
    rows = [*session("s", 3), *session("weird id/\n", 2)]
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path
