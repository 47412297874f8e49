"""Who asks, and what that means for the way to an instance: tenant, headers, cache salt.

A tenant is the name of the key that a request was authenticated with, never something that a
client says of itself. Keys are known by their digests; a look-up by digest takes a time that says
nothing of how near a guess was.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from multidict import CIMultiDictProxy

from proxy.config.options import Settings
from proxy.config.secrets import SecretStr, digest, tenants_of
from proxy.protocol.errors import UnauthorizedError

SALT = "cache_salt"
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_NEEDED = "a key is needed: Authorization: Bearer KEY"
_UNKNOWN = "the key is not known"


@dataclass(frozen=True, slots=True)
class Grant:
    """What one tenant's requests get on their way.

    `hidden`: header names (lower case) that do not go on. `added`: header lines that do. `salt`:
    the `cache_salt` of its bodies.
    """

    tenant: str | None = None
    hidden: frozenset[bytes] = frozenset()
    added: bytes = b""
    salt: str | None = None


class Access:
    """The keys of the options in force, ready to be looked up; `on_denied` counts the others."""

    def __init__(self, settings: Settings, on_denied: Callable[[], None] = lambda: None) -> None:
        self._on_denied = on_denied
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """From now on these keys are known."""
        added = bearer(settings.instance_api_key)
        self._open = Grant(None, _CREDENTIALS if added else frozenset(), added)
        self._by_digest: dict[bytes, Grant] = {}
        if settings.api_key is None:
            return
        secret = settings.cache_salt_secret
        for key, tenant in tenants_of(settings.api_key.get_secret_value()).items():
            salt = None if secret is None else salt_of(secret.get_secret_value().encode(), tenant)
            self._by_digest[key] = Grant(tenant, _CREDENTIALS, added, salt)

    def grant(self, headers: CIMultiDictProxy[str]) -> Grant:
        """What this request gets; raises UnauthorizedError."""
        if not self._by_digest:
            return self._open
        try:
            found = self._by_digest.get(digest(_key(headers)))
            if found is None:
                raise UnauthorizedError(_UNKNOWN)
        except UnauthorizedError:
            self._on_denied()
            raise
        return found


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
    """The header line that shows a key to an instance; nothing without one."""
    if secret is None:
        return b""
    return f"Authorization: Bearer {secret.get_secret_value().strip()}\r\n".encode()


def salt_of(secret: bytes, tenant: str) -> str:
    """base64url(HMAC-SHA256(secret, tenant)) without padding: 43 characters that vLLM takes."""
    mac = hmac.new(secret, tenant.encode(), sha256).digest()
    return urlsafe_b64encode(mac).rstrip(b"=").decode()
