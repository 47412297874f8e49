"""`cache-proxy explain` as typed: of a running proxy, of a log, and what is said of wrong input."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.admin.explain import TOKEN, main
from proxy.cli import main as command
from tests.support.harness import RawEngine, ServedProxy, chat, plain, proxied, words

TOKEN_GIVEN = "operators-token-0123456789"


async def explain(*argv: str, **environ: str) -> int:
    return await asyncio.to_thread(main, argv, environ)


async def test_a_running_proxy_and_its_log_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with proxied(tmp_path, 2, admin_token=TOKEN_GIVEN) as (proxy, _):
        await proxy.post(chat(words(50)), headers={"X-Request-Id": "a/b?c=1"})
        await proxy.records(1)
        at = ("--target", proxy.server.url)
        assert await explain("a/b?c=1", *at, **{TOKEN: TOKEN_GIVEN}) == 0
        told = capsys.readouterr().out
        assert "(load)" in told
        assert "Options, the cheapest first" in told
        (tmp_path / "token").write_text(TOKEN_GIVEN)
        token = ("--admin-token", f"@{tmp_path / 'token'}")
        assert await explain("a/b?c=1", *at, *token, "--policy", "always", "--json") == 0
        found = orjson.loads(capsys.readouterr().out)
        assert found["instead"][0]["policy"] == "always"
        assert found["sentence"] in told
        assert await explain("a/b?c=1", "--log", str(tmp_path / "log.jsonl")) == 0
        assert capsys.readouterr().out == told
        assert await explain("a/b?c=1", *at) == 2
        assert TOKEN in capsys.readouterr().err
        assert await explain("other", *at, *token) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "not known among the last 1, which go back to 2" in line
        assert TOKEN_GIVEN not in line


async def test_an_empty_ring_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        assert await explain("r", "--target", proxy.server.url) == 2
    assert "none was placed or refused yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "REQUEST_ID"),
        (("",), "REQUEST_ID: 1 to 256"),
        (("r", "--log", "{log}", "--target", "http://127.0.0.1:1"), "not allowed with"),
        (("r", "--log", "{log}/none"), "--log"),
        (("r", "--log", "{log}"), "none of its 3 lines is of request r"),
        (("old", "--log", "{log}"), "it has no decode_instance: a line of an older form"),
        (("r", "--target", "ftp://x"), "--target"),
        (("r", "--admin-token", "@/none"), "--admin-token: cannot read"),
        (("r", "--nothing"), "explain --help"),
    ],
)
def test_wrong_input_is_one_line(
    argv: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b'{"request_id":"old","t_proxy_recv":1}\n[1]\n{"request_id":"r"')
    given = [word.replace("{log}", str(log)) for word in argv]
    assert command(["explain", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cache-proxy explain: ")
    assert said in line


async def test_a_log_is_not_decided_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        await proxy.post(chat("x"), headers={"X-Request-Id": "r"})
        await proxy.records(1)
    log = ("--log", str(tmp_path / "log.jsonl"))
    assert await explain("r", *log, "--policy", "never") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this record has no columns to decide again with" in line
    assert await explain("r", *log, "--policy", "best") == 2
    assert "'best' is none of cost, " in capsys.readouterr().err


async def test_who_is_no_proxy_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    async with RawEngine() as engine:
        engine.tells(plain(b"<html>", "404 Not Found"))
        assert await explain("r", "--target", engine.address) == 2
        assert "status 404: it is no cache-proxy" in capsys.readouterr().err
    assert await explain("r", "--target", engine.address) == 1
    (line,) = capsys.readouterr().err.splitlines()
    said = f"cannot connect to {engine.address}: Connection refused"
    assert line == f"cache-proxy explain: {said}"
    assert await explain("r", "--target", "http://no-such-host.invalid:8000") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot connect to http://no-such-host.invalid:8000: " in line
    assert "ssl:" not in line


async def test_the_admin_port_is_the_one_to_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with RawEngine() as engine:
        options = {"admin_port": 0, "admin_token": TOKEN_GIVEN}
        async with ServedProxy(tmp_path / "log", [engine.address], **options) as proxy:
            await proxy.up()
            await proxy.post(chat("x"), headers={"X-Request-Id": "r"})
            assert await explain("r", "--target", proxy.server.url) == 2
            assert (
                await explain("r", "--target", proxy.server.admin_url, **{TOKEN: TOKEN_GIVEN}) == 0
            )
    assert "request r, " in capsys.readouterr().out


ODD: tuple[object, ...] = (None, True, -1, 1e18, 1e308, "", "x", [], [1], [[]], {}, {"a": 1})


async def test_a_record_with_a_field_of_another_form_is_told_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with proxied(tmp_path, 2) as (proxy, _):
        await proxy.post(chat(words(50)), headers={"X-Request-Id": "r"})
        (record,) = await proxy.records(1)
    await asyncio.to_thread(each_is_told, record, tmp_path / "odd", capsys)


def each_is_told(record: dict[str, Any], log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = record["candidates"][0]
    for holder, name in [(record, name) for name in record] + [(row, name) for name in row]:
        was = holder[name]
        for odd in ODD:
            holder[name] = odd
            log.write_bytes(orjson.dumps(record | {"request_id": "r"}))
            for form in ((), ("--json",)):
                status = main(("r", "--log", str(log), *form), {})
                told = capsys.readouterr().err.splitlines()
                assert (status, len(told)) in ((0, 0), (2, 1)), (name, odd)
        holder[name] = was
