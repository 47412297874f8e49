"""kv_transfer_params: both legs of an offload between simulated engines."""

import pytest

from replayer.simulator.host import SimFleet
from tests.support.harness import until
from tests.support.sim_http import CHAT, MESSAGES, decode_leg, events_of, is_idle, post, prefill_leg


async def test_an_offload_gives_the_same_answer_and_moves_the_prompt_once(http, fleet):
    p, d = fleet.engines
    _status, leg = await post(http, p, CHAT, **prefill_leg())
    assert leg["choices"][0]["finish_reason"] == "length"
    assert p.stats()["pinned"] == 1
    _status, there = await post(http, d, CHAT, **decode_leg(p))
    _status, local = await post(http, p, CHAT, messages=MESSAGES, max_tokens=5)
    assert there["choices"] == local["choices"]
    assert there["usage"]["prompt_tokens_details"]["cached_tokens"] == 95
    assert local["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
    assert p.stats()["bytes_sent"] == 95 * 131_072
    assert d.stats()["prompt_external_tokens"] == 95
    assert is_idle(p)
    assert is_idle(d)
    sent, received, _own = fleet.records
    assert (sent["sent_tokens"], received["external_tokens"]) == (95, 95)
    assert sent["transfer_id"] == received["transfer_id"] == "x1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_engine_id": "another"},
        {"remote_bootstrap_addr": "http://127.0.0.1:1"},
        {"remote_bootstrap_addr": "nonsense"},
        {"transfer_id": None},
    ],
)
async def test_what_cannot_be_fetched_is_computed_at_once(http, fleet, wrong):
    p, d = fleet.engines
    status, body = await post(http, d, CHAT, **decode_leg(p, **wrong))
    assert (status, body["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
    assert d.stats()["prompt_computed_tokens"] == 95


async def test_the_fail_policy_is_an_error_of_the_request(http):
    async with SimFleet(2, speed=50.0, kv_load_failure_policy="fail") as fleet:
        p, d = fleet.engines
        body = decode_leg(p, remote_engine_id="another")
        status, answer = await post(http, d, CHAT, **body)
        assert (status, answer["error"]["code"]) == (500, 500)
        (event,) = await events_of(http, d, CHAT, **body)
        assert event["error"]["code"] == 500


async def test_an_engine_refuses_to_fetch_from_itself(http, engine):
    status, answer = await post(http, engine, CHAT, **decode_leg(engine))
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


async def test_a_rejected_decode_leg_lets_the_sender_go(http, fleet):
    p, d = fleet.engines
    await post(http, p, CHAT, **prefill_leg())
    status, _body = await post(http, d, CHAT, model="unknown", **decode_leg(p))
    assert status == 404
    await until(lambda: is_idle(p))
    assert p.stats()["pinned"] == 0
