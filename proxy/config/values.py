"""Types of option values such as instances, sizes and weights, and values as TOML.

Text is parsed to a value or a `ValueError`; flags, files and environment are read elsewhere.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from proxy.config.sensors import FORMS, MOST_PARTS, GpuRange, SensorAt, gpu_ranges

DEFAULT_PORT = 8000
"""Port of an instance that is given by its host alone: that of `vllm serve`."""
INSTANCE_FORM = (
    f"[name=]host:port (default port {DEFAULT_PORT}) or [name=]http(s)://host:port, "
    "then optionally ;bootstrap=PORT or ;bootstrap=http(s)://host:port, ;gpus=0-3 and their "
    "sensor (;dcgm=9400, see docs/operate/gpu-sensors.md), "
    ";thermal=plugin; in quotes in a shell"
)
THERMAL = ("plugin",)
"""Enforcers of a hot instance's cap, other than the proxy."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_NAMED = re.compile(r"(?:(?P<name>[^=/]*)=)?(?P<address>.*)")
# A fixed form instead of urlsplit: path, query and userinfo are refused, not dropped.
_ADDRESS = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})/?"
)
_HOST_ONLY = re.compile(r"\[[0-9A-Fa-f:.]+\]|(?![0-9]+$)[A-Za-z0-9._-]+")
_URL_WITHOUT_PORT = re.compile(r"https?://(\[[^]/]*\]|[^:/]+)/?")
_HINTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r""), "an entry is empty: is there a comma too many?"),
    (re.compile(r"[\[{(\"'].*[\]})\"']?", re.DOTALL), "a list has no brackets and no quotes"),
    (re.compile(r".*[\]})\"']", re.DOTALL), "a list has no brackets and no quotes"),
    (re.compile(r".*\s.*", re.DOTALL), "instances are separated by commas, without spaces"),
    (re.compile(r"[0-9]+"), "a port needs its host: 127.0.0.1:8001"),
    (_URL_WITHOUT_PORT, f"a URL needs its port: http://host:{DEFAULT_PORT}"),
    (re.compile(r"https?://[^/]+/.+"), "only the server's address, without a path"),
    (re.compile(r"[a-z]+://.*"), "the scheme is http or https"),
    (re.compile(r"[^/@]+/.*"), "only the server's address, without a path"),
    (re.compile(r"[0-9A-Fa-f]*(:[0-9A-Fa-f]*){2,}"), "an IPv6 address is in brackets: [::1]:8000"),
    (re.compile(r"[^:]+:[0-9]+:[0-9]+"), "the bootstrap port goes after ;bootstrap="),
    (re.compile(r".*@.*"), "no user or password; --instance-api-key has the servers' key"),
)
"""Hints for a text that is not an address, by its form; the first match counts."""
_PARTS = ("bootstrap", "gpus", "thermal", *FORMS)
"""Parts after an instance's address, each after a semicolon."""
_GPU_BEHIND = re.compile(r"([A-Za-z0-9._-]+:)?[0-9]{1,3}(-[0-9]{1,3})?(;|$)")
"""Matches the text after a comma that joined GPUs."""
USERINFO = re.compile(r"(?<![^\s'\",;/])[^\s'\",;/]+@")
"""Matches the user part of an address: passwords are hidden from terminals, logs and answers."""
_PATH = re.compile(r"/[!-~]+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
HEADER_CHARS, MOST_HEADERS = 64, 16
HEADERS_FORM = f"names of at most {HEADER_CHARS} characters, at most {MOST_HEADERS}"
_HEADER = re.compile(rf"[A-Za-z0-9!#$%&'*+.^_`|~-]{{1,{HEADER_CHARS}}}")
DISCOVER_FORM = "dns://NAME:PORT or k8s://NAMESPACE/SERVICE, comma separated"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DISCOVERIES: dict[str, tuple[re.Pattern[str], str]] = {
    "dns": (re.compile(r"([A-Za-z0-9._-]{1,253}):([0-9]{1,5})"), "dns://NAME:PORT"),
    "k8s": (re.compile(rf"({_LABEL})/({_LABEL})"), "k8s://NAMESPACE/SERVICE"),
}
"""What follows the scheme of each kind of discovery, and the form as it is told."""
_SCHEMES = [f"{kind}://" for kind in _DISCOVERIES]
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
ORIGINS_FORM = "origins like https://app.example.com,http://localhost:3000, or *"
_PORT = r"[0-9]{1,5}|\{port(?:[+-][0-9]{1,5})?\}"
_EVENTS = re.compile(
    r"tcp://(?P<host>\{host\}|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
    rf":(?P<port>{_PORT})(;replay=(?P<replay>{_PORT}))?"
)
EVENTS_FORM = (
    "auto, off, or tcp://{host}:PORT, then optionally ;replay=PORT; {host} is the instance's host, "
    "and PORT a number, or {port}, {port+N}, {port-N} from the instance's port"
)
MIN_WEIGHT, MAX_WEIGHT = 0.1, 100.0
WEIGHTS_FORM = "tenant=weight, comma separated, weights 0.1 to 100"
_WEIGHT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?")
_BYTE_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SIZE = re.compile(r"([0-9]++(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)")
_PREFIXES = "kmgtpe"
_SIZES = {
    "": 1,
    "b": 1,
    **{f"{p}{b}": 1000**n for n, p in enumerate(_PREFIXES, 1) for b in ("", "b")},
    **{f"{p}ib": 1024**n for n, p in enumerate(_PREFIXES, 1)},
}


class ByteSize(int):
    """A number of bytes; as text it has a unit if it is a multiple of one."""

    __slots__ = ()

    @classmethod
    def parse(cls, value: object) -> Self:
        """Read `65536`, `64KiB`, `1.5 GB` or a number; raises `ValueError` for anything else."""
        if isinstance(value, int):
            return cls(value)
        text = value.strip() if isinstance(value, str) else ""
        if text.isascii() and text.lstrip("+-").replace("_", "").isdigit():
            return cls(int(text))
        found = _SIZE.fullmatch(text)
        unit = None if found is None else _SIZES.get(found[2].lower())
        if found is None or unit is None:
            raise ValueError(f"{value!r} is not a size")
        return cls(int(float(found[1]) * unit))


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One vLLM server as configured; its URLs have scheme, host and port only.

    `gpus`: which GPUs of its sensors' hosts are its own; empty: all that a sensor tells.
    `thermal`: `plugin` where the engine has vllm-thermal.
    """

    name: str
    url: str
    bootstrap_url: str | None = None
    gpus: tuple[GpuRange, ...] = ()
    sensors: tuple[SensorAt, ...] = ()
    thermal: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one entry of `--instances`; raises `ValueError` saying which part is wrong."""
        head, *extras = text.strip().split(";")
        named = _NAMED.fullmatch(head)
        if named is None:
            raise ValueError(f"{text!r} has a line break")
        address = named["address"]
        if _HOST_ONLY.fullmatch(address):
            address = f"{address}:{DEFAULT_PORT}"
        scheme, host, port = _address(address)
        name = f"{host}:{port}" if named["name"] is None else named["name"]
        if named["name"] is not None and not _NAME.fullmatch(name):
            raise ValueError(f"name {name!r} has other characters than letters, digits, . _ : -")
        url = f"{scheme or 'http'}://{host}:{port}"
        once, sensors = _parts(extras, host)
        bootstrap, gpus, thermal = (once.get(key) for key in ("bootstrap", "gpus", "thermal"))
        if gpus is not None and not sensors:
            raise ValueError(f"gpus without a sensor: give one of {', '.join(FORMS)}")
        if thermal is not None and thermal not in THERMAL:
            raise ValueError(f"thermal {thermal!r} is not one of: {', '.join(THERMAL)}")
        return cls(
            name,
            url,
            None if bootstrap is None else _bootstrap(bootstrap, host),
            () if gpus is None else gpu_ranges(gpus),
            sensors,
            thermal,
        )

    @property
    def urls(self) -> list[str]:
        """Every address that the proxy connects to because of this entry."""
        given = (self.url, self.bootstrap_url, *(sensor.url for sensor in self.sensors))
        return [url for url in given if url]

    def __str__(self) -> str:
        """Text that `parse` reads back as an equal value."""
        name = "" if self.url.endswith(f"://{self.name}") else f"{self.name}="
        bootstrap = f";bootstrap={self.bootstrap_url}" if self.bootstrap_url else ""
        gpus = f";gpus={'+'.join(map(str, self.gpus))}" if self.gpus else ""
        sensors = "".join(f";{sensor}" for sensor in self.sensors)
        thermal = f";thermal={self.thermal}" if self.thermal else ""
        return f"{name}{self.url}{bootstrap}{gpus}{sensors}{thermal}"


@dataclass(frozen=True, slots=True)
class TenantWeight:
    """A tenant's weight in the wait queue; tenants without an entry have 1."""

    tenant: str
    weight: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `tenant=weight`; raises `ValueError` saying what is wrong."""
        tenant, equals, number = text.strip().rpartition("=")
        if not equals or not _NAME.fullmatch(tenant):
            raise ValueError(f"{text!r} is not tenant=weight, or the name has other characters")
        weight = float(number) if _WEIGHT.fullmatch(number) else 0.0
        if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise ValueError(f"weight {number!r} is not within {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        return cls(tenant, weight)

    def __str__(self) -> str:
        """Text that `parse` reads back as an equal value."""
        return f"{self.tenant}={self.weight:g}"


@dataclass(frozen=True, slots=True)
class EventsAt:
    """Address of the engines' KV events by the option; of rank 0.

    `host`: `{host}` for the instance's own. `port`, `replay_port`: as the option has them; the
    second is None where events that were missed cannot be asked for.
    """

    host: str
    port: str
    replay_port: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `tcp://{host}:PORT;replay=PORT`; raises `ValueError` for any other text."""
        found = _EVENTS.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not an address of KV events")
        at = cls(found["host"], found["port"], found["replay"])
        for port in (at.port, at.replay_port):
            if port is not None and not port.startswith("{"):
                port_by(port, 0)
        return at

    def of(self, host: str, port: int) -> tuple[str, int, int | None]:
        """Host, port and replay port of an instance; raises `ValueError` where a port is none."""
        replay_port = None if self.replay_port is None else port_by(self.replay_port, port)
        own = host if self.host == "{host}" else self.host.strip("[]")
        return own, port_by(self.port, port), replay_port


@dataclass(frozen=True, slots=True)
class DiscoverAt:
    """Where instances are looked for: `dns` has a name and a port, `k8s` a namespace and a service.

    `scope`: the name, or the namespace.
    """

    kind: str
    scope: str
    what: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `dns://NAME:PORT` or `k8s://NAMESPACE/SERVICE`; raises `ValueError` for others."""
        kind, marks, rest = text.strip().partition("://")
        if not marks or kind not in _DISCOVERIES:
            shown = USERINFO.sub("***@", text)
            raise ValueError(f"{shown!r} begins with none of: {', '.join(_SCHEMES)}")
        form, shown = _DISCOVERIES[kind]
        found = form.fullmatch(rest)
        if found is None:
            raise ValueError(f"{USERINFO.sub('***@', text)!r} is not {shown}")
        if kind == "dns":
            port_by(found[2], 0)
        return cls(kind, found[1], found[2])

    def __str__(self) -> str:
        """Text that `parse` reads back as an equal value."""
        between = ":" if self.kind == "dns" else "/"
        return f"{self.kind}://{self.scope}{between}{self.what}"


def port_by(text: str, port: int) -> int:
    """The port that a text of an `EventsAt` means for an instance; raises `ValueError` for none."""
    found = int(text) if text.isdecimal() else port + int(text[len("{port") : -1] or 0)
    if not 1 <= found <= 65535:
        raise ValueError(f"port {found} is not within 1 to 65535")
    return found


def events_text(text: str | None) -> None:
    """Check the option of where KV events are; raises `ValueError`."""
    if text not in ("auto", "off", None):
        EventsAt.parse(text)


def weight_list(value: object) -> object:
    """Parse `a=4,b=1` or a list of texts to weights; other values are left to the type check."""
    entries = [e for e in value.split(",") if e.strip()] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    weights = tuple(TenantWeight.parse(e) if isinstance(e, str) else e for e in entries)
    _refuse_duplicates("tenant", (getattr(weight, "tenant", None) for weight in weights))
    return weights


def instance_list(value: object) -> object:
    """Parse `a,b,c` or a list of texts to instances; other values are left to the type check."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    for entry, behind in pairwise(entries) if isinstance(value, str) else ():
        if ";gpus=" in entry and _GPU_BEHIND.match(behind):
            both = f"{entry}+{behind}"
            raise ValueError(f"GPUs are joined by +, as a comma ends the instance: {both}")
    specs = tuple(
        InstanceSpec.parse(entry) if isinstance(entry, str) else entry for entry in entries
    )
    _refuse_duplicates("name", (getattr(spec, "name", None) for spec in specs))
    _refuse_duplicates("address", (getattr(spec, "url", None) for spec in specs))
    return specs


def discover_list(value: object) -> object:
    """Parse `dns://a:1,k8s://b/c` or a list of texts; other values are left to the type check."""
    entries = [e for e in value.split(",") if e.strip()] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    places = tuple(DiscoverAt.parse(e) if isinstance(e, str) else e for e in entries)
    _refuse_duplicates("source", map(str, places))
    return places


def path_list(value: object) -> object:
    """A list of HTTP paths from `/a,/b` or a list of texts; raises `ValueError` for no path."""
    return _texts(value, _PATH, "does not begin with a slash, or has a blank in it")


def header_list(value: object) -> object:
    """A list of header names from `a,b` or a list of texts; raises `ValueError` for others."""
    names = _texts(value, _HEADER, f"is not a header name, or is over {HEADER_CHARS} characters")
    if isinstance(names, tuple):
        if len(names) > MOST_HEADERS:
            raise ValueError(f"{len(names)} headers, at most {MOST_HEADERS}")
        lower = [name.lower() for name in names]
        _refuse_duplicates("header", lower)
        for name in lower:
            if name in _SECRET_HEADERS:
                raise ValueError(f"{name!r} holds a secret, and session names are logged")
    return names


def origin_list(value: object) -> object:
    """A list of origins from `https://a,http://b:3000`, or `*`; raises `ValueError` for others."""
    return _texts(value, _ORIGIN, "is not an origin: scheme://host[:port], without a path or slash")


def _texts(value: object, form: re.Pattern[str], wrong: str) -> object:
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    texts = tuple(str(entry).strip() for entry in entries if str(entry).strip())
    for text in texts:
        if not form.fullmatch(text):
            raise ValueError(f"{text!r} {wrong}")
    return texts


def cidr_list(value: object) -> object:
    """Parse `10.0.0.0/8,fd00::/8` or a list of texts to networks; an address alone is a network."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    return tuple(ipaddress.ip_network(e.strip()) if isinstance(e, str) else e for e in entries)


def value_text(value: object) -> str:
    """Shortest text that reads back as `value`: `20000`, `32MiB`, `none`, `a:1,b:2`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, ByteSize):
        return next(
            (f"{value // n}{u}" for u, n in _BYTE_UNITS if value and value % n == 0),
            str(int(value)),
        )
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)


def to_toml(value: object) -> str:
    """Write `value` as a TOML value; numbers and booleans bare, the rest as strings."""
    if isinstance(value, tuple):
        return f"[{', '.join(_quoted(str(item)) for item in value)}]"
    text = value_text(value)
    bare = isinstance(value, bool | int | float) and (
        not isinstance(value, ByteSize) or text.isdecimal()
    )
    return text if bare else _quoted(text)


def _address(text: str) -> tuple[str | None, str, int]:
    found = _ADDRESS.fullmatch(text)
    if found is None:
        shown = USERINFO.sub("***@", text)
        hint = next((f"; {hint}" for form, hint in _HINTS if form.fullmatch(text)), "")
        raise ValueError(f"{shown!r} is not host:port or http(s)://host:port{hint}")
    host, port = found["host"].lower(), int(found["port"])
    if not 1 <= port <= 65535:
        raise ValueError(f"port {port} is not within 1 to 65535")
    # Else `10.0.0.256` and `127.1` would be resolved as names, or mean another host.
    if host.startswith("["):
        ipaddress.IPv6Address(host[1:-1])
    elif re.fullmatch(r"[0-9.]+", host):
        ipaddress.IPv4Address(host)
    return found["scheme"], host, port


def _parts(extras: list[str], instance_host: str) -> tuple[dict[str, str], tuple[SensorAt, ...]]:
    """The parts after an instance's address: single ones by name, and its sensors."""
    once: dict[str, str] = {}
    sensors: list[SensorAt] = []
    for part in extras:
        key, _, text = (word.strip() for word in part.partition("="))
        if key not in _PARTS:
            raise ValueError(
                f"unknown part {key!r} after ';', known are {', '.join(_PARTS)}; instances are "
                "separated by commas"
            )
        if key in once:
            raise ValueError(f"part {key} is given twice")
        if key in FORMS:
            sensors.append(SensorAt.parse(key, text, instance_host))
        else:
            once[key] = text
    if len(sensors) > MOST_PARTS:
        raise ValueError(f"{len(sensors)} sensors, at most {MOST_PARTS} of one instance")
    return once, tuple(sensors)


def _bootstrap(text: str, instance_host: str) -> str:
    scheme, host, port = _address(f"http://{instance_host}:{text}" if text.isdecimal() else text)
    if scheme is None:
        raise ValueError(f"bootstrap {text!r} is neither a port nor http(s)://host:port")
    return f"{scheme}://{host}:{port}"


def _refuse_duplicates(what: str, values: Iterable[Any]) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value!r} is given twice")
        seen.add(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
