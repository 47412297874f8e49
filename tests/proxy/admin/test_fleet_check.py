"""`cache-proxy check` in front of engines that serve, sleep, refuse the key, or are not there."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from proxy.admin.fleet_check import Report, check
from proxy.config.options import Settings
from proxy.config.sources import ConfigError
from proxy.net.addresses import Resolver
from replayer.simulator.host import SimFleet
from tests.support.harness import RawEngine, addresses, plain

COMMAND = [sys.executable, "-m", "proxy.cli", "check", "--bootstrap-port", "none"]


async def found(*instances: str, **options: Any) -> Report:
    return await check(Settings(instances=instances, bootstrap_port=None, **options))


async def test_engines_that_serve_are_described_and_nothing_is_wrong() -> None:
    async with SimFleet(2) as fleet:
        first, second = addresses(fleet)[0], fleet.engines[1].url
        report = await found(f"a={first}", f"b={second}", model="sim-8b")
    assert report.problems == ()
    assert report.lines[-1] == "2 instances, no problems"
    of_a, of_b = report.instances
    assert of_a.startswith("a: vLLM 0.")
    for said in ("model sim-8b (131072 tokens)", "KV cache 393232 tokens", "awake"):
        assert said in of_a
        assert said in of_b
    assert of_a.endswith(
        f"mooncake found at {fleet.engines[0].bootstrap_url}, so it takes offloaded prefills"
    )
    assert of_b.endswith(
        "mooncake not looked for, as it shares its host with a: name its port with "
        ";bootstrap=PORT, else it takes no offloaded prefill"
    )
    assert "key" not in of_a


async def test_one_alone_on_its_host_is_asked_at_the_usual_port() -> None:
    async with SimFleet(1) as fleet:
        report = await found(fleet.engines[0].url)
    (line,) = report.instances
    assert line.endswith("no mooncake found, so it takes no offloaded prefill")


async def test_who_is_not_there_or_no_engine_is_a_problem_each() -> None:
    async with RawEngine() as engine:
        port = engine.port
        engine.gets["/health"] = plain(b"no", "404 Not Found")
        report = await found(f"odd=127.0.0.1:{port}", "gone=127.0.0.1:1")
    assert report.instances == ("odd: not reachable", "gone: not reachable")
    odd, gone = report.problems
    assert odd == "odd: GET /health answers 404: is this a vLLM server?"
    assert gone == "gone: nothing listens at http://127.0.0.1:1"
    assert report.lines[-1] == "2 instances, 2 problems"


async def test_an_instance_that_does_not_answer_in_time_names_the_option() -> None:
    async with RawEngine() as engine:
        engine.is_frozen = True
        report = await found(f"127.0.0.1:{engine.port}", health_timeout=0.05)
    (problem,) = report.problems
    assert problem.endswith("no answer in 0.05 s (--health-timeout)")


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_key_that_is_not_accepted_is_a_problem(key: str | None) -> None:
    async with RawEngine() as engine:
        engine.tells(plain(b"{}", "401 Unauthorized"))
        report = await found(f"127.0.0.1:{engine.port}", instance_api_key=key)
    (problem,) = report.problems
    assert ("--instance-api-key" if key is None else "the proxy's own key") in problem
    assert "wrong" not in problem
    assert ("key not accepted" in report.instances[0]) is (key is not None)


async def test_an_engine_that_sleeps_or_serves_another_model_is_a_problem() -> None:
    async with RawEngine() as engine:
        asleep = b'vllm:engine_sleep_state{sleep_state="awake"} 0\n'
        engine.tells(plain(asleep))
        sleeper = await found(f"127.0.0.1:{engine.port}", kv_connector="none")
        engine.tells(plain(b'{"data":[{"id":"sim-8b"}]}'))
        other = await found(f"a=127.0.0.1:{engine.port}", model="m", kv_connector="none")
    assert any(line.endswith(": sleeps, so it gets no request") for line in sleeper.problems)
    assert "a: serves sim-8b, not m (--model)" in other.problems


async def test_models_that_differ_are_a_note_where_no_model_is_named() -> None:
    async with RawEngine() as first, RawEngine() as second:
        first.tells(plain(b'{"data":[{"id":"sim-8b"},{"id":"lora-1"}]}'))
        second.tells(plain(b'{"data":[{"id":"other-7b"}]}'))
        a, b = f"a=127.0.0.1:{first.port}", f"b=localhost:{first.port}"
        c = f"c=127.0.0.1:{second.port}"
        differ = await found(a, c, "d=127.0.0.1:1")
        alike = await found(a, "d=127.0.0.1:1")
        named = await found(a, c, model="sim-8b")
        many = await found(a, c, b)
    assert differ.notes == (
        "a serves sim-8b, lora-1; c serves other-7b: a request goes to those that serve its model",
    )
    assert differ.lines[-2:] == [f"note: {differ.notes[0]}", "3 instances, 1 problem"]
    assert alike.notes == named.notes == ()
    assert many.notes[0].startswith("a, b serve sim-8b, lora-1; c serves other-7b: ")


async def test_an_instance_given_twice_is_a_problem() -> None:
    async with SimFleet(1) as fleet:
        url = fleet.engines[0].url
        report = await found(f"a={url}", f"b={url.replace('127.0.0.1', 'localhost')}")
    assert report.problems == ("b: is the same engine as a: give each engine one name",)


async def test_files_that_options_name_are_read() -> None:
    with pytest.raises(ConfigError, match="tls_cert"):
        await found("127.0.0.1:1", tls_cert="/nowhere.pem")


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "status"), [(("--instances", "127.0.0.1:1"), 1), (("--instances", "a b"), 2)]
)
def test_exit_status(given: tuple[str, ...], status: int) -> None:
    run = subprocess.run([*COMMAND, *given], capture_output=True, text=True, check=False)
    assert run.returncode == status
    lines = (run.stdout + run.stderr).splitlines()
    assert len(lines) == (3 if status == 1 else 1)


async def test_what_discovery_finds_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(host: str, port: int) -> list[str]:
        if host == "none.example":
            raise OSError
        return ["127.0.0.1"]

    monkeypatch.setattr(Resolver.__init__, "__defaults__", (look_up, time.monotonic))
    async with SimFleet(1) as fleet:
        (engine,) = fleet.engines
        port = engine.url.rpartition(":")[2]
        places = f"dns://engines.example:{port},dns://none.example:1"
        report = await check(Settings(discover=places, bootstrap_port=None))
    (line,) = report.instances
    assert line.startswith(f"127.0.0.1:{port}: vLLM")
    assert report.problems == ("dns://none.example:1: its name has no address",)
