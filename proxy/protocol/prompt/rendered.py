"""The texts of a prompt as its engine renders them, read from a body by the rows of a table."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import orjson
from xxhash import xxh3_128_hexdigest

from proxy.protocol.endpoints import Dialect
from proxy.protocol.prompt.rendering import BILLING, MEDIA, ROWS, How, Row, Where

FIRST_ENDS: Final = 2
LAST_ENDS: Final = 8
"""Ends of messages that are looked at: those that conversations share, and the last turns."""
IDS: Final = "I"
"""Array type of token ids: 4 bytes each, like a token of text by the prior."""
_INLINED = re.compile(r"data:([a-z]*+)[^,\s]{0,128};base64,")
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/_-"
_BASE64_LINE: Final = 32
_DATA_CHARS: Final = 1024
"""A string of so many of these letters, in a member that the table does not know, is not text."""
MOST_MEDIA: Final = 1024
"""Images, sounds and files of which each is told apart; vLLM takes 999 of a kind by default."""
_NAMESPACE_CHARS: Final = 128
"""Of a namespace's name, which each of its tools repeats. Models know names of 64 letters."""
_DATA: Final = ("data", "url", "file_data", "file_id", "image_url", "file")
"""Members that have an image's or a sound's data or address, in the order of trust."""
_DEEPEST: Final = 3
"""Parts within parts that are read by their types; vLLM knows one level, the results of tools."""
_FRAMED: Final = frozenset({"thinking", "tool_use", "tool_result"})
"""Types of parts that templates put between marks of their own."""
Texts = list[bytes | memoryview]
Members = list[tuple[str, How]]


class _Reading:
    """The reading rules of a dialect's bodies: its rows, by the object of the members.

    `front`: paths in the order in which they are rendered; `turns`: the member with the turns.
    `turn` and `part`: the members of a turn and of a part by its type, "" for other turns. `left`:
    names that no object renders.
    """

    __slots__ = ("front", "left", "part", "turn", "turns")

    def __init__(self, dialect: Dialect) -> None:
        self.front: list[tuple[tuple[str, ...], How]] = []
        self.turns = ""
        self.turn: dict[str, Members] = {}
        self.part: dict[str, Members] = {}
        self.left: set[str] = set()
        for row in ROWS:
            if row.dialect is dialect:
                self._add(row)

    def _add(self, row: Row) -> None:
        *within, name = row.member.split(".")
        if row.how is How.TURNS:
            self.turns = name
        elif not within or "[" not in within[0]:
            if row.where is Where.FRONT:
                self.front.append(((*within, name), row.how))
        elif within[0].startswith(("messages[", "input[")):
            objects = self.turn if len(within) == 1 else self.part
            members = objects.setdefault(within[-1].partition("[")[2].rstrip("]"), [])
            if row.where is Where.NOT:
                self.left.add(name)
            else:
                members.append((name, row.how))


_READINGS: Final = {dialect: _Reading(dialect) for dialect in Dialect}
_TYPED: Final = {
    kind: members[0]
    for reading in _READINGS.values()
    for kind, members in reading.part.items()
    if kind and members and members[0][1].value in MEDIA
}
"""The member with the data of each type of part that is a medium, in whichever dialect."""
_UNTYPED: Final = ("image_url", "audio_url", "input_audio", "video_url")
"""Members by which vLLM knows what a part without a type is."""


_ARGUMENTS, _MARKS_PER_VALUE = 4, 8
"""Values that a call's arguments count as, beside the call: they are parsed and written again. They
count as more by their commas and brackets: a body may have these as escapes of six bytes, which
nobody has counted. Code has one in some fifteen characters."""


class Rendered:
    """The texts of a prompt, in the order in which the engine renders them.

    `ends`: how many texts its first and last messages end with, of `count`. `before`: how many come
    before the first one that is not the system's. `media`: what becomes no text, by its kind and
    the number of texts before it, the first MOST_MEDIA; `texts` has its digest. Not `is_whole`: the
    body has more than `most_values` values.
    """

    __slots__ = ("_is_messages", "_left", "_reading", "before", "count", "ends", "media", "texts")

    def __init__(self, dialect: Dialect, body: Mapping[str, Any], most_values: int) -> None:
        self.texts: Texts = []
        self.ends: list[int] = []
        self.before = self.count = 0
        self.media: list[tuple[str, int]] = []
        self._left = most_values
        self._is_messages = dialect is Dialect.MESSAGES
        self._reading = reading = _READINGS[dialect]
        for path, how in reading.front:
            value: Any = body
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            if value is None:
                continue
            if how is How.JSON or how is How.TEXT:
                # An effort must not stand for a template.
                self.texts.append(path[-1].encode())
            if how is How.CONTENT and isinstance(value, str):
                self._text(_unbilled(value, is_whole=False))
            else:
                self._member(value, how, of_system=True)
        if reading.turns:
            self._turns(body.get(reading.turns))

    @property
    def is_whole(self) -> bool:
        """Whether all of the prompt was read."""
        return self._left >= 0

    def _turns(self, turns: Any) -> None:
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
            self._any(turns)  # a text, or what the engine will refuse
            return
        count = self.count = len(turns)
        self.before = len(self.texts)
        for at, turn in enumerate(turns):
            if isinstance(turn, dict):
                self._turn(turn)
            else:
                self._any(turn)
            if self._left < count - at - 1:
                self._left = -1
                return
            if at < FIRST_ENDS or at >= count - LAST_ENDS:
                self.ends.append(len(self.texts))
        if turns[0].get("role") in ("system", "developer"):
            self.before = self.ends[0]

    def _turn(self, turn: dict[str, Any]) -> None:
        reading, kind, role = self._reading, turn.get("type"), turn.get("role")
        members = reading.turn.get(kind) if isinstance(kind, str) else None
        if isinstance(kind, str) and members:
            role = None
            self.texts.append(_mark(kind))
        elif role is None and kind is not None:
            self._unknown(turn)
            return
        else:
            members = reading.turn[""]
        self._left -= 1
        for name, how in members:
            value = turn.get(name)
            if value is not None:
                if name == "role" and isinstance(value, str):
                    self.texts.append(_mark(value))
                else:
                    self._member(value, how, of_system=role == "system")
                    if kind == "reasoning" and value:
                        return  # its summary is rendered in place of a content only

    def _member(self, value: Any, how: How, *, of_system: bool = False, depth: int = 0) -> None:
        if how is How.CONTENT:
            self._content(value, of_system=of_system, depth=depth)
        elif how is How.TEXT:
            self._text(value)
        elif (read := _READERS.get(how)) is not None:
            read(self, value)
        else:
            self._medium(value, how)

    def _off(self, value: Any) -> None:
        if value == "disabled":
            self.texts.append(b"thinking disabled")

    def _text(self, value: Any) -> None:
        if isinstance(value, str):
            self.texts.append(value.encode("utf-8", "surrogatepass"))
        else:
            self._any(value)

    def _content(self, value: Any, *, of_system: bool, depth: int) -> None:
        """A text, or parts; of a system message without what is for billing."""
        if isinstance(value, str):
            self._text(_unbilled(value, is_whole=self._is_messages) if of_system else value)
            return
        if not isinstance(value, list) or depth >= _DEEPEST:
            self._any(value)
            return
        self._left -= len(value)
        for part in value:
            if self._left < 0:
                return
            if isinstance(part, dict):
                self._part(part, of_system=of_system, depth=depth)
            else:
                self._any(part)

    def _part(self, part: dict[str, Any], *, of_system: bool, depth: int) -> None:
        kind = part["type"] if "type" in part else _kind_of(part)
        members = self._reading.part.get(kind) if isinstance(kind, str) else None
        if members is None or (kind in _TYPED and members[0][0] not in part):
            self._unknown(part)
            return
        if isinstance(kind, str) and kind in _FRAMED:
            self.texts.append(_mark(kind))
        for name, how in members:
            value = part.get(name)
            if how in MEDIA and isinstance(uuid := part.get("uuid"), str):
                value = uuid  # by which the engine knows it, whatever its data
            if value is None:
                continue
            if of_system and name == "text" and isinstance(value, str):
                value = _unbilled(value, is_whole=self._is_messages)
                if not value:
                    continue
            self._member(value, how, depth=depth + 1)

    def _unknown(self, item: dict[str, Any]) -> None:
        """A part or turn of a type that the table does not have: each text that may be rendered."""
        left = self._reading.left
        if (medium := _typed(item)) is not None:
            self._medium(*medium)
            return
        self._any([value for name, value in item.items() if name not in left], has_data=True)

    def _tools(self, tools: Any) -> None:
        """The parts of the tools that engines render, in order."""
        if not isinstance(tools, list):
            self._any(tools)
            return
        self._left -= len(tools)
        kept: list[Any] = []
        for tool in tools:
            if isinstance(tool, dict):
                self._tool(tool, "", kept)
        self._json(kept)

    def _tool(self, tool: dict[str, Any], prefix: str, kept: list[Any]) -> None:
        inner = tool.get("tools")
        if tool.get("type") == "namespace" and isinstance(inner, list):
            self._left -= len(inner)
            space = tool.get("name")
            within = f"{space[:_NAMESPACE_CHARS]}__" if isinstance(space, str) else ""
            for one in inner:
                if isinstance(one, dict):
                    self._tool(one, within, kept)
            return
        named = tool.get("function")
        function = named if isinstance(named, dict) else tool
        name = function.get("name")
        if not isinstance(name, str):
            return  # a tool of the engine's own, of which its model is told nothing
        schema = function.get("parameters")
        if schema is None:
            schema = function.get("input_schema")
        # About as long as the engine's own JSON, which has a space behind each mark.
        kept.append("type function function name")
        kept.append(prefix + name)
        kept += ("description", function.get("description"), "parameters", schema)
        kept += [function[name] for name in ("strict", "defer_loading") if name in function]

    def _calls(self, calls: Any) -> None:
        """Name and arguments of each call; its id is not rendered."""
        if not isinstance(calls, list):
            self._any(calls)
            return
        self._left -= len(calls)
        for call in calls:
            if self._left < 0:
                return
            named = call.get("function") if isinstance(call, dict) else None
            if not isinstance(named, dict):
                self._unknown(call if isinstance(call, dict) else {"": call})
                continue
            self.texts.append(_CALL)
            for name in ("name", "arguments"):
                if (value := named.get(name)) is not None:
                    self._arguments(value)

    def _arguments(self, value: Any) -> None:
        """The arguments of a call: engines parse the text, and write it again."""
        if isinstance(value, str) and value[:1] == "{":
            marks = value.count(",") + value.count("[") + value.count("{")
            self._left -= _ARGUMENTS + marks // _MARKS_PER_VALUE
            if self._left < 0:
                return
            try:
                value = orjson.loads(value)
            except orjson.JSONDecodeError:  # the engine renders an empty object
                self._text(value)
                return
        if isinstance(value, dict):
            self._json(value)
        else:
            self._text(value)

    def _json(self, value: Any) -> None:
        try:
            self.texts.append(orjson.dumps(value))
        except TypeError:  # half a surrogate pair, a number over 64 bits, too deep
            self._any(value)

    def _medium(self, value: Any, kind: str) -> None:
        """The digest of an image or a sound: of its data or address, and of nothing else."""
        self._left -= 1
        found = _data_of(value)
        if isinstance(found, str):
            self._digest(found, kind)
        else:
            self._any(found, has_data=True)

    def _digest(self, data: str, kind: str) -> None:
        if len(self.media) < MOST_MEDIA:
            self.media.append((kind, len(self.texts)))
        digest = xxh3_128_hexdigest(data.encode("utf-8", "surrogatepass"))
        self.texts.append(digest.encode())

    def _any(self, value: Any, *, has_data: bool = False) -> None:
        """Every text in a value, without recursion, since the client chooses the depth.

        `has_data`: a long text without white space may be an image or a sound.
        """
        stack = [value]
        while stack:
            self._left -= 1
            item = stack.pop()
            if isinstance(item, dict):
                stack.extend(self._object(item))
            elif isinstance(item, list):
                ids = _token_ids(item)
                if ids is None:
                    stack.extend(reversed(item))
                else:
                    self.texts.append(ids)
            elif isinstance(item, str):
                self._any_text(item, has_data=has_data)
            elif item is not None:
                self.texts.append(repr(item).encode())
            if len(stack) > self._left:
                self._left = -1
                return

    def _object(self, item: dict[str, Any]) -> Iterable[Any]:
        """The members of an object, last first; a part is read by its type."""
        if item.get("type") == "text" and isinstance(text := item.get("text"), str):
            self._any_text(text, has_data=False)  # as if it were not in parts
            return ()
        if (medium := _typed(item)) is None:
            return _inner(item)
        if not isinstance(found := _data_of(medium[0]), str):
            return (found,)
        self._digest(found, medium[1])
        return ()

    def _any_text(self, text: str, *, has_data: bool) -> None:
        """A text, or the digest of data that are written as one."""
        inlined = _INLINED.match(text) if text[:5] == "data:" else None
        if inlined is not None:
            kind = inlined.group(1)
            self._digest(text, kind if kind in MEDIA else How.FILE.value)
        elif has_data and len(text) >= _DATA_CHARS and _is_base64(text):
            self._digest(text, How.FILE.value)
        else:
            self._text(text)


def _is_base64(text: str) -> bool:
    """Whether a text is nothing but base64, in one line or in long ones."""
    text = text.rstrip()
    end = text.rstrip("=")
    if len(text) - len(end) > 2 or not end.isascii():
        return False
    data = end.encode()
    rest = data.translate(None, _BASE64)
    if not rest:
        return True
    lines = data.count(b"\n")
    if (
        rest.strip(b"\r\n")
        or lines * _BASE64_LINE > len(data)
        or data.count(b"\r\n") != rest.count(b"\r")
    ):
        return False
    *whole, _ = data.replace(b"\r\n", b"\n").split(b"\n")
    return min(map(len, whole)) >= _BASE64_LINE


def _mark(kind: str) -> bytes:
    """A stand-in for a template's marks around a turn, about as long."""
    return b"<|im_start|>%b<|im_end|>\n" % kind.encode("utf-8", "surrogatepass")


_CALL: Final = _mark("tool_call")


def _unbilled(text: str, *, is_whole: bool) -> str:
    """A system text as engines render it: without its line for billing, or not at all."""
    if not text.startswith(BILLING):
        return text
    return "" if is_whole else text.partition("\n")[2]


def _kind_of(part: dict[str, Any]) -> str:
    """The type of a part without one, as vLLM reads it."""
    return next((name for name in _UNTYPED if name in part), "text")


def _typed(part: dict[str, Any]) -> tuple[Any, str] | None:
    """The data of a part that is a medium by its type, and the medium's kind; None for others."""
    kind = part.get("type")
    known = _TYPED.get(kind) if isinstance(kind, str) else None
    value = part.get(known[0]) if known is not None else None
    return None if known is None or value is None else (value, known[1].value)


def _data_of(value: Any) -> Any:
    """The stand-in for a medium: its data or address; else the object that may have them.

    A source, a URL, a file: whatever names the data in a dialect.
    """
    while isinstance(value, dict):
        if value.get("type") == "text":
            return {"type": "text", "text": value.get("data")}
        inner = next((value[name] for name in _DATA if value.get(name) is not None), None)
        if inner is None:
            return list(value.values())
        value = inner
    return value


def _inner(item: dict[str, Any]) -> Iterable[Any]:
    """Keys and values, last first."""
    parts: list[Any] = []
    for pair in item.items():
        parts += pair
    parts.reverse()
    return parts


def _token_ids(item: list[Any]) -> memoryview | None:
    """The ids of a tokenised prompt; None for any other list."""
    if not item or not isinstance(item[0], int):
        return None
    try:
        return memoryview(array(IDS, item)).cast("B")
    except (TypeError, OverflowError):  # not only ids; the engine will refuse the prompt
        return None


_READERS: Final[dict[How, Callable[[Rendered, Any], None]]] = {
    How.JSON: Rendered._json,
    How.TOOLS: Rendered._tools,
    How.CALLS: Rendered._calls,
    How.ARGUMENTS: Rendered._arguments,
    How.ANY: Rendered._any,
    How.OFF: Rendered._off,
}
