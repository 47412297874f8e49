"""Requests that a web page of somebody else may have its visitor's browser send.

Some are sent as they are, without a preflight. A page whose own name now leads to this listener
(DNS rebinding) reads the answers too. So a request names the listener as no foreign page can.
"""

from __future__ import annotations

import ipaddress
import socket

from aiohttp import web

NOBODYS = ("localhost", "local", "internal", "home.arpa", "lan", "svc", "test")
"""Ends of names that the public name service cannot have."""


def foreign_origin(request: web.Request) -> str | None:
    """Why a request that changes something may be another site's; None where it cannot be."""
    host, origin = request.headers.get("Host", "").lower(), request.headers.get("Origin")
    is_change = request.method not in ("GET", "HEAD")
    if is_change and origin is not None and origin.lower().partition("://")[2] != host:
        return f"Origin: {origin[:100]!r}: cross-origin requests are refused here"
    return None


def forged_host(request: web.Request, own: tuple[str, ...], option: str) -> str | None:
    """Why a Host header may be a foreign page's; None where it cannot be.

    `own`: names of the listener beside those of the machine. `option`: closes it in another way.
    """
    host = request.headers.get("Host", "").lower()
    if _is_own(host, own):
        return None
    return (
        f"Host: {host[:100]!r} may be forged (DNS rebinding): without {option} "
        "use an address, localhost, or a name without a dot"
    )


def _is_own(host: str, given: tuple[str, ...]) -> bool:
    """Whether a Host header has an address in it, or a name that no foreign page can have.

    Without one (HTTP/1.0) no browser has sent it.
    """
    in_brackets = host.startswith("[")
    name = host[1:].partition("]")[0] if in_brackets else host.partition(":")[0].rstrip(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = (*given, socket.gethostname().lower())
        return "." not in name or name in own or name.endswith(tuple(f".{end}" for end in NOBODYS))
    return True
