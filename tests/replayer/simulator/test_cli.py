"""The command: ready lines, request log, one line for every bad start."""

import re
import socket
import sys
from pathlib import Path

import aiohttp
import orjson
import pytest

from bench.measuring.processes import Child
from replayer.simulator.cli import main
from replayer.simulator.options import SimOptions
from tests.support.harness import until
from tests.support.waiting import until_true


def simulator(*options: str) -> Child:
    command = [sys.executable, "-m", "replayer.simulator.cli", "--port", "0", *options]
    return Child(command)


@pytest.mark.long
async def test_it_serves_until_sigterm_and_writes_the_log(tmp_path: Path):
    log = tmp_path / "requests.jsonl"
    own = ("--bootstrap-port", "0", "--instances", "2", "--speed", "20", "--request-log", str(log))
    with simulator(*own) as process:
        await until(lambda: process.log.count("\n") == 2)
        lines = [line.split() for line in process.log.splitlines()]
        assert [line[:2] for line in lines] == [["engine", "0"], ["engine", "1"]]
        assert [line[-1] for line in lines] == ["sim-8b", "sim-8b"]
        url = lines[1][2] + "/v1/completions"
        async with aiohttp.ClientSession() as http:
            body = {"prompt": "a b c", "max_tokens": 4}
            async with http.post(url, json=body, headers={"X-Request-Id": "r1"}) as answer:
                assert answer.status == 200
            async with http.get(lines[0][4] + "/query") as answer:
                assert set(await answer.json()) == {"0"}
        process.terminate()
        assert await process.ended() == 0
    (record,) = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    assert record["request_id"] == "r1"
    assert (record["prompt_tokens"], record["output_tokens"]) == (3, 4)
    assert record["t_arrived"] <= record["t_first_token"] <= record["t_done"]


def test_a_taken_port_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--port", port, "--bootstrap-port", "0"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert port in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--speed", "0"], "--speed"),
        (["--block-size", "0"], "--block-size"),
        (["--num-gpu-blocks", "10"], "--max-model-len"),
        (["--instances", "0"], "--instances"),
        (["--port", "70000"], "--port"),
        (["--port", "9000", "--bootstrap-port", "9001", "--instances", "2"], "--bootstrap-port"),
        (["--kv-events-port", "65535"], "--kv-events-port"),
        (["--request-log", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_a_bad_value_is_one_line_and_status_2(arguments, named, capsys):
    assert main(["--port", "0", "--bootstrap-port", "0", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("engine-sim: ")
    assert named in message
    assert message.count("\n") == 1


def test_a_value_of_the_wrong_type_is_one_line_too(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        main(["--speed", "fast"])
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_options_are_checked_in_process_as_well():
    with pytest.raises(ValueError, match="--kv-load-failure-policy sometimes"):
        SimOptions(kv_load_failure_policy="sometimes")
    assert SimOptions(a1=1e-4).engine().step.a1 == 1e-4


@pytest.mark.long
def test_two_simulators_side_by_side_need_no_bootstrap_ports_to_be_named():
    """Each takes those that vLLM has by default, and free ones where they are taken."""
    with simulator("--instances", "2") as one, simulator() as other:
        until_true(lambda: one.found("engine 1 .*\n") and other.found("engine 0 .*\n"))
        one.terminate()
        other.terminate()
        assert (one.wait(60), other.wait(60)) == (0, 0)
    lines = re.findall("engine . http://.*", one.log + other.log)
    assert all(line.split()[3] == "bootstrap" for line in lines), lines
    assert len({line.split()[4] for line in lines}) == 3


@pytest.mark.parametrize("option", ["--port", "--bootstrap-port", "--kv-events-port"])
def test_a_taken_port_is_named_with_its_option(option, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--port", "0", "--bootstrap-port", "0", option, port]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"engine-sim: {option} {port}: ")
    assert message.count("\n") == 1


def test_usual_bootstrap_ports_never_meet_the_engines_own(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "8998, or free ones" in " ".join(capsys.readouterr().out.split())
    assert main(["--port", "8997", "--instances", "4"]) == 2
    assert "--bootstrap-port 8998: 4 ports from there meet those" in capsys.readouterr().err
