"""The process's memory: what it may use, what it uses, and when free memory is given back."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The least memory limit of the control groups this process is in, bytes; None without one.

    `root` is where proc/ and sys/ are found. Groups above a container's own are not visible in it;
    the one at the mount's top is then its own.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return None
    limits = [limit for line in lines for limit in _limits(root / "sys/fs/cgroup", line)]
    return min(limits, default=None)


def _limits(mount: Path, line: str) -> Iterator[int]:
    """Of one line `number:controllers:path`, from its group up to the top."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if not controllers:
        top, name = mount, "memory.max"
    elif "memory" in controllers.split(","):
        top, name = mount / "memory", "memory.limit_in_bytes"
    else:
        return
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        try:
            text = top.joinpath(*parts[:depth], name).read_text("utf-8").strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < UNLIMITED:
            yield int(text)


def resident_bytes() -> int:
    """What the process has in memory now; 0 where the kernel does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text("utf-8").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
KEEP_BYTES = 256 << 20
"""Freed memory at the heap's end that is kept until `give_back`. JSON of 4 MB is parsed in a block
of twelve times its size, of which long texts touch a twelfth."""
STEP_BYTES = 16 << 20
SWITCH_S = 0.0005
GC_THRESHOLDS = (5_000, 200, 20)
"""A collection of 20,000 young objects, as 500 streams that begin make them, takes 5 ms. At 2,000
records that wait for the request log set off so many that they cost 1.6 % of all."""


def keep_big_blocks() -> None:
    """Have glibc reuse a prompt's buffers instead of giving them back to the kernel each time.

    By default every body above 128 KiB costs a mapping and a page fault per 4 KiB, several times
    over, and above 32 MiB whatever its threshold is; so nothing is mapped alone. All threads share
    one heap: what a prompt that was read in a thread has left there, the event loop could not use,
    nor the other way round. `give_back` is the other half: it is called every few seconds. Called
    before the first thread is started. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
    mallopt(M_ARENA_MAX, 1)


def share_the_interpreter() -> None:
    """Let the event loop wait for another thread's Python code no longer than `SWITCH_S`."""
    sys.setswitchinterval(SWITCH_S)


def collect_rarely() -> None:
    """Leave what was loaded at start out of every collection, and collect less often.

    A request leaves no cycles behind; what little appears elsewhere can wait.
    """
    gc.collect()
    give_back()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def give_back() -> None:
    """What is free anywhere in the heap goes back to the kernel, where glibc can.

    Meanwhile no thread gets memory: some 0.1 ms per MB. So what is free at the heap's end, where
    most of a burst is, goes in steps; what is free between other blocks goes in one. The next giant
    prompt pays for every page again.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for kept in range(_free_at_end(libc) - STEP_BYTES, 0, -STEP_BYTES):
            libc.malloc_trim(ctypes.c_size_t(kept))
        libc.malloc_trim(ctypes.c_size_t(0))


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(9)] + [("keepcost", ctypes.c_size_t)]


def _free_at_end(libc: ctypes.CDLL) -> int:
    """Bytes; 0 where glibc is older than 2.33."""
    try:
        look = libc.mallinfo2
    except AttributeError:
        return 0
    look.restype = _Heap
    return int(look().keepcost)
