"""What all connections to instances share: TLS, the key they are shown, names to addresses."""

from __future__ import annotations

import ssl

from proxy.resolve import Resolver


class Ways:
    """Of one process; changed by a reload, for the connections and probes that come after.

    `auth`: a header line for the proxy's own questions, where instances want a key.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, auth: bytes = b"") -> None:
        self._tls = tls
        self.auth = auth
        self.resolver = Resolver()

    @property
    def tls(self) -> ssl.SSLContext:
        """For https instances; the system's CAs where no other was given."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def change(self, tls: ssl.SSLContext | None, auth: bytes) -> None:
        """From now on."""
        self._tls, self.auth = tls, auth
