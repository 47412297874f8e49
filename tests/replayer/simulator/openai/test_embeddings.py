"""/v1/embeddings of a simulated engine: one vector per prompt, and no token generated."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import aiohttp
import pytest

from replayer.simulator.host import SimEngine
from tests.support.sim_http import MESSAGES, is_idle, post

PATH = "/v1/embeddings"
TEXTS = ["one two three", "one two", "one two three"]


async def test_vectors_are_those_of_their_prompts(
    http: aiohttp.ClientSession, engine: SimEngine
) -> None:
    status, body = await post(http, engine, PATH, model="sim-8b", input=TEXTS)
    assert (status, body["object"], body["model"]) == (200, "list", "sim-8b")
    one, other, again = [item["embedding"] for item in body["data"]]
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert one == again
    assert len(one) == len(other) == 1024
    assert math.hypot(*one) == pytest.approx(1.0, rel=1e-5)
    assert abs(sum(a * b for a, b in zip(one, other, strict=True))) < 0.2
    assert body["usage"] == {
        "prompt_tokens": 8,
        "total_tokens": 8,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert engine.stats()["prompt_computed_tokens"] == 8
    assert engine.stats()["generated_tokens"] == 0
    assert engine.stats()["finished"] == 3
    assert is_idle(engine)
    asked = {"input": TEXTS[0], "encoding_format": "base64", "dimensions": 1024}
    _, packed = await post(http, engine, PATH, **asked)
    assert array("f", base64.b64decode(packed["data"][0]["embedding"])).tolist() == one


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"input": [1, 2, 3, 4]}, 4),
        ({"input": [[1, 2], [3]]}, 3),
        ({"messages": MESSAGES}, 93),  # without the two that ask for an answer
        ({"input": "a b", "dimensions": 2, "encoding_format": "float"}, 2),
    ],
)
async def test_prompts_are_texts_ids_or_a_chat(
    http: aiohttp.ClientSession, engine: SimEngine, body: dict[str, Any], tokens: int
) -> None:
    status, answer = await post(http, engine, PATH, **body)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, tokens)
    assert {len(i["embedding"]) for i in answer["data"]} == {body.get("dimensions", 1024)}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "body.input"),
        ({"input": ""}, 400, "prompt"),
        ({"input": "a", "model": "nobody"}, 404, "model"),
        ({"input": "a", "encoding_format": "bytes"}, 400, "body.encoding_format"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "dimensions": True}, 400, "dimensions"),
        ({"input": [5] * 200_000}, 400, "input_tokens"),
    ],
)
async def test_what_cannot_be_embedded(
    http: aiohttp.ClientSession, engine: SimEngine, body: Any, status: int, param: str
) -> None:
    got, answer = await post(http, engine, PATH, **body)
    assert (got, answer["error"]["param"]) == (status, param)
