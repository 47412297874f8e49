"""The planner's listener: decisions and their acknowledgement, floors, metrics, the report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from planner import control
from planner.control import application
from planner.core.types import COMPONENT
from planner.plugin_api.channel import Channel
from planner.scalers.base import Decision
from planner.scalers.noop import NoopScaler
from planner.scalers.virtual import VirtualScaler
from proxy.config.secrets import SecretStr
from tests.planner.plugin_api.server import Plugin, served, wish
from tests.planner.scalers.test_virtual import FLEET
from tests.planner.test_run import Stage

Client = TestClient[web.Request, web.Application]


@asynccontextmanager
async def listening(stage: Stage, *, token: str | None = None) -> AsyncIterator[Client]:
    secret = None if token is None else SecretStr(token)
    app = application(stage.planner, stage.scaler, secret)
    async with TestClient(TestServer(app)) as client:
        yield client


def staged(folder: Path, scaler: Any) -> Stage:
    stage = Stage(folder)
    stage.planner._state.close()  # type: ignore[union-attr]
    stage.scaler = scaler
    stage.planner = stage.begun()
    return stage


async def answer(client: Client, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if data is not None else {}
    async with client.request(method, path, data=data, headers=headers) as found:
        text = await found.text()
        return found.status, json.loads(text) if text else None


async def test_an_orchestrator_polls_and_acknowledges_and_a_restart_keeps_it(
    tmp_path: Path,
) -> None:
    stage = staged(tmp_path, VirtualScaler())
    async with listening(stage) as client, asyncio.TaskGroup() as tasks:
        polling = tasks.create_task(answer(client, "GET", "/v1/planner/decision"))
        await stage.ticks(4)
        status, told = await polling
        assert (status, told["decision_id"], told["targets"]) == (200, 0, {COMPONENT: 2})
        complete = "/v1/planner/complete"
        wrong = {"decision_id": 7, "ok": True}
        refused = 409, {"error": "decision_id: the current decision is 0"}
        assert await answer(client, "POST", complete, wrong) == refused
        body = {"decision_id": 0, "ok": True, "observed": {COMPONENT: 2}}
        for _ in range(2):
            assert await answer(client, "POST", complete, body) == (200, {"decision_id": 0})
    kept = json.loads((tmp_path / "state.json").read_text())["kept"]
    assert kept["notes"] == {"acknowledged": 0}, "before it was answered"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        ({"decision": 0}, 400),
        ({"decision_id": "0"}, 422),
        ({"decision_id": True}, 422),
        ({"decision_id": 0, "ok": False}, 422),
        (b"x" * (1 << 17), 413),
    ],
)
async def test_a_wrong_acknowledgement_is_refused(tmp_path: Path, body: Any, status: int) -> None:
    scaler = VirtualScaler()
    await scaler.apply(Decision(0, {}, 0.0), FLEET)
    async with listening(staged(tmp_path, scaler)) as client:
        found, told = await answer(client, "POST", "/v1/planner/complete", body)
        assert found == status
        assert "\n" not in told["error"]
    assert not (await scaler.apply(Decision(0, {}, 0.0), FLEET)).is_done


@pytest.mark.parametrize("after", ["x", "-2", "1.5", "", "9" * 40])
async def test_a_wrong_after_is_refused(tmp_path: Path, after: str) -> None:
    async with listening(staged(tmp_path, VirtualScaler())) as client:
        found = await answer(client, "GET", f"/v1/planner/decision?after={after}")
        assert found == (400, {"error": "after: a whole number, -1 or more"})


async def test_a_poll_without_a_decision_ends_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "POLL_S", 0.01)
    async with listening(staged(tmp_path, VirtualScaler())) as client:
        assert await answer(client, "GET", "/v1/planner/decision?after=3") == (204, None)
    stage = Stage(tmp_path / "other")
    async with listening(stage) as client:
        status, told = await answer(client, "GET", "/v1/planner/decision")
        assert (status, "virtual" in told["error"]) == (404, True)


FLOORS = "/v1/min-endpoints"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        (b"", 400),
        ({"decode": 2}, 400),
        ({COMPONENT: None}, 422),
        ({COMPONENT: "2"}, 422),
        ({COMPONENT: True}, 422),
        ({COMPONENT: 0}, 422),
        ({COMPONENT: 9}, 422),
        ({COMPONENT: 2, "decode": 2}, 400),
    ],
)
async def test_a_wrong_floor_changes_nothing(tmp_path: Path, body: Any, status: int) -> None:
    async with listening(Stage(tmp_path)) as client:
        found, told = await answer(client, "PATCH", FLOORS, body)
        assert found == status
        assert told["error"]
        assert await answer(client, "GET", FLOORS) == (200, {COMPONENT: 1})


async def test_a_floor_is_kept_and_followed(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with listening(stage) as client:
        assert await answer(client, "PATCH", FLOORS, {COMPONENT: 5}) == (200, {COMPONENT: 5})
    await stage.ticks(1)
    assert stage.scaler.applied[-1].targets == {COMPONENT: 5}
    assert json.loads((tmp_path / "state.json").read_text())["kept"]["floors"] == {COMPONENT: 5}


async def test_a_floor_that_cannot_be_kept_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    async with listening(stage) as client:
        monkeypatch.setattr(stage.planner, "save", lambda: False)
        status, told = await answer(client, "PATCH", FLOORS, {COMPONENT: 5})
        assert (status, "state file" in told["error"]) == (503, True)
        assert await answer(client, "GET", FLOORS) == (200, {COMPONENT: 1})


async def test_metrics_and_the_report_are_served(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.ticks(3)
    async with listening(stage) as client:
        async with client.get("/metrics") as found:
            text = await found.text()
        assert 'cache_planner_target_replicas{component="combined"} 2.0' in text
        async with client.get("/report") as found:
            assert "Plotly.newPlot" in await found.text()
        assert await answer(client, "GET", "/nothing") == (404, {"error": "Not Found"})


async def test_with_a_token_all_but_live_need_it(tmp_path: Path) -> None:
    stage = staged(tmp_path, NoopScaler())
    async with listening(stage, token="a-token-of-sixteen") as client:
        assert (await answer(client, "GET", "/live"))[0] == 200
        assert (await answer(client, "GET", "/metrics"))[0] == 401
        assert (await answer(client, "PATCH", FLOORS, {COMPONENT: 5}))[0] == 401
        headers = {"Authorization": "Bearer a-token-of-sixteen"}
        async with client.get("/metrics", headers=headers) as found:
            assert found.status == 200
    assert stage.planner.floors == {COMPONENT: 1}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Host": "localhost"}, 200),
    ],
)
async def test_no_web_page_sets_a_floor(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    sent = {"Content-Type": "application/json"} | headers
    async with listening(Stage(tmp_path)) as client:
        body = b'{"combined": 2}'
        async with client.patch("/v1/min-endpoints", data=body, headers=sent) as found:
            assert found.status == status
        shown = {COMPONENT: 2 if status == 200 else 1}
        assert await answer(client, "GET", "/v1/min-endpoints") == (200, shown)


async def test_with_a_token_any_host_may_read(tmp_path: Path) -> None:
    sent = {"Authorization": "Bearer a-token-of-mine", "Host": "planner.example"}
    async with listening(Stage(tmp_path), token="a-token-of-mine") as client:
        async with client.get("/metrics", headers=sent) as found:
            assert found.status == 200


PLUGIN = "/v1/planner/plugins/theirs"


async def test_a_plugin_registers_itself_says_so_again_and_goes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, plugin_registration=True, tick_max_duration_seconds=300.0)
    plugin = Plugin(wish("AT_LEAST", 6, COMPONENT))
    plugin.token = "what it wants to be called with"
    async with served(plugin) as port, listening(stage) as client:
        stage.planner.externals.begin([], Channel)
        told = {
            "stage": "propose",
            "address": f"127.0.0.1:{port}",
            "token": plugin.token,
            "deadline_seconds": 25,
        }
        assert await answer(client, "PUT", PLUGIN, told) == (200, {"lease_seconds": 15.0})
        await stage.ticks(1)
        assert await answer(client, "PUT", PLUGIN, told) == (200, {"lease_seconds": 15.0})
        decision = stage.planner.decision
        assert decision is not None
        assert decision.targets == {COMPONENT: 6}
        _, (shown,) = await answer(client, "GET", "/v1/planner/plugins")
        assert (shown["registered"], shown["state"]) == (True, "answered")
        assert plugin.token not in str(shown)
        metrics = stage.planner.metrics.text().decode()
        assert 'plugin_state{plugin="theirs",state="answered"} 1.0' in metrics
        other = told | {"address": "127.0.0.1:1"}
        status, refused = await answer(client, "PUT", PLUGIN, other)
        assert (status, refused["error"]) == (
            409,
            "theirs: a plugin at another address has that name",
        )
        assert (await answer(client, "DELETE", PLUGIN))[0] == 204
        assert (await answer(client, "DELETE", PLUGIN))[0] == 404
        await stage.ticks(1)
        assert "plugin_state{" not in stage.planner.metrics.text().decode()
        await stage.planner.end()


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"{", 400, "not JSON"),
        ({"stage": "propose", "address": "127.0.0.1:1", "self": 1}, 400, "'self' is not known"),
        ({"stage": "propose"}, 422, "'theirs', address: it is not given"),
        ({"stage": "execute", "address": "127.0.0.1:1"}, 422, "'theirs', stage: one of predict"),
        ({"stage": "propose", "address": "unix:/run/x"}, 422, "not of the form HOST:PORT"),
        ({"stage": "propose", "address": "10.0.0.1:1"}, 422, "not loopback, so it is needed"),
        (
            {"stage": "propose", "address": "127.0.0.1:1", "token": "@/etc/hostname"},
            422,
            "the text itself, and no file",
        ),
        (
            {"stage": "propose", "address": "127.0.0.1:1", "deadline_seconds": 4},
            422,
            "at most 3, a tenth of tick_max_duration_seconds",
        ),
    ],
)
async def test_a_registration_that_cannot_be_used(
    tmp_path: Path, body: Any, status: int, why: str
) -> None:
    stage = Stage(tmp_path, plugin_registration=True)
    async with listening(stage) as client:
        found, told = await answer(client, "PUT", PLUGIN, body)
    assert found == status
    assert why in told["error"]


async def test_nobody_registers_unasked_or_without_the_token(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    told = {"stage": "propose", "address": "127.0.0.1:1"}
    async with listening(stage) as client:
        off = 403, {"error": "plugin_registration is off"}
        assert await answer(client, "PUT", PLUGIN, told) == off
        assert await answer(client, "DELETE", PLUGIN) == off
    async with listening(stage, token="a-long-enough-token") as client:
        assert (await answer(client, "PUT", PLUGIN, told))[0] == 401
