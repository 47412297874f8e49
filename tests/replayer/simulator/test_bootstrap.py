"""The receiving side of a KV transfer: what it makes of a sender's answers, whatever they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from replayer.engine.types import RemoteKv
from replayer.simulator.bootstrap import PullResult, Receiver

QUERY = "http://p:8998/query"
PULL = "http://10.0.0.5:20000/sim/pull"
WORKER = {"0": {"engine_id": "p-1", "worker_addr": {"0": {"0": "tcp://10.0.0.5:20000"}}}}
REMOTE = RemoteKv(engine_id="p-1", transfer_id="x-1", bootstrap_url="http://p:8998/")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as http:
        yield http


def asked(answers: Any, method: str, url: str) -> int:
    return sum(
        len(calls)
        for (seen, where), calls in answers.requests.items()
        if (seen, str(where)) == (method, url)
    )


async def test_the_worker_is_asked_for_once(answers: Any, session: aiohttp.ClientSession) -> None:
    answers.get(QUERY, payload=WORKER)
    answers.post(PULL, payload={"ok": True}, repeat=True)
    receiver = Receiver(session)
    assert [await receiver.fetch(REMOTE, 32) for _ in range(2)] == [PullResult.DONE] * 2
    assert (asked(answers, "GET", QUERY), asked(answers, "POST", PULL)) == (1, 2)


@pytest.mark.parametrize(
    "said",
    [
        {"status": 500, "body": b""},
        {"body": b'{"0": ['},
        {"payload": []},
        {"payload": {}},
        {"payload": {"0": {"engine_id": "p-1"}}},
        {"payload": {"0": {"engine_id": "p-2", "worker_addr": WORKER["0"]["worker_addr"]}}},
        {"exception": aiohttp.ClientConnectionError("refused")},
        {"exception": TimeoutError()},
    ],
    ids=["500", "half", "a list", "no rank", "no address", "another engine", "refused", "late"],
)
async def test_without_a_worker_a_pull_fails(
    answers: Any, session: aiohttp.ClientSession, said: dict[str, Any]
) -> None:
    """And the next one asks again: an engine may only just be starting."""
    answers.get(QUERY, **said)
    receiver = Receiver(session)
    assert await receiver.fetch(REMOTE, 32) is PullResult.FAILED
    answers.get(QUERY, payload=WORKER)
    answers.post(PULL, payload={"ok": True})
    assert await receiver.fetch(REMOTE, 32) is PullResult.DONE


@pytest.mark.parametrize(
    ("said", "result", "where_it_is_noticed"),
    [
        ({"payload": {"ok": False}}, PullResult.FAILED, PullResult.FAILED),
        ({"status": 409}, PullResult.LOST, PullResult.FAILED),
        (
            {"exception": aiohttp.ServerDisconnectedError()},
            PullResult.LOST,
            PullResult.FAILED,
        ),
    ],
    ids=["refused", "another engine by now", "the sender dies"],
)
async def test_a_pull_that_brings_nothing(
    answers: Any,
    session: aiohttp.ClientSession,
    said: dict[str, Any],
    result: PullResult,
    where_it_is_noticed: PullResult,
) -> None:
    """Mooncake waits out a lost sender; NIXL notices it."""
    for gives_up, expected in ((False, result), (True, where_it_is_noticed)):
        answers.get(QUERY, payload=WORKER)
        answers.post(PULL, **said)
        assert await Receiver(session, gives_up=gives_up).fetch(REMOTE, 32) is expected
