"""One run of the demo under a policy, its report in view, and one engine killed if asked for."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from replayer.demo.checks import CLASSES, checks, metric_sum
from replayer.demo.fleet import Fleet, fetched
from replayer.demo.processes import Children

PATIENCE = 20
"""Requests for which an engine with two running ones is waited for: a single one may just end."""
_log = logging.getLogger("demo")


def one_run(children: Children, options: argparse.Namespace, load: tuple[str, ...]) -> bool:
    """Start, replay, check; True if all of it holds."""
    policy = ("--offload-policy", options.offload_policy or "seed-heuristic")
    fleet = Fleet(Path(options.out), children, policy, load, options.speed)
    fleet.make_folder()
    fleet.start_engines(options.engines)
    fleet.wait_for_engines()
    fleet.wait_for_proxy(fleet.start_proxy(fleet.instances))
    fleet.write_record()
    _log.info("%d engines behind %s, logs in %s", options.engines, fleet.url, fleet.out)
    kill_after = options.kill_engine_after
    with nullcontext() if kill_after is None else _killing(fleet, kill_after):
        code = fleet.replay(in_view=True).child.wait()
    offloads = policy[1] not in ("never", "cost")
    killed = kill_after is not None
    classes = CLASSES if offloads else ()
    evidence = fleet.evidence(offloads=offloads, classes=classes, killed=killed)
    held = True
    for ok, text in checks(evidence):
        _log.info("%s %s", "ok    " if ok else "FAILED", text)
        held &= ok
    return held and (code == 0 or killed)


@contextmanager
def _killing(fleet: Fleet, after: int) -> Iterator[None]:
    """Kill one working engine, while the block runs, once enough requests are done."""
    log = fleet.out / "proxy.jsonl"
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.05):
            done = log.read_bytes().count(b"\n") if log.exists() else 0
            if done >= after and _kill_one(fleet, 2 if done < after + PATIENCE else 1):
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        ended.set()
        killer.join()


def _kill_one(fleet: Fleet, least: int) -> bool:
    """SIGKILL the engine with most running requests; False if none has as many as `least`."""
    running = [
        metric_sum(fetched(f"{url}/metrics"), "vllm:num_requests_running")
        for url in fleet.engine_urls
    ]
    if max(running) < least:
        return False
    engine = fleet.engines[running.index(max(running))]
    engine.expected_to_live = False
    engine.child.kill()
    return True
