"""GPU sensors of an instance: the grammar of `;gpus=` and `;SENSOR=` in its entry.

`;gpus=0-3` says which GPUs are the instance's, `;dcgm=9400` what reads them. Lists are joined by
`+`, since a comma ends the instance. A GPU's name is `host:index`. Text is parsed to a value or a
`ValueError`; `proxy/fleet/sensors` does the reading.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

MOST_INDEX = 127
"""Largest index of a GPU on its host: it bounds what is kept and shown of an instance."""
MOST_PARTS = 16
"""Most sensors of one instance: a tensor-parallel group over so many hosts."""
_HOST = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+"
_RANGE = re.compile(rf"(?:(?P<host>{_HOST}):)?(?P<first>[0-9]{{1,4}})(?:-(?P<last>[0-9]{{1,4}}))?")
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?(?P<path>/[!-\"$-~]*)?"
)
_SWING = re.compile(
    r"(?P<low>[0-9]{1,3}(?:\.[0-9]{1,3})?)"
    r"(?:-(?P<high>[0-9]{1,3}(?:\.[0-9]{1,3})?)/(?P<period>[0-9]{1,5}))?"
)
_FILE = re.compile(r"/[!-~]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_SHARE = "utilization_percent"
JSON_FIELDS = (
    *("celsius", "memory_celsius", "watts", "utilization_ratio", _SHARE),
    *("memory_used_bytes", "is_slowed"),
)
"""Figures that a pointer into a JSON document may lead to."""


@dataclass(frozen=True, slots=True)
class GpuRange:
    """GPUs of one host by index, both ends included; `host` None: of every sensor's host."""

    host: str | None
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `0`, `0-3`, `node1:0` or `node1:0-3`; raises `ValueError` for another text."""
        found = _RANGE.fullmatch(text)
        if found is None:
            raise ValueError(f"gpus {text!r} is not [host:]index or [host:]first-last, joined by +")
        first = int(found["first"])
        last = first if found["last"] is None else int(found["last"])
        if not first <= last <= MOST_INDEX:
            raise ValueError(f"gpus {text!r}: indices are 0 to {MOST_INDEX}, the smaller one first")
        return cls(None if found["host"] is None else found["host"].lower(), first, last)

    def __str__(self) -> str:
        """Text that `parse` reads back as an equal value."""
        host = "" if self.host is None else f"{self.host}:"
        return f"{host}{self.first}" + (f"-{self.last}" if self.last > self.first else "")

    def names(self, host: str) -> list[str]:
        """The names of its GPUs on a host; none where it is about another host."""
        if self.host not in (None, host):
            return []
        return [f"{host}:{index}" for index in range(self.first, self.last + 1)]


def gpu_ranges(text: str) -> tuple[GpuRange, ...]:
    """Read `0-3+node2:0`; raises `ValueError` saying what is wrong."""
    return tuple(GpuRange.parse(part) for part in text.split("+"))


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Places of figures in a JSON document: a pointer (RFC 6901) each, `*` for every member.

    `first`: the index of the first GPU that a pointer leads to.
    """

    pointers: tuple[tuple[str, tuple[str, ...]], ...]
    first: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `celsius=/a/*/b&watts=/c&gpu=2`; a pointer alone is that of `celsius`."""
        pointers: dict[str, tuple[str, ...]] = {}
        first = 0
        for part in text.split("&"):
            name, equals, value = ("celsius", "=", part) if part[:1] == "/" else part.partition("=")
            if name == "gpu" and value.isdecimal() and int(value) <= MOST_INDEX:
                first = int(value)
            elif name not in JSON_FIELDS or not equals or not value.startswith("/"):
                known = ", ".join(JSON_FIELDS)
                raise ValueError(
                    f"{part!r} is not FIELD=/POINTER with one of {known}, or gpu=0 to {MOST_INDEX}"
                )
            elif name in pointers:
                raise ValueError(f"field {name} is given twice")
            else:
                tokens = value[1:].split("/")
                pointers[name] = tuple(t.replace("~1", "/").replace("~0", "~") for t in tokens)
        if not pointers:
            raise ValueError("no field is named: #celsius=/POINTER or others, joined by &")
        return cls(tuple(pointers.items()), first)


OWN_FIELDS = JsonFields(
    tuple((name, ("gpus", "*", name)) for name in JSON_FIELDS if name != _SHARE)
)
"""Without pointers a document is `{"gpus": [{"celsius": 71, "watts": 512.5, ...}, ...]}`."""


@dataclass(frozen=True, slots=True)
class Swing:
    """Degrees that rise from `low` to `high` and fall again within `period_s`, or stay at `low`."""

    low: float
    high: float
    period_s: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `75` or `60-95/600`; raises `ValueError` saying what is wrong."""
        found = _SWING.fullmatch(text)
        if found is None:
            raise ValueError(f"simulated {text!r} is not CELSIUS or LOW-HIGH/SECONDS")
        low = float(found["low"])
        if found["high"] is None:
            return cls(low, low, 1)
        high, period_s = float(found["high"]), int(found["period"])
        if low > high or period_s < 1:
            raise ValueError(f"simulated {text!r}: the lower degrees come first, seconds are 1 on")
        return cls(low, high, period_s)


@dataclass(frozen=True, slots=True)
class SensorAt:
    """One sensor of an instance."""

    kind: str
    """Its name in SENSORS."""
    where: str
    """The text after `=`."""
    host: str
    """Prefix of its GPUs' names."""
    url: str | None = None
    """Address to read over the network, None for a sensor of this machine."""
    fields: JsonFields = OWN_FIELDS
    """Pointers into a JSON document."""
    swing: Swing | None = None
    """Range of a simulated sensor."""

    @staticmethod
    def parse(kind: str, text: str, instance_host: str) -> SensorAt:
        """Read what stands behind `;KIND=`; raises `ValueError` saying what is wrong."""
        return FORMS[kind](kind, text, instance_host)

    @property
    def path(self) -> str:
        """The file, or the path of the URL, without pointers."""
        whole = self.where if self.url is None else self.where.removeprefix(self.url)
        return whole.partition("#")[0] or "/"

    def __str__(self) -> str:
        """Text of the part, which is read back as an equal value."""
        return f"{self.kind}={self.where}"


def _exporter(kind: str, text: str, instance_host: str) -> SensorAt:
    """A port on the instance's host, or a URL."""
    return _at_url(kind, f"http://{instance_host}:{text}/metrics" if text.isdecimal() else text)


def _document(kind: str, text: str, instance_host: str) -> SensorAt:
    """A port on the instance's host, or a URL; then perhaps `#` and pointers."""
    address, mark, pointers = text.partition("#")
    at = _at_url(kind, f"http://{instance_host}:{address}/" if address.isdecimal() else address)
    fields = JsonFields.parse(pointers) if mark else OWN_FIELDS
    return replace(at, where=f"{at.where}{mark}{pointers}", fields=fields)


def _at_url(kind: str, text: str) -> SensorAt:
    if "@" in text:
        raise ValueError(f"{kind}: no user or password is taken here")
    found = _URL.fullmatch(text)
    if found is None:
        raise ValueError(f"{kind} {text!r} is not PORT or http(s)://host:port/path")
    host = found["host"].lower()
    port = int(found["port"] or _DEFAULT_PORTS[found["scheme"]])
    if not 1 <= port <= 65535:
        raise ValueError(f"{kind}: port {port} is not within 1 to 65535")
    if host.startswith("["):
        ipaddress.IPv6Address(host[1:-1])
    elif re.fullmatch(r"[0-9.]+", host):
        ipaddress.IPv4Address(host)
    url = f"{found['scheme']}://{host}:{port}"
    return SensorAt(kind, f"{url}{found['path'] or '/'}", host, url)


def _here(kind: str, text: str, instance_host: str) -> SensorAt:
    """This machine's GPUs: `local`."""
    if text != "local":
        raise ValueError(f"{kind} {text!r}: the only value is local, for the GPUs of this machine")
    return SensorAt(kind, text, instance_host)


def _file(kind: str, text: str, instance_host: str) -> SensorAt:
    """An absolute path, then perhaps `#` and pointers."""
    path, mark, pointers = text.partition("#")
    if not _FILE.fullmatch(path):
        raise ValueError(f"{kind} {path!r} is not an absolute path without blanks")
    fields = JsonFields.parse(pointers) if mark else OWN_FIELDS
    return SensorAt(kind, text, instance_host, fields=fields)


def _simulated(kind: str, text: str, instance_host: str) -> SensorAt:
    """Degrees, or degrees that rise and fall."""
    return SensorAt(kind, text, instance_host, swing=Swing.parse(text))


FORMS: Mapping[str, Callable[[str, str, str], SensorAt]] = {
    "dcgm": _exporter,
    "nvml": _here,
    "nvidia-smi": _here,
    "amd-smi": _here,
    "http-json": _document,
    "file": _file,
    "simulated": _simulated,
}
"""The form of each sensor's value; `SENSORS` of proxy/fleet/sensors has the same names."""
