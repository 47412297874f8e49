"""What a client calls its sessions, over real sockets: names, agents beside them, and no name."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ServedProxy, proxied

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


def fresh() -> str:
    return str(uuid.uuid4())


def text(what: str, kib: int) -> str:
    return (f"{what} " * 1024 * kib)[: 1024 * kib]


class Talk:
    """A conversation that grows by an answer and a question per turn."""

    def __init__(self, what: str, kib: int = 8) -> None:
        self._messages = [{"role": "system", "content": text(what, kib)}]
        self._turn = 0

    def body(self) -> dict[str, Any]:
        self._turn += 1
        self._messages.append({"role": "user", "content": f"question {self._turn}"})
        body = {"model": "sim-8b", "messages": list(self._messages), "max_tokens": 4}
        self._messages.append({"role": "assistant", "content": f"answer {self._turn}"})
        return body


TITLE = {
    "model": "sim-8b",
    "messages": [
        {"role": "system", "content": text("make a title of it", 2)},
        {"role": "user", "content": "question 1"},
    ],
    "max_tokens": 4,
}


async def turns(
    proxy: ServedProxy, *asked: tuple[dict[str, Any], dict[str, str]]
) -> list[tuple[str | None, int | None, str | None]]:
    """Session, turn and home by the log, of chats with these bodies and headers."""
    before = len(await proxy.records(0))
    for body, headers in asked:
        assert (await proxy.post(body, headers=headers)).status == 200
    records = (await proxy.records(before + len(asked)))[before:]
    return [(one["session_id"], one["turn"], one["home_instance"]) for one in records]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-claude-code-session-id": "s"}, {}),
        ({"session-id": "s", "thread-id": "s"}, {}),
        ({"session_id": "s"}, {}),
        ({"X-Session-ID": "s", "X-Session-Affinity": "s"}, {}),
        ({}, {"prompt_cache_key": "s"}),
        ({}, {"metadata": {"session_id": "s"}}),
        ({}, {"metadata": {"user_id": '{"device_id":"d","session_id":"s"}'}}),
        ({}, {"user": "user_5f_account__session_5c7f1a2e-0000-4000-8000-000000000000"}),
        ({}, {"session_id": "s"}),
    ],
)
async def test_an_agents_own_name_wins_over_a_correlation_id(
    tmp_path: Path, headers: dict[str, str], body: dict[str, Any]
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        talk = Talk("a")
        asked = [(talk.body() | body, {"X-Correlation-ID": fresh()} | headers) for _ in range(3)]
        told = await turns(proxy, *asked)
    assert len({name for name, _turn, _home in told}) == 1
    assert [turn for _name, turn, _home in told] == [0, 1, 2]


async def test_aiperfs_correlation_id_names_a_session_from_its_second_turn_on(
    tmp_path: Path,
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        one = {"model": "sim-8b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        headers = [{"X-Correlation-ID": "aiperf-7", "X-Request-ID": fresh()} for _ in range(3)]
        told = await turns(proxy, *[(one, each) for each in headers])
        alone = await turns(proxy, *[(one, {"X-Correlation-ID": fresh()}) for _ in range(3)])
    assert [(name, turn) for name, turn, _ in told] == [(None, 0), ("aiperf-7", 1), ("aiperf-7", 2)]
    assert [home is not None for _name, _turn, home in told] == [False, True, True]
    assert alone == [(None, 0, None)] * 3


async def test_titles_and_counts_take_no_turn_and_move_no_home(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        talk, named = Talk("a"), {"X-Session-ID": "s"}
        first = await turns(proxy, (talk.body(), named))
        title = await turns(proxy, (TITLE, named))
        counted = await proxy.post(TITLE, COUNT, headers={"x-claude-code-session-id": "s"})
        (count,) = (await proxy.records(3))[2:]
        later = await turns(proxy, (talk.body(), named), (talk.body(), named))
        records = await proxy.records(5)
    assert counted.status in (200, 404)
    assert (count["session_id"], count["turn"], count["home_instance"]) == ("s", None, None)
    assert title == [("s", None, None)]
    home = records[0]["decode_instance"]
    assert [*first, *later] == [("s", 0, None), ("s", 1, home), ("s", 2, home)]
    assert [one["rehomed"] for one in records[3:]] == [False, False]


async def test_a_title_before_the_first_turn(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        talk, named = Talk("a", kib=24), {"X-Session-ID": "s"}
        told = await turns(proxy, (TITLE, named), *[(talk.body(), named) for _ in range(3)])
    assert [turn for _name, turn, _home in told[1:]] == [0, 1, 2]


async def test_sub_agents_have_places_of_their_own(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        parent, child = Talk("parent"), Talk("child")
        claude = {"x-claude-code-session-id": "s"}
        agent = claude | {"x-claude-code-agent-id": "a"}
        told = await turns(
            proxy,
            (parent.body(), claude),
            *[(child.body(), agent) for _ in range(3)],
            (parent.body(), claude),
        )
    assert [(name, turn) for name, turn, _home in told] == [
        ("s", 0),
        *[("s:a", n) for n in range(3)],
        ("s", 1),
    ]


async def test_a_conversation_without_a_name_has_a_home(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        one, other = Talk("a"), Talk("a")
        one.body()
        told = []
        for _ in range(3):
            told += await turns(proxy, (one.body(), {}), (other.body(), {}))
        records = await proxy.records(6)
    assert [turn for _name, turn, _home in told] == [0, 0, 1, 1, 2, 2]
    for place in (0, 1):
        homes = {record["decode_instance"] for record in records[place::2]}
        assert len(homes) == 1
        assert [record["rehomed"] for record in records[place + 2 :: 2]] == [False, False]


@pytest.mark.parametrize("named", [True, False])
async def test_conversations_at_once_keep_their_instances_with_a_name_and_without(
    tmp_path: Path, named: bool
) -> None:
    """Where placement goes by load alone, only a home keeps a conversation in its place."""
    options: dict[str, Any] = {"offload_policy": "never", "placement": "least-tokens"}
    async with proxied(tmp_path, 3, **options) as (proxy, _):

        async def talks(name: str) -> None:
            talk, headers = Talk("a"), {"X-Session-ID": name} if named else {}
            for _ in range(5):
                body = talk.body()
                body["messages"][1]["content"] = f"I am {name}"
                assert (await proxy.post(body, headers=headers)).status == 200

        async with asyncio.TaskGroup() as group:
            for n in range(7):
                group.create_task(talks(f"s{n}"))
        records = await proxy.records(35)
        await proxy.at_rest()
    assert [one["rehomed"] for one in records].count(None) == 7
    assert not any(one["rehomed"] for one in records)
    assert sorted(one["turn"] for one in records) == sorted(list(range(5)) * 7)


async def test_an_operators_headers_and_the_end_of_a_session(tmp_path: Path) -> None:
    async with proxied(tmp_path, session_headers=("x-chat", "X-Session-ID")) as (proxy, _):
        talk = Talk("a")
        both = [{"X-Session-ID": fresh(), "x-chat": "c"} for _ in range(2)]
        told = await turns(proxy, *[(talk.body(), headers) for headers in both])
        async with proxy.http.post("/sessions/c/end") as ended:
            assert (await ended.json()) == {"ended": True}
        told += await turns(proxy, (talk.body(), {"x-chat": "c"}))
    assert [(name, turn) for name, turn, _home in told] == [("c", 0), ("c", 1), ("c", 0)]
