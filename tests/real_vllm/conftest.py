"""Engines that all tests share, a proxy per test, and figures at the end of the run.

Not part of `make test`; `make test-vllm` makes what the engines need, and names this folder.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from proxy.core.routing import time_limits
from tests.real_vllm.engines.fleet import READY_S, Engine, Site, running
from tests.real_vllm.rig import Pair

ROOT = Path(__file__).parents[2]
TEST_S = 600.0
_FIGURES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the recorded contract anew")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of an engine fixture also waits for its engines."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(READY_S + TEST_S))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash.get(_FIGURES, []):
        terminalreporter.write_line(line)


@pytest.fixture
def figure(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Print a line at the end of the run: what is shown and not asserted."""
    return pytestconfig.stash[_FIGURES].append


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's limits presume engines that do not share two cores with it and everybody else."""
    monkeypatch.setattr(time_limits, "LEG_FIXED_S", 30.0)
    monkeypatch.setattr(time_limits, "FIRST_TOKEN_FIXED_S", 60.0)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    found = Site.below(ROOT / ".cache" / "vllm")
    if not (found.venv / ".installed").is_file() or not (found.model / ".made-by").is_file():
        pytest.fail("no engines: run this with `make test-vllm`")
    yield found
    found.template.end()


@pytest.fixture(scope="session")
def mooncake_engines(site: Site) -> Iterator[tuple[Engine, Engine]]:
    engines = Engine(site, "a", "mooncake"), Engine(site, "b", "mooncake")
    with running(engines):
        yield engines


@pytest.fixture
async def mooncake(mooncake_engines: tuple[Engine, Engine]) -> AsyncIterator[Pair]:
    """Two engines at rest; one that a test has killed is back for the next."""
    for engine in mooncake_engines:
        if not engine.is_alive:
            engine.start()
            engine.wait()
    async with aiohttp.ClientSession() as http:
        pair = Pair(http, mooncake_engines)
        await pair.at_rest()
        yield pair
