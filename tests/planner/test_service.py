"""The planner as a process: what it checks before it begins, and its whole life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from planner import cli
from planner.config.options import PlannerOptions
from planner.scalers.state_file import StateFile
from planner.service import MOST_CLIENTS, StartError, serve, validate
from tests.planner.plugin_api.server import Plugin, served, wish
from tests.support.harness import proxied, until
from tests.test_layers import ROOT


def options(folder: Path, url: str, **more: object) -> PlannerOptions:
    usual: dict[str, object] = {
        "proxies": url,
        "state_file": folder / "state.json",
        "control": "127.0.0.1:0",
        "load_adjustment_interval_seconds": 0.05,
        "throughput_adjustment_interval_seconds": 0.2,
    }
    return PlannerOptions(**(usual | more))


async def test_what_keeps_it_from_beginning_is_a_line_each(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        url = proxy.server.url
        assert await validate(options(tmp_path, url)) == []
        wrong = {"match": "decode-*", "scaler": "exec", "scaler_command": "./not-there"}
        named, command = await validate(options(tmp_path, url, **wrong))
        assert "match decode-*: no instance" in named
        assert command == "./not-there list: No such file or directory"
    (away,) = await validate(options(tmp_path, url))
    assert away.startswith(f"GET {url}/metrics: ")


async def test_it_plans_until_a_signal_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "planner")
    async with proxied(tmp_path, 2) as (proxy, _), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(options(tmp_path, proxy.server.url)))
        line = 'cache_planner_ready_replicas{component="combined"} 2.0'
        await shown(serving, caplog, line)
    assert any(text.endswith("; advisory: nothing is carried out") for text in caplog.messages)
    StateFile(tmp_path / "state.json").close()


async def shown(serving: asyncio.Task[None], caplog: pytest.LogCaptureFixture, wanted: str) -> None:
    """Wait until the metrics of a planner have a line, and end it."""
    listens = "planner listens on "
    (text,) = await until(lambda: [t for t in caplog.messages if t.startswith(listens)])
    async with aiohttp.ClientSession(text.removeprefix(listens).partition(";")[0]) as http:

        async def is_shown() -> bool:
            async with http.get("/metrics") as answer:
                return wanted in (await answer.text()).splitlines()

        await until(is_shown, wanted)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


@pytest.mark.parametrize(("advisory", "baseline"), [(False, 4), (True, 2)])
async def test_it_begins_from_what_its_scaler_was_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, advisory: bool, baseline: int
) -> None:
    caplog.set_level("INFO", "planner")
    path = tmp_path / "decision.json"
    path.write_text('{"decision_id": 7, "targets": {"combined": 4}, "issued_at": 1.5}')
    more = {"scaler": "file", "decision_file": path, "advisory": advisory}
    async with proxied(tmp_path, 2) as (proxy, _), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(options(tmp_path, proxy.server.url, **more)))
        line = f'cache_planner_target_replicas{{component="combined"}} {baseline}.0'
        await shown(serving, caplog, line)


async def test_a_plugin_decides_from_the_configuration_to_the_audit(tmp_path: Path) -> None:
    plugin = Plugin(wish("AT_LEAST", 5, "combined", reason="a sale"))
    audit = tmp_path / "audit.jsonl"
    async with proxied(tmp_path, 1) as (proxy, _), served(plugin) as port:
        table: dict[str, object] = {
            "name": "sale",
            "stage": "propose",
            "address": f"127.0.0.1:{port}",
        }
        slow = {"tick_max_duration_seconds": 300.0, "audit_log": audit}
        table |= {"deadline_seconds": 25.0}
        own = options(tmp_path, proxy.server.url, plugin=[table], **slow)
        assert await validate(own) == []
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(own))
            await until(lambda: audit.is_file() and audit.read_bytes().endswith(b"\n"))
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
    line = json.loads(audit.read_text().splitlines()[0])
    assert line["targets"] == {"combined": 5}
    assert "plugin sale: at_least 5 of combined" in line["decision"]["reason"]
    (told,) = line["decided"]["plugins"]
    assert told == {
        "name": "sale",
        "stage": "propose",
        "state": "answered",
        "says": ["at_least 5 of combined"],
        "final": False,
        "reason": "a sale",
        "failure": "",
        "dropped": [],
    }
    away, *_ = await validate(options(tmp_path, "127.0.0.1:1", plugin=[table], **slow))
    assert away.startswith(f"plugin sale: 127.0.0.1:{port}: unavailable: ")


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(%r))
from planner.cli import main
sys.exit(main(["run", "--proxies", "p:1", *sys.argv[1:]]))
"""
"""A module that is None in sys.modules is one that is not installed."""


@pytest.mark.long
@pytest.mark.parametrize("missing", ["grpc", "google"])
def test_plugins_without_their_extra_are_a_line(tmp_path: Path, missing: str) -> None:
    code = WITHOUT % [missing]
    words = ["--plugin-registration", "--state-file", f"{tmp_path}/s"]
    command = [sys.executable, "-c", code, *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    said = "is not installed; run pip install -c constraints.txt '.[planner-grpc]'"
    assert said in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.long
def test_without_plugins_nothing_of_grpc_is_imported(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from planner.config.load import load
from planner.service import validate
asyncio.run(validate(load({"proxies": ("127.0.0.1:1",)}).options))
print(*sys.modules)
"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tops = {name.split(".")[0] for name in run.stdout.split()}
    assert "planner" in tops
    assert not tops & {"grpc", "google"}


async def test_a_taken_port_is_a_line(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1) as (proxy, _):
        taken = proxy.server.url.removeprefix("http://")
        with pytest.raises(StartError, match=f"control {taken}: "):
            await serve(options(tmp_path, proxy.server.url, control=taken))
    StateFile(tmp_path / "state.json").close()


def test_wrong_words_end_the_command_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = StateFile(tmp_path / "state.json")
    for words, why in (
        (["run", "--proxies", "p:1", "--ttft-ms", "0"], "ttft_ms = '0' (flag --ttft-ms)"),
        (["run", "--proxies", "p:1", "--state-file", f"{tmp_path}/state.json"], "another planner"),
        (["replay", "no-such-load"], "no-such-load"),
    ):
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("cache-planner: ")
        assert why in err
        assert err.count("\n") == 1
    held.close()


def test_an_unknown_flag_does_not_show_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", "--proxy-tokn=s3cret"], ["run", "--proxy-tokn", "s3cret"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert err == "cache-planner: unknown argument '--proxy-tokn'\n"


DEAD = {
    "deployment": [
        {"name": name, "proxies": f"127.0.0.{n}:1", "state_file": f"STATE-{name}"}
        for n, name in enumerate(("chat", "code"), 1)
    ]
}
"""Two deployments, the proxies of which are away."""


def test_validate_names_the_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", json.dumps(DEAD)]) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("chat: GET http://127.0.0.1:1/metrics: ")
    assert out[1].startswith("code: GET http://127.0.0.2:1/metrics: ")
    assert out[-1] == "2 wrong"
    (tmp_path / "no.pem").write_text("no PEM")
    broken = DEAD["deployment"][1] | {"instance_ca": str(tmp_path / "no.pem")}
    assert cli.main(["validate", json.dumps({"deployment": [DEAD["deployment"][0], broken]})]) == 2
    err = capsys.readouterr().err
    assert err.startswith("cache-planner: deployment code: instance_ca = ")
    assert err.count("\n") == 1


def test_a_deployment_that_cannot_begin_is_named_and_none_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: tmp_path / f"STATE-{name}" for name in ("chat", "code")}
    held = StateFile(paths["code"])
    config = json.dumps(DEAD).replace("STATE", f"{tmp_path}/STATE")
    assert cli.main(["run", config, "--control", "127.0.0.1:0"]) == 2
    err = capsys.readouterr().err
    assert (
        err
        == f"cache-planner: deployment code: state_file {paths['code']}: another planner holds it\n"
    )
    held.close()
    StateFile(paths["chat"]).close()


def test_validate_prints_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["validate", "--proxies", "127.0.0.1:1", "--state-file", f"{tmp_path}/s.json"]
    assert cli.main(words) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("GET http://127.0.0.1:1/metrics: ")
    assert out[-1] == "1 wrong"


async def test_idle_connections_keep_nobody_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "planner")
    async with proxied(tmp_path, 1) as (proxy, _), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(options(tmp_path, proxy.server.url)))
        listens = "planner listens on http://"
        (text,) = await until(lambda: [t for t in caplog.messages if t.startswith(listens)])
        host, _, port = text.removeprefix(listens).partition(";")[0].rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(MOST_CLIENTS + 20)]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as http:
            async with http.get("/live") as answer:
                assert answer.status == 200
        await until(lambda: sum(reader.at_eof() for reader, _ in idle) > 20, "others went")
        for _, writer in idle:
            writer.close()
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
