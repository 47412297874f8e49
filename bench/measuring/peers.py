"""Who is measured: how each proxy is installed, configured, started, and known to be up."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from string import Template

from bench.measuring.build import BenchError
from bench.measuring.processes import HOST, Child, Children, Cpus, free_ports, get
from bench.measuring.upstream import Upstream

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMPILED = ROOT / ".cache" / "compiled"
"""Where `make compiled` installs the project."""
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
"""nginx and haproxy live beyond a user's PATH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One proxy.

    In `command`: {port} {metrics_port} {urls} {urls_space} {work} {venv} {bin} (of this
    interpreter) {here}. `config` names a file of configs/, in which $servers is one `server` line
    per instance.
    """

    command: str | None
    config: str | None = None
    server: str = ""
    requirement: str | None = None
    """What pip installs for it, in an environment of its own."""
    package: str | None = None
    """Package of the system that has it."""
    version: str | None = None
    ready: str = "/health"
    start_s: float = 30.0
    settle_s: float = 0.5
    headers: tuple[str, ...] = ()
    lag_metric: str | None = None
    """Histogram of its event loop's lateness, where it exports one."""
    path: Path | None = None
    """Where Python looks first for its modules."""


_SGLANG = (
    "{venv}/bin/python -m sglang_router.launch_router --host 127.0.0.1 --port {port}"
    " --prometheus-host 127.0.0.1 --prometheus-port {metrics_port} --log-level warn"
    " --worker-urls {urls_space} --policy "
)
_VLLM = (
    "{venv}/bin/vllm-router --host 127.0.0.1 --port {port} --prometheus-port {metrics_port}"
    " --log-level warning --worker-urls {urls_space} --policy "
)


def _rust(command: str, requirement: str) -> Peer:
    return Peer(command=command, requirement=requirement, start_s=60.0, settle_s=2.0)


def _bare(mode: str) -> Peer:
    return Peer(command="{bin}/python {here}/bare.py " + mode + " {port} {urls}")


def _ours(path: Path) -> Peer:
    return Peer(
        command="{bin}/cache-proxy --host 127.0.0.1 --port {port} --instances {urls}"
        " --prefill-throughput 20000 --request-log {work}/requests.jsonl",
        headers=("x-session-id: 5e551000-0000-4000-8000-%C",),
        lag_metric="cache_proxy_loop_lag_seconds",
        path=path,
    )


PEERS: dict[str, Peer] = {
    "direct": Peer(command=None),
    "haproxy": Peer(
        command="haproxy -db -f {work}/haproxy.cfg",
        config="haproxy.cfg",
        server="server s{i} {host}:{port} pool-max-conn 2048",
        package="haproxy",
        version="haproxy -v",
    ),
    "nginx": Peer(
        command="nginx -c {work}/nginx.conf -p {work} -g 'daemon off;'",
        config="nginx.conf",
        server="server {host}:{port};",
        package="nginx",
        version="nginx -v",
    ),
    "sglang-router-rr": _rust(_SGLANG + "round_robin", "sglang-router==0.3.2"),
    "sglang-router-cache": _rust(_SGLANG + "cache_aware", "sglang-router==0.3.2"),
    "vllm-router-rr": _rust(_VLLM + "round_robin", "vllm-router==0.1.17"),
    "vllm-router-cache": _rust(_VLLM + "cache_aware", "vllm-router==0.1.17"),
    "naive-aiohttp": Peer(
        command="{bin}/python {here}/naive_aiohttp.py {port} {urls}",
        headers=("x-session-id: s%C",),
    ),
    "bare-aiohttp": _bare("aiohttp"),
    "bare-protocol": _bare("protocol"),
    "ours": _ours(COMPILED),
    "ours-interpreted": _ours(ROOT),
}
BEFORE = "before"
"""The peer that `--before CLONE` adds: another state of this project."""
QUICK = ("direct", "haproxy", "sglang-router-rr", "vllm-router-rr", "naive-aiohttp", "ours")


def clone(root: Path) -> Peer:
    """This project as another clone has it compiled, to measure what a change costs."""
    return _ours(root.resolve() / COMPILED.relative_to(ROOT))


class MissingError(BenchError):
    """A peer is not installed; says how to get it."""


@dataclass(frozen=True, slots=True)
class Running:
    """A peer that is up: where, and which processes it is."""

    name: str
    peer: Peer
    child: Child
    port: int

    @property
    def pids(self) -> list[int]:
        """Every process of it."""
        return self.child.pids


@dataclass(frozen=True, slots=True)
class Site:
    """Where peers run: their folders, their environments, the engine behind them."""

    work: Path
    venvs: Path
    cpus: Cpus
    children: Children
    upstream: Upstream

    def start(self, name: str, peer: Peer, folder: str | None = None) -> Running:
        """Start a peer and wait until it is ready; MissingError when it is not installed."""
        if peer.command is None:
            return Running(name, peer, self.upstream.child, self.upstream.ports[0])
        work = self.work / f"peer-{folder or name}"
        port, metrics_port = free_ports(2)
        command = self._command(peer, work, port, metrics_port)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        if peer.config is not None:
            (work / peer.config).write_text(self._config(peer, work, port))
        child = self.children.start(command, self.cpus.peer, work, _environment(peer))
        running = Running(name, peer, child, port)
        _wait(running)
        return running

    def _command(self, peer: Peer, work: Path, port: int, metrics_port: int) -> list[str]:
        urls = self.upstream.urls
        return resolve(
            peer,
            self.venvs,
            work=str(work),
            port=str(port),
            metrics_port=str(metrics_port),
            urls=",".join(urls),
            urls_space=" ".join(urls),
        )

    def _config(self, peer: Peer, work: Path, port: int) -> str:
        template = Template((HERE / "configs" / str(peer.config)).read_text())
        servers = "\n    ".join(
            peer.server.format(i=i, host=HOST, port=p) for i, p in enumerate(self.upstream.ports)
        )
        user = "user root;" if os.geteuid() == 0 else ""
        return template.substitute(work=work, port=port, servers=servers, user=user)


def resolve(peer: Peer, venvs: Path, **values: str) -> list[str]:
    """A peer's command line; MissingError when its program is not there."""
    venv = venv_of(peer, venvs)
    if peer.path is not None and not (peer.path / "proxy").is_dir():
        raise MissingError("not installed; get it with: make compiled")
    given = {"venv": str(venv), "bin": str(Path(sys.executable).parent), "here": str(HERE)}
    words = shlex.split(str(peer.command).format(**given, **values))
    program = shutil.which(words[0], path=SYSTEM_PATH)
    if program is None:
        raise MissingError(f"not installed; {_how_to_get(peer)}")
    return [program, *words[1:]]


def _how_to_get(peer: Peer) -> str:
    if peer.requirement is not None:
        return f"`make bench` installs {peer.requirement} with pip where it can be had"
    return f"get it with: apt-get install --no-install-recommends {peer.package}"


def venv_of(peer: Peer, venvs: Path) -> Path:
    """The environment that a peer from PyPI has for itself."""
    return venvs / (peer.requirement or "").partition("==")[0]


def version_of(peer: Peer) -> str | None:
    """Its version as measured; None where it is the project's own or not known."""
    if peer.requirement is not None:
        return peer.requirement.partition("==")[2]
    if peer.version is None:
        return None
    program, *rest = shlex.split(peer.version)
    found = shutil.which(program, path=SYSTEM_PATH)
    if found is None:
        return None
    done = subprocess.run([found, *rest], capture_output=True, text=True, check=False)
    version = re.search(r"\d+\.\d+\.\d+", done.stdout + done.stderr)
    return version[0] if version else None


def _environment(peer: Peer) -> dict[str, str]:
    """Without proxies for what stays on this machine, and without look-ups in model hubs."""
    proxies = {"http_proxy", "https_proxy", "all_proxy"}
    kept = {key: value for key, value in os.environ.items() if key.lower() not in proxies}
    if peer.path is not None:
        kept["PYTHONPATH"] = str(peer.path)
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def _wait(running: Running) -> None:
    deadline_s = time.monotonic() + running.peer.start_s
    while time.monotonic() < deadline_s and running.child.is_alive:
        try:
            if get(running.port, running.peer.ready)[0] == 200:
                time.sleep(running.peer.settle_s)
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise BenchError(f"{running.name} did not come up:\n{running.child.tail()}")
