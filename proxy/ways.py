"""What all connections to instances share: TLS, the key they are shown, names to addresses."""

from __future__ import annotations

import asyncio
import ssl

from proxy.net.addresses import Resolver


class Ways:
    """Of one process; changed by a reload, for the connections and probes that come after.

    `auth`: a header line for the proxy's own questions, where instances want a key.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, auth: bytes = b"") -> None:
        self._tls = tls
        self.auth = auth
        self.resolver = Resolver()

    async def tls(self) -> ssl.SSLContext:
        """For https instances; the system's CAs where no other was given.

        Those are read in a thread, once: it takes some 20 ms.
        """
        if self._tls is None:
            return await self._read()
        return self._tls

    async def _read(self) -> ssl.SSLContext:
        made = await asyncio.to_thread(ssl.create_default_context)
        if self._tls is None:  # a reload may have brought another one meanwhile
            self._tls = made
        return self._tls

    def change(self, tls: ssl.SSLContext | None, auth: bytes) -> None:
        """From now on."""
        self._tls, self.auth = tls, auth
