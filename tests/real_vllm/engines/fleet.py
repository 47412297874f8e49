"""Real engines as processes: flags, ports, start, crash, restart, end.

The flags make an engine small (1 GB, one process beside the API server, no compilation) and leave
what matters as it is: paged prefix cache, chunked prefill, continuous batching, the KV connector.
"""

from __future__ import annotations

import http.client
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from bench.measuring.processes import free_ports

HERE = Path(__file__).parent
MODEL = "tiny"
BLOCK_TOKENS = 32
KV_BYTES_PER_TOKEN = 256
ABORT_S = 15
"""How long a broken hand-over keeps blocks pinned; vLLM's own default is 480 s."""
READY_S = 400.0
"""The first takes 20 s on an idle machine, of which 3 s are its own; a busy one takes longer."""
STOP_S = 20.0
PROGRAM = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""What an engine runs, and what it imports later on."""
_TAKEN = "Address already in use"


class Forked:
    """One process that a template has forked; it leads its session and its process group."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor = -1

    def has_ended(self, wait_s: float = 0.0) -> bool:
        """Whether it is over, now or within this time."""
        if self._descriptor >= 0 and select.select([self._descriptor], [], [], wait_s)[0]:
            os.close(self._descriptor)
            self._descriptor = -1
        return self._descriptor < 0

    def signal(self, number: int) -> None:
        """Send a signal to all of its group; that they are over is no error."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Template:
    """A process that has imported a program, and becomes one for each `fork`; see template.py.

    It starts with the first fork. `env`: what modules find that read it while they are imported.
    """

    def __init__(self, python: Path | str, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = [str(python), str(HERE / "template.py"), *modules]
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> Forked:
        """Start the program with these arguments, in this environment and folder."""
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, env=self._env, cwd=cwd
            )
        told, answers = self._process.stdin, self._process.stdout
        assert told is not None
        assert answers is not None
        asked = {"argv": argv, "env": env, "cwd": str(cwd), "log": str(log)}
        told.write(orjson.dumps(asked) + b"\n")
        told.flush()
        if not (answer := answers.readline()):
            raise EngineError(f"{' '.join(self._command)} ended: its last lines are above")
        return Forked(int(answer))

    def end(self) -> None:
        """End it; what it has forked and still runs ends with it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@dataclass(frozen=True, slots=True)
class Site:
    """Where the engines' environment and model are, and where a run leaves its logs."""

    venv: Path
    model: Path
    run: Path
    template: Template

    @classmethod
    def below(cls, cache: Path) -> Site:
        """The layout of `.cache/vllm`, made by `make test-vllm`."""
        venv, run = cache / "venv", cache / "run"
        template = Template(venv / "bin" / "python", PROGRAM, environment(run))
        return cls(venv, cache / "model", run, template)

    @property
    def shared_kv(self) -> Path:
        """The store of engines that share one."""
        return self.run / "shared-kv"


class EngineError(Exception):
    """An engine that did not start."""


@dataclass(slots=True)
class Kind:
    """One KV connector: vLLM's configuration of it, and the environment it wants."""

    config: Mapping[str, object]
    env: dict[str, str] = field(default_factory=dict)
    side_port: str | None = None
    """The variable that names its port; for Mooncake that is where the proxy asks for the id."""


def kinds(site: Site) -> dict[str, Kind]:
    """Every connector that the tests use. No engine id: a restarted engine must have a new one."""
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    mooncake = common | {
        "kv_connector": "MooncakeCpuConnector",
        "kv_connector_module_path": "mooncake_cpu",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    nixl = common | {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    shared = common | {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(site.shared_kv)},
    }
    return {
        "mooncake": Kind(
            mooncake,
            {
                "PYTHONPATH": str(HERE / "plugin"),
                "MC_TCP_BIND_ADDRESS": "127.0.0.1",
                "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(ABORT_S),
            },
            "VLLM_MOONCAKE_BOOTSTRAP_PORT",
        ),
        "nixl": Kind(
            nixl,
            {
                "UCX_TLS": "tcp,self,sm",
                "UCX_NET_DEVICES": "lo",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            },
            "VLLM_NIXL_SIDE_CHANNEL_PORT",
        ),
        "shared": Kind(shared),
        "none": Kind({}),
    }


class Engine:
    """One engine: an address that stays, and a process that may come and go."""

    def __init__(
        self,
        site: Site,
        name: str,
        kind: str,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port, self.side_port = free_ports(2)
        self._site, self._kind, self._flags = site, kinds(site)[kind], flags
        self._env = env or {}
        self._process: Forked | None = None
        self._since_s = 0.0

    @property
    def url(self) -> str:
        """Base URL of the API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def bootstrap_url(self) -> str:
        """Where Mooncake tells the engine's id."""
        return f"http://127.0.0.1:{self.side_port}"

    @property
    def pid(self) -> int:
        """Of the API server, which leads the engine's process group."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        """What it prints."""
        return self._site.run / f"{self.name}.log"

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and not self._process.has_ended()

    def start(self) -> None:
        """Begin; `wait` says when it serves."""
        work = self._site.run / "cwd"  # vLLM imports what lies where it runs
        work.mkdir(parents=True, exist_ok=True)
        template = self._site.template
        self._process = template.fork(self._command(), self._environment(), work, self.log)
        self._since_s = time.monotonic()

    def wait(self) -> None:
        """Until it serves; raises EngineError with the end of its log when it does not."""
        while not self._serves():
            if not self.is_alive:
                raise EngineError(f"{self.name} ended while starting\n{self.tail()}")
            if time.monotonic() - self._since_s > READY_S:
                raise EngineError(f"{self.name} not ready after {READY_S:g} s\n{self.tail()}")
            time.sleep(0.2)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compute one prompt, less than a block of it: nothing of it is cached.

        On some processors vLLM's CPU build crashes where the very first prompt has a few tokens.
        """
        ask = {"model": MODEL, "prompt": [3] * (BLOCK_TOKENS - 1), "max_tokens": 1}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=READY_S)
        try:
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", orjson.dumps(ask), kind)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.name} ended at its first prompt\n{self.tail()}") from error
        finally:
            connection.close()
        if status != 200:
            raise EngineError(f"{self.name}: {status} for its first prompt\n{self.tail()}")

    def kill(self) -> None:
        """A crash: nothing is answered, nothing tidied up."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)
            self._process.has_ended(STOP_S)

    def stop(self) -> None:
        """SIGTERM; then SIGKILL for whatever is left of it."""
        if self._process is None:
            return
        if self.is_alive:
            os.kill(self.pid, signal.SIGTERM)
            self._process.has_ended(STOP_S)
        self.kill()
        self._process = None

    def freeze(self) -> None:
        """It takes connections and answers nothing."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        os.killpg(self.pid, signal.SIGCONT)

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _serves(self) -> bool:
        if _get(self.url, "/health") is None:
            return False
        if self._kind.side_port != "VLLM_MOONCAKE_BOOTSTRAP_PORT":
            return True
        return bool(orjson.loads(_get(self.bootstrap_url, "/query") or b"{}"))

    def _command(self) -> list[str]:
        command = ["vllm", "serve", str(self._site.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL]
        command += ["--max-model-len", "32768", "--max-num-seqs", "16", "--enforce-eager"]
        command += ["--block-size", str(BLOCK_TOKENS), "--distributed-executor-backend", "uni"]
        command += ["--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"]
        command += ["--enable-prompt-tokens-details", "--enable-request-id-headers"]
        if "--kv-cache-memory-bytes" not in self._flags:
            command += ["--kv-cache-memory-bytes", str(64 << 20)]
        if "--max-num-batched-tokens" not in self._flags:
            command += ["--max-num-batched-tokens", "2048"]
        if self._kind.config:
            command += ["--kv-transfer-config", orjson.dumps(self._kind.config).decode()]
        return [*command, *self._flags]

    def _environment(self) -> dict[str, str]:
        env = environment(self._site.run)
        if self._kind.side_port is not None:
            env[self._kind.side_port] = str(self.side_port)
        return {**env, **self._kind.env, **self._env}


def environment(run: Path) -> dict[str, str]:
    """What all engines find; PYTHONHASHSEED and OMP_NUM_THREADS count while they are imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))}
    return env | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the CPU platform adds a worker process
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "XDG_CACHE_HOME": str(run / "home"),
        "XDG_CONFIG_HOME": str(run / "home"),
    }


@contextmanager
def running(engines: Sequence[Engine]) -> Iterator[None]:
    """A block in which these engines serve, started at once; all are stopped at its end."""
    try:
        start(engines)
        yield
    finally:
        for engine in reversed(engines):
            engine.stop()


def start(engines: Sequence[Engine]) -> None:
    """Start engines side by side and wait for all."""
    for engine in engines:
        engine.start()
    for engine in engines:
        try:
            engine.wait()
        except EngineError:
            if engine.is_alive or _TAKEN not in engine.tail(200):
                raise
            # The kernel had given the port away before the engine came to bind it.
            engine.port, engine.side_port = free_ports(2)
            engine.start()
            engine.wait()


def _get(url: str, path: str) -> bytes | None:
    """The body of a 200 answer, or None."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
