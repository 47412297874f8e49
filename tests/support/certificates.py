"""A CA of its own and what it signs, as files."""

from __future__ import annotations

import ssl
from datetime import datetime
from pathlib import Path

import trustme


class Certificates:
    """A CA and what it signs, as files."""

    def __init__(self, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self._home = home
        self._ca = trustme.CA()
        self.ca = home / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def leaf(
        self, name: str, *identities: str, not_after: datetime | None = None
    ) -> tuple[Path, Path]:
        made = self._ca.issue_cert(*identities, not_after=not_after)
        cert, key = self._home / f"{name}.pem", self._home / f"{name}.key"
        cert.write_bytes(b"".join(p.bytes() for p in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        return cert, key

    def server(
        self, *identities: str, wants: Path | None = None, not_after: datetime | None = None
    ) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=wants)
        context.load_cert_chain(*self.leaf("server", *identities, not_after=not_after))
        if wants is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, leaf: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if leaf is not None:
            context.load_cert_chain(*leaf)
        return context
