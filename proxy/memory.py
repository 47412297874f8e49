"""The process's memory: what it may use, and what it uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
