"""Streams that migrate in turns: few bytes at once, in their order, the loop free in between."""

from __future__ import annotations

import asyncio

from proxy.state.move_turns import MoveTurns


class Stream:
    """One that says when it began."""

    def __init__(self, size: int, begun: list[Stream]) -> None:
        self.body_bytes = size
        self._begun = begun

    def begin(self) -> None:
        self._begun.append(self)


async def test_one_begins_in_each_turn_of_the_loop() -> None:
    turns, begun = MoveTurns(), list[Stream]()
    streams = [Stream(1, begun) for _ in range(5)]
    for stream in streams:
        turns.enter(stream)
    assert not begun, "not even the first before others have had their turn"
    for number in range(1, 6):
        await asyncio.sleep(0)
        assert begun == streams[:number]
    assert turns.taken_bytes == 5


async def test_the_others_wait_in_their_order_until_there_is_room() -> None:
    turns, begun = MoveTurns(10), list[Stream]()
    a, b, c, d, e = streams = [Stream(size, begun) for size in (6, 4, 5, 1, 20)]
    for stream in streams:
        turns.enter(stream)
        turns.enter(stream)
    await _turns_of_the_loop(9)
    assert begun == [a, b], "a small one does not overtake"
    turns.enter(a, is_next=True)
    turns.leave(c)
    turns.leave(b)
    await _turns_of_the_loop(9)
    assert begun == [a, b, d], "who has left the queue holds up nobody"
    turns.leave(a)
    turns.enter(b, is_next=True)
    await _turns_of_the_loop(9)
    assert begun == [a, b, d, b], "who had begun is next"
    turns.leave(d)
    turns.leave(b)
    turns.leave(b)
    await _turns_of_the_loop(9)
    assert begun[4:] == [e], "the largest one goes alone"
    assert (turns.has(e), turns.has(a), turns.taken_bytes) == (True, False, 20)
    turns.leave(e)
    assert turns.taken_bytes == 0


async def test_a_stream_counts_as_it_is_when_it_begins() -> None:
    turns, begun = MoveTurns(10), list[Stream]()
    a, b = Stream(9, begun), Stream(1, begun)
    turns.enter(a)
    turns.enter(b)
    b.body_bytes = 2
    await _turns_of_the_loop(9)
    assert begun == [a]


async def _turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
