"""What all tests of agents share; each agent works once, for all that is asked of its requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import namespace
from tests.clients.agents import BIN
from tests.support.fixtures import pytest_asyncio_loop_factories  # noqa: F401

_TABLE = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLE] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An agent needs seconds to start, on a machine with nothing else to do."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash.get(_TABLE, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are printed at the end of the run: the table of docs/concepts/clients.md."""
    return pytestconfig.stash[_TABLE]


@pytest.fixture(scope="session", autouse=True)
def alone() -> None:
    """Agents would call their makers: they run only where nobody else can be reached."""
    if not BIN.is_dir() or not namespace.is_alone():
        pytest.fail("run this with `make test-clients`")
