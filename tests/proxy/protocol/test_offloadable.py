"""Which requests two legs may serve, and flags and numbers as vLLM reads them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.connectors.base import DROP_ON_PREFILL, prefill_edits
from proxy.protocol.body import steering_keys
from proxy.protocol.endpoints import OFFLOADABLE
from proxy.protocol.offloadable import (
    LINKED,
    TAKEN,
    asks_for_stream,
    is_offloadable,
    whole_number,
)
from tests.support.request_fields import documented

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("expected", "extra"),
    [
        (True, {}),
        (True, {"n": 1, "best_of": 1, "echo": False, "use_beam_search": False}),
        (True, {"n": None, "max_tokens": None, "prompt_logprobs": None}),
        (True, {"max_tokens": 2}),
        (True, {**STREAM, "tools": [{}], "response_format": {}}),
        (True, {"stop": ["a", "b"], "stop_token_ids": [1], "min_tokens": 5, "ignore_eos": True}),
        (True, {"stop": "a", "logprobs": None, "top_logprobs": None}),
        (True, {"min_tokens": 5, "max_tokens": 5}),
        (False, {"min_tokens": 6, "max_tokens": 5}),
        (False, {"thinking_token_budget": 7}),
        (False, {"stop": ""}),
        (False, {"stop": ["a", ""]}),
        (False, {"logprobs": 21}),
        (True, {"return_token_ids": True, "return_prompt_text": True}),
        (True, {"prompt": "text"}),
        (True, {"prompt": [1, 2, 3]}),
        (False, {"n": 2}),
        (False, {"best_of": 2}),
        (False, {"use_beam_search": True}),
        (False, {"prompt": ["one", "two"]}),
        (False, {"prompt": [[1, 2], [3]]}),
        (False, {"prompt": []}),
        (False, {"echo": True}),
        (False, {"prompt_logprobs": 1}),
        (False, {"prompt_logprobs": 0}),
        (False, {"prompt_embeds": "AAAA"}),
        (False, {"kv_transfer_params": {}}),
        (False, {"max_tokens": 1}),
        (False, {"max_tokens": 0}),
        (False, {"max_completion_tokens": 1}),
        (False, {"truncate_prompt_tokens": -1}),
        (False, {"truncate_prompt_tokens": 100}),
        (False, {"truncate_prompt_tokens": "-1"}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("endpoint", sorted(OFFLOADABLE))
def test_bodies(endpoint: str, expected: bool, extra: dict[str, Any]) -> None:
    assert is_offloadable(endpoint, {"model": "m", **extra}) is expected


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("/v1/chat/completions", True),
        ("/v1/completions", True),
        ("/v1/chat/completions/batch", False),
        ("/v1/responses", False),
        ("/v1/messages", False),
        ("/v1/embeddings", False),
        ("/v1/score", False),
        ("/v1/rerank", False),
        ("/v1/audio/transcriptions", False),
        ("/tokenize", False),
    ],
)
def test_endpoints(endpoint: str, expected: bool) -> None:
    assert is_offloadable(endpoint, {"prompt": "p"}) is expected


@given(st.dictionaries(st.sampled_from([*TAKEN, "prompt", "messages"]), json_values))
def test_any_body_has_an_answer(body: dict[str, Any]) -> None:
    assert is_offloadable(CHAT, body) in (True, False)
    assert asks_for_stream(body) in (True, False)


@pytest.mark.parametrize("name", sorted({*TAKEN, *LINKED} - {"top_logprobs"}))
def test_what_p_never_judges_must_be_plain(name: str) -> None:
    """P's leg has another value, or none: D would refuse alone, and P's KV stay pinned."""
    values: list[Any] = ["maybe", 1.5, -7, {"a": 1}, [[]], ["a", 1]]
    for endpoint, value in product(sorted(OFFLOADABLE), values):
        is_taken = name == "stop" and isinstance(value, str)
        assert is_offloadable(endpoint, {"prompt": "p", name: value}) is is_taken, (endpoint, value)


def test_every_field_that_the_prefill_leg_changes_is_looked_at() -> None:
    body = {"max_completion_tokens": 9, "n": 1}
    edits = prefill_edits(body, {"do_remote_decode": True})
    assert edits.drop == DROP_ON_PREFILL
    others = {"truncate_prompt_tokens", "prompt_embeds"}
    assert {*TAKEN, *LINKED} == {*edits.put, *edits.drop, *others}


def test_the_documented_table_says_the_same() -> None:
    fields = documented()
    edits = prefill_edits({"max_completion_tokens": 9, "n": 1}, {"do_remote_decode": True})
    by_treatment = {how: {n for n, h in fields.items() if h == how} for how in fields.values()}
    assert by_treatment["set"] == set(edits.put)
    dropped = {n for n in by_treatment["dropped"] if "." not in n} | {"prompt_logprobs"}
    assert dropped == edits.drop
    alone = by_treatment["one instance"]
    assert alone == {n for n in TAKEN if n not in edits.put} - dropped | {"prompt_logprobs"}
    assert by_treatment["stripped"] == set(steering_keys(dict.fromkeys(fields))) - set(edits.put)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"logprobs": True, "top_logprobs": 3}, (True, False)),
        ({"logprobs": True, "logprob_token_ids": [1]}, (True, False)),
        ({"logprobs": 3, "logprob_token_ids": [1]}, (False, True)),
        ({"logprobs": 3}, (False, True)),
        ({"logprob_token_ids": [1]}, (False, False)),
        ({"logprob_token_ids": []}, (True, True)),
        ({"top_logprobs": 3}, (False, True)),
        ({"top_logprobs": 0}, (True, True)),
        ({"stream_options": {"include_usage": True}}, (False, False)),
        ({"stream_options": {}}, (True, True)),
        ({"stream": True, "stream_options": {"include_usage": "maybe"}}, (False, False)),
        ({"stream": "true"}, (False, False)),
        ({"stop": ["a"] * 5}, (False, False)),
        ({"stop_token_ids": [0] * 2000}, (False, False)),
        ({"max_tokens": True}, (False, False)),
        ({"n": True}, (False, False)),
    ],
    ids=repr,
)
def test_fields_that_depend_on_each_other(
    body: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    assert (is_offloadable(CHAT, body), is_offloadable(COMPLETIONS, body)) == expected


URL, DATA = "https://example.com/a.png", "data:image/png;base64,AA"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": URL}, True),
        ({"type": "image_url", "image_url": {"url": DATA}}, True),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, True),
        ("a text", True),
        ({"type": "image_url", "image_url": {"url": URL}}, False),
        ({"type": "image_url", "image_url": URL}, False),
        ({"image_url": {"url": "DATA:image/png;base64,AA"}}, False),
        ({"type": "video_url", "video_url": {"url": URL}}, False),
        ({"type": "audio_url", "audio_url": {"url": "file:///a"}}, False),
        ({"type": "image_url", "image_url": None, "uuid": "u"}, False),
        ({"type": "image_url", "image_url": {"url": DATA}, "uuid": "u"}, False),
    ],
    ids=repr,
)
def test_media_that_each_leg_would_look_up(part: Any, expected: bool) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
    assert is_offloadable(CHAT, body) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *product([True, 1, 1.0, "1", "true", "TRUE", "Yes", "on", "t", "y"], [True]),
        *product([False, 0, 0.0, None, "0", "false", "No", "off", "f", "n"], [False]),
        *product(["", " true", "2", 2, -1, [], [1], {}, float("nan")], [False]),
    ],
    ids=repr,
)
def test_a_stream_is_what_vllm_takes_for_one(value: Any, expected: bool) -> None:
    """What it refuses is none: its answer comes in one piece."""
    assert asks_for_stream({"stream": value}) is expected
    assert asks_for_stream({}) is False


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((7, 7), (7.0, 7), ("7", 7), (" 7 ", 7), ("+7", 7), ("-7", -7), ("7.0", 7), ("07", 7)),
        *((True, 1), (False, 0), ("1_0", 10), ("-0", 0), (10**30, 10**30)),
        *((None, None), (7.5, None), ("7.5", None), ("7e0", None), ("1__0", None), ("", None)),
        *(("x", None), ([7], None), ({}, None), (float("nan"), None), (float("inf"), None)),
        *(("\u0667", None), ("9" * 5000, None)),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_whole_numbers(value: object, expected: int | None) -> None:
    assert whole_number(value) == expected
