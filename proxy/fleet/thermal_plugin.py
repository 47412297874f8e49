"""Sets the cap of an engine that has the plugin vllm-thermal (`;thermal=plugin`).

The engine keeps it from its next step on, and sends running requests back to its own queue for it,
which no proxy can. What the proxy sends to the instance is bounded by the gate as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.net.peer_documents import read_json
from proxy.net.timeouts import Limit
from proxy.net.upstream.client import Upstream
from proxy.protocol.errors import UpstreamFailure
from proxy.telemetry.log import printable

PATH = "/plugins/thermal"
PLUGIN_S = 5.0
"""For both requests of a change together. The engine answers between two of its steps."""
ANSWER_BYTES = 64 << 10
_WORDS = 200
"""Longest text of an instance's error that is shown, in characters."""
_JSON = b"Content-Type: application/json\r\n"
_MEANS = {
    401: "is --thermal-token the engine's VLLM_THERMAL_TOKEN?",
    404: "does its VLLM_PLUGINS name thermal?",
    501: "was it started with the scheduler class of vllm-thermal?",
}
"""The usual cause of a status of the plugin."""


@dataclass(frozen=True, slots=True)
class CapSet:
    """The cap that an instance's engines enforce from now on, or the reason for none.

    `limit`: the cap in force, `running`: requests that run as it is set; both over all of the
    instance's data-parallel engines. `error`: one line, with the instance's name.
    """

    limit: int | None = None
    running: int | None = None
    error: str | None = None


class ThermalPlugins:
    """The plugins of all instances.

    `upstream` gives an instance's connections by name; raises UpstreamFailure. `auth` gives the
    Authorization header line, which a reload may change.
    """

    def __init__(self, upstream: Callable[[str], Upstream], auth: Callable[[], bytes]) -> None:
        self._upstream, self._auth = upstream, auth

    async def set_cap(
        self, instance: str, cap: int | None, victim: str | None = None, ttl_s: float | None = None
    ) -> CapSet:
        """Set the cap of an instance; None gives the engine back its own.

        `victim` names who gives way first, None leaves that as it is. With `ttl_s` the cap ends by
        itself so long after, should nobody renew it.
        """
        fields: dict[str, Any] = {"cap": cap, "ttl_s": ttl_s}
        if victim is not None:
            fields["victim"] = victim
        try:
            with Limit(PLUGIN_S):
                if cap is not None:
                    # Each data-parallel engine has a scheduler and so a cap of its own.
                    engines = await self._ask(instance, "GET", None)
                    fields["cap"] = max(1, cap // len(engines))
                engines = await self._ask(instance, "PUT", fields)
        except TimeoutError:
            return CapSet(error=f"{instance}: no answer of {PATH} in {PLUGIN_S:g} s")
        except UpstreamFailure as failure:
            return CapSet(error=f"{instance}: {PATH}: {failure.kind}: {failure.detail}")
        except _RefusedError as error:
            return CapSet(error=f"{instance}: {error}")
        return CapSet(
            limit=sum(limit for limit, _ in engines), running=sum(runs for _, runs in engines)
        )

    async def _ask(
        self, instance: str, method: str, fields: dict[str, Any] | None
    ) -> list[tuple[int, int]]:
        """Limit and number of running requests of each engine."""
        head = _JSON + self._auth()
        body = None if fields is None else orjson.dumps(fields)
        reply = await self._upstream(instance).send(method, PATH, head, body)
        try:
            raw = await reply.read(ANSWER_BYTES)
        finally:
            reply.close()
        if reply.status != 200:
            meaning = _MEANS.get(reply.status) or _said(raw)
            raise _RefusedError(f"{method} {PATH} answers {reply.status}: {meaning}")
        found = _engines(raw)
        if found is None:
            raise _RefusedError(f"{method} {PATH} answers 200, but not as vllm-thermal does")
        return found


class _RefusedError(Exception):
    """The instance answered, though not as it should."""


def _engines(raw: bytes) -> list[tuple[int, int]] | None:
    """Each engine's answer; None if it is not the plugin's."""
    try:
        found = [(entry["limit"], entry["running"]) for entry in read_json(raw)]
    except (ValueError, TypeError, KeyError):
        return None
    is_right = all(type(number) is int for entry in found for number in entry)
    return found if found and is_right else None


def _said(raw: bytes) -> str:
    """An error's message as one line, whatever the instance sent."""
    try:
        text = read_json(raw)["error"]["message"]
        text = text if isinstance(text, str) else raw.decode(errors="replace")
    except (ValueError, TypeError, KeyError):
        text = raw.decode(errors="replace")
    return printable(text[:_WORDS]) or "without a word"
