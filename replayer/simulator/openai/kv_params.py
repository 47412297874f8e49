"""`kv_transfer_params` as each KV connector reads them, and as NIXL's P answers them.

- mooncake: the proxy names the transfer; D needs its id, P's engine id and P's bootstrap server.
- nixl: P's answer says where its blocks are; D reads them there, whether P still keeps them or not.
- implicit: no parameters; engines find blocks in a store that they share.
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

    `send_as`: id under which its KV is kept for another engine. `fetch`: source of its KV.
    `is_incomplete`: its KV is elsewhere, but a key of the source is missing. `is_fatal`: vLLM
    crashes over that. `p_cached_tokens`: prefix hit that P reported.
    """

    send_as: str | None = None
    fetch: RemoteKv | None = None
    is_incomplete: bool = False
    is_fatal: bool = False
    p_cached_tokens: int | None = None


NOTHING = Handing()


def mooncake(params: Mapping[str, Any]) -> Handing:
    """Read the parameters of MooncakeConnector, as of vLLM 0.16."""
    transfer_id = params.get("transfer_id")
    if params.get("do_remote_prefill"):
        engine_id, address = params.get("remote_engine_id"), params.get("remote_bootstrap_addr")
        if not (transfer_id and engine_id and address):
            return Handing(is_incomplete=True)
        return Handing(fetch=RemoteKv(str(engine_id), str(transfer_id), str(address)))
    if params.get("do_remote_decode") and transfer_id:
        return Handing(send_as=str(transfer_id))
    return NOTHING


def nixl(params: Mapping[str, Any]) -> Handing:
    """Read the parameters of NixlConnector, with which D pulls."""
    if params.get("do_remote_prefill"):
        names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        if not params.get("remote_block_ids"):
            return Handing(is_incomplete=True, is_fatal=True)
        if not all(params.get(name) for name in names):
            return Handing(is_incomplete=True)
        engine_id, request_id, host, port = (str(params[name]) for name in names)
        cached = params.get("remote_prefill_cached_tokens")
        remote = RemoteKv(engine_id, request_id, f"http://{host}:{port}")
        return Handing(fetch=remote, p_cached_tokens=cached if isinstance(cached, int) else 0)
    return Handing(send_as=uuid.uuid4().hex) if params.get("do_remote_decode") else NOTHING


def implicit(params: Mapping[str, Any]) -> Handing:
    """Return no parameters, for a connector without any."""
    del params
    return NOTHING


READERS: dict[str, Callable[[Mapping[str, Any]], Handing]] = {
    "mooncake": mooncake,
    "nixl": nixl,
    "implicit": implicit,
}


def handing_of(body: Mapping[str, Any], connector: str) -> Handing:
    """Read the parameters in a request's body; raises ApiError unless they are an object."""
    params = body.get(FIELD)
    if params is None:
        return NOTHING
    if not isinstance(params, dict):
        raise invalid("dict_type", f"body.{FIELD}", "Input should be a valid dictionary", params)
    return READERS[connector](params)


def nixl_answer(
    engine_id: str, address: tuple[str, int], request: SimRequest, block_size: int
) -> dict[str, Any]:
    """Make P's parameters for D. Block ids are counted from 0, since the model has none."""
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
