"""What the options come to in a process, beside its memory limit."""

from __future__ import annotations

import pytest

from proxy.config.in_force import router_config
from proxy.config.options import Settings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "index", "sessions"),
    [(None, 256, 100_000), (8192, 256, 100_000), (512, 64, 32_768), (64, 8, 4096)],
)
def test_tables_fit_into_the_memory_limit(limit: int | None, index: int, sessions: int) -> None:
    """Nothing else makes them smaller, and refused requests do not."""
    config = router_config(Settings(instances="a:1"), None if limit is None else limit * MIB)
    assert (config.prefix_cache_bytes, config.max_sessions) == (index * MIB, sessions)
