"""The tenant of a request by its key, with its headers and cache salt for an instance.

A tenant is the name of the key that a request was authenticated with, never a client's own claim.
Keys are stored as digests; the time of a look-up by digest does not show how near a guess was.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from multidict import CIMultiDictProxy

from proxy.config.options import Settings
from proxy.config.secrets import SecretStr, digest, tenants_in
from proxy.protocol.errors import UnauthorizedError
from proxy.protocol.headers import CREDENTIALS
from proxy.protocol.names.trace_parent import TRACE_HEADERS

_NEEDED = "a key is needed: Authorization: Bearer KEY"
_UNKNOWN = "the key is not known"


@dataclass(frozen=True, slots=True)
class Grant:
    """Changes to one tenant's requests before an instance gets them."""

    tenant: str | None = None
    hidden: frozenset[bytes] = frozenset()
    """Header names (lower case) to remove."""
    salt: str | None = None
    """The `cache_salt` of the body."""
    salted_paths: frozenset[str] = frozenset()
    """Paths where engines read it, beside those whose row says so."""


class Access:
    """The keys of the options in force, by digest; `on_denied` counts refused requests.

    A tenant's grant is made for its first request, so other keys cost nothing to `use`.
    """

    def __init__(self, settings: Settings, on_denied: Callable[[], None] = lambda: None) -> None:
        self._on_denied = on_denied
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Replace the known keys."""
        # A traced request's legs name their own parents.
        self._traced: frozenset[bytes] = TRACE_HEADERS if settings.otlp_endpoint else frozenset()
        own = frozenset() if settings.instance_api_key is None else CREDENTIALS
        self._open = Grant(None, own | self._traced)
        self._tenants = tenants_in(settings.api_key)
        self._salts_with = settings.cache_salt_secret
        self._salted_paths = frozenset(settings.salted_paths)
        self._grants: dict[str, Grant] = {}

    def grant(self, headers: CIMultiDictProxy[str]) -> Grant:
        """The grant of a request's key; raises UnauthorizedError."""
        if not self._tenants:
            return self._open
        try:
            tenant = self._tenants.get(digest(_key(headers)))
            if tenant is None:
                raise UnauthorizedError(_UNKNOWN)
        except UnauthorizedError:
            self._on_denied()
            raise
        found = self._grants.get(tenant)
        return self._first(tenant) if found is None else found

    def _first(self, tenant: str) -> Grant:
        """A tenant's grant, made and kept."""
        secret, salt = self._salts_with, None
        if secret is not None:
            salt = salt_of(secret.get_secret_value().encode(), tenant)
        made = Grant(tenant, CREDENTIALS | self._traced, salt, self._salted_paths)
        self._grants[tenant] = made
        return made


def _key(headers: CIMultiDictProxy[str]) -> bytes:
    given: Sequence[str] = headers.getall("Authorization", ())
    if given:
        scheme, _, key = given[0].partition(" ")
        if len(given) > 1 or scheme.lower() != "bearer":
            raise UnauthorizedError(_NEEDED)
    else:
        given = headers.getall("x-api-key", ())
        if len(given) != 1:
            raise UnauthorizedError(_NEEDED)
        key = given[0]
    return key.strip().encode("utf-8", "surrogateescape")


def bearer(secret: SecretStr | None) -> bytes:
    """The Authorization header line for an instance; empty without a key."""
    if secret is None:
        return b""
    return f"Authorization: Bearer {secret.get_secret_value().strip()}\r\n".encode()


def salt_of(secret: bytes, tenant: str) -> str:
    """base64url(HMAC-SHA256(secret, tenant)) without padding: 43 characters, which vLLM accepts."""
    mac = hmac.new(secret, tenant.encode(), sha256).digest()
    return urlsafe_b64encode(mac).rstrip(b"=").decode()
