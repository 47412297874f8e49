"""The table of docs/operate/threats.md with limits that are no options, from the constants."""

from __future__ import annotations

from proxy.admin.auth import BODY_BYTES
from proxy.admin.endpoints import MOST_WAIT_S
from proxy.app import KEEPALIVE_S
from proxy.config.regular_files import FILE_BYTES
from proxy.core.fleet.retries import MAX_RETRIES
from proxy.core.routing.request_flow import MAX_WAITS
from proxy.fleet.discovery.base import MOST_FOUND
from proxy.fleet.discovery.kubernetes import LIST_BYTES
from proxy.fleet.discovery.slices import MOST_SLICES
from proxy.fleet.kv_events import PARTIAL_BYTES
from proxy.fleet.membership import DRAINED_S, MOST_DRAINED
from proxy.net import peer_documents, tcp
from proxy.net.kv_events import batches
from proxy.net.kv_events.sources import MOST_RANKS
from proxy.net.kv_events.zmtp import MOST_BYTES as KV_MESSAGE_BYTES
from proxy.net.secured import HANDSHAKE_BYTES, HELLO_BYTES, MOST_CERTIFICATES
from proxy.net.server import handshakes
from proxy.net.server.connection import LIMITS, QUEUED_MAX
from proxy.net.server.handshakes import HANDSHAKE_S
from proxy.net.server.held_heads import UNCOUNTED_BYTES
from proxy.net.server.listener import ADMIN_MOST
from proxy.net.tls_records import SMALL_RECORDS
from proxy.net.upstream import connection
from proxy.net.upstream.response import EVENTS_BYTES
from proxy.process.reload import READ_S
from proxy.protocol import body
from proxy.protocol.request_framing import HEAD_BYTES
from proxy.protocol.streams import parse_cost
from proxy.request.relay import EVENT_BYTES
from proxy.state.held_for_clients import HEADS_BYTES, HEADS_PART, MEMORY_PART, UNREAD_BYTES
from proxy.state.held_for_clients import MOST_BYTES as BODIES_BYTES
from proxy.state.uploads import MOST_BYTES as UPLOADS_BYTES


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


ROWS = (
    ("head of a request", _bytes(HEAD_BYTES)),
    ("line of a head, bytes", LIMITS["max_line_size"]),
    ("lines of a head", LIMITS["max_headers"]),
    ("requests that wait behind one on a connection", QUEUED_MAX),
    ("their heads, together", _bytes(HEAD_BYTES)),
    (
        f"heads over {_bytes(UNCOUNTED_BYTES)}, together; with a memory limit 1/{HEADS_PART} of it",
        _bytes(HEADS_BYTES),
    ),
    ("connections of the admin listener", ADMIN_MOST),
    ("levels of a body", parse_cost.MAX_DEPTH),
    ("fields of a body", body.MAX_FIELDS),
    ("brackets and braces of a body", body.MAX_BRACKETS),
    ("commas of a body", body.MAX_COMMAS),
    ("bodies that are not admitted, together", _bytes(UPLOADS_BYTES)),
    (
        f"bodies without an answer, together; with a memory limit 1/{MEMORY_PART} of it",
        _bytes(BODIES_BYTES),
    ),
    ("unread bytes of answers, together", _bytes(UNREAD_BYTES)),
    ("head of an engine's answer", _bytes(connection.HEAD_BYTES)),
    ("one event of a stream", _bytes(EVENT_BYTES)),
    ("unfinished events and answers' beginnings, together", _bytes(EVENTS_BYTES)),
    ("one message of KV events", _bytes(KV_MESSAGE_BYTES)),
    ("unfinished messages of KV events, together", _bytes(PARTIAL_BYTES)),
    ("KV events of a message", batches.MOST_EVENTS),
    ("blocks of a KV event", batches.MOST_NAMES),
    ("token ids of a KV event", batches.MOST_IDS),
    ("ranks of an instance with KV events", MOST_RANKS),
    ("instances that a source of `--discover` tells", MOST_FOUND),
    ("EndpointSlices of a service", MOST_SLICES),
    ("a list of the Kubernetes API, or one event of its watch", _bytes(LIST_BYTES)),
    (
        "parsing a document of an engine or sensor, as estimated",
        f"{parse_cost.MOST_NS // 1_000_000} ms",
    ),
    ("lines of an engine's metrics that are used", peer_documents.MOST_WANTED),
    ("size of these lines", _bytes(peer_documents.WANTED_BYTES)),
    (
        f"TLS handshakes, together; with a memory limit 1/{handshakes.MEMORY_PART} of it",
        _bytes(handshakes.MOST_BYTES),
    ),
    (
        "TLS handshake",
        f"{HANDSHAKE_S:g} s, {_bytes(HANDSHAKE_BYTES)}, {MOST_CERTIFICATES} certificates; "
        f"{_bytes(HELLO_BYTES)} without any",
    ),
    ("tiny TLS records", SMALL_RECORDS),
    ("idle connection", f"{KEEPALIVE_S:g} s"),
    ("client that reads nothing", f"{tcp.UNTAKEN_MS // 1000} s"),
    ("body of an admin request", _bytes(BODY_BYTES)),
    ("file of options, keys or certificates", _bytes(FILE_BYTES)),
    ("reading them all for a reload", f"{READ_S:g} s"),
    ("wait for the end of a drain, in one request", f"{MOST_WAIT_S} s"),
    ("drained instances that are told of", MOST_DRAINED),
    ("time that they are told of", f"{DRAINED_S:g} s"),
    ("repetitions of a request, within a budget over all", MAX_RETRIES),
    ("waits of a request that engines refuse as busy", MAX_WAITS),
)


def fixed_limits() -> str:
    """Return the table between the marks `fixed limits`."""
    rows = [
        f"| {name} | {n:,} |" if isinstance(n, int) else f"| {name} | {n} |" for name, n in ROWS
    ]
    return "\n".join(("| subject | at most |", "|---|---|", *rows))
