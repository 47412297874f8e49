"""The API paths that are relayed to instances, one row each; any other path is not.

An engine also has paths for its operators, some of them below /v1, and each release may add more.
So a path passes only with a row that says what it is for, or where `--extra-paths` names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final


class Dialect(StrEnum):
    """The API of a path: the form of its errors, token counts and streams."""

    OPENAI = "openai"
    """OpenAI's errors; a stream's events, if there is one, are of a kind that is not known."""
    CHAT = "chat"
    """OpenAI's chats: chunks, then [DONE]."""
    COMPLETIONS = "completions"
    """OpenAI's completions: the same with texts."""
    MESSAGES = "messages"
    """Anthropic's API: events with names, errors and token counts of its own."""
    RESPONSES = "responses"
    """OpenAI's Responses API: events with names, token counts of its own, OpenAI's errors."""


DONE: Final = "[DONE]"
"""The data of the event that ends a stream of chunks."""
LAST_EVENTS: Final = {
    Dialect.OPENAI: (),
    Dialect.CHAT: (DONE,),
    Dialect.COMPLETIONS: (DONE,),
    Dialect.MESSAGES: ("message_stop",),
    Dialect.RESPONSES: tuple(
        f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled")
    ),
}
"""The events that end a stream, by their names, or DONE; none: the stream ends with its body."""
ENDED: Final = tuple(dialect for dialect, names in LAST_EVENTS.items() if names)
"""Dialects whose streams are whole with an event of their own only."""
ENDED_BY_NAME: Final = tuple(dialect for dialect in ENDED if DONE not in LAST_EVENTS[dialect])
END_NAMES: Final = tuple(name for names in LAST_EVENTS.values() for name in names if name != DONE)
"""Names of the events that end the stream of some dialect."""


_POSTED: Final = ("POST",)


class Salting(Enum):
    """Whether engines keep tenants' KV apart on a path, by the body's field `cache_salt`."""

    ALWAYS = "always"
    """Every supported vLLM reads the field."""
    SINCE = "since"
    """Newer ones read it, older ones ignore it, or none of them has it."""
    NO_KV = "no kv"
    """No prompt is computed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API path."""

    path: str
    use: str
    """Its purpose for clients."""
    methods: tuple[str, ...] = _POSTED
    """Its HTTP methods."""
    is_counted: bool = True
    """Metrics count it under its own label."""
    offloadable: bool = False
    """It takes a JSON object, and two instances may serve it, one for the prompt and one for the
    answer."""
    salting: Salting = Salting.SINCE
    """Effect of a tenant's salt."""
    dialect: Dialect = Dialect.OPENAI
    teaches: bool = False
    """A request is one prompt and its answer, so the engine's token counts match the bytes that the
    proxy saw."""

    @property
    def is_posted(self) -> bool:
        """Whether a request is answered from what it brings, with status 200."""
        return self.methods == _POSTED

    @property
    def label(self) -> str:
        """The path's value of the metric label `endpoint`."""
        return self.path if self.is_counted else "other"


MODELS: Final = "/v1/models"
"""Answered by the proxy itself."""
ANY_METHOD: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
OTHER: Final = Endpoint("", "paths of --extra-paths", ANY_METHOD, is_counted=False)
"""Row of the paths of `--extra-paths`."""
RESPONSES: Final = "/v1/responses"
COMPACT: Final = f"{RESPONSES}/compact"
MESSAGES: Final = "/v1/messages"
_STORED: Final = Endpoint(
    f"{RESPONSES}/",
    "stored responses: read, list items, cancel, delete",
    ("GET", "POST", "DELETE"),
    is_counted=False,
    dialect=Dialect.RESPONSES,
)
"""Row of the paths below RESPONSES: a stored response may be had as a stream too."""
_ROWS: Final = (
    Endpoint(
        "/v1/chat/completions",
        "chat completions",
        offloadable=True,
        salting=Salting.ALWAYS,
        dialect=Dialect.CHAT,
        teaches=True,
    ),
    Endpoint(
        "/v1/completions",
        "text completions",
        offloadable=True,
        salting=Salting.ALWAYS,
        dialect=Dialect.COMPLETIONS,
        teaches=True,
    ),
    Endpoint("/v1/chat/completions/batch", "several chats in one request", is_counted=False),
    Endpoint(
        RESPONSES,
        "OpenAI responses",
        salting=Salting.ALWAYS,
        dialect=Dialect.RESPONSES,
        teaches=True,
    ),
    Endpoint(
        COMPACT,
        "compaction of a conversation, as Codex asks for",
        is_counted=False,
        dialect=Dialect.RESPONSES,
    ),
    Endpoint(
        f"{RESPONSES}/input_tokens",
        "token count of a response's input",
        is_counted=False,
        salting=Salting.NO_KV,
        dialect=Dialect.RESPONSES,
    ),
    Endpoint(
        MESSAGES,
        "Anthropic messages",
        dialect=Dialect.MESSAGES,
        teaches=True,
    ),
    Endpoint(
        f"{MESSAGES}/count_tokens",
        "token count of Anthropic messages",
        is_counted=False,
        salting=Salting.NO_KV,
        dialect=Dialect.MESSAGES,
    ),
    Endpoint("/v1/embeddings", "OpenAI embeddings"),
    Endpoint("/v2/embed", "Cohere embeddings", is_counted=False),
    Endpoint("/pooling", "hidden states, rewards", is_counted=False),
    Endpoint("/classify", "classification of texts", is_counted=False),
    Endpoint("/v1/score", "similarity scores of text pairs"),
    Endpoint("/score", "the same", is_counted=False),
    Endpoint("/v1/rerank", "reranking in Jina's form"),
    Endpoint("/rerank", "the same", is_counted=False),
    Endpoint("/v2/rerank", "the same in Cohere's form", is_counted=False),
    Endpoint("/v1/audio/transcriptions", "speech to text", is_counted=False),
    Endpoint("/v1/audio/translations", "speech to English text", is_counted=False),
    Endpoint("/tokenize", "token ids of a prompt", salting=Salting.NO_KV),
    Endpoint("/detokenize", "text of token ids", salting=Salting.NO_KV),
)
ENDPOINTS: Final = {row.path: row for row in _ROWS}
OFFLOADABLE: Final = frozenset(row.path for row in _ROWS if row.offloadable)
"""The paths of nearly all requests; a set, since each request is looked up in it four times."""
BESIDE_V1: Final = tuple(path for path in ENDPOINTS if not path.startswith("/v1/"))
"""Paths outside /v1 that are relayed."""
RELAYED: Final = (*_ROWS, _STORED)
"""All rows, for the documentation; the last one is of the paths below its own."""
OPERATORS_ONLY: Final = ("/v1/admin", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Paths that change one engine, with all below them; no option has them relayed."""
_LONGEST: Final = max(len(path) for path in ENDPOINTS) + 8
"""Characters of a path beyond which it resembles none that is known."""
_NO_HINT: Final = "not relayed; docs/reference/http-api.md lists what is, --extra-paths adds to it"
_HINTS: Final = (
    ("/v1/realtime", "websockets are not relayed"),
    ("/api/", "this is OpenAI's API below /v1, not Ollama's"),
    ("/openai/", "this is OpenAI's API below /v1, not Azure's"),
    ("/inference/", "token ids in and out are not for clients of a fleet"),
)
"""Hints on paths that begin like this."""


def endpoint_of(path: str) -> Endpoint:
    """The row of a path; `OTHER` for a path without one."""
    if (row := ENDPOINTS.get(path)) is not None:
        return row
    return _STORED if path.startswith(f"{RESPONSES}/") else OTHER


def dialect_of(path: str) -> Dialect:
    """The dialect of a path's errors, also of one that is not relayed but resembles a known one."""
    if (row := endpoint_of(path)) is not OTHER:
        return row.dialect
    named = [part for part in path.split("/") if part not in ("", "v1")]
    return Dialect.MESSAGES if named[:1] == ["messages"] else Dialect.OPENAI


def is_for_operators(path: str) -> bool:
    """Whether a path changes one engine, also with slashes that a server in between merges."""
    path = "/" + "/".join(filter(None, path.split("/")))
    return any(path == own or path.startswith(f"{own}/") for own in OPERATORS_ONLY)


def is_relayed(path: str, extra_paths: Collection[str]) -> bool:
    """Whether a path is relayed to instances: it has a row, or is one of the extra paths.

    An extra path that ends in /* stands for all below it. A path with a segment `.` or `..` leads
    elsewhere, and a backslash may.
    """
    if "\\" in path or not {".", ".."}.isdisjoint(path.split("/")) or is_for_operators(path):
        return False
    if endpoint_of(path) is not OTHER:
        return not path.endswith("/")  # which an engine would redirect
    return any(
        path.startswith(extra[:-1]) if extra.endswith("/*") else path == extra
        for extra in extra_paths
    )


def why_not_relayed(path: str) -> str:
    """The text for a client that asked for a path which is not relayed, with what it may want.

    It repeats nothing of the path.
    """
    if is_for_operators(path):
        return "path: changes one engine only; ask that engine itself"
    return f"path: {_hint(path) or _NO_HINT}"


def _hint(path: str) -> str | None:
    bare = "/".join(part for part in path.split("/") if part)
    slashed = f"/{bare}"
    known = {*ENDPOINTS, MODELS}
    if slashed == "/v1":
        return "/v1 ends a client's base URL; its requests go to paths below, /v1/chat/completions"
    if slashed in known:
        extra = "at its end" if path.endswith("/") else "too many"
        return f"without the slash {extra}: {slashed}"
    if f"/v1{slashed}" in known:
        return f"/v1 is missing, with which a client's base URL ends: /v1{slashed}"
    undoubled = slashed.replace("/v1/v1/", "/v1/", 1)
    if undoubled != slashed and undoubled in known:
        return f"/v1 is there twice, the base URL has it already: {undoubled}"
    for start, text in _HINTS:
        if slashed.startswith(start):
            return text
    close = (
        difflib.get_close_matches(slashed.lower(), known, 1, 0.8) if len(path) <= _LONGEST else []
    )
    return f"did you mean {close[0]}?" if close else None
