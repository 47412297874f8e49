"""Engines that find each other's KV by themselves."""

from __future__ import annotations

from proxy.core.connectors.base import KV_PARAMS, Edits
from proxy.core.connectors.implicit import Implicit
from tests.support.connector_legs import BODY, TRANSFER, answer


def test_implicit_legs_carry_nothing() -> None:
    edits = Implicit().prepare(TRANSFER, BODY)
    assert KV_PARAMS not in edits.put
    assert Implicit().after_prefill(TRANSFER, answer("length")) == Edits()
