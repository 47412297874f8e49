"""Pairs of requests that differ in one member, for each row of the table of what engines render.

A body has what real clients send: tools and system text in front, turns, and a last turn in which
nothing differs. Every text in it is long enough to fill blocks of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from proxy.protocol.prompt.rendering import ROWS, Where

MODEL = "tiny"
ABSENT: Any = object()
"""The member is left out."""
REFUSED = None
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "chat", "messages", "responses", "completions"
PATHS = {
    CHAT: "/v1/chat/completions",
    MESSAGES: "/v1/messages",
    RESPONSES: "/v1/responses",
    COMPLETIONS: "/v1/completions",
}
ADAPTER = "adapter"
"""The name of an adapter that the engine has."""
BILLING = "x-anthropic-billing-header: cc_version=2.1.119; cc_entrypoint=cli; cch={};"
BILLED, BILLED_AGAIN = BILLING.format("3fa1c"), BILLING.format("90bb2")
TURN = 60
"""Words of a text: some four blocks."""


def words(count: int, seed: str) -> str:
    """Text that no other seed has, some two tokens a word."""
    pick = random.Random(seed)
    return " ".join(f"{pick.getrandbits(20):x}" for _ in range(count))


_MARK = {"type": "ephemeral"}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": words(20, "path")},
        "limit": {"type": "integer"},
    },
    "required": ["path"],
}
_SCHEMA_TURNED = dict(reversed(_SCHEMA.items()))
_ABOUT = words(30, "about")
_INPUT = {"path": words(20, "input"), "limit": 7}
_TURNED = dict(reversed(_INPUT.items()))
_SYSTEM, _FIRST, _LAST = words(TURN, "system"), words(TURN, "first"), words(TURN, "last")
_THOUGHT, _SAID, _RESULT = words(TURN, "thought"), words(TURN, "said"), words(TURN, "result")
_NOTE = words(TURN, "note")
_OTHER = words(TURN, "other")

_MESSAGES: dict[str, Any] = {
    "max_tokens": 1,
    "system": [{"type": "text", "text": BILLED}, {"type": "text", "text": _SYSTEM}],
    "tools": [{"name": "read", "description": _ABOUT, "input_schema": _SCHEMA}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": _FIRST}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": _THOUGHT, "signature": "c2lnbmVk"},
                {"type": "text", "text": _SAID},
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": _INPUT},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": _RESULT}],
                },
                {"type": "text", "text": words(TURN, "beside")},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": _NOTE}]},
        {"role": "user", "content": _LAST},
    ],
}
_CHAT: dict[str, Any] = {
    "max_tokens": 1,
    "tools": [
        {
            "type": "function",
            "function": {"name": "read", "description": _ABOUT, "parameters": _SCHEMA},
        }
    ],
    "messages": [
        {
            "role": "system",
            "content": [{"type": "text", "text": BILLED}, {"type": "text", "text": _SYSTEM}],
        },
        {"role": "user", "content": [{"type": "text", "text": _FIRST}]},
        {
            "role": "assistant",
            "content": _SAID,
            "reasoning": _THOUGHT,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "a", "limit": 7}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": _RESULT},
        {"role": "system", "content": _NOTE},
        {"role": "user", "content": _LAST},
    ],
}
_RESPONSES: dict[str, Any] = {
    "max_output_tokens": 1,
    "instructions": f"{BILLED}\n{_SYSTEM}",
    "tools": [
        {"type": "function", "name": "read", "description": _ABOUT, "parameters": _SCHEMA},
        {"type": "custom", "name": "run", "description": "Runs a line."},
    ],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _FIRST}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "In short."}],
            "content": [{"type": "reasoning_text", "text": _THOUGHT}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": _SAID, "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "read",
            "arguments": '{"path": "a", "limit": 7}',
            "status": "completed",
        },
        {
            "type": "custom_tool_call",
            "id": "ct_1",
            "call_id": "call_2",
            "name": "run",
            "input": "ls",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": _RESULT},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "none"},
        {"role": "user", "content": _NOTE},
        {"role": "user", "content": _LAST},
    ],
}
_PROMPT = f"{_SYSTEM}\n{_FIRST}\n{_LAST}"
_COMPLETIONS: dict[str, Any] = {"max_tokens": 1, "prompt": _PROMPT}
BODIES = {CHAT: _CHAT, MESSAGES: _MESSAGES, RESPONSES: _RESPONSES, COMPLETIONS: _COMPLETIONS}


class Case(NamedTuple):
    """Where in the dialect's body the two requests differ, and by what."""

    at: tuple[str | int, ...]
    one: Any
    other: Any
    also: Mapping[str, Any] = {}
    """Members that both requests have besides."""


def pair(dialect: str, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both requests of a case."""
    bodies = []
    for value in (case.one, case.other):
        body: dict[str, Any] = deepcopy(BODIES[dialect]) | deepcopy(dict(case.also))
        place: Any = body
        for key in case.at[:-1]:
            place = place[key]
        if value is not ABSENT:
            place[case.at[-1]] = value
        elif case.at[-1] in place:
            del place[case.at[-1]]
        bodies.append(body)
    return bodies[0], bodies[1]


def _turned(value: Mapping[str, Any]) -> dict[str, Any]:
    return dict(reversed(list(value.items())))


def _given(**values: Any) -> dict[str, Case]:
    """Cases of members that are left out in one of the requests."""
    return {name: Case((name,), ABSENT, value) for name, value in values.items()}


def _keyed(dialect: str) -> dict[str, Case]:
    """Of what an engine has in its blocks' hashes, and not in their tokens."""
    return {
        "cache_salt": Case(("cache_salt",), f"{dialect} one", f"{dialect} other"),
        "model": Case(("model",), MODEL, ADAPTER),
    }


_STYLE = Case(("chat_template_kwargs",), ABSENT, {"style": "terse"})
_SCHEMATIC = {"type": "object", "properties": {"a": {"type": "integer"}}}
_SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "metadata": {"user_id": "u"}}

_OF_MESSAGES: dict[str, Case] = {
    **_keyed(MESSAGES),
    "chat_template_kwargs": _STYLE,
    **_given(
        **_SAMPLING,
        stop_sequences=["x"],
        tool_choice={"type": "none"},
        context_management={"edits": []},
        service_tier="auto",
        top_k=5,
    ),
    "system": Case(("system", 1, "text"), _SYSTEM, _OTHER),
    "system[] billing block": Case(("system", 0, "text"), BILLED, f"{BILLED_AGAIN}\nmore"),
    "system billing line": Case(("system",), f"{BILLED}\n{_SYSTEM}", f"{BILLED_AGAIN}\n{_SYSTEM}"),
    "system[text].cache_control": Case(("system", 1, "cache_control"), ABSENT, _MARK),
    "tools[].name": Case(("tools", 0, "name"), "read", "view"),
    "tools": Case(("tools", 0, "description"), _ABOUT, _OTHER),
    "tools[].input_schema": Case(("tools", 0, "input_schema"), _SCHEMA, _SCHEMATIC),
    "tools[].input_schema order": Case(("tools", 0, "input_schema"), _SCHEMA, _SCHEMA_TURNED),
    "tools[].strict": Case(("tools", 0, "strict"), ABSENT, True),
    "tools[].cache_control": Case(("tools", 0, "cache_control"), ABSENT, _MARK),
    "tools[] order": Case(("tools", 0), _MESSAGES["tools"][0], _turned(_MESSAGES["tools"][0])),
    "tools[] without schema": Case(("tools", 0), {"name": "a"}, {"type": "b", "name": "b"}),
    "output_config.effort": Case(("output_config",), {"effort": "low"}, {"effort": "high"}),
    "output_config.format": Case(
        ("output_config",), ABSENT, {"format": {"type": "json_schema", "schema": _SCHEMATIC}}
    ),
    "thinking.type": Case(("thinking",), ABSENT, {"type": "disabled"}),
    "thinking.budget_tokens": Case(
        ("thinking", "budget_tokens"),
        1024,
        1025,
        {
            "thinking": {"type": "enabled"},
            "max_tokens": 1026,
            "stop_sequences": list("aet "),
        },
    ),
    "thinking enabled": Case(
        ("thinking",),
        ABSENT,
        {"type": "enabled", "budget_tokens": 1024},
        {"max_tokens": 1025, "stop_sequences": list("aet ")},
    ),
    "thinking adaptive": Case(("thinking",), ABSENT, {"type": "adaptive"}),
    "messages[].content[text].text": Case(("messages", 0, "content", 0, "text"), _FIRST, _OTHER),
    "messages[].content[text].cache_control": Case(
        ("messages", 0, "content", 0, "cache_control"), ABSENT, _MARK
    ),
    "messages[].content as string": Case(
        ("messages", 0, "content"), _FIRST, [{"type": "text", "text": _FIRST}]
    ),
    "max_tokens": Case(("max_tokens",), 1, 2),
    "messages": Case(
        ("messages", 3),
        {"role": "user", "content": _NOTE},
        {"role": "assistant", "content": _OTHER},
    ),
    "messages[].role": Case(("messages", 3, "role"), "system", "user"),
    "messages[].content": Case(("messages", 0, "content"), _FIRST, _OTHER),
    "messages[].content[text].citations": Case(
        ("messages", 0, "content", 0, "citations"), ABSENT, []
    ),
    "messages[].content[tool_use].caller": Case(
        ("messages", 1, "content", 2, "caller"), ABSENT, {"type": "direct"}
    ),
    "messages[].content[tool_reference].tool_name": Case(
        ("messages", 2, "content", 0, "content"),
        [{"type": "tool_reference", "tool_name": _FIRST}],
        [{"type": "tool_reference", "tool_name": _OTHER}],
    ),
    "messages[] order": Case(
        ("messages", 1), _MESSAGES["messages"][1], _turned(_MESSAGES["messages"][1])
    ),
    "messages[].content[thinking].thinking": Case(
        ("messages", 1, "content", 0, "thinking"), _THOUGHT, _OTHER
    ),
    "messages[].content[thinking].signature": Case(
        ("messages", 1, "content", 0, "signature"), "YQ==", "Yg=="
    ),
    "messages[].content[redacted_thinking].data": Case(
        ("messages", 1, "content"),
        _MESSAGES["messages"][1]["content"],
        [*_MESSAGES["messages"][1]["content"], {"type": "redacted_thinking", "data": "YQ=="}],
    ),
    "messages[].content[tool_use].name": Case(
        ("messages", 1, "content", 2, "name"), "read", "view"
    ),
    "messages[].content[tool_use].input": Case(
        ("messages", 1, "content", 2, "input"), _INPUT, {"path": "b"}
    ),
    "tool_use.input order": Case(("messages", 1, "content", 2, "input"), _INPUT, _TURNED),
    "messages[].content[tool_use].id": Case(
        ("messages", 1, "content", 2, "id"), "toolu_1", "toolu_9"
    ),
    "tool_use before text": Case(
        ("messages", 1, "content"),
        _MESSAGES["messages"][1]["content"],
        _MESSAGES["messages"][1]["content"][::-1],
    ),
    "messages[].content[tool_result].content": Case(
        ("messages", 2, "content", 0, "content"), _RESULT, _OTHER
    ),
    "tool_result.content as string": Case(
        ("messages", 2, "content", 0, "content"), _RESULT, [{"type": "text", "text": _RESULT}]
    ),
    "messages[].content[tool_result].tool_use_id": Case(
        ("messages", 2, "content", 0, "tool_use_id"), "toolu_1", "toolu_9"
    ),
    "messages[].content[tool_result].is_error": Case(
        ("messages", 2, "content", 0, "is_error"), ABSENT, True
    ),
    "tool_result behind text": Case(
        ("messages", 2, "content"),
        _MESSAGES["messages"][2]["content"],
        _MESSAGES["messages"][2]["content"][::-1],
    ),
    "messages[] of role system": Case(("messages", 3, "content"), _NOTE, _OTHER),
    "messages[] of role system, billing block": Case(
        ("messages", 3, "content"),
        [{"type": "text", "text": BILLED}, {"type": "text", "text": _NOTE}],
        [{"type": "text", "text": f"{BILLED_AGAIN}\nmore"}, {"type": "text", "text": _NOTE}],
    ),
    "messages[] of role system, billing alone": Case(
        ("messages", 3, "content"), BILLED, BILLED_AGAIN
    ),
    "document": Case(
        ("messages", 0, "content", 0),
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "b"}},
    ),
}
_FUNCTION = _CHAT["tools"][0]["function"]
_CALL = _CHAT["messages"][2]["tool_calls"][0]["function"]
_OF_CHAT: dict[str, Case] = {
    **_keyed(CHAT),
    "chat_template_kwargs": _STYLE,
    **_given(
        **_SAMPLING,
        tool_choice="none",
        seed=7,
        user="u",
        stop=["x"],
        prompt_cache_key="k",
        store=True,
        response_format={"type": "json_object"},
        parallel_tool_calls=False,
        thinking={"type": "disabled"},
        enable_thinking=False,
        include_reasoning=False,
        reasoning_effort="low",
        documents=[{"title": "a", "text": "b"}],
        chat_template="{{ messages[0].content }}",
    ),
    "chat_template_kwargs.enable_thinking": Case(
        ("chat_template_kwargs",), ABSENT, {"enable_thinking": False}
    ),
    "tools[].function.name": Case(("tools", 0, "function", "name"), "read", "view"),
    "tools": Case(("tools", 0, "function", "description"), _ABOUT, _OTHER),
    "tools[].function.parameters": Case(
        ("tools", 0, "function", "parameters"), _SCHEMA, _SCHEMATIC
    ),
    "tools[].function.parameters order": Case(
        ("tools", 0, "function", "parameters"), _SCHEMA, _SCHEMA_TURNED
    ),
    "tools[].function.strict": Case(("tools", 0, "function", "strict"), ABSENT, True),
    "tools[].function order": Case(("tools", 0, "function"), _FUNCTION, _turned(_FUNCTION)),
    "tools[].cache_control": Case(("tools", 0, "cache_control"), ABSENT, _MARK),
    "messages": Case(
        ("messages", 4),
        {"role": "user", "content": _NOTE},
        {"role": "assistant", "content": _OTHER},
    ),
    "messages[].role": Case(("messages", 4, "role"), "system", "user"),
    **{
        f"messages[].content[{kind}].{name}": Case(
            ("messages", 1, "content", 0),
            {"type": kind, name: _FIRST},
            {"type": kind, name: _OTHER},
        )
        for kind, name in (
            ("input_text", "text"),
            ("output_text", "text"),
            ("refusal", "refusal"),
            ("thinking", "thinking"),
            ("tool_reference", "name"),
        )
    },
    "messages[].reasoning_content": Case(
        ("messages", 2),
        {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT},
        {"role": "assistant", "content": _SAID, "reasoning_content": _OTHER},
    ),
    "messages[0] of role system": Case(("messages", 0, "content", 1, "text"), _SYSTEM, _OTHER),
    "messages[] of role system, billing line": Case(
        ("messages", 0, "content"), f"{BILLED}\n{_SYSTEM}", f"{BILLED_AGAIN}\n{_SYSTEM}"
    ),
    "messages[] of role system, billing part": Case(
        ("messages", 0, "content", 0, "text"), BILLED, BILLED_AGAIN
    ),
    "messages[] of role system": Case(("messages", 4, "content"), _NOTE, _OTHER),
    "messages[] of role developer": Case(
        ("messages", 3),
        {"role": "developer", "content": _NOTE},
        {"role": "developer", "content": _OTHER},
        {"messages": [{"role": "system", "content": "Be brief."}, *_CHAT["messages"][1:]]},
    ),
    "messages[].content[text].text": Case(("messages", 1, "content", 0, "text"), _FIRST, _OTHER),
    "messages[].content as string": Case(
        ("messages", 1, "content"), _FIRST, [{"type": "text", "text": _FIRST}]
    ),
    "messages[].content[text].cache_control": Case(
        ("messages", 1, "content", 0, "cache_control"), ABSENT, _MARK
    ),
    "messages[].cache_control": Case(("messages", 1, "cache_control"), ABSENT, _MARK),
    "messages[].name": Case(("messages", 1, "name"), ABSENT, "ann"),
    "messages[].reasoning": Case(("messages", 2, "reasoning"), _THOUGHT, _OTHER),
    "messages[].reasoning by its other name": Case(
        ("messages", 2),
        {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT},
        {"role": "assistant", "content": _SAID, "reasoning": _THOUGHT},
    ),
    "messages[].reasoning_details": Case(
        ("messages", 2, "reasoning_details"), ABSENT, [{"text": _OTHER}]
    ),
    "messages[].refusal": Case(("messages", 2, "refusal"), ABSENT, _OTHER),
    "messages[].annotations": Case(("messages", 2, "annotations"), ABSENT, []),
    "messages[] order": Case(("messages", 2), _CHAT["messages"][2], _turned(_CHAT["messages"][2])),
    "messages[].tool_calls[].id": Case(("messages", 2, "tool_calls", 0, "id"), "call_1", "call_9"),
    "tool_calls[].index": Case(("messages", 2, "tool_calls", 0, "index"), ABSENT, 0),
    "messages[].tool_calls": Case(
        ("messages", 2, "tool_calls", 0, "function", "name"), "read", "view"
    ),
    "tool_calls[].function.arguments": Case(
        ("messages", 2, "tool_calls", 0, "function", "arguments"),
        _CALL["arguments"],
        '{"path": "b"}',
    ),
    "tool_calls[].function.arguments, order": Case(
        ("messages", 2, "tool_calls", 0, "function", "arguments"),
        _CALL["arguments"],
        '{"limit": 7, "path": "a"}',
    ),
    "tool_calls[].function.arguments, blanks": Case(
        ("messages", 2, "tool_calls", 0, "function", "arguments"),
        _CALL["arguments"],
        '{\n  "path":"a",  "limit":7}',
    ),
    "tool_calls[].function.arguments, no object": Case(
        ("messages", 2, "tool_calls", 0, "function", "arguments"), '{"path": "a', "[1, 2]"
    ),
    "messages[].tool_call_id": Case(("messages", 3, "tool_call_id"), "call_1", "call_9"),
    "messages[].content": Case(("messages", 3, "content"), _RESULT, _OTHER),
    "file part": Case(
        ("messages", 1, "content", 0),
        {"type": "file", "file": {"file_data": "YQ=="}},
        {"type": "file", "file": {"file_data": "Yg=="}},
    ),
}
_ITEMS = _RESPONSES["input"]
_OF_RESPONSES: dict[str, Case] = {
    **_keyed(RESPONSES),
    "chat_template_kwargs": _STYLE,
    **_given(
        **_SAMPLING,
        tool_choice="none",
        user="u",
        prompt_cache_key="k",
        store=False,
        include=["reasoning.encrypted_content"],
        parallel_tool_calls=False,
        client_metadata={"a": "b"},
        text={"verbosity": "low"},
    ),
    "text.format": Case(
        ("text",),
        ABSENT,
        {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMATIC}},
    ),
    "reasoning.effort": Case(("reasoning",), {"effort": "low"}, {"effort": "high"}),
    "reasoning.summary": Case(
        ("reasoning",), {"effort": "low"}, {"effort": "low", "summary": "auto"}
    ),
    "instructions": Case(("instructions",), _SYSTEM, _OTHER),
    "instructions, billing line": Case(
        ("instructions",), f"{BILLED}\n{_SYSTEM}", f"{BILLED_AGAIN}\n{_SYSTEM}"
    ),
    "tools[].name": Case(("tools", 0, "name"), "read", "view"),
    "tools": Case(("tools", 0, "description"), _ABOUT, _OTHER),
    "tools[].parameters": Case(("tools", 0, "parameters"), _SCHEMA, _SCHEMATIC),
    "tools[].parameters order": Case(("tools", 0, "parameters"), _SCHEMA, _SCHEMA_TURNED),
    "tools[].strict": Case(("tools", 0, "strict"), ABSENT, False),
    "tools[] order": Case(("tools", 0), _RESPONSES["tools"][0], _turned(_RESPONSES["tools"][0])),
    "tools[] custom": Case(("tools", 1, "description"), "Runs a line.", "Runs one."),
    "tools[] built in": Case(
        ("tools",), _RESPONSES["tools"], [*_RESPONSES["tools"], {"type": "web_search"}]
    ),
    "input[].content[input_text].text": Case(("input", 0, "content", 0, "text"), _FIRST, _OTHER),
    "input[] message without type": Case(
        ("input", 0), _ITEMS[0], {"role": "user", "content": _FIRST}
    ),
    "input[] of role developer": Case(
        ("input", 7),
        {"role": "developer", "content": _NOTE},
        {"role": "developer", "content": _OTHER},
        {"instructions": "Be brief."},
    ),
    "input": Case(
        ("input", 7), {"role": "user", "content": _NOTE}, {"role": "assistant", "content": _OTHER}
    ),
    "input[].role": Case(("input", 7, "role"), "user", "system"),
    "input[].content": Case(("input", 7, "content"), _NOTE, _OTHER),
    "input[].content[text].text": Case(
        ("input", 0, "content", 0), {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    ),
    "input[].content[output_text].logprobs": Case(
        ("input", 2, "content", 0, "logprobs"), ABSENT, []
    ),
    "input[reasoning].id": Case(("input", 1, "id"), "rs_1", "rs_9"),
    "input[reasoning].content": Case(
        ("input", 1, "content"),
        [{"type": "reasoning_text", "text": _THOUGHT}],
        [{"type": "reasoning_text", "text": _OTHER}],
    ),
    "input[reasoning].summary": Case(
        ("input", 1),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": _THOUGHT}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": _OTHER}]},
    ),
    "input[custom_tool_call].name": Case(("input", 4, "name"), "run", "do"),
    "input[custom_tool_call_output].output": Case(("input", 6, "output"), "none", _OTHER),
    "input[].id": Case(("input", 2, "id"), "msg_1", "msg_9"),
    "input[].status": Case(("input", 2, "status"), "completed", "in_progress"),
    "input[].phase": Case(("input", 2, "phase"), ABSENT, "commentary"),
    "input[].content[output_text].annotations": Case(
        ("input", 2, "content", 0, "annotations"), [], ABSENT
    ),
    "input[].content[output_text].text": Case(("input", 2, "content", 0, "text"), _SAID, _OTHER),
    "input[] of role assistant, second part": Case(
        ("input", 2, "content"),
        _ITEMS[2]["content"],
        [*_ITEMS[2]["content"], {"type": "output_text", "text": _OTHER, "annotations": []}],
    ),
    "input[].content[reasoning_text].text": Case(
        ("input", 1, "content", 0, "text"), _THOUGHT, _OTHER
    ),
    "reasoning.summary beside content": Case(
        ("input", 1, "summary", 0, "text"), "In short.", "In other words."
    ),
    "input[].content[summary_text].text": Case(
        ("input", 1),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": _THOUGHT}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": _OTHER}]},
    ),
    "input[reasoning].encrypted_content": Case(("input", 1, "encrypted_content"), "YQ==", "Yg=="),
    "reasoning.encrypted_content null": Case(("input", 1, "encrypted_content"), ABSENT, None),
    "input[function_call].name": Case(("input", 3, "name"), "read", "view"),
    "input[function_call].namespace": Case(("input", 3, "namespace"), ABSENT, "space"),
    "input[function_call].arguments": Case(
        ("input", 3, "arguments"), _ITEMS[3]["arguments"], '{"path": "b"}'
    ),
    "function_call.arguments, blanks": Case(
        ("input", 3, "arguments"), _ITEMS[3]["arguments"], '{"path":"a","limit":7}'
    ),
    "input[function_call].id": Case(("input", 3, "id"), "fc_1", "fc_9"),
    "input[function_call].call_id": Case(("input", 3, "call_id"), "call_1", "call_9"),
    "input[custom_tool_call].input": Case(("input", 4, "input"), "ls", "pwd"),
    "input[function_call_output].output": Case(("input", 5, "output"), _RESULT, _OTHER),
    "function_call_output.output as parts": Case(
        ("input", 5, "output"), _RESULT, [{"type": "input_text", "text": _RESULT}]
    ),
    "input[function_call_output].call_id": Case(("input", 5, "call_id"), "call_1", "call_9"),
    "input[item_reference].id": Case(
        ("input", 7),
        {"type": "item_reference", "id": "msg_1"},
        {"type": "item_reference", "id": "msg_2"},
    ),
    "web_search_call": Case(
        ("input", 7),
        {"type": "web_search_call", "id": "a", "status": "completed"},
        {"type": "web_search_call", "id": "b", "status": "completed"},
    ),
    "input[compaction].encrypted_content": Case(
        ("input", 7),
        {"type": "compaction", "encrypted_content": "YQ=="},
        {"type": "compaction", "encrypted_content": "Yg=="},
    ),
    "input_file": Case(
        ("input", 0, "content", 0),
        {"type": "input_file", "filename": "a", "file_data": "YQ=="},
        {"type": "input_file", "filename": "b", "file_data": "Yg=="},
    ),
}
_OF_COMPLETIONS: dict[str, Case] = {
    **_keyed(COMPLETIONS),
    **_given(temperature=0.5, seed=7, user="u", echo=True, stop=["x"], messages=[], input="x"),
    "prompt": Case(("prompt",), _PROMPT, f"{_SYSTEM}\n{_OTHER}\n{_LAST}"),
    "suffix": Case(("suffix",), "a", "b"),
}
CASES: dict[str, dict[str, Case]] = {
    CHAT: _OF_CHAT,
    MESSAGES: _OF_MESSAGES,
    RESPONSES: _OF_RESPONSES,
    COMPLETIONS: _OF_COMPLETIONS,
}


FRONT, IN_PLACE, NOT = Where.FRONT, Where.IN_PLACE, Where.NOT
_BESIDE: dict[tuple[str, Where | None], str] = {
    (MESSAGES, FRONT): """
        cache_salt
        model
        tools[].name
        tools[].strict
        tools[].input_schema
        tools[].input_schema order
    """,
    (MESSAGES, IN_PLACE): """
        messages[] of role system
        tool_use.input order
    """,
    (MESSAGES, NOT): """
        system[] billing block
        system billing line
        messages[] of role system, billing block
        messages[] of role system, billing alone
        tools[] order
        tool_choice
        output_config.format
        thinking adaptive
        thinking enabled
        messages[].content as string
        messages[] order
        tool_use before text
        tool_result behind text
        tool_result.content as string
        temperature
        top_p
        top_k
        stop_sequences
        service_tier
    """,
    (MESSAGES, REFUSED): """
        document
        tools[] without schema
    """,
    (CHAT, FRONT): """
        cache_salt
        model
        chat_template_kwargs.enable_thinking
        tools[].function.name
        tools[].function.strict
        tools[].function.parameters
        tools[].function.parameters order
        messages[0] of role system
        messages[] of role developer
    """,
    (CHAT, IN_PLACE): """
        messages[] of role system
        tool_calls[].function.arguments
        tool_calls[].function.arguments, order
    """,
    (CHAT, NOT): """
        parallel_tool_calls
        thinking
        enable_thinking
        top_p
        seed
        stop
        include_reasoning
        tools[].function order
        messages[] of role system, billing line
        messages[] of role system, billing part
        messages[].content as string
        messages[] order
        messages[].reasoning by its other name
        messages[].reasoning_details
        messages[].refusal
        tool_calls[].index
        tool_calls[].function.arguments, blanks
        tool_calls[].function.arguments, no object
    """,
    (CHAT, REFUSED): """
        messages[].content[input_text].text
        messages[].content[output_text].text
        file part
    """,
    (RESPONSES, FRONT): """
        cache_salt
        model
        tools[].name
        tools[].strict
        tools[] custom
        tools[].parameters
        tools[].parameters order
        input[] of role developer
    """,
    (RESPONSES, NOT): """
        tool_choice
        text.format
        reasoning.summary
        instructions, billing line
        temperature
        top_p
        parallel_tool_calls
        client_metadata
        tools[] order
        tools[] built in
        input[] message without type
        input[] of role assistant, second part
        reasoning.summary beside content
        reasoning.encrypted_content null
        function_call.arguments, blanks
        function_call_output.output as parts
    """,
    (RESPONSES, REFUSED): """
        input[reasoning].encrypted_content
        input[item_reference].id
        web_search_call
        input[compaction].encrypted_content
        input_file
        input[].content[text].text
    """,
    (COMPLETIONS, FRONT): """
        cache_salt
        model
    """,
    (COMPLETIONS, IN_PLACE): """
        prompt
    """,
    (COMPLETIONS, NOT): """
        temperature
        seed
        echo
        stop
    """,
    (COMPLETIONS, REFUSED): """
        suffix
    """,
}
"""Of each dialect what is no row of the table, one a line, and what vLLM does otherwise: mostly it
refuses what it does not know, where other engines may take it."""


def _found() -> Iterator[tuple[tuple[str, str], Where | None]]:
    for row in ROWS:
        if row.member in CASES.get(row.dialect.value, {}):
            yield (row.dialect.value, row.member), row.where
    for (dialect, where), members in _BESIDE.items():
        for member in members.strip().splitlines():
            yield (dialect, member.strip()), where


FOUND = dict(_found())
"""Where vLLM renders each member; REFUSED: such a request is refused."""
