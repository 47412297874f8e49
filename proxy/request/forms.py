"""A form upload's small fields: its model, and whether it asks for a stream.

Only the headers of the parts and the values of a few small fields are read, anywhere in the form. A
file is only searched for its end. The form goes on to an instance as it came.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

from proxy.protocol.examined import NO_OBJECT, READ, Examined
from proxy.protocol.names.session_names import session_in
from proxy.protocol.prompt.facts import MODEL_CHARS, PromptFacts

MOST_PARTS = 256
"""The parts behind these are not looked at."""
MOST_ALIKE = 64
"""Behind more lines of a form that only begin like a delimiter nothing is looked at."""
HEAD_BYTES = 8192
"""Most bytes of a part's headers; behind a part with more nothing is looked at."""
HEADS_BYTES = 32_768
"""Most bytes of all parts' headers; behind more nothing is looked at."""
MOST_PARAMS = 8
"""Parameters of one header; those behind them are not looked at. Clients send three."""
VALUE_BYTES = 1024
"""Most bytes of a field that is looked at."""
BOUNDARY_BYTES = 256
"""Most bytes of a boundary; RFC 2046 allows 70."""
SLICE_BYTES = 1 << 18
"""Searched at once: in a thread, the event loop has its turn after each."""
THREAD_BYTES = 1 << 20
"""A longer form is looked at in a thread."""
_WANTED = READ | {"model", "user"}
_PARAM = re.compile(r';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^;]*))', re.DOTALL)
_DISPOSITION = re.compile(rb"(?:^|\r\n)content-disposition[ \t]*:([^\r\n]*)", re.IGNORECASE)
_LINE_REST = re.compile(rb"--|[ \t]{0,64}(?:\r\n|\Z)")
"""Follows the delimiter in its line: the marks of the last one, or blanks."""
_CRLF = b"\r\n"
_NO_TEXT = chr(0xD800)
"""No text that is decoded has it."""


async def examine_form(raw: bytes, content_type: str) -> Examined:
    """Read a form's fields by the request's header; a long form in a thread."""
    if len(raw) > THREAD_BYTES:
        return await asyncio.to_thread(read_form, raw, content_type)
    return read_form(raw, content_type)


def read_form(raw: bytes, content_type: str) -> Examined:
    """Read a form's fields; the last of two equal names counts, as with engines."""
    boundary = params(content_type).get("boundary", "").encode("utf-8", "surrogateescape")
    if not 0 < len(boundary) <= BOUNDARY_BYTES:
        return NO_OBJECT
    fields: dict[str, str] = dict(_fields(raw, b"--" + boundary))
    model = fields.pop("model", "")[:MODEL_CHARS]
    if not fields and not model:
        return NO_OBJECT
    prompt = PromptFacts(model, 0, 0, [], offloadable=False)
    return Examined(fields, session_in(fields), prompt, {}, [])


def params(header: str) -> dict[str, str]:
    """The parameters of a header's value by their names in lower case: `kind; name="value"`."""
    found: dict[str, str] = {}
    at = header.find(";")
    for _ in range(MOST_PARAMS):
        match = _PARAM.match(header, at) if at >= 0 else None
        if match is None:
            break
        name, quoted, plain = match.groups()
        value = plain.strip() if quoted is None else _unescaped(quoted)
        found.setdefault(name.lower(), value)
        at = header.find(";", match.end())
    return found


def _unescaped(quoted: str) -> str:
    """A quoted value without the backslash before each character that has one.

    In whole passes: a step of Python per backslash would hold up the event loop.
    """
    return quoted.replace("\\\\", _NO_TEXT).replace("\\", "").replace(_NO_TEXT, "\\")


def _fields(raw: bytes, delimiter: bytes) -> Iterator[tuple[str, str]]:
    """Names and values of the wanted small fields, in their order."""
    # A form begins with a delimiter, as behind a line end, or with words that nobody reads.
    begin, alike = len(delimiter), MOST_ALIKE
    if not (raw.startswith(delimiter) and _LINE_REST.match(raw, begin)):
        _, begin, alike = _delimiter_end(raw, delimiter, 0, alike)
    left = HEADS_BYTES
    for _ in range(MOST_PARTS):
        line_end = raw.find(_CRLF, begin, begin + HEAD_BYTES)
        if begin == 0 or line_end < 0 or raw[begin:line_end].strip(b" \t"):
            return  # the last delimiter, or none
        head_end = raw.find(_CRLF + _CRLF, line_end, line_end + HEAD_BYTES)
        left -= head_end - line_end
        if head_end < 0 or left < 0:
            return
        value = head_end + 2 * len(_CRLF)
        # The end of an empty value is the line end of the headers.
        end, begin, alike = _delimiter_end(raw, delimiter, value - len(_CRLF), alike)
        if begin == 0:
            return
        name = _field_name(raw[line_end + len(_CRLF) : head_end])
        if name in _WANTED and end - value <= VALUE_BYTES:
            yield name, raw[value:end].decode("utf-8", "replace")


def _delimiter_end(raw: bytes, delimiter: bytes, start: int, alike: int) -> tuple[int, int, int]:
    """Start of the next delimiter, with the line end before it, and its end; else zeros.

    Not behind `alike` lines that only begin like it; the third is how many of them are left.
    A line that only begins like it is data: a boundary may be the beginning of another one.
    """
    sought = _CRLF + delimiter
    for left in range(alike, 0, -1):
        at = _find(raw, sought, start)
        if at < 0:
            break
        start = at + len(sought)
        if _LINE_REST.match(raw, start):
            return at, start, left
    return 0, 0, 0


def _field_name(head: bytes) -> str | None:
    """The name of a part that is a field; None for a file."""
    match = _DISPOSITION.search(head)
    if match is None:
        return None
    told = params(match.group(1).decode("utf-8", "replace"))
    return None if "filename" in told or "filename*" in told else told.get("name")


def _find(raw: bytes, sought: bytes, start: int) -> int:
    """`raw.find`, a slice at a time: each call has the interpreter for itself."""
    while start < len(raw):
        found = raw.find(sought, start, start + SLICE_BYTES + len(sought))
        if found >= 0:
            return found
        start += SLICE_BYTES
    return -1
