"""The systems that are compared, and how each is started in front of the same engines.

Dynamo's own router is a frontend over mockers that it has discovered. Any other system is a proxy
in front of stand-alone engines: mockers with a frontend each.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench.measuring.peers import COMPILED, PEERS, ROOT, resolve
from bench.measuring.processes import HOST
from bench.routing import environments
from bench.routing.engine import MODEL, PREFILL_TPS, model_folder
from bench.routing.environments import Environment, RoutingError
from bench.routing.load import Shape
from replayer.demo.processes import ChildProcess, Children

OURS, BEFORE = "cache-proxy", "before"
FRONTENDS = {
    "dynamo-kv": ("--router-mode", "kv"),
    "dynamo-kv-affinity": ("--router-mode", "kv", "--router-session-affinity-ttl-secs", "600"),
}
ROUTERS = {name: PEERS[name] for name in ("sglang-router-cache", "vllm-router-cache")}
RIVALS = (*FRONTENDS, *ROUTERS)
SYSTEMS = (*RIVALS, OURS)
GAUGES, PLAIN, EVENTS = "gauges", "plain", "events"
MODES = {
    GAUGES: "the engines' /metrics tell the size of their KV",
    PLAIN: "their /metrics have names that no proxy knows",
    EVENTS: "as gauges, and they publish KV events",
}
UNKNOWN_PREFIX = "bench"
"""Of the metrics' names in the mode `plain`."""
EVENTS_OFFSET, REPLAY_OFFSET = 1_000, 1_001
"""An engine's KV events, and earlier ones again, are on ports so far above that of its API."""
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
LOCAL = (
    *("DYN_EVENT_PLANE_HOST", "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"),
    "DYN_HTTP_RPC_HOST",
)
DYNAMO_ENVIRONMENT = {
    **dict.fromkeys(LOCAL, HOST),
    "DYN_LOG": "error",
    "DYN_SELF_HOST_METADATA": "0",
    "DYN_TOKENIZER_CACHE_BYTES": str(512 << 20),
    # As vLLM: a field that only some routers add is no error.
    "DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS": "1",
}
INOTIFY_LIMIT = "fs.inotify.max_user_instances"
START_S = 120.0
"""Longest time from a program's start to its first answer; several start on few cores."""
PROBE_S = 5.0
PORT_TRIES = 50
PROBE = orjson.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "the"}], "max_tokens": 1}
)


@dataclass(frozen=True, slots=True)
class Site:
    """What all runs of a command share. `ours`: where Python finds the project, per system."""

    venvs: Path
    speedup: float
    ours: dict[str, Path]
    proxy_options: tuple[str, ...] = ()


def environments_of(systems: Iterable[str]) -> list[Environment]:
    """The environments that these systems need; the engines' first."""
    packages = [str(ROUTERS[name].requirement) for name in systems if name in ROUTERS]
    return [environments.dynamo(), *map(environments.of_package, packages)]


def inotify_instances(names: Iterable[str], engines: int) -> int:
    """How many inotify instances these systems hold together, as counted on Dynamo 1.6.1.

    A frontend watches its discovery folder: three times per engine that it routes to, and for
    itself. Stand-alone engines have one each.
    """
    of_router, of_engines = 1 + 3 * engines, 5 * engines
    return sum(of_router if name in FRONTENDS else of_engines for name in names)


def inotify_limit() -> int | None:
    """How many inotify instances the kernel lets a user have; None where it does not say."""
    try:
        return int(Path("/proc/sys", *INOTIFY_LIMIT.split(".")).read_text())
    except OSError:
        return None


def is_compiled_current() -> bool:
    """Whether the compiled project is there, and not older than any of its sources."""
    stamp = COMPILED / ".installed"
    if not stamp.is_file():
        return False
    made_s = stamp.stat().st_mtime
    return all(source.stat().st_mtime <= made_s for source in (ROOT / "proxy").rglob("*.py"))


def our_path() -> Path:
    """Where Python finds the project: compiled if that is current, else the sources."""
    return COMPILED if is_compiled_current() else ROOT


@dataclass(frozen=True, slots=True)
class System:
    """One system to start: its folder is for logs, discovery files and the request log."""

    name: str
    mode: str
    shape: Shape
    folder: Path
    engine: Path
    """Arguments of the mockers, in the engine's folder."""

    def start(self, children: Children, site: Site) -> str:
        """Start engines and router; returns the URL once it has answered a request."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        starter = _Starter(self, children, site)
        port = starter.frontend() if self.name in FRONTENDS else starter.proxy()
        return f"http://{HOST}:{port}"


class _Starter:
    """Starts the processes of one system."""

    def __init__(self, system: System, children: Children, site: Site) -> None:
        self._system, self._children, self._site = system, children, site
        self._folder = system.folder
        self._python = str(site.venvs / environments.DYNAMO / "bin" / "python")

    def frontend(self) -> int:
        """One frontend that routes to all mockers; returns its port."""
        shape, discovery = self._system.shape, self._folder / "discovery"
        mockers = [self._mocker(f"mocker{n}", discovery) for n in range(shape.engines)]
        least = ("--router-min-initial-workers", str(shape.engines))
        options = (*FRONTENDS[self._system.name], *least)
        with reserved_ports(1) as [port]:
            frontend = self._frontend("frontend", discovery, port, options)
            wait_until_answers(port, [*mockers, frontend])
        return port

    def proxy(self) -> int:
        """Stand-alone engines with a proxy in front of them; returns its port."""
        ports = self._engines()
        with reserved_ports(2) as [port, metrics_port]:
            wait_until_answers(port, [self._proxy(ports, port, metrics_port)])
        return port

    def _proxy(self, ports: Sequence[int], port: int, metrics_port: int) -> ChildProcess:
        urls = [f"http://{HOST}:{engine}" for engine in ports]
        if self._system.name in ROUTERS:
            command = resolve(
                ROUTERS[self._system.name],
                self._site.venvs,
                work=str(self._folder),
                port=str(port),
                metrics_port=str(metrics_port),
                urls=",".join(urls),
                urls_space=" ".join(urls),
            )
            return self._start("router", command, {})
        path = self._site.ours[self._system.name]
        return self._start("proxy", self._our_command(urls, port), {"PYTHONPATH": str(path)})

    def _our_command(self, urls: Sequence[str], port: int) -> list[str]:
        site = self._site
        command = [sys.executable, "-P", "-m", "proxy.cli", "--host", HOST, "--port", str(port)]
        command += ["--instances", ",".join(urls), "--kv-connector", "none"]
        command += ["--prefill-throughput", f"{PREFILL_TPS * site.speedup:g}"]
        command += ["--request-log", str(self._folder / "proxy.jsonl")]
        if self._system.mode == EVENTS:
            at = f"tcp://{{host}}:{{port+{EVENTS_OFFSET}}};replay={{port+{REPLAY_OFFSET}}}"
            command += ["--kv-events", at]
        return [*command, *site.proxy_options]

    def _engines(self) -> list[int]:
        """Mockers with a frontend each; returns the frontends' ports once all answer."""
        count = self._system.shape.engines
        with reserved_ports(count, EVENTS_OFFSET, REPLAY_OFFSET) as ports:
            for port, both in zip(ports, self._begin(ports), strict=True):
                wait_until_answers(port, both)
        return ports

    def _begin(self, ports: Sequence[int]) -> list[list[ChildProcess]]:
        """Start a mocker and its frontend for each port."""
        system = self._system
        prefix = {"DYN_METRICS_PREFIX": UNKNOWN_PREFIX} if system.mode == PLAIN else {}
        started = []
        for number, port in enumerate(ports):
            discovery = self._folder / f"discovery{number}"
            events = (
                *("--zmq-kv-events-ports", str(port + EVENTS_OFFSET)),
                *("--zmq-replay-ports", str(port + REPLAY_OFFSET)),
            )
            mocker = self._mocker(
                f"mocker{number}", discovery, events if system.mode == EVENTS else ()
            )
            route = ("--router-mode", "round-robin")
            frontend = self._frontend(f"frontend{number}", discovery, port, route, prefix)
            started.append([mocker, frontend])
        return started

    def _mocker(self, name: str, discovery: Path, options: Sequence[str] = ()) -> ChildProcess:
        discovery.mkdir(exist_ok=True)
        engine = self._system.engine
        model = ("--model-path", str(model_folder(engine.parent)), "--model-name", MODEL)
        what = (*model, "--extra-engine-args", str(engine), *PLANES, *options)
        return self._dynamo(name, discovery, ("-m", "dynamo.mocker", *what))

    def _frontend(
        self,
        name: str,
        discovery: Path,
        port: int,
        options: Sequence[str],
        environment: dict[str, str] | None = None,
    ) -> ChildProcess:
        where = ("--http-host", HOST, "--http-port", str(port))
        what = ("-m", "dynamo.frontend", *where, *PLANES, *options)
        return self._dynamo(name, discovery, what, environment or {})

    def _dynamo(
        self,
        name: str,
        discovery: Path,
        arguments: Sequence[str],
        environment: dict[str, str] | None = None,
    ) -> ChildProcess:
        more = {**DYNAMO_ENVIRONMENT, "DYN_FILE_KV": str(discovery), **(environment or {})}
        return self._start(name, [self._python, *arguments], more)

    def _start(self, name: str, command: Sequence[str], more: dict[str, str]) -> ChildProcess:
        output = self._folder / f"{name}.log"
        # What a program leaves in its folder for temporary files goes with the run's.
        more = {"TMPDIR": str(self._folder.resolve()), **more}
        return self._children.start_program(name, output, command, environment(more))


def environment(more: dict[str, str]) -> dict[str, str]:
    """This process's environment without proxies, which are not for 127.0.0.1, and with `more`."""
    proxies = {"http_proxy", "https_proxy", "all_proxy"}
    kept = {key: value for key, value in os.environ.items() if key.lower() not in proxies}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} | more


@contextmanager
def reserved_ports(count: int, *offsets: int) -> Iterator[list[int]]:
    """Ports with others at these offsets above each, which the kernel gives nobody else meanwhile.

    A program that sets SO_REUSEADDR, as servers do, may listen on them all the same. Without that
    another program's connection may get such a port as its own before a server has begun.
    """
    with ExitStack() as stack:
        yield _reserve(stack, count, offsets)


def _reserve(stack: ExitStack, count: int, offsets: Sequence[int]) -> list[int]:
    for _ in range(PORT_TRIES):
        with ExitStack() as held, suppress(OSError, OverflowError):
            ports = [_hold(held, 0) for _ in range(count)]
            for port in ports:
                for offset in offsets:
                    _hold(held, port + offset)
            stack.push(held.pop_all())
            return ports
    raise RoutingError(f"no {count} free ports with others above them")


def _hold(held: ExitStack, port: int) -> int:
    one = held.enter_context(socket.socket())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((HOST, port))
    return int(one.getsockname()[1])


def wait_until_answers(port: int, needed: Sequence[ChildProcess]) -> None:
    """Wait until a one-token request is answered; RoutingError if a process ends or it is late."""
    wait_for(lambda: _answers(port), needed)


def wait_for(condition: Callable[[], bool], needed: Sequence[ChildProcess]) -> None:
    """Wait until a condition holds; RoutingError if a process ends or START_S are over."""
    deadline_s = time.monotonic() + START_S
    while not condition():
        ended = [process for process in needed if process.child.poll() is not None]
        if ended or time.monotonic() > deadline_s:
            blamed = ended[0] if ended else needed[-1]
            what = "ended" if ended else f"did not answer within {START_S:g} s"
            raise RoutingError(f"{blamed.name} {what}; {blamed.said()}")
        time.sleep(0.2)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=PROBE_S)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/chat/completions", PROBE, headers)
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return response.status == 200
