"""The table of API paths."""

from __future__ import annotations

import pytest

from proxy.protocol.endpoints import (
    BESIDE_V1,
    ENDPOINTS,
    LAST_EVENTS,
    OFFLOADABLE,
    OTHER,
    ErrorForm,
    Salting,
    endpoint_of,
)
from proxy.protocol.sse import Scanner, names_the_end


def test_a_path_without_a_row_is_other() -> None:
    assert endpoint_of("/v1/audio/transcriptions") is OTHER
    assert (OTHER.label, OTHER.last_events, OTHER.error_form) == ("other", (), ErrorForm.OPENAI)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_rows(path: str) -> None:
    row = endpoint_of(path)
    assert row.path == path
    assert row.label in (path, "other")
    assert not (row.operators_only and row.is_counted)
    assert (path in OFFLOADABLE) == row.offloadable
    assert not row.offloadable or row.salting is Salting.ALWAYS
    assert (path in BESIDE_V1) == (not path.startswith("/v1/"))


@pytest.mark.parametrize("name", LAST_EVENTS)
def test_a_stream_ends_with_each_of_the_last_events(name: str) -> None:
    event = b'event: %b\ndata: {"a":1}\n\n' % name.encode()
    scanner = Scanner()
    scanner.feed(event)
    assert scanner.is_done
    assert names_the_end(event)
    assert not names_the_end(event.replace(b"\n", b"s\n", 1))
