"""Fixtures for every test that runs the proxy: its event loop, and no blocking call on that loop.

A `conftest.py` imports what its folder needs; pytest finds fixtures and hooks there by name.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import uvloop
from blockbuster import BlockBuster

from proxy.net import timeouts


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@cache
def _watch() -> BlockBuster:
    made = BlockBuster("proxy")
    for function in made.functions.values():
        # Opening the log and reading the version happen once, before the first request.
        function.can_block_in("proxy/state/proxy_state.py", "start")
        function.can_block_in("proxy/app.py", "start")
    return made


@pytest.fixture(autouse=True, scope="module")
def blockbuster() -> Iterator[BlockBuster]:
    """For a module at a time: to begin and end it takes longer than many a test."""
    watch = _watch()
    watch.activate()
    try:
        yield watch
    finally:
        watch.deactivate()


@pytest.fixture(autouse=True, scope="module")
def a_hiccup_of_the_machine_is_no_timeout() -> Iterator[None]:
    """Limits are some tenths of a second here, so what a busy machine takes of them is given back.

    Else only what is longer than a second counts as time in which nothing here could run.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timeouts, "LOST_S", timeouts.TICK_S / 5)
        yield
