"""What `kv_transfer_params` mean to each KV connector, and what NIXL's P answers.

- mooncake: the proxy names the transfer; D needs that, P's engine id and its bootstrap server.
- nixl: P tells D where the blocks are; whatever D is told is read, still there or not.
- implicit: nothing is said; engines find blocks in a store that they share.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from replayer.engine.types import RemoteKv, SimRequest
from replayer.simulator.openai.errors import invalid

FIELD = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class Handing:
    """A request's part in a hand-over of KV.

    `send_as`: the id under which its KV is kept for somebody; `fetch`: where its KV is; `lacks`: it
    says that its KV is elsewhere, and not where; `is_deadly`: so that the engine does not survive
    it. `p_cached_tokens`: what P had found in its cache.
    """

    send_as: str | None = None
    fetch: RemoteKv | None = None
    lacks: bool = False
    is_deadly: bool = False
    p_cached_tokens: int | None = None


NOTHING = Handing()


def mooncake(params: Mapping[str, Any]) -> Handing:
    """MooncakeConnector since 0.16."""
    transfer_id = params.get("transfer_id")
    if params.get("do_remote_prefill"):
        engine_id, address = params.get("remote_engine_id"), params.get("remote_bootstrap_addr")
        if not (transfer_id and engine_id and address):
            return Handing(lacks=True)
        return Handing(fetch=RemoteKv(str(engine_id), str(transfer_id), str(address)))
    if params.get("do_remote_decode") and transfer_id:
        return Handing(send_as=str(transfer_id))
    return NOTHING


def nixl(params: Mapping[str, Any]) -> Handing:
    """NixlConnector, pull."""
    if params.get("do_remote_prefill"):
        names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        if not params.get("remote_block_ids"):
            return Handing(lacks=True, is_deadly=True)
        if not all(params.get(name) for name in names):
            return Handing(lacks=True)
        engine_id, request_id, host, port = (str(params[name]) for name in names)
        cached = params.get("remote_prefill_cached_tokens")
        remote = RemoteKv(engine_id, request_id, f"http://{host}:{port}")
        return Handing(fetch=remote, p_cached_tokens=cached if isinstance(cached, int) else 0)
    return Handing(send_as=uuid.uuid4().hex) if params.get("do_remote_decode") else NOTHING


def implicit(params: Mapping[str, Any]) -> Handing:
    """A connector that reads no parameters."""
    del params
    return NOTHING


READERS: dict[str, Callable[[Mapping[str, Any]], Handing]] = {
    "mooncake": mooncake,
    "nixl": nixl,
    "implicit": implicit,
}


def handing_of(body: Mapping[str, Any], connector: str) -> Handing:
    """Read a body's parameters; raises ApiError when they are no object."""
    params = body.get(FIELD)
    if params is None:
        return NOTHING
    if not isinstance(params, dict):
        raise invalid("dict_type", f"body.{FIELD}", "Input should be a valid dictionary", params)
    return READERS[connector](params)


def told_by_nixl(
    engine_id: str, address: tuple[str, int], request: SimRequest, block_size: int
) -> dict[str, Any]:
    """What P answers about the blocks that it keeps; the model has no numbers for them."""
    prompt = request.job.prompt_tokens
    host, port = address
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(-(-prompt // block_size)))],
        "remote_engine_id": engine_id,
        "remote_request_id": request.job.send_as,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": prompt,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": request.local_hit_tokens,
    }
