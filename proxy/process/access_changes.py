"""Changes of access by a reload: it opens nothing, and logs every change.

A file that was cut reads like a shorter one, and a line that is missing means the default, which is
open for most of what closes. So options that are read while the process serves open nothing that
was closed, and take no key that may be the rest of one. A process that is restarted takes what it
is given, and says what is open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from proxy.config.options import Settings
from proxy.config.secrets import (
    KEY_CHARS,
    SecretStr,
    entries_of,
    is_loopback,
    key_of,
    tenants_of,
)
from proxy.config.sources import ConfigError

SECRETS: Final = (
    *("admin_token", "api_key", "cache_salt_secret"),
    *("instance_api_key", "thermal_token"),
)
FILES: Final = ("tls_cert", "tls_client_ca", "instance_ca")
LISTS: Final = ("extra_paths", "cors_allowed_origins", "salted_paths", "allow_cidr")
"""Options that let in what they name."""
LISTED_MOST: Final = 5


def refuse_opening(old: Settings, new: Settings) -> None:
    """Raise ConfigError if other options would open what is closed, or have a part of a key."""
    closed_by = (*SECRETS, *FILES, "admin_port")
    gone = [n for n in closed_by if getattr(old, n) is not None and getattr(new, n) is None]
    if gone:
        raise ConfigError(
            f"{', '.join(gone)} would become none, which opens access; if the file is complete, "
            "stop the process and start it"
        )
    for name in ("host", "admin_host"):
        if is_loopback(getattr(old, name)) and not is_loopback(getattr(new, name)):
            raise ConfigError(
                f"{name} would become {getattr(new, name)}, which other machines can reach; "
                "stop the process and start it"
            )
    for name in SECRETS:
        _refuse_parts(name, _entries(name, old), _entries(name, new))


def _entries(name: str, settings: Settings) -> list[str]:
    """The secrets of an option, each as it is written; those of clients with their tenants."""
    secret: SecretStr | None = getattr(settings, name)
    if secret is None:
        return []
    text = secret.get_secret_value()
    return entries_of(text) if name == "api_key" else [text.strip()]


def _refuse_parts(name: str, old: list[str], new: list[str]) -> None:
    """Raise ConfigError if a secret that was not there before is the beginning of one, or short."""
    known, is_short_refused = set(old), name in ("api_key", "admin_token")
    for at, entry in enumerate(new, 1):
        if entry in known:
            continue
        which = f"key {at}" if name == "api_key" else "it"
        if any(whole.startswith(entry) for whole in old):
            raise ConfigError(f"{name}: {which} is the start of an earlier one, as if cut")
        if is_short_refused and len(key_of(entry) if name == "api_key" else entry) < KEY_CHARS:
            raise ConfigError(f"{name}: {which} is new and shorter than {KEY_CHARS} characters")


def changes(old: Settings, new: Settings) -> list[str]:
    """Changes of access in words, without a secret."""
    found = list(_of_keys(old, new))
    for name in (*SECRETS, *FILES):
        before, now = getattr(old, name), getattr(new, name)
        if name != "api_key" and before != now:
            found.append(f"{name} is {'set' if before is None else 'another one'}")
    for name in LISTS:
        before, now = (set(map(str, getattr(of, name) or ())) for of in (old, new))
        found += _parts(name, now - before, before - now)
    if old.response_headers != new.response_headers:
        found.append(f"response_headers is {str(new.response_headers).lower()}")
    return found


def _of_keys(old: Settings, new: Settings) -> Iterator[str]:
    """Changes of clients' keys, by tenant."""
    before, now = _tenants(old), _tenants(new)
    if before == now:
        return
    if not before:
        yield "api_key is set"
    came = Counter(tenant for key, tenant in now.items() if before.get(key) != tenant)
    left = Counter(tenant for key, tenant in before.items() if now.get(key) != tenant)
    yield from _parts("api_key: keys of", _counted(came), _counted(left))


def _counted(tenants: Counter[str]) -> list[str]:
    return [tenant if count == 1 else f"{tenant} ({count})" for tenant, count in tenants.items()]


def _tenants(settings: Settings) -> dict[bytes, str]:
    secret = settings.api_key
    return {} if secret is None else tenants_of(secret.get_secret_value())


def _parts(name: str, came: Iterable[str], left: Iterable[str]) -> Iterator[str]:
    for what, members in (("added", sorted(came)), ("removed", sorted(left))):
        if members:
            more = len(members) - LISTED_MOST
            shown = members[:LISTED_MOST] + ([f"{more} more"] if more > 0 else [])
            yield f"{name} {', '.join(shown)} {what}"
