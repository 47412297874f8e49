"""Users of real clients at once: recorded sessions through the proxy in front of engine-sim.

Each user has the session's texts but for the first words, names of his own, and short answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tests.support.clients import Recorded, recorded
from tests.support.harness import ServedProxy

MODEL, ANSWER_TOKENS = "sim-8b", 12
_NAMING = (
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "x-session-affinity",
    "x-session-id",
    "x-parent-session-id",
)
"""Headers whose values name sessions, and stand in bodies too."""
Change = Callable[[int, dict[str, Any]], None]
"""Changes the body of a user's n-th request."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request as the proxy logged it. `agent`: of the user's session, as recorded."""

    user: str
    agent: int
    turn: int
    record: dict[str, Any]

    @property
    def error(self) -> float:
        """The error of the predicted hit, as a part of the prompt."""
        told = self.record["cached_tokens"]
        return float(abs(self.record["hit_tokens"] - told) / self.record["prompt_tokens"])


def sessions_of(client: str) -> list[list[Recorded]]:
    """A client's recorded sessions without what computes no prompt, the longest first."""
    found: dict[str, list[Recorded]] = {}
    for request in recorded(client):
        if request.rendered_chars:
            found.setdefault(request.session, []).append(request)
    return sorted(found.values(), key=len, reverse=True)


async def served(
    proxy: ServedProxy,
    session: Sequence[Recorded],
    users: Sequence[str],
    change: dict[str, Change] | None = None,
) -> list[Served]:
    """The session for each user, all at once, each turn behind the last one's answer."""
    async with asyncio.TaskGroup() as group:
        for user in users:
            group.create_task(_replayed(proxy, session, user, (change or {}).get(user)))
    records = {r["request_id"]: r for r in await proxy.records(len(session) * len(users))}
    return [
        Served(user, request.agent, turn, records[f"{user}.{turn}"])
        for user in users
        for turn, request in enumerate(session)
    ]


async def _replayed(
    proxy: ServedProxy, session: Sequence[Recorded], user: str, change: Change | None
) -> None:
    names = {value for r in session for key, value in r.headers.items() if key in _NAMING}
    for turn, request in enumerate(session):
        headers, raw = dict(request.headers), request.body.decode()
        for name in names:
            own = f"{user}{name[len(user) :]}"
            raw = raw.replace(name, own)
            headers = {key: value.replace(name, own) for key, value in headers.items()}
        body = orjson.loads(raw)
        _own(body, user)
        if change is not None:
            change(turn, body)
        headers |= {"content-type": "application/json", "x-request-id": f"{user}.{turn}"}
        answer = await proxy.post(body, request.path, headers=headers)
        assert answer.status == 200, answer.body[:300]


def _own(body: dict[str, Any], user: str) -> None:
    """Give a body the user's words, the engine's model, and short answers."""
    body["model"] = MODEL
    is_response = "input" in body
    body["max_output_tokens" if is_response else "max_tokens"] = ANSWER_TOKENS
    body.pop("max_completion_tokens", None)
    turns = body["input" if is_response else "messages"]
    if is_response and isinstance(turns, list):  # vLLM refuses references
        turns[:] = [item for item in turns if item.get("type") != "item_reference"]
    for turn in turns if isinstance(turns, list) else ():
        if turn.get("role") == "user":
            turn["content"] = _begun(turn["content"], f"I am {user}, ")
            return


def _begun(content: Any, words: str) -> Any:
    if isinstance(content, str):
        return words + content
    for part in content:
        if isinstance(part.get("text"), str):
            part["text"] = words + part["text"]
            break
    return content
