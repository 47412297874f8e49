"""Reads the KV engine's id from an answer of its bootstrap server."""

from __future__ import annotations

from proxy.core.types import FailureKind
from proxy.net.peer_documents import read_json
from proxy.protocol.errors import UpstreamFailure

ENGINE_ID_CHARS = 256


def read_engine_id(body: bytes) -> str | None:
    """The id of data-parallel rank 0 in a bootstrap server's `/query` answer.

    None while no engine is registered; raises UpstreamFailure if the answer is not of that form.
    """
    try:
        ranks = read_json(body)
        rank = ranks.get("0", {})
        found = rank.get("engine_id")
    except (ValueError, AttributeError) as error:
        raise UpstreamFailure(FailureKind.MALFORMED, "not a bootstrap answer") from error
    if rank and not (isinstance(found, str) and 0 < len(found) <= ENGINE_ID_CHARS):
        raise UpstreamFailure(FailureKind.MALFORMED, "not an engine id")
    return found if rank else None
