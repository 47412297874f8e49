"""Reads what others serve over HTTP: bounded in size and time, and errors in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from proxy.config.values import USERINFO

MOST_BYTES = 8 << 20
"""Of a document; a fleet of 1,000 instances has 3 MB of `/instances`."""
MOST_VALUE = 1e18
"""A larger figure than any counter has; one that is no number is left out as well."""
READ_S = 4.0
"""Time for one document, within a tick."""


class SourceError(Exception):
    """Somebody did not answer, or not what was asked for; the text is one line."""


async def fetch(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
    allowed: tuple[int, ...] = (200,),
) -> tuple[int, bytes]:
    """The status and the body of an answer. Raises SourceError."""
    shown = shown_url(url)
    data = None if body is None else orjson.dumps(body)
    sent = {**(headers or {}), **({} if data is None else {"Content-Type": "application/json"})}
    try:
        async with (
            asyncio.timeout(READ_S),
            session.request(method, url, headers=sent, data=data, allow_redirects=False) as answer,
        ):
            found = await answer.content.read(MOST_BYTES + 1)
            while len(found) <= MOST_BYTES and (more := await answer.content.readany()):
                found += more
    except TimeoutError:
        raise SourceError(f"{method} {shown}: no answer within {READ_S:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise SourceError(f"{method} {shown}: {_first_line(error)}") from error
    if len(found) > MOST_BYTES:
        raise SourceError(f"{method} {shown}: the answer is larger than {MOST_BYTES} bytes")
    if answer.status not in allowed:
        raise SourceError(f"{method} {shown}: status {answer.status}")
    return answer.status, found


def shown_url(url: str) -> str:
    """An address without its password."""
    return USERINFO.sub("***@", url)


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0][:200]
    return "".join(c if c.isprintable() else "?" for c in text) or type(error).__name__


def samples(
    exposition: bytes, names: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Each sample of these metrics: its name, its labels, its value. Raises SourceError."""
    starts = tuple(name.encode() for name in names)
    whole = exposition.split(b"\n")[:-1]  # the last one may be cut
    lines = b"\n".join(line for line in whole if line.startswith(starts))
    try:
        for family in text_string_to_metric_families(lines.decode() + "\n"):
            for sample in family.samples:
                if sample.name in names and abs(sample.value) < MOST_VALUE:
                    yield sample.name, sample.labels, sample.value
    except ValueError as error:
        raise SourceError(f"metrics: {_first_line(error)}") from error
