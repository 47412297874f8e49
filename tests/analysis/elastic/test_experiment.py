"""The founding experiment on requests, in virtual time: what each rule does at which load."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from analysis.bench.finished import Finished
from analysis.elastic.experiment import (
    ElasticError,
    ElasticOptions,
    Task,
    check_source,
    figures,
    run_elastic,
    run_task,
)
from analysis.elastic.readings import BASELINE, RULES, Heuristic
from analysis.elastic.tables import summarise
from analysis.rivals.registry import Rival
from replayer.virtual.load import load_source
from tests.support.traces import SAMPLE

LOADS = (2, 8, 16)
COMPARED = (BASELINE, "always", "seed-heuristic")
OPTIONS = ElasticOptions(SAMPLE, sessions=LOADS, rules=COMPARED, seeds=1)


Measured = dict[tuple[str, int], dict[str, Any]]


def _ignore(_done: int, _of: int) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def measured() -> Measured:
    rows = run_elastic(OPTIONS, _ignore)
    assert [row["drift"] for row in rows] == [0] * len(rows)
    return {(one["rule"], one["sessions"]): one for one in summarise(rows)}


def _of(measured: Measured, rule: str, name: str) -> list[Any]:
    return [measured[rule, sessions][name] for sessions in LOADS]


@pytest.mark.long
def test_every_rule_serves_the_same_sessions_whole(measured: Measured) -> None:
    for rule in COMPARED:
        assert _of(measured, rule, "requests") == _of(measured, BASELINE, "requests")
        assert _of(measured, rule, "success_ratio") == [1.0, 1.0, 1.0]


@pytest.mark.long
def test_the_heuristic_offloads_more_the_higher_the_load(measured: Measured) -> None:
    """The founding text expects most at low load, half at eight sessions, almost none at high."""
    low, medium, high = _of(measured, "seed-heuristic", "offloaded_ratio")
    assert low < medium < high
    assert low < 0.25
    assert high > 0.5


@pytest.mark.long
def test_why_heavy_requests_stay(measured: Measured) -> None:
    """At low load D decodes nothing; P is the idlest, so it is never above the fleet's mean."""
    assert _of(measured, "seed-heuristic", "heavy_reasons")[0].keys() == {"d_idle"}
    idle = [
        one["heavy_reasons"]["d_idle"] / one["heavy"]
        for one in (measured["seed-heuristic", sessions] for sessions in LOADS)
    ]
    assert idle == sorted(idle, reverse=True)
    for reasons in _of(measured, "seed-heuristic", "heavy_reasons"):
        assert "p_overloaded" not in reasons


@pytest.mark.long
def test_an_offloaded_request_waits_longer_for_its_first_token(measured: Measured) -> None:
    """P lacks the session's prefix and computes it again; then comes the transfer."""
    for rule in ("always", "seed-heuristic"):
        for told in _of(measured, rule, "beside_home"):
            assert told["offloaded"] > 0
            assert told["ttft_s"] > 1.2 * told["ttft_at_home_s"]
            assert told["computed_tokens"] > 1.2 * told["computed_tokens_at_home"]
    assert not any(told["offloaded"] for told in _of(measured, BASELINE, "beside_home"))


@pytest.mark.long
def test_always_is_the_forerunner_of_the_founding_text(measured: Measured) -> None:
    """All HEAVY requests are offloaded; the late tail of TTFT pays for the quick steps."""
    assert min(_of(measured, "always", "offloaded_ratio")) == 1.0
    for sessions in LOADS:
        base, always = measured[BASELINE, sessions], measured["always", sessions]
        assert always["ttft_s.p90"] > 1.25 * base["ttft_s.p90"]
        if sessions < 16:
            assert always["tpot_s.p90"] < 0.9 * base["tpot_s.p90"]


@pytest.mark.long
def test_the_reading_with_the_proxys_own_terms_is_the_proxys_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, "own terms", Rival("", lambda _kv: Heuristic()))
    options = ElasticOptions(SAMPLE, rules=("seed-heuristic", "own terms"))
    proxys, read = run_task(load_source(SAMPLE), options, Task(8, 0))
    assert read.pop("rule") != proxys.pop("rule")
    assert read == proxys


def test_a_failed_request_is_late_for_ever_but_not_among_the_answered() -> None:
    answered = Finished(True, 1.0, 0.01, 2.0, "HEAVY_P2P", "p_idle_d_busy", True)
    stayed = Finished(True, 3.0, None, 4.0, "HEAVY_COLO", "d_idle", True)
    lost = Finished(False, None, None, None, "HEAVY_P2P", "p_idle_d_busy", False)
    row = figures([answered, stayed, lost])
    assert row["ttft_s"] == {"p50": 3.0, "p90": None}
    assert row["ttft_ok_s"] == {"p50": 1.0, "p90": 3.0}
    assert row["tpot_s"] == {"p50": 0.01, "p90": 0.01}
    assert (row["success_ratio"], row["goodput_ratio"]) == (2 / 3, 2 / 3)
    assert (row["heavy"], row["heavy_offloaded"]) == (3, 2)
    assert row["heavy_reasons"] == {"d_idle": 1}
    assert figures([])["ttft_s"] == {"p50": None, "p90": None}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rules": ("cost", "nobody")}, "--rules: must be of"),
        ({"rules": ()}, "not nothing"),
        ({"instances": 1}, "--instances: must be at least 2, not 1"),
        ({"kv_tokens": 50_000}, "--kv-tokens: must be at least 60077"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ElasticError, match=told) as raised:
        run_elastic(ElasticOptions(SAMPLE, **options), _ignore)
    assert "\n" not in str(raised.value)


def test_a_trace_needs_sessions(tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}
    trace.write_bytes(orjson.dumps(row))
    with pytest.raises(ElasticError, match="must have sessions"):
        check_source(load_source(trace), ElasticOptions(trace))
