"""What the tests of the bench share: compiled programs, and windows of a few milliseconds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.measuring import build, upstream
from bench.measuring.peers import Site
from bench.measuring.processes import Children, Cpus, children
from bench.measuring.scenarios import Load, Scenario
from bench.measuring.window import Bench

TINY = Scenario("tiny", Load("2k_stream1", 4, 1, warm_s=0.02, window_s=0.05))


@dataclass(frozen=True)
class Rig:
    """A bench with its engine running, and a site to start peers on."""

    bench: Bench
    site: Site


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if build.compiler() is None:
        pytest.skip("no C compiler")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the bench needs two CPUs")
    work, shared = tmp_path_factory.mktemp("bench"), tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # the first worker compiles, for all of them
    with (shared / "bench.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build.build(shared / "bench-bin")
    (work / "bin").symlink_to(shared / "bench-bin")
    return work


@pytest.fixture
def started() -> Iterator[Children]:
    with children() as block:
        yield block


@pytest.fixture
def rig(programs: Path, started: Children) -> Rig:
    cpus = Cpus.of_this_machine()
    program = programs / "bin" / "upstream"
    engine = upstream.start(started, program, cpus.load, programs / "upstream", ports=2)
    bench = Bench(programs / "bin", programs / "bodies", cpus, engine)
    return Rig(bench, Site(programs, programs / "venvs", cpus, started, engine))
