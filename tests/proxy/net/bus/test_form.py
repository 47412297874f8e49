"""Batches as bytes: what is encoded comes back, and what is no batch is one kind of error."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.known.fleet_state import FleetState
from proxy.core.sharing.apply import Others
from proxy.core.sharing.batch import (
    ALL_PREFILLS,
    MOST_EVENTS,
    MOST_HASHES,
    MOST_NAME,
    MOST_OPEN,
    MOST_PREFILLS,
    NOTHING,
    Batch,
    Course,
    Event,
    Prefill,
    Prompt,
    Row,
    Turn,
)
from proxy.core.types import Instance, Load, RouterConfig
from proxy.net.bus.base import MOST_BYTES
from proxy.net.bus.form import FORM, BatchError, BatchForm, Places

NAMES = ("e0", "e1", "e2")
PLACES = Places([(name, f"http://{name}:8000", 1000.0 + n) for n, name in enumerate(NAMES)])
KEY = b"a key that replicas have"
names = st.sampled_from(NAMES)
counts = st.integers(0, 10**12)
spans = st.floats(0.0, 1e6)
hashes = st.lists(st.integers(0, 2**64 - 1), max_size=20)
texts = st.text(max_size=MOST_NAME // 4)
prefills = st.builds(Prefill, st.tuples(counts, counts), spans, spans, spans)
rows = st.builds(
    Row,
    names,
    st.tuples(*(counts for _ in NOTHING)),
    st.lists(prefills, max_size=3).map(tuple),
    spans,
    spans,
    spans,
    spans | st.just(math.inf),
)
prompts = st.builds(Prompt, names, hashes, st.floats(1.0, 1e5), counts, texts)
begun = st.builds(
    Event, st.sampled_from((Course.BEGUN, Course.RECEIVED)), counts, prompts, st.just(0.0)
)
later = st.sampled_from([c for c in Course if c not in (Course.BEGUN, Course.RECEIVED)])
went_on = st.builds(Event, later, counts, st.none(), st.floats(0.0, 1.0))
placed = st.builds(Turn, counts, texts.filter(bool), names, counts, counts, texts)
moved = st.builds(Turn, counts, st.just(""), names, st.none(), st.just(0), st.just(""))
over = st.builds(
    Turn, counts, st.just(""), st.just(""), st.none() | counts, st.just(0), st.just("")
)
batches = st.builds(
    Batch,
    st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}"),
    st.integers(1, 10**12),
    st.lists(rows, max_size=3, unique_by=lambda row: row.name).map(tuple),
    st.lists(begun | went_on, max_size=5).map(tuple),
    st.lists(placed | moved | over, max_size=5).map(tuple),
    st.booleans(),
    st.lists(counts, max_size=5).map(tuple),
    st.lists(counts, max_size=5).map(tuple),
    st.booleans(),
)
EMPTY = Batch("00000000000000aa", 1, (), (), (), True, (), ())
ROW = Row("e0", NOTHING, (), 0.0, 0.0, 0.0, 0.0)


FULL = [0, [0] * 11, [[1, 1, 0.0, 0.0, 0.0]] * MOST_PREFILLS, 0.0, 0.0, 0.0, 0.0]


def error(data: bytes, form: BatchForm | None = None) -> str:
    with pytest.raises(BatchError) as caught:
        (form or BatchForm()).decode(data, PLACES)
    return caught.value.kind


def spoilt(fields: dict[str, object], batch: Batch = EMPTY) -> bytes:
    """A batch with other values in its header or sections."""
    told = msgspec.msgpack.decode(BatchForm().encode(batch, PLACES))
    return msgspec.msgpack.encode(told | fields)


def section(*items: object) -> bytes:
    return msgspec.msgpack.encode(list(items))


@given(batch=batches, key=st.sampled_from((b"", KEY)))
def test_a_batch_comes_back_as_it_was(batch: Batch, key: bytes) -> None:
    data = BatchForm(key, "me").encode(batch, PLACES)
    found = BatchForm(key).decode(data, PLACES)
    assert found.batch == batch
    assert (found.is_readable, found.unknown) == (True, 0)
    assert found.about == ("me" if batch.is_whole else "")


@given(
    number=st.sampled_from((-1, 10**15 + 1, 10**30)),
    span=st.sampled_from((-1.0, 1e300, math.inf, math.nan)),
    start_s=st.sampled_from((-1.0, 1e14, math.inf, math.nan)),
)
def test_no_number_makes_others_drop_a_batch(number: int, span: float, start_s: float) -> None:
    """An engine, or a client, may be behind it."""
    prefill = Prefill((1, number), span, span, span)
    a = number
    numbers = (a, a, a, a, a, a, a, a, a, a, a)
    row = Row("e0", numbers, (prefill,), span, span, span, span)
    events = [Event(c, 1, None, span) for c in Course if c not in (Course.BEGUN, Course.RECEIVED)]
    events.append(Event(Course.BEGUN, 1, Prompt("e0", [1], span, number, ""), 0.0))
    turns = [Turn(1, "k", "e0", number, number, "")]
    batch = EMPTY._replace(rows=(row,), events=tuple(events), turns=tuple(turns))
    places = Places([("e0", "http://e0:8000", start_s)])
    form = BatchForm()
    told = form.decode(form.encode(batch, places), places).batch
    assert (len(told.rows), len(told.events), len(told.turns)) == (1, len(events), 1)


@given(batch=batches, data=st.data())
def test_torn_or_changed_bytes_are_a_batch_or_one_kind_of_error(
    batch: Batch, data: st.DataObject
) -> None:
    whole = BatchForm().encode(batch, PLACES)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert error(whole[:cut])
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    for bytes_ in (bytes(changed), data.draw(st.binary(max_size=200))):
        with suppress(BatchError):
            BatchForm().decode(bytes_, PLACES)


@given(told=st.lists(batches, min_size=1, max_size=4))
def test_whatever_is_a_batch_can_be_taken_in_and_leaves_nothing(told: list[Batch]) -> None:
    known = FleetState(RouterConfig(prefill_throughput=20_000))
    for name in NAMES:
        known.add(Instance(name, f"http://{name}:8000"))
    others = Others(known, "me")
    for number, batch in enumerate(told):
        writer = batch._replace(writer="00000000000000bb", number=number + 1)
        others.apply(BatchForm().decode(BatchForm().encode(writer, PLACES), PLACES).batch, 2000.0)
    known.ledger.load("e0"), known.latency.wait_s("e0", 2000.0)
    deque(others.drop_all(2000.0), maxlen=0)
    assert known.ledger.drift() == 0
    assert known.reuse.is_at_rest
    for name in NAMES:
        assert known.ledger.load(name) == Load()
        assert not known.latency.of(name).pending


def test_another_key_leaves_the_rows_and_hides_names() -> None:
    prompt = Prompt("e0", [1, 2, 3], 256.0, 700, "tenant-name")
    batch = EMPTY._replace(
        rows=(ROW,),
        events=(Event(Course.BEGUN, 1, prompt, 0.0),),
        turns=(Turn(1, "session-name", "e0", 5, 0, "tenant-name"),),
    )
    data = BatchForm(KEY).encode(batch, PLACES)
    assert b"session-name" not in data
    assert b"tenant-name" not in data
    found = BatchForm(b"another key, as long").decode(data, PLACES)
    assert not found.is_readable
    assert (found.batch.rows, found.batch.events, found.batch.turns) == ((ROW,), (), ())


def test_the_same_is_sealed_otherwise_in_the_next_batch() -> None:
    turn = (Turn(1, "session-name", "e0", 5, 0, ""),)
    one, other = (EMPTY._replace(number=number, turns=turn) for number in (1, 2))
    sealed = [
        msgspec.msgpack.decode(BatchForm(KEY).encode(batch, PLACES))["turns"]
        for batch in (one, other)
    ]
    assert sealed[0] != sealed[1]


def test_a_section_and_a_member_that_are_unknown_are_skipped() -> None:
    data = spoilt({"later": b"\x00\xff", "and_more": {"a": [1]}}, EMPTY._replace(rows=(ROW,)))
    assert BatchForm().decode(data, PLACES).batch.rows == (ROW,)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"f": FORM + 1}, "form"),
        ({"f": FORM + 1, "writer": "of another form"}, "form"),
        ({"f": -1}, "form"),
        ({"f": "1"}, "range"),
        ({"writer": b"short"}, "range"),
        ({"number": 0}, "range"),
        ({"number": 2**63}, "range"),
        ({"rows": b"\xc1"}, "torn"),
        ({"rows": section([0, [0] * 10, [], 0.0, 0.0, 0.0, 0.0])}, "range"),
        ({"rows": section([0, [-1] * 11, [], 0.0, 0.0, 0.0, 0.0])}, "range"),
        ({"rows": section([0, [0] * 11, [], math.nan, 0.0, 0.0, 0.0])}, "range"),
        ({"rows": section([0, [0] * 11, [], math.inf, 0.0, 0.0, 0.0])}, "range"),
        ({"rows": section([3, [0] * 11, [], 0.0, 0.0, 0.0, 0.0])}, "range"),
        ({"rows": section([-1, [0] * 11, [], 0.0, 0.0, 0.0, 0.0])}, "range"),
        ({"events": section([0, 1, None, 0.0])}, "range"),
        ({"events": section([9, 1, None, 0.0])}, "range"),
        ({"events": section([2, 1, [0, b"", 256.0, 1, b""], 0.0])}, "range"),
        ({"events": section([3, 1, None, 1.5])}, "range"),
        ({"events": section([0, 1, [0, b"1234567", 256.0, 1, b""], 0.0])}, "range"),
        ({"events": section([0, 1, [0, b"", 0.0, 1, b""], 0.0])}, "range"),
        ({"events": section([0, 1, [7, b"", 256.0, 1, b""], 0.0])}, "range"),
        ({"events": section([0, 1, [0, bytes(8 * MOST_HASHES + 8), 256.0, 1, b""], 0.0])}, "range"),
        ({"events": section(*([[5, 1, None, 0.0]] * (MOST_EVENTS + 1)))}, "range"),
        ({"turns": section([1, b"key", -1, 1, 0, b""])}, "range"),
        ({"turns": section([1, b"\xff", 0, 1, 0, b""])}, "range"),
        ({"turns": section([1, bytes(MOST_NAME + 1), 0, 1, 0, b""])}, "range"),
        ({"turns": section([1, b"key", 0, 1, 0, bytes(MOST_NAME + 1)])}, "range"),
        ({"open": section([1] * (MOST_OPEN + 1), [])}, "range"),
        ({"rows": section(*([FULL] * (ALL_PREFILLS // MOST_PREFILLS + 1)))}, "range"),
        ({"instances": section(*([[bytes(8), None]] * 1025))}, "range"),
        ({"open": section([-1], [])}, "range"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_out_of_range_is_refused_before_anything_is_taken(
    fields: dict[str, object], kind: str
) -> None:
    assert error(spoilt(fields)) == kind


def test_a_large_batch_is_refused_unread_and_not_written() -> None:
    assert error(bytes(MOST_BYTES + 1)) == "range"
    deep = b"\x91" * 100_000
    assert error(deep) in ("torn", "range")
    prompt = Prompt("e0", [7] * MOST_HASHES, 256.0, 1, "")
    many = EMPTY._replace(events=(Event(Course.BEGUN, 1, prompt, 0.0),) * 9)
    with pytest.raises(BatchError):
        BatchForm().encode(many, PLACES)


def test_what_has_a_long_name_is_not_told() -> None:
    long = "\u20ac" * (MOST_NAME // 3 + 1)
    prompts = [Prompt("e0", [7], 256.0, 1, tenant) for tenant in ("a", long)]
    turns = [
        Turn(1, key, "e0", 1, 0, tenant) for key, tenant in (("k", ""), (long, ""), ("k", long))
    ]
    batch = EMPTY._replace(
        events=tuple(Event(Course.BEGUN, 1, prompt, 0.0) for prompt in prompts),
        turns=tuple(turns),
    )
    found = BatchForm().decode(BatchForm().encode(batch, PLACES), PLACES).batch
    assert (found.events, found.turns) == (batch.events[:1], batch.turns[:1])


def rows_at(start_s: float | None, url: str = "http://e0:8000") -> int:
    """Rows that a replica takes which knows this of the instance."""
    data = BatchForm().encode(EMPTY._replace(rows=(ROW,)), PLACES)
    return len(BatchForm().decode(data, Places([("other-name", url, start_s)])).batch.rows)


def test_an_instance_is_the_same_by_address_and_start_whatever_its_name() -> None:
    assert rows_at(1000.0) == rows_at(1000.9) == rows_at(None) == 1
    assert rows_at(1060.0) == rows_at(1000.0, "http://e1:8000") == 0
