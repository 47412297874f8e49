"""What the scripted model does next."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from replayer.simulator.openai.agent import next_step

USER = {"role": "user", "content": "do it"}
CALLED = {"role": "assistant", "content": "", "tool_calls": []}
RESULT = {"role": "tool", "content": "x"}
REMINDER = {"type": "text", "text": "<system-reminder>\nbe brief\n</system-reminder>"}


def shell(name: str = "bash", **properties: Any) -> dict[str, Any]:
    given = properties or {"command": {"type": "string"}}
    schema = {"type": "object", "properties": given, "required": list(given)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def calls(*messages: dict[str, Any], tools: list[Any] | None = None, most: int = 2) -> list[Any]:
    chat = {"messages": list(messages), "tools": [shell()] if tools is None else tools}
    step = next_step(chat, most, "r1")
    return [(call.namespace, call.name, orjson.loads(call.arguments)) for call in step.calls]


@pytest.mark.parametrize(
    ("messages", "is_done"),
    [
        ([USER], False),
        ([USER, CALLED, RESULT], False),
        ([USER, CALLED, RESULT, CALLED, RESULT], True),
        ([USER, CALLED, RESULT, CALLED, RESULT, CALLED, USER], False),
        ([USER, CALLED, RESULT, {"role": "user", "content": [REMINDER]}, CALLED, RESULT], True),
        ([USER, CALLED, RESULT, CALLED, RESULT, {"role": "user", "content": None}], True),
    ],
)
def test_calls_are_counted_from_the_users_last_words(messages: Any, is_done: bool) -> None:
    assert bool(calls(*messages)) != is_done


@pytest.mark.parametrize(
    "name",
    ["Bash", "shell", "run_shell_command", "exec_command", "execute_command", "run_commands"],
)
def test_any_clients_shell_is_found(name: str) -> None:
    tools = [shell("read_file"), shell("bash_output"), shell(name)]
    assert [found for _, found, _ in calls(USER, tools=tools)] == [name]


@pytest.mark.parametrize("tools", [[], [shell("read")], [{"type": "web_search"}]])
def test_without_a_shell_it_is_done_at_once(tools: Any) -> None:
    assert calls(USER, tools=tools) == []


def test_arguments_are_what_the_schema_asks_for() -> None:
    needed: dict[str, Any] = {
        "command": {"type": "string"},
        "why": {"type": "string"},
        "how": {"enum": ["fast", "slow"]},
        "is_background": {"type": "boolean"},
        "timeout": {"type": "integer"},
    }
    ((_, _, found),) = calls(USER, tools=[shell("bash", **needed)])
    assert "cat README.md" in found["command"]
    assert (found["how"], found["is_background"], found["timeout"]) == ("fast", False, 1)
    for name, first in (("command", "bash"), ("commands", found["command"])):
        ((_, _, listed),) = calls(USER, tools=[shell("bash", **{name: {"type": "array"}})])
        assert listed[name][0] == first


def test_a_tool_of_a_name_space_is_called_in_it() -> None:
    space = {"type": "namespace", "name": "os", "tools": [shell("shell")]}
    ((namespace, name, _),) = calls(USER, tools=[space])
    assert (namespace, name) == ("os", "shell")
