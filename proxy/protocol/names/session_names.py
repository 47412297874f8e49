"""The name of a request's session, by its headers and body.

An agent's own name comes first: a session's id in a header, then one in the body. An id that may be
the request's own (a correlation id, the continued response) names a session only without any other
name. It must also have come back once (`core/kvcache/conversations.py`). An agent that works for
another one under the session's name has a name of its own beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from multidict import istr
from xxhash import xxh3_128_hexdigest

SESSION_HEADERS: Final = (
    "X-Session-ID",
    "X-Session-Affinity",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "X-Dynamo-Session-ID",
)
"""The headers that name a session, without `--session-headers`."""
CORRELATION: Final = istr("X-Correlation-ID")
"""AIPerf's name of a session; of gateways and meshes it is the name of one request."""
OF_REQUESTS: Final = frozenset(
    {
        "correlation-id",
        "request-id",
        "traceparent",
        "x-amzn-trace-id",
        "x-b3-traceid",
        "x-client-request-id",
        "x-cloud-trace-context",
        "x-correlation-id",
        "x-request-id",
        "x-trace-id",
    }
)
"""Headers whose ids could be each request's own, in lower case."""
AGENT: Final = istr("x-claude-code-agent-id")
THREAD: Final = istr("thread-id")
THREADS_SESSION: Final = (istr("session-id"), istr("session_id"))
"""A thread with another id than the session in these is an agent that works for it."""
_NAME_CHARS: Final = 128
_HALVES: Final = re.compile(r"[\ud800-\udfff]")
_USER_CHARS: Final = 1024
"""A longer `user_id` is ignored."""
_OLD_USER: Final = re.compile(r"user_[0-9A-Za-z-]*_account_[0-9A-Za-z-]*_session_([\w-]{8,64})")
_NEW_USER: Final = re.compile(r'"session_id"\s*:\s*"([^"\\]{1,128})"')
InBody = tuple[str | None, str | None]
"""A session's name by a body, and an id that may be the request's own."""
NO_NAMES: Final[InBody] = (None, None)


class SessionNames:
    """Headers that name a session, in order; `given`: the operator's, in place of the default."""

    def __init__(self, given: Sequence[str] | None = None) -> None:
        listed = SESSION_HEADERS if given is None else given
        # As the mapping compares them: any other name is made lower case at each look-up.
        self._order = [(istr(header), header.lower() in OF_REQUESTS) for header in listed]
        self._last = CORRELATION if given is None else None

    def of(self, headers: Mapping[str, str], in_body: InBody) -> InBody:
        """The session's name, and an id that may be the request's own; at most one of them."""
        for header, is_of_request in self._order:
            if given := headers.get(header):
                if is_of_request:
                    return None, bounded(given)
                return _with_agent(given, _agent(headers)), None
        name, own_id = in_body
        if name is not None:
            return _with_agent(name, _agent(headers)), None
        if self._last is not None and (given := headers.get(self._last)):
            return None, bounded(given)
        return None, own_id


def _agent(headers: Mapping[str, str]) -> str | None:
    """The agent that asks, where it works for another one under the session's name."""
    if agent := headers.get(AGENT):
        return agent
    if thread := headers.get(THREAD):
        for header in THREADS_SESSION:
            if session := headers.get(header):
                return None if session == thread else thread
    return None


def _with_agent(session: str, agent: str | None) -> str:
    return bounded(session if not agent or agent == session else f"{session}:{agent}")


def session_in(body: Mapping[str, Any]) -> InBody:
    """The session's name by the first body field that gives one, and the response continued."""
    get = body.get
    name = plain_name(get("session_id"))
    if not name and (metadata := get("metadata")):
        name = _in_metadata(metadata)
    if not name and (user := get("user")):
        name = _in_user(user)
    if not name and (client := get("client_metadata")):
        name = _in_client(client)
    if not name:
        name = plain_name(get("prompt_cache_key"))
    if name:
        return bounded(name), None
    own_id = plain_name(get("previous_response_id"))
    return None, (bounded(own_id) if own_id else None)


def _in_metadata(metadata: Any) -> str:
    if not isinstance(metadata, dict):
        return ""
    return plain_name(metadata.get("session_id")) or _in_user(metadata.get("user_id"))


def _in_client(client: Any) -> str:
    """Codex's session, with its thread where that is another agent's."""
    if not isinstance(client, dict):
        return ""
    session, thread = plain_name(client.get("session_id")), plain_name(client.get("thread_id"))
    return _with_agent(session, thread) if session else ""


def _in_user(user: Any) -> str:
    """The session in Claude Code's name of its user, in its older form or as JSON."""
    if not isinstance(user, str) or len(user) > _USER_CHARS:
        return ""
    found = _NEW_USER.search(user) if user[:1] == "{" else _OLD_USER.fullmatch(user)
    return "" if found is None else str(found.group(1))


def plain_name(value: Any) -> str:
    """A string, or a whole number as its digits; empty for any other value."""
    kind = type(value)
    return value if kind is str else str(value) if kind is int else ""


def bounded(session_id: str) -> str:
    """A session's key: its name, or a digest of one that is long or not text."""
    if len(session_id) <= _NAME_CHARS and is_text(session_id):
        return session_id
    return xxh3_128_hexdigest(session_id.encode("utf-8", "surrogatepass"))


def of_tenant(session_id: str | None, tenant: str | None) -> str | None:
    """The key of a tenant's session. Tenant names have no slash, so keys cannot collide."""
    return session_id if session_id is None or tenant is None else f"{tenant}/{session_id}"


def is_text(text: str) -> bool:
    """Whether a text can be encoded: a header's bytes that are not UTF-8 cannot."""
    return text.isascii() or _HALVES.search(text) is None


def tenant_of(key: str) -> str:
    """The tenant of a key that `of_tenant` has made; empty for one without a tenant."""
    tenant, slash, _id = key.partition("/")
    return tenant if slash else ""
