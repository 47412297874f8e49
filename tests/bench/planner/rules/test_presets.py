"""Dynamo's presets: where a benchmark of the engine would look, and what stands in."""

from __future__ import annotations

import sys

import pytest

from bench.planner.rules import presets
from tests.bench.planner.runs_for_tests import CONTEXT


def test_points_are_what_the_engine_can_hold() -> None:
    prefill, decode = presets.points(CONTEXT)
    assert (prefill[0], prefill[-1]) == (256, 8192)
    assert max(kv_tokens for _, kv_tokens in decode) <= CONTEXT.kv_tokens
    assert (1, 500) in decode
    assert all(kv_tokens % batch == 0 for batch, kv_tokens in decode)


def test_unused_packages_are_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a_package_that_nobody_has"
    monkeypatch.setattr(presets, "UNUSED", {name: ("Thing",)})
    monkeypatch.delitem(sys.modules, name, raising=False)
    presets.stand_in()
    try:
        assert issubclass(sys.modules[name].Thing, Exception)
    finally:
        del sys.modules[name]


def test_without_dynamo_a_preset_says_so() -> None:
    with pytest.raises(ImportError, match="dynamo"):
        presets.Preset(CONTEXT, "throughput")
