"""TLS contexts in which no handshake is expensive, whatever the other side chooses.

The other side chooses how a key is agreed on, and the event loop does the arithmetic. So only
elliptic curves are offered: a finite field of 8192 bits takes 0.2 s.
"""

from __future__ import annotations

import ssl

_CIPHERS = "ECDH+AESGCM:ECDH+CHACHA20:ECDH+AES:!aNULL:!eNULL:!aDSS:!SHA1:!AESCCM"
"""Python's own list for TLS 1.2 without DHE, in which a server chooses the field."""
_GROUPS = "X25519:prime256v1:secp384r1"
_CURVE = "prime256v1"
"""The one that every side has to know (RFC 8446 9.1). Before 3.15 Python can name one only."""


def cheap(context: ssl.SSLContext) -> ssl.SSLContext:
    """The context, so changed that no handshake is expensive, and none follows the first."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    if (set_groups := getattr(context, "set_groups", None)) is not None:
        set_groups(_GROUPS)
    else:
        context.set_ecdh_curve(_CURVE)
    return context


def by_the_system() -> ssl.SSLContext:
    """The context for https instances that the system's CAs have signed. Reads files."""
    context = cheap(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.load_default_certs()
    return context
