"""What a client has in tokens: a generation that is cut anywhere, any number of times, is the same.

The engine here is a model of vLLM's: a token is a piece of text, text is held back while a stop
string may have begun, and a stop string ends the answer without being shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.types import Unmoved
from proxy.protocol.streams.movable import Plan
from proxy.protocol.streams.trail import (
    AT_ONCE_BYTES,
    STEP_BYTES,
    STREAM_BYTES,
    TRAIL_BYTES,
    Resumption,
    Trail,
    TrailMemory,
    is_lost_error,
    member_list,
    trail_bytes,
)

PIECES = ("a", "b", "ab", "", "ba", "E", "N", "EN", "D", "xyz")


def plan(stop_chars: int = 0, most: int | None = None, *, shows_ids: bool = False) -> Plan:
    return Plan(b'"model":"m"', most, 0, stop_chars, is_chat=False, shows_ids=shows_ids)


def events(tokens: list[int], begin: int, stop: str) -> Iterator[tuple[int, str, bool]]:
    """Token, text shown with it, and whether it ends there, of a request behind `begin` tokens."""
    said, shown, held = "", 0, max(0, len(stop) - 1)
    for number, token in enumerate(tokens[begin:], begin + 1):
        said += PIECES[token]
        at = said.find(stop) if stop else -1
        is_last = at >= 0 or number == len(tokens)
        end = at if at >= 0 else len(said) - (0 if is_last else held)
        text, shown = said[shown:end] if end > shown else "", max(shown, end)
        yield token, text, is_last
        if is_last:
            return


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stop=st.sampled_from(["", "END", "abba", "Nx"]),
)
def test_a_cut_generation_is_the_uncut_one(tokens: list[int], cuts: list[int], stop: str) -> None:
    whole = "".join(text for _, text, _ in events(tokens, 0, stop))
    trail = Trail(plan(max(0, len(stop) - 1)), TrailMemory(), None)
    trail.begin(b"{", b"1,2,3")
    got, is_over = "", False
    for cut in [*cuts, len(tokens) + 1]:
        for number, (token, text, is_last) in enumerate(events(tokens, trail.tokens, stop)):
            if number == cut:
                break
            overlap = trail.overlap
            size = min(len(text), len(overlap))
            assert text[:size] == overlap[:size]
            trail.overlap = overlap[size:]
            got += text[size:]
            trail.add(b"%d" % token, text, is_shown=bool(text) or is_last)
            is_over = is_last
            if is_over:
                break
        if is_over:
            break
        found = trail.resumption()
        assert isinstance(found, Resumption)
        assert found.ids == b",".join(b"%d" % token for token in tokens[: found.tokens])
        trail.resume(found)
    assert got == whole


def test_tokens_of_an_incomplete_character_are_generated_again() -> None:
    trail = Trail(plan(), TrailMemory(), None)
    trail.begin(b"{", b"1")
    trail.add(b"5", "", is_shown=True)
    trail.add(b"6,7", "", is_shown=False)
    found = trail.resumption()
    assert isinstance(found, Resumption)
    assert (found.ids, found.tokens) == (b"5", 1)
    trail.add(b"8", "", is_shown=True)
    found = trail.resumption()
    assert isinstance(found, Resumption)
    assert (found.ids, found.tokens) == (b"5,6,7,8", 4)


def test_the_continuation_asks_for_the_rest() -> None:
    trail = Trail(plan(most=10), TrailMemory(), None)
    trail.begin(b"{", b"1,2")
    trail.add(b"3,4", "", is_shown=True)
    found = trail.resumption()
    assert isinstance(found, Resumption)
    body = orjson.loads(trail.request_body(found))
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3, 4],
        "max_tokens": 8,
        "min_tokens": 0,
        "stream": True,
        "return_token_ids": True,
    }


def test_why_a_stream_cannot_go_on() -> None:
    long, memory = Trail(plan(), TrailMemory(), 4), TrailMemory(5000)
    long.begin(b"{", b"1,2,3")
    long.add(b"4", "", is_shown=True)
    assert isinstance(long.resumption(), Resumption)
    long.add(b"5", "", is_shown=True)
    assert long.resumption() is Unmoved.TOO_LONG
    first, second = Trail(plan(), memory, None), Trail(plan(), memory, None)
    first.begin(b"{", b"1")
    second.begin(b"{", b"1")
    assert second.resumption() is Unmoved.MEMORY
    first.let_go()
    assert memory.taken_bytes == 0
    ended = Trail(plan(most=2), TrailMemory(), None)
    ended.begin(b"{", b"1")
    ended.add(b"1,2", "", is_shown=True)
    assert ended.resumption() is Unmoved.FINISHED
    refused = Trail(plan(), TrailMemory(), None)
    refused.stop(Unmoved.NO_IDS)
    refused.begin(b"{" * 5000, b"1")
    assert not refused.head, "what is not counted is not kept"
    odd = Trail(plan(), TrailMemory(), None)
    odd.begin(b"{", b"1, 2")
    assert odd.resumption() is Unmoved.NO_IDS


@pytest.mark.parametrize(
    ("data", "is_lost"),
    [
        (b'{"error":{"code":500}}', True),
        (b'{"error":{"message":"x"}}', True),
        (b'{"error":"x"}', True),
        (b'{"error":{"code":400}}', False),
        (b'{"error":{', False),
        (b'{"choices":[]}', False),
    ],
)
def test_errors_that_another_instance_may_not_have(data: bytes, is_lost: bool) -> None:
    assert is_lost_error(data) is is_lost


def test_a_list_in_a_text_is_no_member() -> None:
    said = orjson.dumps({"text": '"token_ids":[1]', "token_ids": [7, 8]})
    begin, end = member_list(said, b'"token_ids":[')
    assert said[begin:end] == b"7,8"
    assert member_list(said[:-2], b'"token_ids":[') == (-1, -1)


def test_a_tenant_that_fills_the_memory_leaves_room_for_the_others() -> None:
    memory = TrailMemory(8 * STEP_BYTES * 10)
    taken = [memory.take(STEP_BYTES, "mallory") for _ in range(100)]
    assert sum(taken) == 70, "seven eighths"
    assert memory.take(STEP_BYTES, "alice")
    memory.give_back(STEP_BYTES, "alice")
    memory.give_back(70 * STEP_BYTES, "mallory")
    assert (memory.taken_bytes, memory._taken_by) == (0, {})
    assert sum(memory.take(STEP_BYTES) for _ in range(100)) == 80, "who has no tenant shares it"


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\N{GRINNING FACE}"])
def test_text_that_is_kept_is_counted(letter: str) -> None:
    """As long as it is: the last events of a stream with stop strings."""
    memory = TrailMemory()
    trail = Trail(plan(5), memory, None)
    trail.begin(b"{", b"1")
    piece, most = letter * 10_000, 0
    for _ in range(200):
        trail.add(b"7", piece, is_shown=True)
        kept = sum(sys.getsizeof(passed.text) for passed in trail._window)
        assert memory.taken_bytes >= kept
        most = max(most, memory.taken_bytes)
    assert most <= 5 * (len(trail._window) + 1) * 10_000
    at = trail.resumption()
    assert isinstance(at, Resumption)
    trail.resume(at)
    trail.stop(Unmoved.DIFFERS)
    assert not memory.taken_bytes
    trail = Trail(plan(5), TrailMemory(len(piece)), None)
    trail.begin(b"{", b"1")
    trail.add(b"7", piece, is_shown=True)
    assert trail.why_fixed() is Unmoved.MEMORY


@given(st.lists(st.sampled_from([b"1", b"2,3", b"4, 5", b"x"]), max_size=8), st.booleans())
def test_each_id_is_looked_at_once(ids: list[bytes], shows: bool) -> None:
    """However often it is asked whether a stream can move."""
    trail = Trail(plan(), TrailMemory(), None)
    trail.begin(b"{", b"1")
    is_good = True
    for some in ids:
        trail.add(some, "x", is_shown=shows)
        is_good = is_good and some.translate(None, b"0123456789,") == b""
        expected = None if is_good or not shows else Unmoved.NO_IDS
        assert trail.why_fixed() is expected
        found = trail.resumption()
        assert isinstance(found, Resumption) is (expected is None)
        assert not isinstance(found, Resumption) or trail._checked == len(trail._ids)


def test_what_was_said_before_it_goes_on_elsewhere() -> None:
    trail = Trail(plan(5), TrailMemory(), None)
    trail.begin(b"{", b"1")
    for number, text in enumerate(["", "Hello", " you", "\nU"]):
        trail.add(b"%d" % number, text, is_shown=bool(text))
    at = trail.resumption()
    assert isinstance(at, Resumption)
    assert (at.said, at.overlap, at.tokens) == ("Hello you\n", "U", 2)
    trail.resume(at)
    trail.add(b"9", "U", is_shown=True)
    assert trail.said == "Hello you\nU"


def test_ids_without_text_are_kept_and_not_copied() -> None:
    """An event may have a million, and thousands without text may follow it."""
    trail = Trail(plan(), TrailMemory(), None)
    trail.begin(b"{", b"1,2,3")
    trail.add(b"7" + b",7" * 100_000, "", is_shown=False)
    kept = trail._pending
    for _ in range(100):
        trail.add(b"8", "", is_shown=False)
    assert trail._pending is kept
    trail.add(b"9", "x", is_shown=True)
    at = trail.resumption()
    assert isinstance(at, Resumption)
    assert (at.ids[-8:], at.tokens) == (b",8,8,8,9", 100_102)


@pytest.mark.parametrize("shows", [True, False])
def test_ids_of_more_tokens_than_there_can_be_are_not_kept(shows: bool) -> None:
    """It is seen when they come, not when the stream migrates."""
    memory, most = TrailMemory(), [20_000.0]
    trail = Trail(plan(), memory, None)
    trail.most_output = lambda: most[0]
    trail.begin(b"{", b"1")
    some = b",".join([b"123456"] * 1000)
    for _ in range(20):
        trail.add(some, "", is_shown=shows)
    assert trail.why_fixed() is None
    most[0] += 1000
    trail.add(some, "", is_shown=shows)
    assert trail.why_fixed() is None, "later there can be more"
    trail.add(some, "", is_shown=shows)
    assert trail.why_fixed() is Unmoved.NO_IDS
    for _ in range(100):
        trail.add(some, "", is_shown=shows)
    assert not memory.taken_bytes
    assert len(trail._ids) == len(trail._pending) == 0


def test_one_stream_holds_a_few_megabytes() -> None:
    memory = TrailMemory()
    trail = Trail(plan(), memory, None)
    trail.begin(b"{", b"1")
    some = b"1" + b",1" * (STREAM_BYTES // 40)
    while trail.why is None:
        assert memory.taken_bytes <= STREAM_BYTES
        trail.add(some, "", is_shown=True)
    assert (trail.why, memory.taken_bytes) == (Unmoved.MEMORY, 0)


@pytest.mark.parametrize("shows", [True, False])
def test_ids_of_too_many_tokens_at_once_are_not_looked_at(shows: bool) -> None:
    trail = Trail(plan(), TrailMemory(), None)
    trail.begin(b"{", b"1")
    trail.add(b"1" + b",1" * (AT_ONCE_BYTES // 2), "", is_shown=shows)
    assert trail.why is Unmoved.NO_IDS


def test_ids_are_looked_at_as_they_come() -> None:
    """So little is left for the moment in which many streams migrate."""
    trail = Trail(plan(), TrailMemory(), None)
    trail.begin(b"{", b"1" + b",1" * 100_000)
    assert trail._knows_prompt, "also the prompt"
    for _ in range(10_000):
        trail.add(b"123456", "", is_shown=True)
        assert len(trail._ids) - trail._checked <= STEP_BYTES
    trail.add(b"12 34", "", is_shown=True)
    for _ in range(STEP_BYTES):
        trail.add(b"1", "", is_shown=True)
    assert trail.why is Unmoved.NO_IDS


def test_headers_and_fields_are_counted_and_dropped_with_the_rest() -> None:
    memory = TrailMemory(STEP_BYTES * 4)
    given = Plan(b"f" * STEP_BYTES, None, 0, 0, is_chat=False, shows_ids=False)
    trail = Trail(given, memory, None)
    trail.keep(b"h" * STEP_BYTES)
    assert memory.taken_bytes == trail.held_bytes == 2 * STEP_BYTES
    other = Trail(Plan(b"f" * STEP_BYTES * 3, None, 0, 0, is_chat=True, shows_ids=False), memory, 9)
    other.keep(b"h")
    assert (other.why, other.headers, other.plan.fields) == (Unmoved.MEMORY, b"", b"")
    trail.stop(Unmoved.TOOLS)
    assert (memory.taken_bytes, trail.headers, given.fields) == (0, b"", b"")


@pytest.mark.parametrize(
    ("limit_bytes", "room"),
    [(None, TRAIL_BYTES), (64 << 20, 8 << 20), (1 << 40, TRAIL_BYTES)],
)
def test_with_a_memory_limit_the_room_is_a_part_of_it(limit_bytes: int | None, room: int) -> None:
    assert trail_bytes(limit_bytes) == room
