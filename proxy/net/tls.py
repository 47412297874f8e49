"""TLS contexts for clients, instances and other servers, from options; TLS 1.2 or newer.

A context is never changed once it is in use: new certificates make a new context, for later
connections.
"""

from __future__ import annotations

import ssl
from enum import StrEnum
from pathlib import Path

from proxy.config.options import Settings
from proxy.config.regular_files import read_regular
from proxy.config.sources import ConfigError
from proxy.net.cheap_tls import by_the_system, cheap


class HandshakeEnd(StrEnum):
    """Why a TLS handshake was not finished: the label of a metric."""

    LATE = "late"
    """The client did not finish the handshake in time."""
    DISPLACED = "displaced"
    """A newer handshake needed its place."""
    FAILED = "failed"
    """The handshake broke off, or the two sides share no protocol or cipher."""


def for_clients(settings: Settings) -> ssl.SSLContext | None:
    """The listeners' context; None: plain HTTP. Raises ConfigError. Reads files."""
    if settings.tls_cert is None:
        return None
    context = cheap(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.set_alpn_protocols(["http/1.1"])
    _show(context, "tls_cert", settings.tls_cert, settings.tls_key)
    if settings.tls_client_ca is not None:
        _trust(context, "tls_client_ca", settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # OpenSSL keeps 20,480 sessions of TLS 1.2, each with all certificates that its client has
        # shown: up to 220 KiB, which nobody counts. Those of TLS 1.3 are kept by clients.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def for_instances(settings: Settings) -> ssl.SSLContext:
    """The context for https instances: verified, with their names. Raises ConfigError."""
    return for_servers(
        "instance", settings.instance_ca, settings.instance_cert, settings.instance_key
    )


def for_servers(kind: str, ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """The context for https servers of a kind, whose options begin with its name.

    They are verified, with their names. Raises ConfigError. Reads files.
    """
    if ca is None:
        context = by_the_system()
    else:
        context = cheap(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        _trust(context, f"{kind}_ca", ca)
    if cert is not None:
        _show(context, f"{kind}_cert", cert, key)
    return context


def own_for_instances(settings: Settings) -> ssl.SSLContext | None:
    """The context for instances, by the options; None: made for the first https instance."""
    own = (settings.instance_ca, settings.instance_cert)
    return for_instances(settings) if any(own) else None


def _show(context: ssl.SSLContext, name: str, cert: Path, key: Path | None) -> None:
    try:
        for path in filter(None, (cert, key)):
            read_regular(path)  # OpenSSL would wait for a FIFO's other side
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        beside = f" with {name.replace('cert', 'key')} = '{key}'" if key else ""
        raise ConfigError(f"{name} = '{cert}'{beside}: {_plain(error)}") from error


def _trust(context: ssl.SSLContext, name: str, path: Path) -> None:
    try:
        read_regular(path)
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} = '{path}': {_plain(error)}") from error


def _no_password() -> str:
    """Without this, an encrypted key would ask for its password at the terminal."""
    raise ValueError("the key is encrypted")


def _plain(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a PEM file of the kind, or not its key ({error.reason or 'no PEM in it'})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
