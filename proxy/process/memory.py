"""The process's memory: its limit, its use, and the return of free memory to the kernel."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63; a limit from here on is ignored."""


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The lowest memory limit of this process's control groups, in bytes; None without one.

    `root` is where proc/ and sys/ are found. Groups above a container's own are not visible in it;
    the group at the mount's top is then its own.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return None
    limits = [limit for line in lines for limit in _limits(root / "sys/fs/cgroup", line)]
    return min(limits, default=None)


def _limits(mount: Path, line: str) -> Iterator[int]:
    """The limits of a line `number:controllers:path`, from its group up to the top."""
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
    """The process's resident memory; 0 where the kernel does not report it."""
    try:
        pages = Path("/proc/self/statm").read_text("utf-8").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
KEEP_BYTES = 256 << 20
"""Freed memory kept at the heap's end until `give_back`. JSON of 4 MB is parsed in a block of
twelve times its size, of which long texts use a twelfth."""
STEP_BYTES = 16 << 20
SWITCH_S = 0.0005
GC_THRESHOLDS = (5_000, 200, 20)
"""Allocations before a collection. A collection of the 20,000 young objects that 500 new streams
make takes 5 ms. At a threshold of 2,000, records that wait for the request log would cause so many
collections that they took 1.6 % of the CPU time."""


def keep_big_blocks() -> None:
    """Make glibc reuse a prompt's buffers instead of returning them to the kernel each time.

    By default every body above 128 KiB costs a mapping and a page fault per 4 KiB, several times
    over. Above 32 MiB the threshold does not help. So no block gets its own mapping. All threads
    share one heap. Otherwise the event loop could not reuse memory that a thread freed after
    reading a prompt, nor the reverse. `give_back` is called every few seconds in return. Call this
    before the first thread starts. Without glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
    mallopt(M_ARENA_MAX, 1)


def share_the_interpreter() -> None:
    """Make the event loop wait for another thread's Python code no longer than `SWITCH_S`."""
    sys.setswitchinterval(SWITCH_S)


def collect_rarely() -> None:
    """Exclude objects made at start from collections, and collect less often.

    A request leaves no cycles behind; the few cycles that other code makes can wait.
    """
    gc.collect()
    give_back()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def give_back() -> None:
    """Return all free memory of the heap to the kernel, if glibc can.

    No thread can allocate meanwhile, for some 0.1 ms per MB. So the free memory at the heap's end,
    which is most of a burst's, is returned in steps. Free memory between blocks is returned at
    once. The next giant prompt has to fault every page in again.
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
    """Free bytes at the heap's end; 0 with a glibc older than 2.33."""
    try:
        look = libc.mallinfo2
    except AttributeError:
        return 0
    look.restype = _Heap
    return int(look().keepcost)
