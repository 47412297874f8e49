"""What tests of the replayer share: answers to aiohttp's client, without a socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import aiohttp
import aioresponses
import aioresponses.core
import pytest


class _Response(aiohttp.ClientResponse):
    """aioresponses 0.7.9 does not know `stream_writer`, which aiohttp >= 3.14 requires."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("stream_writer", Mock(output_size=0))
        super().__init__(*args, **kwargs)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[aioresponses.aioresponses]:
    """Answers by URL to every request of an aiohttp session; what has none cannot be reached."""
    monkeypatch.setattr(aioresponses.core, "ClientResponse", _Response)
    with aioresponses.aioresponses() as prepared:
        yield prepared
