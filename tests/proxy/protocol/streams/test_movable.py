"""Which streams may go on elsewhere: each field that keeps one here, and what the rest become."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.types import Unmoved
from proxy.protocol.streams.movable import (
    FIELDS_BYTES,
    KEPT,
    REPLACED,
    UNLESS,
    Plan,
    plan_of,
    unpacked_plan,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(**more: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    return plan_of(CHAT, body | more, [])


def text(**more: Any) -> Any:
    return plan_of(TEXT, {"model": "m", "prompt": "x", "stream": True} | more, [])


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("response_format", {"type": "json_object"}, Unmoved.STRUCTURED),
        ("structured_outputs", {"regex": "a"}, Unmoved.STRUCTURED),
        ("guided_json", {}, Unmoved.STRUCTURED),
        ("tools", [{"type": "function"}], Unmoved.TOOLS),
        ("functions", [{}], Unmoved.TOOLS),
        ("reasoning_effort", "low", Unmoved.REASONING),
        ("include_reasoning", False, Unmoved.REASONING),
        ("n", 2, Unmoved.CHOICES),
        ("n", "1", Unmoved.CHOICES),
        ("best_of", 2, Unmoved.CHOICES),
        ("use_beam_search", True, Unmoved.BEAM),
        ("logprobs", True, Unmoved.LOGPROBS),
        ("logprobs", 0, Unmoved.LOGPROBS),
        ("prompt_logprobs", 0, Unmoved.LOGPROBS),
        ("echo", True, Unmoved.ECHO),
        ("prompt_embeds", "x", Unmoved.EMBEDS),
        ("audio", {}, Unmoved.MEDIA),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], Unmoved.MEDIA),
        ("messages", "?", Unmoved.MEDIA),
        ("store", True, Unmoved.STORED),
        ("seed", 1, Unmoved.SEED),
        ("presence_penalty", 0.1, Unmoved.PENALTIES),
        ("bad_words", ["x"], Unmoved.PENALTIES),
        ("vllm_xargs", {"a": 1}, Unmoved.PLUGINS),
        ("who_knows", 1, Unmoved.UNKNOWN_FIELD),
        ("truncate_prompt_tokens", 5, Unmoved.UNKNOWN_FIELD),
        ("return_token_ids", "yes", Unmoved.UNKNOWN_FIELD),
        ("max_tokens", "many", Unmoved.UNKNOWN_FIELD),
        ("min_tokens", "few", Unmoved.UNKNOWN_FIELD),
        ("max_tokens", "1" + 30 * "0", Unmoved.UNKNOWN_FIELD),
        ("min_tokens", 1 << 70, Unmoved.UNKNOWN_FIELD),
        ("stop", "x" * 300, Unmoved.MEMORY),
        ("stop", ["x"] * 33, Unmoved.MEMORY),
        ("user", "x" * FIELDS_BYTES, Unmoved.MEMORY),
    ],
)
def test_fields_that_keep_a_stream_where_it_is(field: str, value: Any, why: Unmoved) -> None:
    assert chat(**{field: value}) is why


@pytest.mark.parametrize("name", [name for name in UNLESS if name != "include_reasoning"])
def test_a_field_that_is_null_keeps_nothing(name: str) -> None:
    assert isinstance(chat(**{name: None}), Plan)


def test_tables_name_a_field_once() -> None:
    assert not KEPT & REPLACED
    assert not (KEPT | REPLACED) & UNLESS.keys()


def test_several_prompts() -> None:
    assert text(prompt=["a", "b"]) is Unmoved.CHOICES
    assert text(prompt=[[1], [2]]) is Unmoved.CHOICES
    assert isinstance(text(prompt=[1, 2]), Plan)


def test_stop_strings_whose_state_is_not_known() -> None:
    assert chat(stop="END", include_stop_str_in_output=True) is Unmoved.STOP_INCLUDED
    assert chat(stop="END", return_token_ids=True) is Unmoved.STOP_INCLUDED
    assert chat(stop=["a", "long"]).stop_chars == 3
    assert chat(stop="x").stop_chars == 0


def test_what_is_no_stream_of_tokens() -> None:
    assert chat(stream=False) is None
    assert plan_of("/v1/responses", {"stream": True}, []) is None


def test_what_the_continuation_keeps() -> None:
    plan = chat(temperature=0.7, seed=None, tools=[{}], tool_choice="none", metadata={}, top_p=1)
    assert orjson.loads(b"{%b}" % plan.fields) == {"model": "m", "temperature": 0.7, "top_p": 1}
    assert isinstance(chat(seed=7, temperature=0), Plan)
    assert isinstance(
        plan_of(CHAT, {"messages": [], "stream": 1, "do_remote_x": 1}, ["do_remote_x"]), Plan
    )


def test_lengths() -> None:
    assert (chat().most_tokens, text().most_tokens, text(max_tokens=None).most_tokens) == (
        None,
        16,
        None,
    )
    plan = chat(max_tokens=5, max_completion_tokens="7", min_tokens=2.0)
    assert (plan.most_tokens, plan.least_tokens) == (7, 2)


def test_to_another_process_and_back() -> None:
    plan = chat(max_tokens=5, stop="END", temperature=0.5)
    assert unpacked_plan(orjson.loads(orjson.dumps(plan.packed()))).packed() == plan.packed()
