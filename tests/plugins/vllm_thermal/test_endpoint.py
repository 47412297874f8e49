"""Who may ask the plugin, and what it answers."""

import pytest

from vllm_thermal import endpoint
from vllm_thermal.endpoint import AccessError, Door, answered

TOKEN = "0123456789abcdef"


def test_only_the_token_opens():
    door = Door({"VLLM_THERMAL_TOKEN": TOKEN})
    assert door.lets_in(f"Bearer {TOKEN}")
    assert door.lets_in(f"bearer {TOKEN} ")
    for wrong in ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}0", "Bearer", "Bearer \udcff"):
        assert not door.lets_in(wrong), wrong


def test_a_file_may_have_the_token(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert Door({"VLLM_THERMAL_TOKEN": f"@{path}"}).lets_in(f"Bearer {TOKEN}")


@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        ({}, "VLLM_THERMAL_TOKEN is not set: set it, or VLLM_THERMAL_OPEN=1 to let in everyone"),
        ({"VLLM_THERMAL_OPEN": "yes"}, "VLLM_THERMAL_TOKEN is not set: "),
        ({"VLLM_THERMAL_TOKEN": "short"}, "VLLM_THERMAL_TOKEN is shorter than 16 bytes"),
        (
            {"VLLM_THERMAL_TOKEN": "@/no/such/file", "VLLM_THERMAL_OPEN": "1"},
            "VLLM_THERMAL_TOKEN names a file that cannot be read: ",
        ),
        (
            {"VLLM_THERMAL_TOKEN": "@/dev/null", "VLLM_THERMAL_OPEN": "1"},
            "VLLM_THERMAL_TOKEN names a file that is empty",
        ),
    ],
)
def test_nothing_is_open_by_accident(environment, wrong):
    with pytest.raises(AccessError) as error:
        Door(environment)
    assert str(error.value).startswith(wrong)


def test_it_may_be_opened_on_purpose():
    assert Door({"VLLM_THERMAL_OPEN": "1"}).lets_in("")


async def engines(method, *arguments):
    return [{"method": method, "body": list(arguments)}, {}]


async def test_every_engine_answers():
    assert await answered(engines, "GET", b"") == (200, [{"method": "thermal_get", "body": []}, {}])
    put = await answered(engines, "PUT", b'{"cap": 2}')
    assert put == (200, [{"method": "thermal_set", "body": [{"cap": 2}]}, {}])


@pytest.mark.parametrize(
    ("body", "status", "wrong"),
    [
        (b"", 400, "the body is not JSON: "),
        (b'{"cap": NaN}', 400, "the body is not JSON: "),
        (b'{"cap": "\xff"}', 400, "the body is not JSON: "),
        (b"[]", 400, "the body is not a JSON object"),
        (b'{"cap": 1e99}', 400, "cap is 1e+99: it must be a whole number"),
        (b" " * ((64 << 10) + 1), 413, "the body is longer than 65536 bytes"),
    ],
)
async def test_a_bad_body_reaches_no_engine(body, status, wrong):
    async def none(method, *arguments):
        raise AssertionError

    told, answer = await answered(none, "PUT", body)
    assert told == answer["error"]["code"] == status
    assert answer["error"]["message"].startswith(wrong)


async def test_what_an_engine_refuses_is_an_error():
    async def refusing(method, *arguments):
        return [{}, {"refused": 501, "why": "no scheduler"}]

    assert await answered(refusing, "GET", b"") == endpoint.error(501, "no scheduler")


async def test_an_engine_that_does_not_answer(monkeypatch):
    async def stuck(method, *arguments):
        import asyncio

        await asyncio.Event().wait()

    async def dead(method, *arguments):
        raise Exception("EngineCore encountered an issue")

    monkeypatch.setattr(endpoint, "ENGINE_S", 0.001)
    assert await answered(stuck, "GET", b"") == endpoint.error(
        504, "the engine has not answered in 0.001 s"
    )
    assert await answered(dead, "GET", b"") == endpoint.error(
        503, "the engine has not answered: EngineCore encountered an issue"
    )
