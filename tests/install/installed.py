"""An installation: commands that run in it, and a proxy in front of a simulated engine."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import orjson

from bench.measuring.processes import Child
from tests.support.waiting import until_true


class Installed(Protocol):
    """A place in which the project is installed."""

    def command(self, *words: str, **variables: str) -> dict[str, Any]:
        """Arguments for `subprocess`."""


@contextmanager
def proxied(place: Installed, folder: str) -> Iterator[tuple[Child, str, str]]:
    """Run `engine-sim` and `cache-proxy` of a folder; yield the proxy, its URL and the engine's."""
    engine = [f"{folder}/engine-sim", "--port", "0", "--bootstrap-port", "0", "--speed", "50"]
    with Child(**place.command(*engine)) as simulator:
        of_engine = until_true(lambda: simulator.found(r"engine 0 (\S+) "))[1]
        options = ["--instances", of_engine, "--host", "127.0.0.1", "--port", "0"]
        with Child(**place.command(f"{folder}/cache-proxy", *options)) as child:
            url = until_true(lambda: child.found(r"listening on (\S+)\s"))[1]
            yield child, url, of_engine


def answered(url: str) -> int:
    """Send a chat request for four tokens, and return how many the answer has."""
    body = {"model": "sim-8b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", orjson.dumps(body), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(orjson.loads(answer.read())["usage"]["completion_tokens"])
