"""`make demo`: simulated engines, the proxy, a replay of a real agentic trace, and checks.

Every part is the command that a user would type, in a process of its own; all are stopped by pid at
the end. The checks compare independent records of the run: the proxy's request log and metrics, the
engines' request logs and metrics, and the client's rows.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from replayer.arguments import missing_for_reports
from replayer.demo.checks import Evidence, checks, metric_sum
from replayer.demo.processes import RECORD, ChildProcess, Children, Stopped, write_record

SAMPLE = "agentic_sample.trace.jsonl.gz"
PREFILL_TPS = 20_000
TRANSFER_S = 0.5
EXIT_SIGNAL = 128  # plus the signal's number
_log = logging.getLogger("demo")


@dataclass
class Demo:
    """The processes of a demo, and the folder that they write to."""

    out: Path
    options: argparse.Namespace
    children: Children = field(default_factory=Children)
    engines: list[ChildProcess] = field(default_factory=list)
    engine_urls: list[str] = field(default_factory=list)
    proxy_flags: tuple[str, ...] = ()

    def start(self, name: str, *command: str) -> ChildProcess:
        """Run one of the project's commands until the demo ends."""
        return self.children.start(name, self.out / f"{name}.out", *command)

    def start_engines(self) -> list[str]:
        """Start engines on ports that the kernel chooses; returns the items of `--instances`."""
        for i in range(self.options.engines):
            name, log = f"engine{i}", str(self.out / f"engine{i}.jsonl")
            ports = ("--port", "0", "--bootstrap-port", "0")
            speed = ("--speed", str(self.options.speed), "--request-log", log)
            self.engines.append(self.start(name, "replayer.simulator.cli", *ports, *speed))
        instances = []
        for i, engine in enumerate(self.engines):
            ready = engine.wait_for(r"engine 0 (http://\S+) bootstrap (http://\S+)")
            self.engine_urls.append(ready[1])
            instances.append(f"engine{i}={ready[1]};bootstrap={ready[2]}")
        return instances

    def start_proxy(self, instances: list[str]) -> str:
        """Start the proxy with rates for engines at this speed; returns its URL."""
        speed = self.options.speed
        # On two shared cores an engine may answer a probe late.
        probing = ("--health-timeout", "5")
        rates = [*("--prefill-throughput", str(PREFILL_TPS * speed))]
        rates += ["--kv-transfer-time", str(TRANSFER_S / speed)]
        log = ("--request-log", str(self.out / "proxy.jsonl"))
        self.proxy_flags = (
            *("--host", "127.0.0.1", "--port", "0"),
            *("--instances", ",".join(instances), *rates, *log, *probing),
            *("--offload-policy", self.options.offload_policy),
        )
        proxy = self.start("proxy", "proxy.cli", *self.proxy_flags)
        return proxy.wait_for(r"listening on (http://\S+)")[1]

    def replay(self, target: str) -> int:
        """Run the client, its progress and report on the demo's own output; returns its status."""
        command = [*self.load, "--target", target, "--out", str(self.out)]
        command += ["--proxy-log", str(self.out / "proxy.jsonl")]
        with self.killing():
            return self.children.start_in_view("replay", "replayer.replay", *command).child.wait()

    @property
    def load(self) -> tuple[str, ...]:
        """Arguments of `replay`: trace, pace, and the user's own."""
        # Trace and engines run at the same speed, and the report is in engine time.
        speed = str(self.options.speed)
        # The same words in every demo: its engines are fresh, and two runs can be compared.
        pace = ("--speedup", speed, "--time-scale", speed, "--seed", "0")
        return (str(Path(self.options.trace).resolve()), *pace, *self.options.replay)

    @contextmanager
    def killing(self) -> Iterator[None]:
        """Kill one working engine, while the block runs, once enough requests are done."""
        after = self.options.kill_engine_after
        log = self.out / "proxy.jsonl"
        ended = threading.Event()

        def kill() -> None:
            while not ended.wait(0.05):
                if log.exists() and log.read_bytes().count(b"\n") >= after and self._kill_one():
                    return

        killer = threading.Thread(target=kill)
        if after is not None:
            killer.start()
        try:
            yield
        finally:
            ended.set()
            if after is not None:
                killer.join()

    def _kill_one(self) -> bool:
        """SIGKILL the first engine with running requests; False if there is none."""
        for engine, url in zip(self.engines, self.engine_urls, strict=True):
            if metric_sum(_get(f"{url}/metrics"), "vllm:num_requests_running"):
                engine.expected_to_live = False
                engine.child.kill()
                return True
        return False

    def evidence(self, target: str) -> Evidence:
        """Collect the records to check, while the engines still answer."""
        alive = [
            (i, url) for i, url in enumerate(self.engine_urls) if self.engines[i].expected_to_live
        ]
        return Evidence(
            proxy_log=self.out / "proxy.jsonl",
            client_log=self.out / "requests.jsonl",
            proxy_metrics=_get(f"{target}/metrics"),
            engine_metrics={f"engine{i}": _get(f"{url}/metrics") for i, url in alive},
            engine_logs={f"engine{i}": self.out / f"engine{i}.jsonl" for i, _ in alive},
            killed=self.options.kill_engine_after is not None,
            offloads_expected=self.options.offload_policy != "never",
            wait=_patiently,
        )


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def _patiently(condition: Callable[[], bool]) -> None:
    """Wait up to 10 s for a condition, since the engines' logs are written late."""
    deadline_s = time.monotonic() + 10.0
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.1)


def main() -> int:
    """Run the demo; 0 only when every check holds."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = _options()
    if missing := missing_for_reports():
        _log.error("demo: %s", missing)
        return 1
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    # Only what a demo writes: the folder may have traces and logs of others.
    for name in (
        "engine*.jsonl",
        "engine*.out",
        "proxy.jsonl",
        "proxy.out",
        "requests.jsonl",
        RECORD,
    ):
        for old in out.glob(name):
            old.unlink()
    demo = Demo(out, options)
    try:
        with demo.children.stopped_at_the_end():
            failed = _run(demo)
    except RuntimeError as error:
        _log.error("demo: %s", error)
        return 1
    except Stopped as stop:
        _log.info("demo: stopped by %s, and so is every process it had started", stop)
        return EXIT_SIGNAL + stop.number
    return 1 if failed else 0


def _run(demo: Demo) -> bool:
    """Start, replay, check; True if the replay or a check failed."""
    instances = demo.start_engines()
    target = demo.start_proxy(instances)
    engine = {"speed": demo.options.speed}
    write_record(demo.out, demo.proxy_flags, [engine] * len(instances), demo.load)
    _log.info("%d engines behind %s, logs in %s", len(instances), target, demo.out)
    code = demo.replay(target)
    failed = _report(demo.evidence(target))
    return bool(failed or (code and demo.options.kill_engine_after is None))


def _report(evidence: Evidence) -> int:
    results = list(checks(evidence))
    for ok, text in results:
        _log.info("%s %s", "ok    " if ok else "FAILED", text)
    return sum(not ok for ok, _ in results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.splitlines()[0])
    trace = str(files("replayer") / "data" / SAMPLE)
    parser.add_argument("--trace", default=trace, help="trace to replay")
    parser.add_argument("--out", default=".cache/demo", help="folder for logs and the report")
    parser.add_argument("--engines", type=int, default=4, help="simulated engines")
    parser.add_argument("--speed", type=float, default=6.0, help="times faster than real engines")
    parser.add_argument("--offload-policy", default="seed-heuristic", help="of the proxy")
    parser.add_argument(
        "--kill-engine-after",
        type=int,
        metavar="N",
        help="SIGKILL to an engine at work once N requests are done",
    )
    parser.add_argument("replay", nargs="*", help="more options for replay, behind --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
