"""An answer in one piece that is all there when it is looked at: one write, nothing to watch."""

from __future__ import annotations

from contextlib import suppress

from aiohttp import web

from proxy.net.upstream.response import Reply
from proxy.protocol.framing import Length
from proxy.protocol.sse import last_usage
from proxy.relay import RelayResponse

AT_ONCE_BYTES = 32768
"""An empty transport takes so much and is not full, so its client need not be waited for."""


def is_whole(request: web.Request, reply: Reply) -> bool:
    """Whether the answer is complete and its client can be given it now."""
    if not reply.is_over or reply.is_stream or type(reply.framing) is not Length:
        return False
    transport = request.transport
    if reply.failure is not None or transport is None or transport.get_write_buffer_size():
        return False
    return len(reply.head.after_version) + reply.held_bytes <= AT_ONCE_BYTES


def pass_on(request: web.Request, reply: Reply, response: RelayResponse) -> bytes | None:
    """Write it; gives its usage object as JSON bytes, where it has one."""
    assert request.transport is not None
    body = b"".join(reply.body)
    # uvloop's word for closed in this turn of the loop: the task is cancelled in the next one.
    with suppress(RuntimeError):
        request.transport.write(response.begin(reply) + body)
    response.end()
    reply.close()
    return last_usage(body)
