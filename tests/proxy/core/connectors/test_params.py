"""P's answer about its KV: what D may be told, and what never."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.connectors.params import DEPTH, NODES, wrong_params
from proxy.core.types import Instance

P = Instance("p", "http://10.0.0.1:8000", "http://10.0.0.1:8998")
GOOD = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "transfer_id": "t",
    "remote_block_ids": [list(range(8192))] * 4,
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_bootstrap_addr": "http://10.0.0.1:8998",
}


def wrong(params: object, engine_id: str | None = "e") -> str | None:
    return wrong_params(params, P, engine_id, "t")


@pytest.mark.parametrize("params", [None, {}, GOOD, GOOD | {"remote_host": "localhost"}])
def test_good_ones(params: Any) -> None:
    assert wrong(params) is None


def test_any_engine_where_none_is_known() -> None:
    assert wrong(GOOD | {"remote_engine_id": "other"}, engine_id=None) is None


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    "params",
    [
        [],
        "x",
        7,
        GOOD | {"remote_engine_id": "other"},
        GOOD | {"remote_engine_id": 7},
        GOOD | {"transfer_id": "other"},
        GOOD | {"remote_host": "169.254.169.254"},
        GOOD | {"remote_host": ["10.0.0.1"]},
        GOOD | {"remote_host": {}},
        GOOD | {"remote_port": 70000},
        GOOD | {"remote_port": True},
        GOOD | {"remote_bootstrap_addr": "http://10.0.0.2:8998"},
        GOOD | {"remote_block_ids": list(range(NODES))},
        GOOD | {"x": "y" * 5_000_000},
        deep(300),
    ],
)
def test_bad_ones(params: Any) -> None:
    assert wrong(params) is not None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_never_raises_and_depth_is_bounded(params: Any) -> None:
    verdict = wrong(params)
    if isinstance(params, dict) and depth(params) > DEPTH:
        assert verdict is not None


def depth(node: Any) -> int:
    if isinstance(node, dict):
        return 1 + max((depth(n) for n in node.values()), default=0)
    return 1 + max((depth(n) for n in node), default=0) if isinstance(node, list) else 0
