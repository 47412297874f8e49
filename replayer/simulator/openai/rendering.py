"""A chat as the model reads it: a ChatML template with one word per role marker.

As vLLM and its templates have it: options of reasoning in front, then the tools, then the turns. Of
a tool its name, description and schema are read, of a call its name and arguments; ids, marks for
caches and signatures never are. An image or a sound is always as many words, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson
from xxhash import xxh3_64_hexdigest

from replayer.engine.tokens import ASSISTANT, IM_END, IM_START
from replayer.simulator.openai.errors import ApiError, invalid

_NO_MESSAGES = "Cannot apply chat template to an empty conversation. Provide at least one message."
_OPTIONS = ("reasoning_effort", "chat_template", "chat_template_kwargs", "documents")
"""Fields that a template writes in front of everything else."""
_MEDIA = {
    "image_url": ("image_url", 256),
    "input_image": ("image_url", 256),
    "image": ("source", 256),
    "input_audio": ("input_audio", 128),
    "audio_url": ("audio_url", 128),
    "video_url": ("video_url", 1024),
    "file": ("file", 512),
    "input_file": ("file_data", 512),
}
"""Types of parts that are no text: the member with the data, and the tokens of each."""


def render_chat(body: dict[str, Any]) -> str:
    """Render options, tools and messages; ApiError for what is not a chat."""
    messages = _messages(body)
    parts = []
    for name in _OPTIONS:
        if body.get(name):
            parts += [name, _spaced_json(body[name])]
    if body.get("tools"):
        tools = [tool | {"name": full_name(tool)} for tool in functions_of(body["tools"])]
        parts += [IM_START, "tools", _spaced_json([_without_space(tool) for tool in tools]), IM_END]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid("missing", "body.messages.role", "Field required", message)
        parts += [IM_START, message["role"], spoken(message), IM_END]
    if body.get("continue_final_message"):
        parts.pop()
    elif body.get("add_generation_prompt", True):
        parts += [IM_START, ASSISTANT]
    return " ".join(parts)


def spoken(message: Mapping[str, Any]) -> str:
    """A message as it stands behind its role: reasoning, text, calls."""
    said = []
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        said += ["<think>", _text_of(reasoning), "</think>"]
    said.append(_text_of(message.get("content") or ""))
    calls = message.get("tool_calls")
    said += [_spaced_json(_called(call)) for call in calls or ()] if _is_list(calls) else []
    return " ".join(said)


def functions_of(tools: Any) -> Iterator[dict[str, Any]]:
    """The functions among a request's tools, those of a name space by themselves.

    Each with its name, description, parameters and `namespace`; other tools are the client's own.
    """
    for tool in tools if _is_list(tools) else ():
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if kind == "namespace":
            for inner in functions_of(tool.get("tools")):
                yield inner | {"namespace": tool.get("name")}
        elif kind == "function":
            nested = tool.get("function")
            given = nested if isinstance(nested, dict) else tool
            found = {name: given.get(name) for name in ("name", "description", "parameters")}
            yield found | {"namespace": None}


def full_name(function: Mapping[str, Any]) -> str:
    """A function's name as the model reads it, with its name space."""
    space, name = function.get("namespace"), str(function.get("name"))
    return f"{space}.{name}" if space else name


def _without_space(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in function.items() if name != "namespace"}


def _called(call: Any) -> dict[str, Any]:
    """Name and arguments of a call; arguments that are JSON in a text are read."""
    call = call if isinstance(call, dict) else {}
    nested = call.get("function")
    given = nested if isinstance(nested, dict) else call
    arguments = given.get("arguments")
    if isinstance(arguments, str):
        with suppress(orjson.JSONDecodeError):  # a template writes it as it is
            arguments = orjson.loads(arguments)
    return {"name": full_name(given), "arguments": arguments}


def _messages(body: dict[str, Any]) -> list[Any]:
    messages = body.get("messages")
    if messages is None:
        raise invalid("missing", "body.messages", "Field required", body)
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    if not messages:
        raise ApiError(400, _NO_MESSAGES)
    return messages


def _text_of(content: Any) -> str:
    """The text of a string or of parts."""
    if _is_list(content):
        return " ".join([_part(p) if isinstance(p, dict) else str(p) for p in content])
    return str(content)


def _part(part: Mapping[str, Any]) -> str:
    """A text, or the words that stand for an image or a sound, by its content."""
    kind = str(part.get("type"))
    if kind not in _MEDIA:
        return str(part.get("text", ""))
    member, tokens = _MEDIA[kind]
    data = orjson.dumps(part.get(member), option=orjson.OPT_SORT_KEYS)
    return " ".join([f"m{xxh3_64_hexdigest(data)[:5]}"] * tokens)


def _spaced_json(value: Any) -> str:
    """JSON with white space between its items, so that each item is a word."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
