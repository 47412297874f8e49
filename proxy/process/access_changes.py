"""Changes of access by a reload: it opens nothing, and logs every change.

A file that was cut reads like a shorter one, and a line that is missing means the default, which is
open for most of what closes. So options that are read while the process serves open nothing that
was closed, and take no key that may be the rest of one. A process that is restarted takes what it
is given, and says what is open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from proxy.config.options import Settings
from proxy.config.secrets import (
    KEY_CHARS,
    SecretStr,
    entries_of,
    is_loopback,
    key_of,
    slips_in,
    tenants_in,
)
from proxy.config.sources import ConfigError

SECRETS: Final = (
    *("admin_token", "api_key", "cache_salt_secret"),
    *("instance_api_key", "thermal_token"),
)
FILES: Final = ("tls_cert", "tls_client_ca", "instance_ca")
LISTS: Final = ("extra_paths", "cors_allowed_origins", "salted_paths", "allow_cidr")
"""Options that let in what they name."""
CLOSED_BY: Final = (*SECRETS, *FILES, "admin_port")
"""Options that close something where they are given."""
HOSTS: Final = ("host", "admin_host")
LISTED_MOST: Final = 5
EARLIER_CHARS: Final = 4 << 20
"""Of an option's earlier secrets the latest of so many characters are remembered."""


class Earlier:
    """The secrets of an option that have been in force: none may come back as a part of itself."""

    def __init__(self) -> None:
        self._entries: dict[str, None] = {}  # the latest last
        self._chars = 0
        self._noted: SecretStr | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def note(self, secret: SecretStr | None, entries: Iterable[str]) -> None:
        """Remember the entries of a secret that is in force."""
        if secret is self._noted:
            return
        self._noted = secret
        self.add(entries)

    def add(self, entries: Iterable[str]) -> None:
        """Remember these as the latest."""
        for entry in entries:
            if entry not in self._entries:
                self._chars += len(entry)
            self._entries.pop(entry, None)
            self._entries[entry] = None
        while self._chars > EARLIER_CHARS:
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self._chars -= len(oldest)


class Fence:
    """What keeps a reload from opening access, with the secrets so far, also of predecessors.

    Its time grows with the keys, and is spent in a thread: one call at a time.
    """

    def __init__(self) -> None:
        self._earlier = {name: Earlier() for name in SECRETS}

    def refuse_opening(self, old: Settings, new: Settings) -> None:
        """Raise ConfigError if other options would open what is closed, or have a part of a key."""
        _refuse_open(_closed(old), new)
        self._note(old)
        for name in SECRETS:
            if getattr(old, name) != getattr(new, name):
                before = set(_entries(name, old))
                _refuse_parts(name, before, self._earlier[name], _entries(name, new))

    def handed_on(self, settings: Settings) -> dict[str, Any]:
        """What the next process needs to go on with this fence: secrets, as they are written.

        `settings`: those in force.
        """
        self._note(settings)
        return {
            "closed": _closed(settings),
            "in_force": {name: _entries(name, settings) for name in SECRETS},
            "earlier": {name: list(earlier) for name, earlier in self._earlier.items()},
        }

    def take_over(self, handed: Mapping[str, Any], new: Settings) -> None:
        """Go on with a predecessor's fence; raises ConfigError as `refuse_opening` does."""
        if not handed:
            return
        _refuse_open(handed["closed"], new)
        for name, earlier in self._earlier.items():
            earlier.add(handed["earlier"].get(name, ()))
            _refuse_parts(name, set(handed["in_force"].get(name, ())), earlier, _entries(name, new))

    def _note(self, settings: Settings) -> None:
        for name, earlier in self._earlier.items():
            earlier.note(getattr(settings, name), _entries(name, settings))


def _closed(settings: Settings) -> list[str]:
    """The options that close something now."""
    given = [name for name in CLOSED_BY if getattr(settings, name) is not None]
    return given + [name for name in HOSTS if is_loopback(getattr(settings, name))]


def _refuse_open(closed: Collection[str], new: Settings) -> None:
    """Raise ConfigError if what is closed would be open."""
    gone = [name for name in CLOSED_BY if name in closed and getattr(new, name) is None]
    if gone:
        raise ConfigError(
            f"{', '.join(gone)} would become none, which opens access; if the file is complete, "
            "stop the process and start it"
        )
    for name in HOSTS:
        if name in closed and not is_loopback(getattr(new, name)):
            raise ConfigError(
                f"{name} would become {getattr(new, name)}, which other machines can reach; "
                "stop the process and start it"
            )


def _entries(name: str, settings: Settings) -> list[str]:
    """The secrets of an option, each as it is written; those of clients with their tenants."""
    secret: SecretStr | None = getattr(settings, name)
    if secret is None:
        return []
    text = secret.get_secret_value()
    return entries_of(text) if name == "api_key" else [text.strip()]


def _refuse_parts(name: str, known: set[str], earlier: Iterable[str], new: list[str]) -> None:
    """Raise ConfigError if a secret that is not in force is the beginning of one, or short."""
    is_short_refused = name in ("api_key", "admin_token")
    starts = _starts({entry for entry in new if entry not in known}, earlier)
    for at, entry in enumerate(new, 1):
        if entry in known:
            continue
        which = f"key {at}" if name == "api_key" else "it"
        if entry in starts:
            raise ConfigError(f"{name}: {which} is the start of an earlier one, as if cut")
        if is_short_refused and len(key_of(entry) if name == "api_key" else entry) < KEY_CHARS:
            raise ConfigError(f"{name}: {which} is new and shorter than {KEY_CHARS} characters")


def _starts(entries: set[str], wholes: Iterable[str]) -> set[str]:
    """Those of the entries with which a longer text begins; as many steps as it has characters."""
    sizes, found = sorted({len(entry) for entry in entries}), set()
    for whole in wholes:
        for size in sizes:
            if size >= len(whole):
                break
            if (start := whole[:size]) in entries:
                found.add(start)
    return found


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
    if old.api_key == new.api_key:
        return
    before, now = tenants_in(old.api_key), tenants_in(new.api_key)
    if before == now:
        return
    if not before:
        yield "api_key is set"
    came = Counter(tenant for key, tenant in now.items() if before.get(key) != tenant)
    left = Counter(tenant for key, tenant in before.items() if now.get(key) != tenant)
    yield from _parts("api_key: keys of", _counted(came), _counted(left))
    if slips := slips_in(new.api_key):
        yield slips


def _counted(tenants: Counter[str]) -> list[str]:
    return [tenant if count == 1 else f"{tenant} ({count})" for tenant, count in tenants.items()]


def _parts(name: str, came: Iterable[str], left: Iterable[str]) -> Iterator[str]:
    for what, members in (("added", sorted(came)), ("removed", sorted(left))):
        if members:
            more = len(members) - LISTED_MOST
            shown = members[:LISTED_MOST] + ([f"{more} more"] if more > 0 else [])
            yield f"{name} {', '.join(shown)} {what}"
