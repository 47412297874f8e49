"""A scripted model with tools: it calls the client's shell, then ends.

So real agents can be run in front of `engine-sim` (`--tool-calls`). The script depends on the
conversation alone. A limit of output is not kept to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from replayer.simulator.openai.rendering import full_name, functions_of, spoken

_SHELL = re.compile(
    r"(bash|terminal|(run|exec|execute)?_?(local_|shell|terminal_)?_?(command|shell)s?)"
)
_COMMAND = ("command", "cmd", "commands", "script")
"""Names that clients give to what their shell is to run."""
_REMINDER = re.compile(r"<(system-reminder|environment_context)>.*?</\1>", re.DOTALL)
"""Text that a client adds to the words of its user."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; `arguments` is JSON."""

    id: str
    name: str
    namespace: str | None
    arguments: str

    def in_chat(self) -> dict[str, Any]:
        """The call as a message of a chat has it."""
        space = {"namespace": self.namespace} if self.namespace else {}
        function = {"name": self.name, "arguments": self.arguments} | space
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of the model."""

    thought: str
    text: str
    calls: tuple[Call, ...] = ()

    def rendered(self) -> str:
        """The answer as it will stand in the next prompt."""
        calls = [call.in_chat() for call in self.calls]
        return spoken({"reasoning": self.thought, "content": self.text, "tool_calls": calls})


def next_step(chat: Mapping[str, Any], most_calls: int, request_id: str) -> Step:
    """The answer to a chat: a call, until there are `most_calls` behind the user's last words."""
    messages = [message for message in chat.get("messages") or () if isinstance(message, dict)]
    done = 0
    for message in messages:
        if message.get("role") == "tool":
            done += 1
        elif message.get("role") == "user" and _words(message.get("content")):
            done = 0
    said = len([message for message in messages if message.get("role") == "assistant"])
    shell = next((f for f in functions_of(chat.get("tools")) if _SHELL.fullmatch(_plain(f))), None)
    thought = f"The user has a task. This is answer {said} of mine, so I look at what is there."
    if shell is None or done >= most_calls:
        return Step(thought, f"All steps of the task are done, after {said} answers.")
    command = f"echo step {said}; ls; cat README.md"
    arguments = orjson.dumps(_arguments(shell["parameters"], command)).decode()
    call = Call(f"call_{request_id}", str(shell["name"]), shell["namespace"], arguments)
    return Step(thought, f"Step {said}: I use {full_name(shell)}.", (call,))


def _plain(function: Mapping[str, Any]) -> str:
    return str(function["name"]).lower()


def _words(content: Any) -> str:
    """The text of a user's message, without the client's additions."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    texts = [str(part.get("text") or "") for part in parts if isinstance(part, dict)]
    return _REMINDER.sub("", "\n".join(texts)).strip()


def _arguments(schema: Any, command: str) -> dict[str, Any]:
    """Arguments by the schema of a shell: its command, and whatever else it needs."""
    schema = schema if isinstance(schema, dict) else {}
    found: dict[str, Any] = {}
    for name, spec in (schema.get("properties") or {}).items():
        if name in _COMMAND:
            found[name] = _as_command(name, spec, command)
        elif name in (schema.get("required") or ()):
            found[name] = _value(spec)
    return found


def _as_command(name: str, spec: Mapping[str, Any], command: str) -> Any:
    """A command as a text, as a list of such, or as a program and what it is given."""
    if spec.get("type") != "array":
        return command
    return [command] if name == "commands" else ["bash", "-c", command]


def _value(spec: Mapping[str, Any]) -> Any:
    """Any value that a schema allows."""
    if spec.get("enum"):
        return spec["enum"][0]
    empty = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}
    return empty.get(str(spec.get("type")), "a step of the task")
