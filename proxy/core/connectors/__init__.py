"""KV connectors: the changes of an offload to the bodies of its two legs.

A driver is pure: it names fields, the caller splices them into the body. Differences between vLLM's
releases are read from P's answer. The two legs run one after the other.
"""

from proxy.core.connectors.base import (
    KV_PARAMS,
    Connector,
    Edits,
    Transfer,
    finished_by_length,
    prefill_edits,
    transfer_rules,
)
from proxy.core.connectors.implicit import Implicit, NoConnector
from proxy.core.connectors.mooncake import Mooncake
from proxy.core.connectors.nixl import Nixl

__all__ = [
    "CONNECTORS",
    "KV_PARAMS",
    "Connector",
    "Edits",
    "Implicit",
    "Mooncake",
    "Nixl",
    "NoConnector",
    "Transfer",
    "finished_by_length",
    "prefill_edits",
    "transfer_rules",
]

CONNECTORS: dict[str, Connector] = {
    "mooncake": Mooncake(),
    "nixl": Nixl(),
    "implicit": Implicit(),
    "none": NoConnector(),
}
