"""The decision's benchmark runs and gives every figure; what they are is not looked at."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from bench import core
from bench.core import Case, Traffic, busy_router
from proxy.protocol.prompt.facts import TokenEstimator


def test_every_row_has_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "core.json"
    small = ["--sizes", "2k", "--instances", "2", "--repeats", "1", "--batch", "2"]
    small += ["--sessions", "50"]
    assert core.main([*small, "--json", str(out)]) == 0
    rows = orjson.loads(out.read_bytes())
    assert [row["case"]["policy"] for row in rows] == list(core.POLICIES)
    assert all(list(row["steps_s"]) == list(core.STEPS) for row in rows)
    assert all(row["whole_s"] == pytest.approx(sum(row["steps_s"].values())) for row in rows)
    assert "seed-heuristic" in capsys.readouterr().out


def test_four_fifths_of_each_prompt_are_known_and_the_rest_is_new() -> None:
    traffic, estimator = Traffic("32k"), TokenEstimator()
    router = busy_router(Case("32k", 4, "cost"), traffic, estimator, sessions=50)
    for raw in traffic.batch(2 * core.VARIANTS):
        facts = core.facts_of(estimator, orjson.loads(raw))
        hits = router.known.prefixes.hits(facts.block_hashes)
        blocks = len(facts.block_hashes)
        assert sum(hit >= 0.75 * blocks for hit in hits.values()) == 2, hits
        assert max(hits.values()) <= 0.85 * blocks
        assert min(hits.values()) >= 0.05 * blocks


def test_no_two_bodies_are_alike() -> None:
    bodies = Traffic("2k").batch(2 * core.VARIANTS)
    assert len(set(bodies)) == len(bodies)
