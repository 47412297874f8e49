"""Checks P's `kv_transfer_params` before D gets them: they could make D fetch from anywhere.

Fields that name an engine, a transfer or a host must name P's. Size and depth are bounded, so that
P's answer cannot make the decode leg's body huge.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from proxy.core.types import Instance

NODES, DEPTH, TEXT_CHARS = 262_144, 6, 4096
"""A prompt of a million tokens has 65,536 blocks of 16 tokens in each group of layers."""
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
PORTS = range(1, 65536)


def wrong_params(
    params: object, p: Instance, engine_id: str | None, transfer_id: str
) -> str | None:
    """Why D must not get these `kv_transfer_params`; None if it may, or if there are none."""
    if params is None:
        return None
    if not isinstance(params, dict):
        return "not an object"
    if not _is_small(params):
        return "too large or too deep"
    for name, expected in (("remote_engine_id", engine_id), ("transfer_id", transfer_id)):
        found = params.get(name)
        if found is not None and (not isinstance(found, str) or expected not in (None, found)):
            return f"another {name}"
    return _wrong_place(params, p)


def _wrong_place(params: dict[str, object], p: Instance) -> str | None:
    hosts = {urlsplit(p.url).hostname, urlsplit(p.bootstrap_url or p.url).hostname, *_LOCAL}
    host, port = params.get("remote_host"), params.get("remote_port")
    if host is not None and (not isinstance(host, str) or host not in hosts):
        return "another host"
    if port is not None and (type(port) is not int or port not in PORTS):
        return "no port"
    address = params.get("remote_bootstrap_addr")
    return "another bootstrap server" if address not in (None, p.bootstrap_url) else None


def _is_small(params: dict[str, object]) -> bool:
    """Whether size and depth are within the bounds; visits at most NODES nodes, not recursive.

    Numbers, which are nearly all of a long prompt's blocks, are counted and passed over.
    """
    left = NODES
    layer: list[object] = [params]
    for _ in range(DEPTH):
        below: list[object] = []
        for node in layer:
            if isinstance(node, str) and len(node) > TEXT_CHARS:
                return False
            found = _members(node)
            left -= len(found)
            if left < 0:
                return False
            below += [one for one in found if type(one) is not int]
        if not below:
            return True
        layer = below
    return False


def _members(node: object) -> list[object]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    return node if isinstance(node, list) else []
