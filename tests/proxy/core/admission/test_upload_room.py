"""Room for bodies before admission: who waits, who is next, and who has to go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission import order, upload_room
from proxy.core.admission.upload_room import (
    LONG_WAIT_S,
    OVER,
    PATIENCE_S,
    Round,
    Upload,
    UploadRoom,
)
from tests.support.work import lines_of

KIB, MIB = 1 << 10, 1 << 20
Key = Callable[[Upload], tuple[int, float]]


def asks(room: UploadRoom, owner: str, size: int, now_s: float = 0.0, held: int = 0) -> Upload:
    upload = room.enter(owner, held, now_s)
    room.ask(upload, size - held)
    room.granted(now_s)
    return upload


def test_a_body_has_room_until_there_is_none() -> None:
    room = UploadRoom(4 * MIB)
    uploads = [asks(room, "a", MIB) for _ in range(6)]
    assert [bool(u.wanted) for u in uploads] == [False] * 4 + [True] * 2
    room.leave(uploads[0])
    assert room.granted(1.0) == [uploads[4]]
    room.leave(uploads[0])
    assert room.held_bytes == 4 * MIB, "one leaves once"


def test_a_body_larger_than_all_of_it_is_alone() -> None:
    room = UploadRoom(MIB)
    large, small = asks(room, "a", 8 * MIB), asks(room, "b", KIB)
    assert not large.wanted
    assert small.wanted
    assert not room.is_over


def test_two_hundred_long_bodies_at_once_are_not_too_much() -> None:
    """Of each as much as one read brings has come before there is room for it."""
    room = UploadRoom(32 * MIB)
    uploads = [room.enter("all", 256 * KIB, 0.0) for _ in range(200)]
    assert not room.is_over
    for upload in uploads:
        room.ask(upload, 150 * KIB)
    room.enter("all", 2 * MIB + 1, 0.0)
    assert room.is_over


def test_the_owner_that_has_least_is_next() -> None:
    room = UploadRoom(4 * MIB)
    first = asks(room, "hog", 4 * MIB)
    hogs = [asks(room, "hog", 512 * KIB) for _ in range(8)]
    few = asks(room, "few", 2 * MIB, 1.0)
    room.leave(first)
    assert room.granted(1.0)[0] is few
    assert sum(bool(hog.wanted) for hog in hogs) == 4


def test_of_one_owner_the_smallest_and_youngest_is_next() -> None:
    room = UploadRoom(4 * MIB)
    first = asks(room, "a", 4 * MIB)
    large, small = asks(room, "a", 3 * MIB), asks(room, "a", 2 * MIB)
    room.leave(first)
    assert room.granted(0.0) == [small]
    assert large.wanted


def test_who_stands_still_goes_when_others_wait() -> None:
    room = UploadRoom(4 * MIB)
    small, large = asks(room, "a", MIB), asks(room, "a", 3 * MIB)
    assert room.overdue(60.0) is None, "nobody waits"
    waits = asks(room, "b", 2 * MIB, 10.0)
    assert room.overdue(10.0) is large
    room.leave(large)
    assert room.granted(10.0) == [waits]
    assert small in room.uploads


def test_who_goes_on_stays_unless_it_is_slow() -> None:
    room = UploadRoom(4 * MIB)
    uploads = fast, slow, still = [asks(room, "a", size * MIB) for size in (2, 1, 1)]
    asks(room, "b", MIB)
    assert room.overdue(PATIENCE_S) is None, "each has a moment"
    for step in range(1, 6):
        now_s = 0.4 * step
        room.moved(fast, step * 600 * KIB, now_s)
        room.moved(slow, step * 70 * KIB, now_s)
    gone = []
    while (upload := room.overdue(2.0)) is not None:
        gone.append(upload)
        room.leave(upload)
    assert gone == [slow, still]
    assert uploads[0] in room.uploads


def test_a_whole_body_goes_only_for_another_owners() -> None:
    room = UploadRoom(4 * MIB)
    whole = asks(room, "a", 4 * MIB)
    whole.is_whole = True
    own = asks(room, "a", MIB)
    assert room.overdue(30.0) is None
    room.leave(own)
    asks(room, "b", MIB)
    assert room.overdue(30.0) is whole


def test_the_owner_that_has_most_pays() -> None:
    room = UploadRoom(4 * MIB)
    hogs = [asks(room, "hog", 256 * KIB, 1.0) for _ in range(12)]
    asks(room, "few", MIB)
    asks(room, "other", MIB, 1.0)
    assert room.overdue(30.0) in hogs


def test_bodies_that_grow_do_not_wait_for_each_other_for_ever() -> None:
    room = UploadRoom(4 * MIB)
    uploads = [asks(room, "a", MIB) for _ in range(4)]
    for upload in uploads:
        room.ask(upload, MIB)
    assert room.granted(0.0) == []
    assert room.overdue(LONG_WAIT_S + 1) in uploads


def test_what_waiting_bodies_have_brought_does_not_take_all_room() -> None:
    room = UploadRoom(4 * MIB)
    hogs = [asks(room, "a", MIB, held=200 * KIB) for _ in range(16)]
    gone = 0
    while (upload := room.overdue(LONG_WAIT_S + 1)) is not None:
        room.leave(upload)
        room.granted(LONG_WAIT_S + 1)
        gone += 1
    assert 0 < gone < len(hogs)
    assert sum(u.held for u in room.waiting) <= 2 * MIB


def test_what_comes_unasked_has_a_limit_too() -> None:
    room = UploadRoom(4 * MIB)
    for number in range(64):
        room.enter("a", 256 * KIB, float(number))
        while room.is_over:
            worst = room.worst(float(number))
            assert worst is not None
            room.leave(worst)
    assert room.held_bytes <= 4 * MIB * OVER


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 300), st.integers(1, 2000)), max_size=30
    ),
    st.lists(st.integers(0, 29), max_size=40),
)
def test_sums_are_right_after_any_history(
    come: list[tuple[str, int, int]], leave: list[int]
) -> None:
    room = UploadRoom(3000)
    uploads = [asks(room, owner, held + more, 0.0, held) for owner, held, more in come]
    for number, index in enumerate(leave):
        if index < len(uploads):
            room.leave(uploads[index])
            room.granted(float(number))
    there = list(room.uploads)
    assert room.held_bytes == sum(u.held for u in there)
    owned: dict[str, int] = {}
    for upload in there:
        size = upload.held + upload.wanted
        if size:
            owned[upload.owner] = owned.get(upload.owner, 0) + size
    assert {owner: size for owner, size in room._owned.items() if size} == owned
    for upload in there:
        room.leave(upload)
    assert (room.held_bytes, room._owned) == (0, {})


class LooksAtAll:
    """Which body is next, and which one has to go, as a look at each of them finds it."""

    def __init__(self, room: UploadRoom, now_s: float) -> None:
        self.room, self.now_s = room, now_s

    def turn(self, upload: Upload) -> tuple[int, float]:
        age_s = self.now_s - upload.since_s
        size = upload.held + upload.wanted
        return self.room.owned(upload.owner), size * (age_s + upload_room._SOON_S)

    def weight(self, upload: Upload) -> tuple[int, float]:
        return self.room.owned(upload.owner), upload.held * (self.now_s - upload.since_s)

    def is_due(self, upload: Upload, waiter: Upload) -> bool:
        age_s = self.now_s - upload.since_s
        if upload.wanted or age_s <= PATIENCE_S:
            return False
        if upload.is_whole:
            has_half = 2 * self.room.owned(upload.owner) > self.room.max_bytes
            return upload.owner != waiter.owner and has_half
        is_still = self.now_s - upload.moved_s > PATIENCE_S
        return is_still or age_s > PATIENCE_S + upload.come / upload_room.LEAST_RATE

    def overdue(self) -> tuple[int, float] | None:
        room = self.room
        if not room.waiting:
            return None
        waiter = min(room.waiting, key=self.turn)
        due = [u for u in room.uploads if self.is_due(u, waiter)]
        if not due:
            are_all = len(room.waiting) == len(room.uploads)
            if are_all or 2 * sum(u.held for u in room.waiting) > room.max_bytes:
                due = [u for u in room.waiting if self.now_s - u.since_s > LONG_WAIT_S]
        return max(map(self.weight, due), default=None)


def is_nearly(upload: Upload | None, found: tuple[int, float] | None, key: Key) -> bool:
    """Whether a body has this key, but for what is lost in rounding."""
    if upload is None or found is None:
        return upload is None and found is None
    (owned, weight), (most, heaviest) = key(upload), found
    return owned == most and abs(weight - heaviest) < 1e-6


def changes(room: UploadRoom, what: str, owner: str, held: int, more: int, now_s: float) -> None:
    """Let a body come, or something happen to one that is there."""
    if what == "come":
        new = room.enter(owner, held, now_s)
        if more > 0:
            room.ask(new, more)
        return
    if not room.uploads:
        return
    upload = list(room.uploads)[held % len(room.uploads)]
    if what == "leave":
        room.leave(upload)
    elif what == "moved":
        room.moved(upload, upload.come + 1000 * held, now_s)
    elif what == "whole":
        upload.is_whole = not upload.wanted
    else:
        room.resize(upload, held)


def ends(room: UploadRoom, now_s: float) -> None:
    """All that have had their time end, in the order in which a look at all finds them."""
    over, looks = Round(room, now_s), LooksAtAll(room, now_s)
    while (due := looks.overdue()) is not None:
        upload = over.overdue()
        assert upload is not None
        assert looks.weight(upload) == due
        room.leave(upload)
        room.granted(now_s)
    assert over.overdue() is None


def test_a_body_of_which_nothing_has_come_is_there_too() -> None:
    room = UploadRoom(MIB)
    asks(room, "a", KIB, held=KIB)
    assert room.worst(1.0) is not None
    empty = room.enter("b", 0, 2.0)
    room.ask(empty, 0)
    assert room.granted(2.0) == [empty]
    room.leave(empty)
    assert room.owned("b") == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["come", "come", "come", "leave", "moved", "whole", "resize", "ends"]),
            st.sampled_from("abc"),
            st.integers(0, 400),
            st.integers(-500, 2000),
            st.sampled_from([0.0, 0.25, 1.0, 3.0]),
        ),
        max_size=60,
    )
)
def test_a_look_at_all_finds_the_same(steps: list[tuple[str, str, int, int, float]]) -> None:
    room, now_s = UploadRoom(3000), 0.0
    for what, owner, held, more, seconds in steps:
        now_s += seconds
        if what == "ends":
            ends(room, now_s)
        else:
            changes(room, what, owner, held, more, now_s)
        looks = LooksAtAll(room, now_s)
        turn = min(map(looks.turn, room.waiting), default=None)
        assert is_nearly(room.next(now_s), turn, looks.turn)
        if held % 2:  # what is heaviest is not asked from the start
            weight = max(map(looks.weight, room.uploads), default=None)
            assert is_nearly(room.worst(now_s), weight, looks.weight)
        room.granted(now_s)


def work(count: int, owners: int) -> float:
    """Lines for each of so many bodies, most of which wait: they come, some end, and all go."""
    room = UploadRoom(32 * MIB)
    uploads = []
    with lines_of(upload_room, order) as lines:
        for number in range(count):
            size, now_s = MIB + number * 7919 % 1000, number / 1000
            uploads.append(asks(room, str(number % owners), size, now_s, held=6))
        over, gone = Round(room, 30.0), 0
        while gone < count // 2 and (upload := over.overdue()) is not None:
            room.leave(upload)
            room.granted(30.0)
            gone += 1
        for upload in uploads:
            room.leave(upload)
            room.granted(31.0)
    return lines.count / count


@pytest.mark.long
def test_a_body_costs_the_same_beside_many_that_wait() -> None:
    for is_of_one in (True, False):
        few, many = (work(count, 1 if is_of_one else count) for count in (100, 1600))
        assert many <= 2 * few, (few, many)


def excess(count: int) -> float:
    """Lines for each of so many bodies beyond the hard limit, of which one has to go for each."""
    room = UploadRoom(count * KIB)
    for number in range(count * 2):
        room.enter("a", KIB, number / 1000)
    with lines_of(upload_room, order) as lines:
        for number in range(count):
            room.enter("a", KIB, 10 + number / 1000)
            while room.is_over:
                worst = room.worst(10 + number / 1000)
                assert worst is not None
                room.leave(worst)
    return lines.count / count


@pytest.mark.long
def test_a_body_beyond_the_limit_costs_the_same_beside_many() -> None:
    few, many = excess(100), excess(1600)
    assert many <= 2 * few, (few, many)
