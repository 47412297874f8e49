"""The snapshot of a hot restart: sessions' homes, cached prefixes, learned times, orders.

Without it every session would lose its home, engines would compute again what they hold, and the
first decisions would use the options in place of measured times. It is an unnamed file of JSON
lines, written when the successor starts:

    {"form": 1, "bytes_per_token": {model: ratio}}
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
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from typing import Any, BinaryIO

import orjson

from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.sessions import nobody
from proxy.core.thermal.fleet_control import FleetControl

FORM = 3
"""Version of the file's form; to be changed when block hashes or rows change their meaning."""
ROWS_PER_LINE = 2000
"""Rows made without a pause; the event loop waits about a millisecond for them."""
_log = logging.getLogger(__name__)


async def leave(known: FleetState, heat: FleetControl) -> BinaryIO:
    """Write the snapshot and return the file, at its beginning; OSError if there is no room."""
    head = {"form": FORM, "bytes_per_token": known.bytes_per_token.all()}
    with ExitStack() as unless_whole:
        file = unless_whole.enter_context(await asyncio.to_thread(_unnamed))
        await asyncio.to_thread(_write, file, head)
        await asyncio.to_thread(_write, file, _orders(heat))
        for member in known.fleet.members():
            name = member.instance.name
            line: dict[str, Any] = {"instance": name, "url": member.instance.url}
            line |= {"start_s": member.state.start_s}
            line |= {"runs": member.state.cache.runs.rows()}
            line |= {"times": known.latency.legacy(name)}
            await asyncio.to_thread(_write, file, line)
        for key, rows in (
            ("sessions", known.sessions.rows()),
            ("responses", known.responses.rows()),
        ):
            while some := await asyncio.to_thread(list, islice(rows, ROWS_PER_LINE)):
                await asyncio.to_thread(_write, file, {key: some})
        await asyncio.to_thread(file.seek, 0)
        unless_whole.pop_all()
    return file


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
) -> None:
    """Read a predecessor's snapshot; call it before the first probe of the instances.

    `tenant_of`: whose session or response has this key.
    """
    try:
        with file:
            lines = [orjson.loads(line) for line in file]
        if not lines or lines[0]["form"] != FORM:
            raise ValueError("another form")
        for model, ratio in lines[0]["bytes_per_token"].items():
            if isinstance(ratio, int | float):
                known.bytes_per_token.adopt(str(model), ratio)
        sessions = [row for line in lines[1:] for row in line.get("sessions", ())]
        # What was cached is taken to be used as lately as the last session: it keeps no times.
        known.prefixes.now_s = max([row[3] for row in sessions], default=0.0)
        kept = {line["instance"] for line in lines[1:] if _take_instance(known, line)}
        rows = [row for row in sessions if row[1] in kept]
        known.sessions.adopt(
            [
                (s, known.fleet.states[home].cache, *use, None if form is None else tuple(form))
                for s, home, *use, form in rows
            ],
            tenant_of,
        )
        for line in reversed(lines[1:]):  # the first line has those that were unused longest
            held = [row for row in line.get("responses", ()) if row[1] in kept]
            found = [(k, known.fleet.states[at].cache, s) for k, at, s in held]
            known.responses.adopt(found, tenant_of)
            if "orders" in line:
                orders = [row for row in line["orders"] if row[0] in kept]
                heat.adopt_orders(orders, int(line["version"]), now_s)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        _log.warning("hot restart: the predecessor's snapshot is not used: %r", error)
        return
    counts = len(known.sessions), known.prefixes.total_blocks
    _log.info("hot restart: %d sessions and %d blocks taken over", *counts)


def _take_instance(known: FleetState, line: dict[str, Any]) -> bool:
    """Read the line of an instance; False if this process does not know it at the same address.

    Whether the engine is still the same process is found out later by its start time
    (`InstanceEvents.observe_start`).
    """
    member = known.fleet.get(line.get("instance", ""))
    if member is None or member.instance.url != line["url"]:
        return False
    member.state.start_s = line["start_s"]
    known.prefixes.adopt(member.state.cache, line["runs"])
    if times := line.get("times"):
        known.latency.adopt(member.instance.name, times)
    return True
