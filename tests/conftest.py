"""Fixtures for all tests: hypothesis profiles, a SIGINT that works, fewer objects to collect."""

import gc
import os
import signal
from collections.abc import Generator
from functools import partial

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from tests.support.watchdog import Watchdog

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else its threads spin for the workers' cores
_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=_FINE)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=40)
settings.register_profile("long", max_examples=10_000, deadline=None, suppress_health_check=_FINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
_watchdog = Watchdog()


def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """One thread for all tests: pytest-timeout would start and join one for each."""
    end = partial(pytest_timeout.timeout_timer, item, settings)
    _watchdog.set(float(settings.timeout or 0), end)
    return True


def pytest_timeout_cancel_timer() -> bool:
    _watchdog.set(None)
    return True


def pytest_configure() -> None:
    """Take SIGINT back where it is ignored, as under `nohup` or in a script's background.

    A child inherits that, and a test that interrupts one would wait for its end for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the scenarios and demos as long, and begin with the demos.

    These mostly wait for their child processes, and would be waited for.

    Those that import the official clients stand together, so that few processes import them.
    """
    for item in items:
        if "scenarios" in item.path.parts or item.get_closest_marker("demo") is not None:
            item.add_marker("long")
    marks = ("demo", "official")
    items.sort(key=lambda item: [item.get_closest_marker(mark) is None for mark in marks])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what stays, while it is collected and ever after.

    It is thousands of tests, never freed.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
