"""The tables of the glossary and of the request log's page, from docstrings of what they list.

Python forgets the docstring of a member of an enumeration or of a field, so the source is read.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from textwrap import dedent

from proxy.core.fleet.health import State
from proxy.core.placement.alternatives import Shadowed
from proxy.core.routing.actions import ReleaseResult
from proxy.core.types import (
    FailureKind,
    Fallback,
    MoveCause,
    Outcome,
    Place,
    Reason,
    RejectReason,
    RouteClass,
    Unmoved,
)
from proxy.net.server.refusals import _ANSWERS
from proxy.net.tls import HandshakeEnd
from proxy.protocol import errors
from proxy.protocol.errors import ProxyError
from proxy.telemetry.record import Migration, RequestRecord

Row = tuple[str, ...]
SECTIONS: tuple[tuple[str, str, type[StrEnum]], ...] = (
    (
        "Size classes",
        "`route_class` in the request log and in metrics, `X-Cache-Proxy-Route`.",
        RouteClass,
    ),
    (
        "Reasons of decisions",
        "`offload_decision_reason` in the request log, `reason` of "
        "`cache_proxy_offload_decisions_total`, the last word of `X-Cache-Proxy-Reason`.",
        Reason,
    ),
    (
        "Why this instance",
        "`place` in the request log, the first word of `X-Cache-Proxy-Reason`.",
        Place,
    ),
    (
        "Outcomes",
        "`outcome` in the request log and of `cache_proxy_requests_total`.",
        Outcome,
    ),
    (
        "Busy answers",
        "`error` of an `outcome` that is `rejected`, `reason` of `cache_proxy_rejected_total` and "
        "in the answer, the first word of its `X-Cache-Proxy-Reason`. `check` beside it is one of "
        "the first five.",
        RejectReason,
    ),
    (
        "Offloads that fail",
        "`fallback` in the request log, `reason` of `cache_proxy_offload_fallbacks_total`.",
        Fallback,
    ),
    (
        "Instances that fail",
        "`reason` of `cache_proxy_upstream_retries_total`, and the first word of many an `error`.",
        FailureKind,
    ),
    (
        "States of an instance",
        "`state` in `/instances` and `/health`; `cache_proxy_breaker_state` counts them from 0.",
        State,
    ),
    (
        "Streams that migrate",
        "`reason` of `cache_proxy_migrations_total`, and `cause` in the request log's "
        "`migrations`.",
        MoveCause,
    ),
    (
        "Streams that do not migrate",
        "`outcome` of `cache_proxy_migrations_total`, and `ended` in the request log's "
        "`migrations`; see [Migration](../concepts/migration.md).",
        Unmoved,
    ),
    (
        "Releases of KV",
        "Results for KV on P that will not be fetched: `result` of "
        "`cache_proxy_kv_releases_total`.",
        ReleaseResult,
    ),
    (
        "TLS handshakes",
        "`reason` of `cache_proxy_tls_handshakes_failed_total`.",
        HandshakeEnd,
    ),
)
STATUSES = (
    "Answers that the proxy makes itself, beside busy answers (`--overload-status`; 503 where no "
    "instance is up, or the proxy stops or is short of memory). Any other status is an engine's. A "
    "stream that breaks ends with an event that has a code of its own: see "
    "[Failures](../concepts/failures.md#what-a-client-sees-of-a-stream-that-breaks)."
)
REFUSALS = "`reason` of `cache_proxy_client_errors_total`; not in the request log."
JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "Alternatives | PastChecks": "list",
    "Shadowed": "object",
    "list[Migration]": "list",
    "Trace": "string",
}


def described(declared: type) -> Iterator[tuple[str, str]]:
    """Each assigned name of a class with the docstring behind it; all of them have one."""
    (body,) = ast.parse(dedent(inspect.getsource(declared))).body
    assert isinstance(body, ast.ClassDef)
    for statement, after in zip(body.body, [*body.body[1:], None], strict=True):
        match statement:
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield name, " ".join(text.split())
                    case _:
                        raise AssertionError(f"{declared.__name__}.{name} has no docstring")
            case _:
                pass


def table(*rows: Row) -> str:
    """A table; the first row is its head."""
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *rest])


def words(listed: type[StrEnum]) -> str:
    """A row for each member, with what it means."""
    rows = [(f"`{listed[name]}`", text) for name, text in described(listed)]
    assert len(rows) == len(listed)
    return table(("name", "meaning"), *rows)


def _own_errors() -> Iterator[Row]:
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, ProxyError) and error is not ProxyError:
            code = f"`{error.code}`" if error.code else f"{error.status}"
            said = (error.__doc__ or "").partition("\n")[0]
            yield str(error.status), f"`{error.type}`", code, f"`{error.outcome}`", said


def statuses() -> str:
    """A row for each error that the proxy answers itself, by status."""
    return table(("status", "`type`", "`code`", "`outcome`", "meaning"), *sorted(_own_errors()))


def refusals() -> str:
    """A row for each kind of bytes that are no request to answer."""
    rows = [(f"`{reason}`", str(status), text) for reason, (status, text) in _ANSWERS.items()]
    return table(("`reason`", "status", "what the client is told"), *rows)


def field_table(record: type) -> str:
    """A row for each field of a record."""
    types = {field.name: str(field.type) for field in fields(record)}
    rows = []
    for name, text in described(record):
        plain = types[name].removesuffix(" | None")
        rows.append((f"`{name}`", JSON_TYPES.get(plain, "string"), text))
    assert len(rows) == len(types)
    return table(("field", "type", "meaning"), *rows)


def log_fields() -> str:
    """The table of docs/reference/request-log.md."""
    return field_table(RequestRecord)


def shadow_fields() -> str:
    """The table of `shadow` there."""
    return field_table(Shadowed)


def migration_fields() -> str:
    """The table of `migrations` there."""
    return field_table(Migration)


def glossary() -> str:
    """The generated part of docs/reference/glossary.md."""
    parts = [(title, where, words(listed)) for title, where, listed in SECTIONS]
    parts.insert(5, ("Statuses", STATUSES, statuses()))
    parts.append(("Bytes that are no request", REFUSALS, refusals()))
    return "\n\n".join(f"## {title}\n\n{where}\n\n{rows}" for title, where, rows in parts)
