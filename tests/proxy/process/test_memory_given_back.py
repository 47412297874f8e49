"""What a burst has left in the heap: kept for the next one, until it is given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BURST = """
import threading
from proxy.process.memory import resident_bytes
from proxy.process.memory import give_back, keep_big_blocks

keep_big_blocks()
kept = []

def burst():
    bodies = []
    for _ in range(24):
        bodies.append(b"x" * (1 << 20))
        kept.append(bytes(700))  # small blocks that stay, between the big ones

def in_thread():
    thread = threading.Thread(target=burst)
    thread.start()
    thread.join()

start = resident_bytes()
in_thread()
once = resident_bytes()
burst()
twice = resident_bytes()
give_back()
print(once - start, twice - once, resident_bytes() - start)
"""

END = """
from proxy.process.memory import resident_bytes
from proxy.process.memory import give_back, keep_big_blocks

keep_big_blocks()
start = resident_bytes()
bodies = [b"x" * (1 << 20) for _ in range(100)]
bodies.clear()
kept = resident_bytes()
give_back()
print(kept - start, resident_bytes() - start)
"""

GIANT = """
from resource import RUSAGE_SELF, getrusage
import orjson
from proxy.process.memory import keep_big_blocks

def parse():
    before = getrusage(RUSAGE_SELF).ru_minflt
    orjson.loads(body)
    return getrusage(RUSAGE_SELF).ru_minflt - before

keep_big_blocks()
body = orjson.dumps({"messages": ["x" * 1000] * 4000})
print(parse(), parse(), parse())
"""
is_glibc = platform.libc_ver()[0] == "glibc"


@pytest.mark.skipif(not is_glibc, reason="the allocator is glibc's")
def test_a_giant_body_is_parsed_where_the_last_one_was() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", GIANT], capture_output=True, text=True, check=True
    )
    first, *later = map(int, run.stdout.split())
    assert first > 900 > 100 > max(later), "page faults"


@pytest.mark.skipif(not is_glibc, reason="the allocator is glibc's")
def test_big_blocks_are_used_again_by_any_thread_and_given_back_when_asked() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", BURST], capture_output=True, text=True, check=True
    )
    once, more, left = (int(word) / (1 << 20) for word in run.stdout.split())
    assert once > 20, "a process that frees them keeps them"
    assert more < 8, "the next burst needs little more, though it is another thread's"
    assert left < 8


@pytest.mark.skipif(not is_glibc, reason="the allocator is glibc's")
def test_what_is_free_at_the_end_of_the_heap_goes_in_steps_and_wholly() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", END], capture_output=True, text=True, check=True
    )
    kept, left = (int(word) / (1 << 20) for word in run.stdout.split())
    assert kept > 90
    assert left < 8
