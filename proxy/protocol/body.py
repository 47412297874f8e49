"""A client's JSON body: fields that it may not set, limits on its shape, and edits of its bytes.

Clients address models, not engines: the fields that direct KV from one engine to another, or select
a data-parallel rank, are set by the proxy only. A client that could set them could make an engine
fetch from an address of its choice.

`Members.edited` changes a few top-level fields of a JSON object without touching any other byte.
Big integers, float spelling, key order and escapes of all other fields survive, which parsing and
serialising again would not guarantee. Callers have parsed the body before, so it is a valid object.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.core.connectors.base import KV_PARAMS
from proxy.protocol.streams.parse_cost import MAX_DEPTH, has_brackets, is_deep, marks

MAX_BRACKETS, MAX_COMMAS = 1 << 18, 1 << 21
"""Most `[` and `{`, and most commas, in a body's bytes, also within texts. Each may become a Python
object: 60 to 100 bytes, and 100 ns in each of four steps. A prompt of a million tokens has a tenth
of them."""
MAX_FIELDS: Final = 512
"""Most fields of the body, and of the plug-ins' arguments: each name is checked. Where a body is
edited, fields of the same name are counted each."""
MOST_PLACES: Final = 64
"""Places of members that are kept with a body: 240 bytes each, which nobody counts. Real bodies
have up to 40 members; the places of more are looked for again by each edit."""
_KEY_CHARS: Final = 64
"""Kept of a top-level field's name; the names that matter are shorter."""
_ORDINARY: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "input",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "ignore_eos",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "n",
        "user",
        "metadata",
        "response_format",
        "reasoning_effort",
        "session_id",
        "prompt_cache_key",
    }
)
_STEERING: Final = frozenset({KV_PARAMS, "ec_transfer_params", "data_parallel_rank"})
_STEERING_PREFIX: Final = "do_remote_"
_OPENING: Final = (b"[", b"{")
_COUNTED_BYTES: Final = 4096
SMALL_BYTES, SMALL_COMMAS = 1 << 20, 1 << 14
"""A larger body, or one with more commas, is not parsed on the event loop: texts of this size take
0.6 ms there, as many values 2 ms."""
_UNCOUNTED_BYTES: Final = 1 << 17
"""Up to here commas are not counted: were all of it strings of one letter, it took 4 ms."""
_FREE_BYTES, _SMALL_BRACKETS = 4096, 1 << 13
"""So many arrays and objects take 2 ms. Brackets in texts count too, and source code has 4 to 12
per KiB. With fewer allowed, prompts of 200 KiB would leave the event loop."""
PLUGINS: Final = "vllm_xargs"
"""Arguments for an engine's plug-ins; vLLM takes `kv_transfer_params` from there too, as text."""
_SALT: Final = re.compile(r"[^@/\\\x00-\x1f\x7f\ud800-\udfff]{1,128}")
"""The cache_salt that vLLM accepts; others crashed engines before 0.30 (CVE-2026-105756)."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a body is refused, and the field at fault."""

    message: str
    param: str | None = None


TOO_DEEP: Final = Unfit(f"body: nested deeper than {MAX_DEPTH}")
TOO_MANY_BRACKETS: Final = Unfit(f"body: over {MAX_BRACKETS} of [ and {{")


def steering_keys(body: Mapping[str, Any]) -> list[str]:
    """Top-level keys that a client may not set, in any case of letters, cut like `members`'."""
    if _ORDINARY.issuperset(body):
        return []
    return [name for name in map(_name_of, body) if _steers(name.lower())]


def _name_of(key: str) -> str:
    """A key as `members` gives it: cut, and without halves of surrogate pairs."""
    return (key if key.isascii() else key.encode("utf-8", "ignore").decode())[:_KEY_CHARS]


def harmless_arguments(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The plug-ins' arguments without those that a client may not set; None if all may stay."""
    given = body.get(PLUGINS)
    if not isinstance(given, dict) or not (steering := frozenset(steering_keys(given))):
        return None
    return {key: value for key, value in given.items() if _name_of(key) not in steering}


def overfull(raw: bytes) -> Unfit | None:
    """Why a body is refused unparsed: so many values that parsing it would take too much memory."""
    if brackets(raw) > MAX_BRACKETS:
        return TOO_MANY_BRACKETS
    if raw.count(b",") > MAX_COMMAS:
        return Unfit(f"body: over {MAX_COMMAS} commas")
    return None


def is_small(raw: bytes) -> bool:
    """Whether parsing a body may hold up the event loop for as long as it takes, up to 5 ms."""
    size = len(raw)
    if size <= _FREE_BYTES:
        return True
    if size > SMALL_BYTES:
        return False
    if brackets(raw) > _SMALL_BRACKETS:
        return False
    return size <= _UNCOUNTED_BYTES or raw.count(b",") <= SMALL_COMMAS


def brackets(raw: bytes, one_by_one: int = _SMALL_BRACKETS) -> int:
    """Number of `[` and `{`, also within texts; `one_by_one`: see `marks`."""
    return marks(raw, b"[", one_by_one) + marks(raw, b"{", one_by_one)


def _steers(key: str) -> bool:
    return key in _STEERING or key.startswith(_STEERING_PREFIX)


def complaint(body: Mapping[str, Any], raw: bytes, *, is_salted: bool = False) -> Unfit | None:
    """Why a body, a JSON object, exceeds a limit; None if it does not.

    `raw`: its bytes. `is_salted`: its own `cache_salt` will be replaced, whatever it is.
    """
    for name, fields in ((None, body), (PLUGINS, body.get(PLUGINS))):
        if isinstance(fields, dict) and len(fields) > MAX_FIELDS:
            return Unfit(f"{name or 'body'}: over {MAX_FIELDS} fields", name)
    if not is_salted and "cache_salt" in body and not _is_salt(body["cache_salt"]):
        return Unfit("cache_salt: 1 to 128 characters without @ / \\ and controls", "cache_salt")
    if (len(raw) > _COUNTED_BYTES or has_brackets(raw)) and is_deep(body, raw):
        return TOO_DEEP
    return None


def _is_salt(salt: Any) -> bool:
    return salt is None or (isinstance(salt, str) and _SALT.fullmatch(salt) is not None)


Span = tuple[str, int, int]
"""A top-level member: its key, and where in the body it begins and ends."""
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_SHORT: Final = dict(zip("bfnrt", "\b\f\n\r\t", strict=True))
_STRING: Final = rb'"(?:[^"]*+(?<!\\)"|[^"\\]*+(?:\\.[^"\\]*+)*+")'
"""The first form, without a quote in it, is matched four times as fast."""


_STEP_BYTES: Final = 1 << 18
_KEY_BEGIN: Final = re.compile(
    rb"(?:\\u[0-9a-fA-F]{4}|\\.|[^\\]){0,%d}" % (4 * _KEY_CHARS), re.DOTALL
)
"""Bytes and escapes that hold the kept part of a key: a character has at most four."""
_KEY: Final = re.compile(rb"[\s,]*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_PLAIN: Final = re.compile(_STRING + rb"|[^][{},\s\"]++", re.DOTALL)
_TO_BRACKET: Final = re.compile(rb'(?:[^][{}"]++|' + _STRING + rb")*+([][{}])", re.DOTALL)
"""Texts and numbers up to the next bracket or brace, in one match however many they are."""


def members(body: bytes) -> Iterator[Span]:
    """Top-level members as (key, start of the key, end of the value); long keys are cut.

    Takes a Python step per member and per bracket, none per text or number. Raises ValueError where
    there are more than `MAX_FIELDS`, of which a parse keeps one per name.
    """
    next_key, at, left = _KEY.match, body.index(b"{") + 1, MAX_FIELDS
    while key := next_key(body, at):
        left -= 1
        if left < 0:
            raise ValueError(f"body: over {MAX_FIELDS} fields")
        plain = _PLAIN.match(body, key.end())
        at = _end_of_nest(body, key.end()) if plain is None else plain.end()
        yield _unescape(key.group(1)[1:-1]), key.start(1), at


def _end_of_nest(body: bytes, at: int) -> int:
    """End of the array or object that begins at `at`."""
    next_bracket, depth = _TO_BRACKET.match, 0
    while found := next_bracket(body, at):
        at = found.end()
        depth += 1 if found.group(1) in _OPENING else -1
        if depth == 0:
            return at
    raise ValueError("an array or object without end")


def _unescape(key: bytes) -> str:
    """A key as the engine will read it, cut: `\\u006bv` is `kv`."""

    def plain(match: re.Match[str]) -> str:
        code, short = match.groups()
        return chr(int(code, 16)) if code else _SHORT.get(short, short)

    begin = _KEY_BEGIN.match(key)
    name = (begin.group() if begin is not None else b"").decode("utf-8", "ignore")
    if "\\" in name:
        name = _ESCAPE.sub(plain, name).encode("utf-16", "surrogatepass").decode("utf-16", "ignore")
    return name[:_KEY_CHARS]


class Members:
    """A JSON object as bytes, `raw`, and where its top-level members are.

    They are looked for when the first edit needs them, and kept up to `MOST_PLACES`.
    """

    __slots__ = ("_spans", "raw")

    def __init__(self, raw: bytes, spans: list[Span] | None = None) -> None:
        self.raw = raw
        self._spans: list[Span] | None = None
        self._keep(spans)

    def _keep(self, spans: list[Span] | None) -> None:
        if spans is not None and len(spans) <= MOST_PLACES:
            self._spans = spans

    @property
    def spans(self) -> list[Span]:
        """The top-level members, duplicates included; raises ValueError, see `members`."""
        found = self._spans
        if found is None:
            found = list(members(self.raw))
            self._keep(found)
        return found

    def edited(self, put: Mapping[str, bytes], drop: Collection[str] = ()) -> Members:
        """A copy without the members named in `drop` and `put`, then those of `put`, JSON values.

        What stays keeps its bytes and its order. Raises ValueError like `spans`. A long body is
        copied in steps: a thread that edits one holds the interpreter's lock for one step at a
        time, and not for joining them, which it would with views.
        """
        removed, raw = {*drop, *put}, memoryview(self.raw)
        is_long = len(raw) > SMALL_BYTES
        pieces: list[bytes | memoryview] = []
        spans: list[Span] = []
        at, mark = 1, b"{"
        for key, start, end in self.spans:
            if key not in removed:
                pieces.append(mark)
                if is_long:
                    steps = range(start, end, _STEP_BYTES)
                    pieces += [self.raw[step : min(end, step + _STEP_BYTES)] for step in steps]
                else:
                    pieces.append(raw[start:end])
                spans.append((key, at, at + end - start))
                at, mark = at + end - start + 1, b","
        for key, value in put.items():
            member = b'"%s":%s' % (key.encode(), value)
            pieces += (mark, member)
            size = len(member)
            spans.append((key, at, at + size))
            at, mark = at + size + 1, b","
        pieces.append(b"}" if mark == b"," else b"{}")
        return Members(b"".join(pieces), spans)

    def with_first(self, key: str, value: bytes) -> Members:
        """A copy of an object that is not empty, with one more member in front.

        `key` must not be in it: nothing is looked for, as for each body of a stream it would be.
        """
        at = self.raw.index(b"{") + 1
        more = b'"%s":%s,' % (key.encode(), value)
        raw = b"".join((self.raw[:at], more, memoryview(self.raw)[at:]))
        if self._spans is None:
            return Members(raw)
        size = len(more)
        moved = [(name, start + size, end + size) for name, start, end in self._spans]
        return Members(raw, [(key, at, at + size - 1), *moved])
