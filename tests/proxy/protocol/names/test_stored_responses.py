"""Which stored response a request is about, and which ids of an answer are believed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.names.stored_responses import Reference, may_be_stored, reference, stored_id

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "response", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("/v1/responses", {}, None),
        ("/v1/responses", {"previous_response_id": "r"}, Reference("r", "previous_response_id")),
        ("/v1/responses/", {"previous_response_id": "r"}, Reference("r", "previous_response_id")),
        ("/v1/responses", {"previous_response_id": 7}, None),
        ("/v1/responses", {"previous_response_id": ""}, None),
        ("/v1/responses/r", {}, Reference("r", "response_id")),
        ("/v1/responses/r/cancel", {}, Reference("r", "response_id")),
        ("/v1/responses//r", {}, Reference("r", "response_id")),
        ("/v1/responses///r//cancel", {}, Reference("r", "response_id")),
        (
            "/v1/responses/r/input_items",
            {"previous_response_id": "q"},
            Reference("r", "response_id"),
        ),
        ("/v1/responses/compact", {}, None),
        ("/v1/responses/input_tokens", {"input": "x"}, None),
        (
            "/v1/responses/compact",
            {"previous_response_id": "r"},
            Reference("r", "previous_response_id"),
        ),
        ("/v1/responses/compacted", {}, Reference("compacted", "response_id")),
        ("/v1/responsesx/r", {}, None),
        ("/v1/chat/completions", {"previous_response_id": "r"}, None),
    ],
)
def test_what_a_request_is_about(path: str, body: dict[str, Any], found: Reference | None) -> None:
    assert reference(path, body) == found


@pytest.mark.parametrize(
    ("path", "body", "is_stored"),
    [
        ("/v1/responses", {}, True),
        ("/v1/responses", {"store": None}, True),
        ("/v1/responses", {"store": False}, False),
        ("/v1/responses/r", {}, False),
        ("/v1/responses/compact", {}, False),
    ],
)
def test_which_answers_may_be_asked_for_later(
    path: str, body: dict[str, Any], *, is_stored: bool
) -> None:
    assert may_be_stored(path, body) is is_stored


@given(planted=JSON)
def test_an_id_is_where_the_engine_writes_it(planted: Any) -> None:
    """Whatever of the client's is echoed behind it, or stands there instead of it."""
    real = {"id": "resp_1", "metadata": planted, "tools": [planted]}
    assert stored_id(orjson.dumps(real), is_stream=False) == "resp_1"
    assert stored_id(orjson.dumps({"metadata": planted} | real), is_stream=False) is None
    for created in (
        {"response": real, "type": "response.created"},
        {"type": "response.created", "sequence_number": 0, "response": real},
    ):
        event = b"event: response.created\ndata: " + orjson.dumps(created) + b"\n\n"
        assert stored_id(event, is_stream=True) == "resp_1"
        assert stored_id(b": ping\n\n" + event, is_stream=True) == "resp_1"
        assert stored_id(event, is_stream=False) is None
    late = b"data: " + orjson.dumps({"x": planted, "response": real})
    assert stored_id(late, is_stream=True) is None


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_have_an_id_or_none(head: bytes, is_stream: bool) -> None:
    found = stored_id(head, is_stream=is_stream)
    assert found is None or found.encode() in head
