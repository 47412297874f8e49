"""vLLM's Mooncake connector where there is no accelerator; loaded by the engine, not by tests.

Over TCP nothing in the connector needs a GPU, but its worker asks torch for the current device's
index, which raises on such a machine; and its bootstrap server binds every interface.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as stock


class _OnLoopback(stock.MooncakeBootstrapServer):
    """The bootstrap server, for this machine only."""

    def __init__(self, host: str, port: int) -> None:
        del host
        super().__init__("127.0.0.1", port)


if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0
stock.MooncakeBootstrapServer = _OnLoopback


class MooncakeCpuConnector(stock.MooncakeConnector):
    """The stock connector; a class of its own because vLLM asks for one by name."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
