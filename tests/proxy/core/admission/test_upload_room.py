"""Room for bodies before admission: who waits, who is next, and who has to go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.admission.upload_room import LONG_WAIT_S, OVER, PATIENCE_S, Upload, UploadRoom

KIB, MIB = 1 << 10, 1 << 20


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
    assert small in room._uploads


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
    assert uploads[0] in room._uploads


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
    assert sum(u.held for u in room._waiting) <= 2 * MIB


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
    there = list(room._uploads)
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
