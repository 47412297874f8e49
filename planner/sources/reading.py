"""Reads what others serve over HTTP: bounded in size and time, and errors in one line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from proxy.config.values import USERINFO
from proxy.net.peer_documents import Sample, in_turns, sample_of, wanted_lines
from replayer.answers import MOST_BYTES, MOST_VALUE, body_of

PROXY_TIMES = 64
"""A proxy's metrics may have so many times the lines of an engine's: it tells of a whole fleet."""
READ_S = 4.0
"""Time for one document, within a tick."""


class SourceError(Exception):
    """Somebody did not answer, or not what was asked for; the text is one line."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which answers are read: their statuses, and the bytes of their body."""

    statuses: tuple[int, ...] = (200,)
    most_bytes: int = MOST_BYTES


ANY = Wanted()


async def fetch(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
    wanted: Wanted = ANY,
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
            found = await body_of(answer, wanted.most_bytes)
    except TimeoutError:
        raise SourceError(f"{method} {shown}: no answer within {READ_S:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise SourceError(f"{method} {shown}: {_first_line(error)}") from error
    if len(found) > wanted.most_bytes:
        most = wanted.most_bytes
        raise SourceError(f"{method} {shown}: the answer is larger than {most} bytes")
    if answer.status not in wanted.statuses:
        raise SourceError(f"{method} {shown}: status {answer.status}")
    return answer.status, found


def shown_url(url: str) -> str:
    """An address without its password."""
    return USERINFO.sub("***@", url)


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0][:200]
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "")
        text = f"its certificate is not trusted: {why}"
    elif isinstance(error, aiohttp.ClientConnectorSSLError):
        text = f"no TLS: {error.strerror}"
    elif isinstance(error, aiohttp.ClientConnectorError):
        number, said = error.os_error.errno or 0, error.os_error.strerror  # a name's is negative
        text = f"cannot connect: {os.strerror(number) if number > 0 else said or 'no address'}"
    return "".join(c if c.isprintable() else "?" for c in text) or type(error).__name__


async def samples(exposition: bytes, names: tuple[str, ...], times: int = 1) -> list[Sample]:
    """Each sample of these metrics, read in turns; what is no sample is left out.

    `times`: so often the limits of an engine's document.
    """
    return await in_turns(_samples(exposition, names, times))


def _samples(
    exposition: bytes, names: tuple[str, ...], times: int
) -> Generator[None, None, list[Sample]]:
    found, starts = [], tuple(name.encode() for name in names)
    for line in wanted_lines(exposition, starts, times):
        if line is None:
            yield
        elif (
            (sample := sample_of(line))
            and sample.name in names
            and 0.0 <= sample.value < MOST_VALUE
        ):
            found.append(sample)
    return found
