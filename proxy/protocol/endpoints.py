"""The API paths that the proxy knows, one row each.

A path without a row is relayed too, as `OTHER`, if it is below /v1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ErrorForm(Enum):
    """The form of an error event in a stream that has begun."""

    OPENAI = "openai"
    """`data: {"error": ...}`: OpenAI's chat clients raise an exception at it."""
    MESSAGES = "messages"
    """Anthropic's event `error`."""
    RESPONSES = "responses"
    """The event `error` of OpenAI's Responses API, with the plain error object in it."""


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
    """One API path.

    `is_counted`: metrics count it under its own label. `offloadable`: it takes a JSON object by
    POST only, and two instances may serve it, one for the prompt and one for the
    answer. `salting`: what a tenant's salt does there. `last_events`: names of the events that end
    its stream; none: [DONE] ends it. `operators_only`: it changes one engine, and is
    refused to clients.
    """

    path: str
    is_counted: bool = True
    offloadable: bool = False
    salting: Salting = Salting.SINCE
    last_events: tuple[str, ...] = ()
    error_form: ErrorForm = ErrorForm.OPENAI
    operators_only: bool = False

    @property
    def label(self) -> str:
        """The path's value of the metric label `endpoint`."""
        return self.path if self.is_counted else "other"


OTHER = Endpoint("", is_counted=False)
"""Row of all paths without one."""
_RESPONSES_END = ("response.completed", "response.incomplete", "response.failed")
RESPONSES = "/v1/responses"
_STORED = Endpoint("", is_counted=False, last_events=_RESPONSES_END, error_form=ErrorForm.RESPONSES)
"""Row of the paths below RESPONSES: a stored response may be had as a stream too."""
_ROWS = (
    Endpoint("/v1/chat/completions", offloadable=True, salting=Salting.ALWAYS),
    Endpoint("/v1/completions", offloadable=True, salting=Salting.ALWAYS),
    Endpoint(
        RESPONSES,
        salting=Salting.ALWAYS,
        last_events=_RESPONSES_END,
        error_form=ErrorForm.RESPONSES,
    ),
    Endpoint("/v1/messages", last_events=("message_stop",), error_form=ErrorForm.MESSAGES),
    Endpoint("/v1/messages/count_tokens", is_counted=False, salting=Salting.NO_KV),
    Endpoint("/v1/embeddings"),
    Endpoint("/v1/rerank"),
    Endpoint("/v1/score"),
    Endpoint("/tokenize", salting=Salting.NO_KV),
    Endpoint("/detokenize", salting=Salting.NO_KV),
    Endpoint("/v1/load_lora_adapter", is_counted=False, operators_only=True),
    Endpoint("/v1/unload_lora_adapter", is_counted=False, operators_only=True),
)
ENDPOINTS = {row.path: row for row in _ROWS}
OFFLOADABLE = frozenset(row.path for row in _ROWS if row.offloadable)
"""The paths of nearly all requests; a set, since each request is looked up in it four times."""
BESIDE_V1 = tuple(path for path in ENDPOINTS if not path.startswith("/v1/"))
"""Paths outside /v1 that are relayed."""
LAST_EVENTS = tuple(dict.fromkeys(name for row in _ROWS for name in row.last_events))
"""Names of the events that end the stream of some endpoint."""


def endpoint_of(path: str) -> Endpoint:
    """The row of a path; `OTHER` for a path without one."""
    if (row := ENDPOINTS.get(path)) is not None:
        return row
    return _STORED if path.startswith(f"{RESPONSES}/") else OTHER
