"""TLS records by their heads: counted in any segmentation, and ended where most are tiny."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from proxy.net.tls_records import SMALL_RECORDS, SmallRecordsError, TlsRecords

MANY = 1_000_000


def record(size: int) -> bytes:
    return b"\x17\x03\x03" + size.to_bytes(2, "big") + bytes(size)


def ended(pieces: Iterable[bytes], most: int = MANY) -> list[int]:
    """How many records end in each piece, or before `most` of them."""
    records = TlsRecords(0.0)
    counts = []
    for piece in pieces:
        data, at = memoryview(piece), 0
        while at < len(data):
            at = records.cut(data, at, most)
            counts.append(records.ended)
    return counts


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 64, 1000, 100_000])
def test_every_segmentation_has_the_same_records(step: int) -> None:
    sizes = [0, 1, 0, 300, 16384, 5, 0]
    wire = b"".join(map(record, sizes))
    pieces = [wire[at : at + step] for at in range(0, len(wire), step)]
    assert sum(ended(pieces)) == len(sizes)
    assert all(count <= 1 for count in ended(pieces, most=1))
    assert sum(ended(pieces, most=2)) == len(sizes)


def test_a_cut_ends_with_a_record() -> None:
    data = memoryview(record(10) + record(20) + record(30))
    records = TlsRecords(0.0)
    assert records.cut(data, 0, 2) == 15 + 25
    assert records.ended == 2
    assert records.cut(data, 40, 2) == len(data)
    assert records.ended == 1


def send(records: TlsRecords, content: int, count: int, *, a_second: float, size: int = 0) -> int:
    """Send records of one content; how many were taken before the connection ended."""
    data = memoryview(record(size or content + 17))
    for n in range(count):
        records.cut(data, 0, MANY)
        try:
            records.charge(1 if content else 0, content, n / a_second)
        except SmallRecordsError:
            return n
    return count


def test_a_stream_of_events_goes_on_for_ever() -> None:
    assert send(TlsRecords(0.0), 200, MANY // 4, a_second=1e9) == MANY // 4


def test_tiny_records_end_a_connection() -> None:
    taken = send(TlsRecords(0.0), 1, MANY, a_second=1e9)
    assert SMALL_RECORDS < taken < 1.1 * SMALL_RECORDS


def test_whoever_types_goes_on_for_ever() -> None:
    assert send(TlsRecords(0.0), 1, 100_000, a_second=500.0) == 100_000


@pytest.mark.parametrize("size", [22, 1000, 16401])
def test_records_without_content_end_it_soon(size: int) -> None:
    taken = send(TlsRecords(0.0), 0, MANY, a_second=1e9, size=size)
    assert 1 <= taken <= 32
    assert taken * size < 32_768


def test_content_pays_for_updates_of_keys() -> None:
    records = TlsRecords(0.0)
    for _ in range(1000):
        assert send(records, 16_384, 10, a_second=1e9) == 10
        assert send(records, 0, 1, a_second=1e9, size=22) == 1


def test_time_pays_once() -> None:
    records = TlsRecords(0.0)
    assert send(records, 1, MANY, a_second=1e9) < MANY
    data = memoryview(record(18))
    records.cut(data, 0, MANY)
    records.charge(1, 1, 1000.0)
    assert send(records, 1, MANY, a_second=1e9) < 1.1 * SMALL_RECORDS
