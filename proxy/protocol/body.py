"""A client's JSON body: fields that it may not set, limits on its shape, and edits of its bytes.

Clients address models, not engines: the fields that direct KV from one engine to another, or select
a data-parallel rank, are set by the proxy only. A client that could set them could make an engine
fetch from an address of its choice.

`splice` changes a few top-level fields of a JSON object without touching any other byte. Big
integers, float spelling, key order and escapes of all other fields survive, which parsing and
serialising again would not guarantee. Callers have parsed the body before, so it is a valid object.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

from proxy.core.connectors.base import KV_PARAMS

MAX_DEPTH = 128
MAX_MESSAGES = 4096
MAX_FIELDS = 4096
"""Most fields of the body, and of the plug-ins' arguments: each name is checked."""
_ORDINARY = frozenset(
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
_STEERING = frozenset({KV_PARAMS, "ec_transfer_params", "data_parallel_rank"})
_STEERING_PREFIX = "do_remote_"
_COUNTED_BYTES = 4096
_MANY = 1 << 16
"""From this many values in one level on (token ids as a rule), counting brackets is cheaper than
visiting the values."""
_is_nest = frozenset({dict, list}).__contains__
PLUGINS = "vllm_xargs"
"""Arguments for an engine's plug-ins; vLLM takes `kv_transfer_params` from there too, as text."""
_SALT = re.compile(r"[^@/\\\x00-\x1f\x7f]{1,128}")
"""What vLLM accepts as cache_salt; others crashed engines before 0.30 (CVE-2026-105756)."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a body is refused, and the field at fault."""

    message: str
    param: str | None = None


def steering_keys(body: Mapping[str, Any]) -> list[str]:
    """Top-level keys that a client may not set, in any case of letters."""
    if _ORDINARY.issuperset(body):
        return []
    return [key for key in body if _steers(key.lower())]


def harmless_arguments(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The plug-ins' arguments without those that a client may not set; None if all may stay."""
    given = body.get(PLUGINS)
    if not isinstance(given, dict) or not (steering := steering_keys(given)):
        return None
    return {key: value for key, value in given.items() if key not in steering}


def _steers(key: str) -> bool:
    return key in _STEERING or key.startswith(_STEERING_PREFIX)


def complaint(body: Mapping[str, Any], raw: bytes) -> Unfit | None:
    """Why a body, a JSON object, exceeds a limit; None if it does not. `raw`: its bytes."""
    messages = body.get("messages")
    if type(messages) is list and len(messages) > MAX_MESSAGES:
        return Unfit(f"messages: over {MAX_MESSAGES}", "messages")
    for name, fields in ((None, body), (PLUGINS, body.get(PLUGINS))):
        if isinstance(fields, dict) and len(fields) > MAX_FIELDS:
            return Unfit(f"{name or 'body'}: over {MAX_FIELDS} fields", name)
    if "cache_salt" in body and not _is_salt(body["cache_salt"]):
        return Unfit("cache_salt: 1 to 128 characters without @ / \\ and controls", "cache_salt")
    if (len(raw) > _COUNTED_BYTES or _has_brackets(raw)) and is_deep(body, raw):
        return Unfit(f"body: nested deeper than {MAX_DEPTH}")
    return None


def _has_brackets(raw: bytes) -> bool:
    """Whether there are enough brackets for MAX_DEPTH; for large bodies `is_deep` is cheaper."""
    return raw.count(b"[") + raw.count(b"{") > MAX_DEPTH


def _is_salt(salt: Any) -> bool:
    return salt is None or (isinstance(salt, str) and _SALT.fullmatch(salt) is not None)


def is_deep(body: Mapping[str, Any], raw: bytes) -> bool:
    """Whether arrays and objects are nested more than `MAX_DEPTH` deep.

    Level by level, without recursion and without a Python step per value.
    """
    objects: list[Any] = [body]
    arrays: list[Any] = []
    for _ in range(MAX_DEPTH):
        if sum(map(len, arrays)) > _MANY and not _has_brackets(raw):
            return False
        values = list(chain.from_iterable(map(dict.values, objects)))
        values += chain.from_iterable(arrays)
        below = list(compress(values, map(_is_nest, map(type, values))))
        if not below:
            return False
        objects = [x for x in below if type(x) is dict]
        arrays = [x for x in below if type(x) is list] if len(objects) < len(below) else []
    return True


_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^][{}"]*+\]|[][{},]', re.DOTALL)
"""Strings, arrays without strings or nesting (thousands of token ids), single marks."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_SHORT = dict(zip("bfnrt", "\b\f\n\r\t", strict=True))
_OPEN, _CLOSE = frozenset(b"{["), frozenset(b"}]")


def members(body: bytes) -> Iterator[tuple[str, int, int]]:
    """Top-level members as (key, start of the key, end of the value)."""
    depth, key, start = 0, b"", -1
    for token in _TOKEN.finditer(body):
        kind, last = body[token.start()], body[token.end() - 1]
        depth += (kind in _OPEN) - (last in _CLOSE)
        if start < 0 and depth == 1 and kind == ord('"'):
            key, start = token.group(), token.start()
        elif start >= 0 and (depth == 0 or (depth == 1 and kind == ord(","))):
            yield _unescape(key[1:-1]), start, token.start()
            start = -1


def _unescape(key: bytes) -> str:
    """A key as the engine will read it: `\\u006bv` is `kv`."""

    def plain(match: re.Match[str]) -> str:
        code, short = match.groups()
        return chr(int(code, 16)) if code else _SHORT.get(short, short)

    name = key.decode()
    if "\\" not in name:
        return name
    return _ESCAPE.sub(plain, name).encode("utf-16", "surrogatepass").decode("utf-16")


def splice(body: bytes, put: Mapping[str, bytes], drop: Collection[str] = ()) -> bytes:
    """Remove the members named in `drop` and `put`, then append those of `put` (JSON values)."""
    removed = {*drop, *put}
    kept = [body[start:end].rstrip() for key, start, end in members(body) if key not in removed]
    added = [b'"%s":%s' % (key.encode(), value) for key, value in put.items()]
    return b"{" + b",".join(kept + added) + b"}"
