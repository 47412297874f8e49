"""The snapshot of a hot restart: sessions' homes, cached prefixes, learned times, orders.

Without it every session would lose its home, engines would compute again what they hold, and the
first decisions would use the options in place of measured times. It is an unnamed file of JSON
lines, written when the successor starts:

    {"form": 4, "seed": of hashes, "bytes_per_token": {model: ratio}, "fence": of `access_changes`,
     "members": of `Membership.of_operators`}
    {"instance": name, "url": ..., "start_s": ..., "runs": [[block hash, ...], ...], "times": ...}
    {"sessions": [[id, instance, turn, used_s, tokens, form of its prompts], ...]}
    {"responses": [[key, instance, used_s], ...]}
    {"orders": [[instance, *StandingOrder.row], ...], "version": of the last one}

The oldest runs and the longest idle sessions and responses come first; `used_s` is read from the
clock that all processes of a machine share. A file of another form is ignored, and so is an
instance with another address.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO

import orjson

from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.sessions import nobody
from proxy.core.thermal.fleet_control import FleetControl
from proxy.protocol.prompt.facts import SEED_BYTES, hash_seed, seed_hashes

FORM = 4
"""Version of the file's form; to be changed when block hashes or rows change their meaning."""
ROWS_PER_LINE = 2000
"""Rows made without a pause; the event loop waits about a millisecond for them."""
_log = logging.getLogger(__name__)


async def leave(
    known: FleetState,
    heat: FleetControl,
    fence: Mapping[str, Any] | None = None,
    members: Mapping[str, Any] | None = None,
) -> BinaryIO:
    """Write the snapshot and return the file, at its beginning; OSError if there is no room.

    `fence`: what the successor may not open. `members`: what operators changed of the fleet.
    """
    lines = known.snapshot(ROWS_PER_LINE)
    with ExitStack() as unless_whole:
        file = unless_whole.enter_context(await asyncio.to_thread(_unnamed))
        head = {"form": FORM, "seed": hash_seed(), "fence": fence or {}, "members": members or {}}
        head |= next(lines)
        await asyncio.to_thread(_write, file, head)
        await asyncio.to_thread(_write, file, _orders(heat))
        for line in lines:
            await asyncio.to_thread(_write, file, line)
        await asyncio.to_thread(file.seek, 0)
        unless_whole.pop_all()
    return file


def members_in(file: BinaryIO) -> dict[str, list[str]]:
    """What operators had changed of the fleet; empty where the file is of another form."""
    try:
        head = orjson.loads(file.readline())
        told = head["members"] if head["form"] == FORM else {}
        return {key: list(map(str, told.get(key, ()))) for key in ("added", "gone")}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}  # `take` says why
    finally:
        file.seek(0)


def _orders(heat: FleetControl) -> dict[str, Any]:
    return {"orders": heat.order_rows(), "version": heat.version}


def _unnamed() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("snapshot"), "w+b")
    return tempfile.TemporaryFile()


def _write(file: BinaryIO, line: dict[str, Any]) -> None:
    file.write(orjson.dumps(line) + b"\n")
    file.flush()


def take(
    known: FleetState,
    heat: FleetControl,
    file: BinaryIO,
    now_s: float,
    tenant_of: Callable[[str], str] = nobody,
    seed: int | None = None,
) -> dict[str, Any]:
    """Read a predecessor's snapshot; call it before the first probe of the instances.

    Returns its `fence`, also where nothing else in it can be used; empty without one.

    `tenant_of`: whose session or response has this key. `seed`: that hashes have to begin with, if
    it is not the predecessor's to say; what was hashed with another is of no use.
    """
    fence: dict[str, Any] = {}
    try:
        with file:
            lines = [orjson.loads(line) for line in file]
        if not lines or lines[0]["form"] != FORM:
            raise ValueError("another form")
        fence = lines[0].get("fence", fence)
        theirs = int(lines[0]["seed"]) % (1 << 8 * SEED_BYTES)
        if seed is None:
            seed_hashes(theirs)
        elif seed != theirs:
            lines = [line | {"runs": []} if "runs" in line else line for line in lines]
        kept = known.adopt(lines, tenant_of)
        for line in lines[1:]:
            if "orders" in line:
                orders = [row for row in line["orders"] if row[0] in kept]
                heat.adopt_orders(orders, int(line["version"]), now_s)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        _log.warning("hot restart: the predecessor's snapshot is not used: %r", error)
        return fence
    counts = len(known.sessions), known.prefixes.total_blocks
    _log.info("hot restart: %d sessions and %d blocks taken over", *counts)
    return fence
