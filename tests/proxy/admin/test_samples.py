"""GET /samples at a real proxy in front of simulated engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.admin.samples import MOST_SEQUENCE
from proxy.config.model import OptionError
from proxy.config.options import Settings
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.samples import ROWS_AT_ONCE
from tests.support.admin import call
from tests.support.harness import chat, proxied, words

KEY = {"Authorization": "Bearer k3y"}
SAME = ("t_proxy_recv", "isl_tokens", "hit_tokens", "new_tokens", "osl_tokens")


def rows_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(answer["fields"], row, strict=True)) for row in answer["samples"]]


async def test_samples_are_the_ended_requests_in_plain_numbers(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, samples=3, api_key="team:k3y") as (proxy, _):
        _, empty = await call(proxy, "GET", "/samples")
        assert (empty["first"], empty["last"], empty["samples"]) == (1, 0, [])
        assert (await proxy.post(chat("without a key"))).status == 401
        for tokens in (40, 30):
            named = KEY | {"X-Session-ID": "who", "X-Request-Id": f"one{tokens}"}
            body = chat(words(200, "secret"), max_tokens=tokens)
            assert (await proxy.post(body, headers=named)).status == 200
        _, (instance,) = await call(proxy, "GET", "/instances")
        await call(proxy, "DELETE", f"/instances/{instance['name']}")
        assert (await proxy.post(chat("nobody there"), headers=KEY)).status == 503
        records = [r for r in await proxy.records(4) if r["isl_tokens"] is not None]
        _, found = await call(proxy, "GET", "/samples?after=0")
        assert (found["first"], found["last"], found["started_at"]) == (1, 3, empty["started_at"])
        rows = rows_of(found)
        for number, (row, record) in enumerate(zip(rows, records, strict=True), 1):
            assert row.keys() == {"sequence", *SAME, "queue_s", "ttft_s", "tpot_s", "outcome"}
            assert row["sequence"] == number
            assert [row[name] for name in SAME] == [record[name] for name in SAME]
        assert [row["outcome"] for row in rows] == ["ok", "ok", "rejected"]
        assert [row["osl_tokens"] for row in rows] == [40, 30, None]
        assert rows[1]["hit_tokens"] > 0 == rows[0]["hit_tokens"]
        assert all(row["ttft_s"] > 0 < row["tpot_s"] for row in rows[:2])
        assert (rows[2]["ttft_s"], rows[2]["tpot_s"]) == (None, None)
        _, later = await call(proxy, "GET", "/samples?after=2")
        assert rows_of(later) == rows[2:]


async def test_a_late_reader_is_told_what_is_left_and_gets_it_in_parts(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, samples=2000) as (proxy, _):
        ring = proxy.server.state.telemetry.samples
        for number in range(1, 2501):
            ring.write(RequestRecord(request_id="r", isl_tokens=number))
        _, found = await call(proxy, "GET", "/samples?after=3")
        assert (found["first"], found["last"]) == (501, 2500)
        sequences = [row["sequence"] for row in rows_of(found)]
        assert sequences == [*range(501, 501 + ROWS_AT_ONCE)]
        _, beyond = await call(proxy, "GET", f"/samples?after={MOST_SEQUENCE}")
        assert (beyond["last"], beyond["samples"]) == (2500, [])


async def test_another_process_says_that_sequences_begin_anew(tmp_path: Path) -> None:
    starts = []
    for _ in range(2):
        async with proxied(tmp_path, 1, samples=2) as (proxy, _fleet):
            starts.append((await call(proxy, "GET", "/samples?after=7"))[1]["started_at"])
    assert starts[0] < starts[1]


async def test_without_the_option_nothing_is_kept(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        await proxy.post(chat("x"))
        await proxy.records(1)
        assert proxy.server.state.telemetry.samples.last == 0
        status, answer = await call(proxy, "GET", "/samples")
        assert (status, answer["error"]["code"]) == (404, 404)
        assert "--samples" in answer["error"]["message"]


@pytest.mark.parametrize("after", ["-1", "1.5", "x", "", "%20", "9" * 5000, f"{MOST_SEQUENCE + 1}"])
async def test_after_is_a_whole_number(tmp_path: Path, after: str) -> None:
    async with proxied(tmp_path, 1, samples=2) as (proxy, _):
        status, answer = await call(proxy, "GET", f"/samples?after={after}")
        assert (status, answer["error"]["code"]) == (400, 400)
        assert answer["error"]["message"] == f"after: a whole number, 0 to {MOST_SEQUENCE}"
        assert (await call(proxy, "POST", "/samples", {}))[0] == 405


@pytest.mark.parametrize("samples", ["-1", "100001", "1.5", "many"])
def test_the_option_is_a_count(samples: str) -> None:
    with pytest.raises(OptionError, match="samples"):
        Settings(instances="127.0.0.1:9", samples=samples)
