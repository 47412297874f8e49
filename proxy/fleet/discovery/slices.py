"""EndpointSlices of one Kubernetes service, and the instances that they name.

A document may say anything: what has another form than Kubernetes' is a DiscoveryError.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
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
        slices = dict(_read(item) for item in items)
        _refuse_many(slices.values())
        self._by_name, self.version = slices, _version(meta)

    def apply(self, event: Any) -> None:
        """Take an event of a watch; raises DiscoveryError, OutdatedError where a list is needed."""
        what, told = _of(event, "type", str), _of(event, "object", dict)
        if what == "ERROR":
            if told.get("code") == GONE:
                raise OutdatedError
            said = " ".join(str(told.get("message", "")).split())[:_SAID_CHARS]
            raise DiscoveryError(f"its watch ends with an error {told.get('code')}: {said}")
        if what in ("ADDED", "MODIFIED"):
            name, new = _read(told)
            slices = self._by_name | {name: new}
            _refuse_many(slices.values())
            self._by_name = slices
        elif what == "DELETED":
            self._by_name.pop(_name(told), None)
        elif what != "BOOKMARK":
            raise DiscoveryError(f"its watch has an event of type {what[:_SAID_CHARS]!r}")
        self.version = _version(_of(told, "metadata", dict)) or self.version

    def found(self) -> Found:
        """The instances; of an endpoint in several slices the state that is told anywhere.

        Slices of IPv6 count where none of IPv4 has endpoints: a pod of two kinds is in both.
        """
        slices = [s for s in self._by_name.values() if s.endpoints]
        kinds = {s.kind for s in slices} & {"IPv4", "IPv6"}
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
    if kind not in ("IPv4", "IPv6") or not endpoints:
        return name, _Slice(kind, ())
    if not isinstance(endpoints, list):
        raise _other_form("endpoints")
    scheme, port, bootstrap = _ports(document, name)
    return name, _Slice(kind, tuple(_endpoint(e, scheme, port, bootstrap) for e in endpoints))


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


def _endpoint(document: Any, scheme: str, port: int, bootstrap: int | None) -> _Endpoint:
    """An endpoint: named as its pod, or by its address. Without a word on it, it is ready."""
    addresses = _of(document, "addresses", list)
    first = addresses[0] if addresses else None  # Kubernetes: the others have no meaning
    try:
        address = ipaddress.ip_address(first if isinstance(first, str) else "")
    except ValueError as error:
        raise _other_form("addresses") from error
    host = f"[{address}]" if address.version == 6 else str(address)
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


def _refuse_many(slices: Iterable[_Slice]) -> None:
    counts = [len(one.endpoints) for one in slices]
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
