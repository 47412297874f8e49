"""Errors in vLLM's words."""

import pytest

from tests.support.sim_http import CHAT, MESSAGES, TEXT, post


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"model": "zz", "messages": MESSAGES}, 404, "model"),
        (CHAT, {}, 400, "body.messages"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "body.messages.role"),
        (CHAT, {"messages": MESSAGES, "stream_options": {}}, 400, "stream_options"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": "one"}, 400, "body.max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 131_073}, 400, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "min_tokens": 5}, 400, None),
        (CHAT, {"messages": MESSAGES, "stream": "maybe"}, 400, "body.stream"),
        (CHAT, {"messages": MESSAGES, "kv_transfer_params": 7}, 400, "body.kv_transfer_params"),
        (CHAT, {"messages": MESSAGES, "n": 1_000}, 400, "n"),
        (TEXT, {"prompt": ""}, 400, "prompt"),
        (TEXT, {"prompt": {}}, 400, "body.prompt"),
        (TEXT, {"prompt": [-1]}, 400, "prompt"),
        (TEXT, {"prompt": "w " * 131_072}, 400, "input_tokens"),
    ],
)
async def test_errors_have_vllms_shape(http, engine, path, body, status, param):
    found, answer = await post(http, engine, path, **body)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, status)


async def test_bodies_that_are_no_objects_and_unknown_paths(http, engine):
    for raw in (b"{", b"[]"):
        async with http.post(engine.url + CHAT, data=raw) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "Bad Request"
    async with http.get(engine.url + "/nothing") as answer:
        assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})
    async with http.get(engine.url + CHAT) as answer:
        assert answer.status == 405
