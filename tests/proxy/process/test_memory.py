"""Memory near its limit: what is still answered, and where the limit comes from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.core.admission.memory import Level
from proxy.process import background
from proxy.process.memory import cgroup_limit, resident_bytes
from tests.support.harness import chat, proxied, until, words

V1 = "9:cpu:/a\n8:rdma,memory:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4096"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "1024", "a/memory.max": "4096"}, 1024),
        ("0::/not/seen/here\n", {"memory.max": "2048\n"}, 2048),
        ("0::/../../x\n", {"memory.max": "2048\n"}, 2048),
        ("0::/\n", {}, None),
        (V1, {"memory/a/b/memory.limit_in_bytes": "9223372036854771712"}, None),
        (V1, {"memory/a/b/memory.limit_in_bytes": "512"}, 512),
        (V1, {"memory/memory.limit_in_bytes": "512", "memory.max": "256"}, 256),
        ("nonsense\n\n:::\n", {}, None),
        (None, {}, None),
    ],
)
def test_the_least_limit_of_the_control_groups(
    tmp_path: Path, groups: str | None, files: dict[str, str], expected: int | None
) -> None:
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cgroup_limit(tmp_path) == expected


def test_what_is_resident() -> None:
    assert resident_bytes() > 10 << 20


async def test_above_the_last_mark_nothing_is_let_in(tmp_path: Path) -> None:
    """This process is above 64 MiB: its own measurement says so. The body is not waited for."""
    async with proxied(tmp_path, 1, max_memory_bytes=64 << 20) as (proxy, _):
        await until(lambda: proxy.server.state.memory.level is Level.NOTHING)
        answer = await proxy.post(chat("x"))
        assert (answer.status, answer.json["message"][-15:]) == (503, "short of memory")
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["Connection"] == "close"
        assert proxy.rejected("memory") == 1
        assert proxy.metric("issued_total") == 1, "so that no more are rejected than there were"
        assert proxy.metric("memory_level") == 3
        assert proxy.metric("memory_used_bytes") > proxy.metric("memory_limit_bytes") == 64 << 20
        host, port = proxy.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 9999999\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        writer.close()


@pytest.mark.parametrize("level", [Level.NORMAL, Level.NO_KEEPALIVE, Level.NO_HEAVY])
async def test_levels_below(tmp_path: Path, level: Level) -> None:
    async with proxied(tmp_path, 1, warm_threshold=10, heavy_threshold=100) as (proxy, _):
        # No limit, so no measurement moves it.
        await until(lambda: proxy.server.state.memory.used_bytes)
        assert proxy.server.state.memory.limit_bytes is None
        proxy.server.state.memory.level = level
        for stream in (True, False):
            short = await proxy.post(chat("x", stream=stream))
            assert short.status == 200
            closes = short.headers.get("Connection") == "close"
            assert closes == (level is not Level.NORMAL)
        long = await proxy.post(chat(words(500)))
        assert long.status == (503 if level is Level.NO_HEAVY else 200)
        await proxy.at_rest()
        again = await proxy.post(chat(words(500)))
        assert again.status == long.status


async def test_idle_connections_are_closed_while_memory_is_short(tmp_path: Path) -> None:
    """They have memory, and the requests that would be refused for it have none."""
    async with proxied(tmp_path, 1) as (proxy, _):
        host, port = proxy.server.url.removeprefix("http://").split(":")
        head = b"GET /live HTTP/1.1\r\nHost: p\r\n\r\n"
        idle, sender = await asyncio.open_connection(host, int(port))
        busy, writer = await asyncio.open_connection(host, int(port))
        sender.write(head)
        assert (await idle.readline()).endswith(b"200 OK\r\n")
        writer.write(head[:20])
        await asyncio.sleep(0.05)
        proxy.server.state.memory.level = Level.NO_KEEPALIVE
        assert (await asyncio.wait_for(idle.read(), 10.0)).endswith(b"}"), "and then its end"
        writer.write(head[20:])
        assert (await busy.readline()).endswith(b"200 OK\r\n")
        for each in (sender, writer):
            each.close()


async def test_freed_memory_is_kept_while_giants_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there is room for it: each would have to get every page again."""
    seen: list[str] = []

    def look() -> int:
        seen.append("look")
        if is_busy:
            state.memory.note_giant(state.clock.now_s())
        return resident_bytes()

    async def some_looks() -> list[str]:
        await until(lambda: seen[-1:] == ["look"])  # not amid one
        seen.clear()
        await until(lambda: seen.count("look") > 4)
        return seen

    async with proxied(tmp_path, 1, sim={"max_model_len": 200_000}) as (proxy, _):
        state, is_busy = proxy.server.state, True
        monkeypatch.setattr(background, "give_back", lambda: seen.append("give back"))
        monkeypatch.setattr(background, "resident_bytes", look)
        monkeypatch.setattr(background, "GIVE_BACK_S", 0.0)
        monkeypatch.setattr(background, "CALM_S", 3600.0)
        monkeypatch.setattr(background, "MEMORY_INTERVAL_S", 0.01)
        await until(lambda: len(seen) > 2)
        assert "give back" not in await some_looks()
        state.memory.level = Level.NO_HEAVY
        assert "give back" in await some_looks()
        state.memory.level = Level.NORMAL
        await some_looks()
        assert "give back" not in await some_looks()
        is_busy = False
        await some_looks()
        assert "give back" not in await some_looks(), "the next one may be on its way"
        monkeypatch.setattr(background, "CALM_S", 0.0)
        await some_looks()
        assert "give back" in await some_looks()
        before_s = state.clock.now_s()
        assert (await proxy.post(chat(words(80_000)))).status == 200
        assert state.memory.giant_s > before_s
