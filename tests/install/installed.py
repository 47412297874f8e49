"""An installation: commands that run in it, and a proxy in front of a simulated engine."""

from __future__ import annotations

import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import orjson

from tests.support.waiting import until_true


class Installed(Protocol):
    """A place in which the project is installed."""

    def command(self, *words: str, **variables: str) -> dict[str, Any]:
        """Arguments for `subprocess`."""


@contextmanager
def serving(
    place: Installed, words: list[str], sign: str, stream: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a command, and yield the line with which it says that it serves."""
    with tempfile.TemporaryFile("w+") as output:
        command = place.command(*words) | {stream: output}
        with subprocess.Popen(**command) as child:
            try:
                yield child, until_true(lambda: _line(output, sign), sign)
            finally:
                child.kill()


def _line(output: Any, sign: str) -> str:
    output.seek(0)
    return next((line for line in output.read().splitlines() if sign in line), "")


@contextmanager
def proxied(place: Installed, folder: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run `engine-sim` and `cache-proxy` of a folder; yield the proxy, its URL and the engine's."""
    engine = [f"{folder}/engine-sim", "--port", "0", "--bootstrap-port", "0", "--speed", "50"]
    with serving(place, engine, "engine 0", "stdout") as (_, line):
        of_engine = line.split()[2]
        options = ["--instances", of_engine, "--host", "127.0.0.1", "--port", "0"]
        words = [f"{folder}/cache-proxy", *options]
        with serving(place, words, "listening on", "stderr") as (child, told):
            yield child, told.split("listening on ")[1].split()[0], of_engine


def answered(url: str) -> int:
    """Send a chat request for four tokens, and return how many the answer has."""
    body = {"model": "sim-8b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", orjson.dumps(body), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(orjson.loads(answer.read())["usage"]["completion_tokens"])
