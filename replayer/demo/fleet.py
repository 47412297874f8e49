"""A fleet of the demo: simulated engines, the proxy and the client as processes, and one folder.

Every part is the command that a user would type, in a process of its own.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from replayer.demo.checks import Evidence
from replayer.demo.processes import RECORD, ChildProcess, Children, write_record

PREFILL_TPS = 20_000
TRANSFER_S = 0.5
ITS_FILES = ("engine*.jsonl", "engine*.out", "proxy.jsonl", "*.out", "requests.jsonl", RECORD)


@dataclass
class Fleet:
    """The processes of one run, and the folder that they write to.

    `policy` are the proxy's options that tell this run from another, `load` the arguments of
    `replay`, `speed` how many times faster than real engines the simulated ones run.
    """

    out: Path
    children: Children
    policy: tuple[str, ...]
    load: tuple[str, ...]
    speed: float = 6.0
    engines: list[ChildProcess] = field(default_factory=list)
    engine_urls: list[str] = field(default_factory=list)
    instances: list[str] = field(default_factory=list)
    """Items of `--instances`, in the order of the engines."""
    proxy_flags: tuple[str, ...] = ()
    url: str = ""
    """Address of the proxy."""
    _started: list[ChildProcess] = field(default_factory=list)

    def make_folder(self) -> None:
        """Make the folder, and remove what an earlier demo left in it."""
        self.out.mkdir(parents=True, exist_ok=True)
        # Only what a demo writes: the folder may have traces and logs of others.
        for pattern in ITS_FILES:
            for old in self.out.glob(pattern):
                old.unlink()

    def start_engines(self, count: int) -> None:
        """Start engines on ports that the kernel chooses; `wait_for_engines` waits for them."""
        for i in range(count):
            name, log = f"engine{i}", str(self.out / f"engine{i}.jsonl")
            ports = ("--port", "0", "--bootstrap-port", "0")
            speed = ("--speed", str(self.speed), "--request-log", log)
            self.engines.append(self._start(name, "replayer.simulator.cli", *ports, *speed))

    def wait_for_engines(self) -> None:
        """Wait until every engine listens, and note its addresses."""
        for i, engine in enumerate(self.engines):
            ready = engine.wait_for(r"engine 0 (http://\S+) bootstrap (http://\S+)")
            self.engine_urls.append(ready[1])
            self.instances.append(f"engine{i}={ready[1]};bootstrap={ready[2]}")

    def start_proxy(self, instances: Sequence[str]) -> ChildProcess:
        """Start the proxy with rates for engines at this speed."""
        # On two shared cores an engine may answer a probe late.
        probing = ("--health-timeout", "5")
        rates = [*("--prefill-throughput", str(PREFILL_TPS * self.speed))]
        rates += ["--kv-transfer-time", str(TRANSFER_S / self.speed)]
        self.proxy_flags = (
            *("--host", "127.0.0.1", "--port", "0"),
            *("--instances", ",".join(instances), *rates),
            *("--request-log", str(self.out / "proxy.jsonl"), *probing, *self.policy),
        )
        return self._start("proxy", "proxy.cli", *self.proxy_flags)

    def wait_for_proxy(self, proxy: ChildProcess) -> str:
        """Wait until the proxy listens, and return its URL."""
        self.url = proxy.wait_for(r"listening on (http://\S+)")[1]
        return self.url

    def write_record(self) -> None:
        """Write `run.json`, with which the run can be repeated in virtual time."""
        engine = {"speed": self.speed}
        write_record(self.out, self.proxy_flags, [engine] * len(self.engines), self.load)

    def replay(self, *, in_view: bool) -> ChildProcess:
        """Start the client; in view: its progress and report on the demo's own output."""
        command = [*self.load, "--target", self.url, "--out", str(self.out)]
        command += ["--proxy-log", str(self.out / "proxy.jsonl")]
        if in_view:
            return self.children.start_in_view("replay", "replayer.replay", *command)
        return self._start("replay", "replayer.replay", *command, "--no-progress")

    def stop(self) -> None:
        """Stop its processes, the last one first."""
        for process in reversed(self._started):
            process.stop()

    def evidence(
        self, *, offloads: bool, classes: Sequence[str] = (), killed: bool = False
    ) -> Evidence:
        """Collect the records to check, while the engines still answer."""
        alive = [
            (i, url) for i, url in enumerate(self.engine_urls) if self.engines[i].expected_to_live
        ]
        return Evidence(
            proxy_log=self.out / "proxy.jsonl",
            client_log=self.out / "requests.jsonl",
            proxy_metrics=fetched(f"{self.url}/metrics"),
            engine_metrics={f"engine{i}": fetched(f"{url}/metrics") for i, url in alive},
            engine_logs={f"engine{i}": self.out / f"engine{i}.jsonl" for i, _ in alive},
            killed=killed,
            offloads_expected=offloads,
            wait=patiently,
            classes=tuple(classes),
        )

    def _start(self, name: str, *command: str) -> ChildProcess:
        process = self.children.start(name, self.out / f"{name}.out", *command)
        self._started.append(process)
        return process


def fetched(url: str) -> str:
    """Return the text at a URL of the demo's own processes."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def patiently(condition: Callable[[], bool]) -> None:
    """Wait up to 10 s for a condition, since the engines' logs are written late."""
    deadline_s = time.monotonic() + 10.0
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.1)
