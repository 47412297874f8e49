"""EndpointSlices of one Kubernetes service, and the instances that they name.

A document may say anything: what has another form than Kubernetes' is a DiscoveryError.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.config.values import InstanceSpec
from proxy.fleet.discovery.base import MOST_FOUND, DiscoveryError, Found

MOST_SLICES = 256
"""Most slices of a service; each has a hundred endpoints by default."""
BOOTSTRAP, SERVES = "bootstrap", ("http", "https")
"""Names of a slice's ports: Mooncake's bootstrap server, and the engine where ports are several."""
NAME_CHARS = 253
"""Longest name of an object."""
KINDS: Mapping[str, type[ipaddress.IPv4Address | ipaddress.IPv6Address]] = {
    "IPv4": ipaddress.IPv4Address,
    "IPv6": ipaddress.IPv6Address,
}
"""Kinds of slices that are read, and of what kind their addresses are."""
GONE = 410
"""The API does not know the version from which a watch was to go on."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SAID_CHARS = 100


class OutdatedError(Exception):
    """A watch has to begin anew, with a list."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    spec: InstanceSpec
    is_ready: bool
    is_terminating: bool


@dataclass(frozen=True, slots=True)
class _Slice:
    kind: str
    endpoints: tuple[_Endpoint, ...]


class Slices:
    """The slices as they were told last. Bounded by MOST_SLICES and MOST_FOUND."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Slice] = {}
        self.version = ""
        """From where a watch goes on; empty where the API tells none."""

    def replace(self, document: Any) -> None:
        """Take a whole list; raises DiscoveryError, and then nothing has changed."""
        meta, items = _of(document, "metadata", dict), _of(document, "items", list)
        if meta.get("continue"):
            raise DiscoveryError("its list is cut into pages")
        _refuse_many([_size(item) for item in items])
        slices = dict(_read(item) for item in items)
        self._by_name, self.version = slices, _version(meta)

    def apply(self, event: Any) -> bool:
        """Take an event of a watch; returns whether a slice has changed.

        Raises DiscoveryError, OutdatedError where a list is needed.
        """
        what, told = _of(event, "type", str), _of(event, "object", dict)
        if what == "ERROR":
            if told.get("code") == GONE:
                raise OutdatedError
            said = " ".join(str(told.get("message", "")).split())[:_SAID_CHARS]
            raise DiscoveryError(f"its watch ends with an error {told.get('code')}: {said}")
        has_changed = False
        if what in ("ADDED", "MODIFIED"):
            name = _name(told)
            others = [len(one.endpoints) for key, one in self._by_name.items() if key != name]
            _refuse_many([*others, _size(told)])
            _, new = _read(told)
            has_changed = self._by_name.get(name) != new
            self._by_name[name] = new
        elif what == "DELETED":
            has_changed = self._by_name.pop(_name(told), None) is not None
        elif what != "BOOKMARK":
            raise DiscoveryError(f"its watch has an event of type {what[:_SAID_CHARS]!r}")
        self.version = _version(_of(told, "metadata", dict)) or self.version
        return has_changed

    def found(self) -> Found:
        """The instances; of an endpoint in several slices the state that is told anywhere.

        Slices of IPv6 count where none of IPv4 has endpoints: a pod of two kinds is in both.
        """
        slices = [s for s in self._by_name.values() if s.endpoints]
        kinds = {s.kind for s in slices} & KINDS.keys()
        known = [e for s in slices if s.kind == min(kinds, default="") for e in s.endpoints]
        terminating = {e.spec.name for e in known if e.is_terminating}
        ready = {
            e.spec.name: e.spec for e in known if e.is_ready and e.spec.name not in terminating
        }
        leaving = {e.spec.name for e in known} - ready.keys()
        return Found(tuple(ready[name] for name in sorted(ready)), frozenset(leaving))


def _read(document: Any) -> tuple[str, _Slice]:
    """A slice and its name."""
    name, kind = _name(document), _of(document, "addressType", str)
    endpoints = document.get("endpoints") or []
    if kind not in KINDS or not endpoints:
        return name, _Slice(kind, ())
    if not isinstance(endpoints, list):
        raise _other_form("endpoints")
    scheme, port, bootstrap = _ports(document, name)
    found = (_endpoint(e, _host(e, kind), scheme, port, bootstrap) for e in endpoints)
    return name, _Slice(kind, tuple(found))


def _size(document: Any) -> int:
    """How many endpoints of a slice are to be read."""
    endpoints, kind = _object(document).get("endpoints"), document.get("addressType")
    if not isinstance(endpoints, list) or kind not in (*KINDS,):
        return 0
    return len(endpoints)


def _name(document: Any) -> str:
    name: str = _of(_of(document, "metadata", dict), "name", str)
    if len(name) > NAME_CHARS:
        raise _other_form("name")
    return name


def _ports(document: Any, name: str) -> tuple[str, int, int | None]:
    """Scheme and port of the engines, and the port of their bootstrap servers."""
    ports = {
        str(port.get("name") or ""): port
        for port in map(_object, _of(document, "ports", list))
        if port.get("protocol", "TCP") == "TCP"
    }
    bootstrap = ports.pop(BOOTSTRAP, None)
    serving = next((ports[key] for key in SERVES if key in ports), None)
    if serving is None and len(ports) == 1:
        serving = next(iter(ports.values()))
    if serving is None:
        told = f"{len(ports)} ports, none of them named {' or '.join(SERVES)}"
        raise DiscoveryError(f"slice {name[:_SAID_CHARS]} has {told}")
    is_tls = "https" in (serving.get("name"), serving.get("appProtocol"))
    other = None if bootstrap is None else _number(bootstrap)
    return "https" if is_tls else "http", _number(serving), other


def _host(document: Any, kind: str) -> str:
    """The host of an endpoint in a URL. An address with a zone means something on one host only."""
    addresses = _of(document, "addresses", list)
    first = addresses[0] if addresses else None  # Kubernetes: the others have no meaning
    try:
        address = KINDS[kind](first if isinstance(first, str) else "")
    except ValueError as error:
        raise _other_form("addresses") from error
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.scope_id is not None:
        raise _other_form("addresses")
    return f"[{address}]"


def _endpoint(document: Any, host: str, scheme: str, port: int, bootstrap: int | None) -> _Endpoint:
    """An endpoint: named as its pod, or by its address. Without a word on it, it is ready."""
    conditions = _object(document.get("conditions") or {})
    target = _object(document.get("targetRef") or {})
    pod = str(target.get("name")) if target.get("kind") == "Pod" else ""
    spec = InstanceSpec(
        pod if _NAME.fullmatch(pod) else f"{host}:{port}",
        f"{scheme}://{host}:{port}",
        None if bootstrap is None else f"http://{host}:{bootstrap}",
    )
    return _Endpoint(
        spec, conditions.get("ready") is not False, conditions.get("terminating") is True
    )


def _number(port: Any) -> int:
    number = port.get("port")
    if type(number) is not int or not 1 <= number <= 65535:
        raise _other_form("port")
    return number


def _version(meta: dict[str, Any]) -> str:
    version = meta.get("resourceVersion", "")
    if not isinstance(version, str) or not re.fullmatch(r"[A-Za-z0-9._-]{0,64}", version):
        raise _other_form("resourceVersion")
    return version


def _refuse_many(counts: Sequence[int]) -> None:
    """Raise DiscoveryError for too many slices or endpoints; `counts`: endpoints by slice."""
    if len(counts) > MOST_SLICES or sum(counts) > MOST_FOUND:
        raise DiscoveryError(f"it has more than {MOST_SLICES} slices or {MOST_FOUND} endpoints")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _other_form("object")
    return value


def _of(document: Any, key: str, kind: type) -> Any:
    """A member of an object, of the kind that it has to have."""
    value = _object(document).get(key)
    if not isinstance(value, kind):
        raise _other_form(key)
    return value


def _other_form(what: str) -> DiscoveryError:
    return DiscoveryError(f"its answer has another form than Kubernetes': {what}")


class Lines:
    """The whole lines of a watch that comes in pieces."""

    def __init__(self, most_bytes: int) -> None:
        self._pieces: list[bytes] = []
        self._size, self._most_bytes = 0, most_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece; the lines that end in it. Raises DiscoveryError for a longer one."""
        self._pieces.append(data)
        self._size += len(data)
        lines: list[bytes] = []
        if b"\n" in data:
            *lines, rest = b"".join(self._pieces).split(b"\n")
            self._pieces, self._size = [rest], len(rest)
        if max(self._size, *map(len, lines), 0) > self._most_bytes:
            raise DiscoveryError(f"its watch has a line of more than {self._most_bytes} bytes")
        return [line for line in lines if line.strip()]
