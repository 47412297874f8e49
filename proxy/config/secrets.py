"""Secrets among the options, given as text or as `@/path` of a file.

Of client keys (`tenant:key`, or `key` alone with its fingerprint as the tenant) only digests are
kept.
"""

from __future__ import annotations

import ipaddress
import re
from hashlib import sha256

from proxy.config.regular_files import read_regular

KEYS_FORM = "[tenant:]key, several with commas, or @FILE with one per line"
SECRET_FILE_BYTES = 1 << 20
"""Of a larger file nothing is read: the rest of a key that was cut would be a key."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_BUS = re.compile(r"rediss?://[!-~]{1,1024}|unix://[!-~]{1,1024}")
_LINE = re.compile(r"[\x20-\x7e]+")
_SLIP = re.compile(_TENANT.pattern + "=+[^=].*")
"""Such an entry is one key, and seems meant as a tenant and its key. Base64 has its = last."""
SLIPS_NAMED = 5
KEY_CHARS = 16
"""A key of fewer characters can be guessed, or may be what is left of one that was cut. A
fingerprint shows the first four characters of any other."""


class SecretStr:
    """A text that does not print: only `get_secret_value` returns it.

    `tenants`: what `tenants_in` has read in it; None before.
    """

    __slots__ = ("_text", "tenants")

    def __init__(self, text: str | SecretStr) -> None:
        if not isinstance(text, str | SecretStr):
            raise TypeError("not a text")
        self._text: str = text if isinstance(text, str) else text._text
        self.tenants: dict[bytes, str] | None = None if isinstance(text, str) else text.tenants

    def get_secret_value(self) -> str:
        """The text."""
        return self._text

    def __str__(self) -> str:
        return "**********"

    def __repr__(self) -> str:
        return f"SecretStr('{self}')"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretStr) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


def secret_text(value: object) -> object:
    """The text of an option, or of the file that it names; its ValueError has no path in it."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if not isinstance(text, str):
        return value
    if text.startswith("@"):
        text = _of_file(text[1:])
    if not text.strip():
        raise ValueError("it is empty")
    return text


def _of_file(path: str) -> str:
    try:
        return read_regular(path, SECRET_FILE_BYTES).decode().strip()
    except OSError as error:
        raise ValueError(f"cannot read the file it names: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError("the file it names is not text") from error


def long_enough(secret: SecretStr | None) -> SecretStr | None:
    """The secret; raises ValueError if it has fewer than 16 bytes."""
    if secret is not None and len(secret.get_secret_value().encode()) < 16:
        raise ValueError("it is shorter than 16 bytes")
    return secret


def bus_url(secret: SecretStr | None) -> SecretStr | None:
    """The secret; raises ValueError if it is not a URL of a Redis or Valkey server."""
    if secret is not None and not _BUS.fullmatch(secret.get_secret_value()):
        raise ValueError("it is not redis://host:port, rediss://host:port or unix:///path")
    return secret


def sendable(secret: SecretStr | None) -> SecretStr | None:
    """The secret; raises ValueError if it is not a single line that a header can have."""
    if secret is not None and not _LINE.fullmatch(secret.get_secret_value().strip()):
        raise ValueError("it is not one line of printable ASCII")
    return secret


def checked_keys(secret: SecretStr | None) -> SecretStr | None:
    """The keys unchanged; raises ValueError if `tenants_of` cannot read them."""
    tenants_in(secret)
    return secret


def tenants_in(secret: SecretStr | None) -> dict[bytes, str]:
    """The keys of an option as `tenants_of` has them, read once; do not change them."""
    if secret is None:
        return {}
    if secret.tenants is None:
        secret.tenants = tenants_of(secret.get_secret_value())
    return secret.tenants


def tenants_of(text: str) -> dict[bytes, str]:
    """SHA-256 of each key to its tenant; a ValueError names the wrong entry by number only.

    Commas or line ends separate entries; empty ones and lines that begin with # are skipped.
    """
    found: dict[bytes, str] = {}
    for at, entry in enumerate(entries_of(text), 1):
        tenant, colon, key = entry.partition(":")
        if not colon:
            tenant, key = fingerprint(entry), entry
        if not _KEY.fullmatch(key):
            raise ValueError(f"key {at} is empty, too long, or has other characters than ASCII")
        if not _TENANT.fullmatch(tenant):
            raise ValueError(
                f"the tenant of key {at} has other characters than letters, digits .-_"
            )
        if found.setdefault(digest(key.encode()), tenant) != tenant:
            raise ValueError(f"key {at} is given to two tenants")
    if not found:
        raise ValueError("there is no key in it")
    return found


def entries_of(text: str) -> list[str]:
    """The entries of `tenants_of` as they are written."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [e.strip() for line in lines for e in line.split(",") if e.strip()]


def slips_in(secret: SecretStr | None) -> str | None:
    """Which keys have the form `tenant=key`, in words by their numbers; None without any."""
    entries = [] if secret is None else entries_of(secret.get_secret_value())
    found = [str(at) for at, entry in enumerate(entries, 1) if _SLIP.fullmatch(entry)]
    if not found:
        return None
    more = f" and {len(found) - SLIPS_NAMED} more" if len(found) > SLIPS_NAMED else ""
    which = ", ".join(found[:SLIPS_NAMED]) + more
    return f"api_key: key {which}: a tenant ends with a colon; with = the whole text is the key"


def key_of(entry: str) -> str:
    """The key of an entry, without its tenant."""
    _tenant, colon, key = entry.partition(":")
    return key if colon else entry


def digest(key: bytes) -> bytes:
    """The stored form of a key. The time of a look-up does not show how near a guess was."""
    return sha256(key).digest()


def fingerprint(key: str) -> str:
    """A key's name in logs: 8 digits of its digest, after its first 4 letters if it is long."""
    short = digest(key.encode()).hex()[:8]
    shown = re.sub(r"[^A-Za-z0-9]", "", key[:4]) if len(key) >= KEY_CHARS else ""
    return f"{shown}-{short}" if shown else f"key-{short}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
