"""Fixtures for all tests: hypothesis profiles, and aioresponses on the aiohttp in use."""

import os
import signal
from typing import Any
from unittest.mock import Mock

import aiohttp
import aioresponses.core
import pytest
from hypothesis import HealthCheck, settings

_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=_FINE)
settings.register_profile("long", max_examples=10_000, deadline=None, suppress_health_check=_FINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure() -> None:
    """Take SIGINT back where it is ignored, as under `nohup` or in a script's background.

    A child inherits that, and a test that interrupts one would wait for its end for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Response(aiohttp.ClientResponse):
    """aioresponses 0.7.9 does not know `stream_writer`, which aiohttp >= 3.14 requires."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("stream_writer", Mock(output_size=0))
        super().__init__(*args, **kwargs)


@pytest.fixture(autouse=True)
def _aioresponses_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aioresponses.core, "ClientResponse", _Response)
