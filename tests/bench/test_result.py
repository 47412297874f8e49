"""From windows to the tables: paired ratios, what is met, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.cost import cli, tables
from bench.cost.result import Result, SessionTable
from bench.cost.targets import Verdict, verdicts
from bench.measuring.build import BenchError
from bench.measuring.looplag import buckets, quantile_bound_s
from bench.measuring.scenarios import SCENARIOS
from bench.measuring.upstream import Counts
from bench.measuring.window import Window, faults, starves


def window(peer: str, scenario: str, turn: int, **more: Any) -> Window:
    given: dict[str, Any] = {
        "requests": 1,
        "events": 1,
        "window_s": 1.0,
        "cpu_s": 1.0,
        "cpu_per_unit_s": 1e-6,
        "foreign_ratio": 0.0,
        "ttft_p50_s": None,
        "lag_p50_s": None,
        "lag_p99_s": None,
    }
    return Window(peer=peer, scenario=scenario, round=turn, **(given | more))


def result(*windows: Window) -> Result:
    made = Result("2026-01-01", "2 CPUs", 3)
    for one in windows:
        made.versions.setdefault(one.peer, "")
        made.add(one)
    return made


def costs(peer: str, scenario: str, *cpu_us: float, **more: Any) -> list[Window]:
    return [
        window(peer, scenario, turn, cpu_per_unit_s=us / 1e6, **more)
        for turn, us in enumerate(cpu_us, start=1)
    ]


def verdict(made: Result, what: str, limit: float) -> Verdict:
    [found] = [
        v for v in verdicts(made) if v.target.what.startswith(what) and v.target.limit == limit
    ]
    return found


def test_ratios_are_those_of_one_round_and_their_median_counts() -> None:
    made = result(
        *costs("ours", "paced-c512", 10, 20, 30), *costs("haproxy", "paced-c512", 10, 10, 30)
    )
    found = verdict(made, "CPU per event", 1.25)
    assert found.samples.values == [1.0, 2.0, 1.0]
    assert found.middle == 1.0
    assert found.is_met


def test_the_better_router_is_the_one_with_the_lower_median() -> None:
    made = result(
        *costs("ours", "plain-c32", 50, 50, 50),
        *costs("sglang-router-rr", "plain-c32", 40, 40, 99),
        *costs("vllm-router-rr", "plain-c32", 60, 60, 10),
    )
    found = verdict(made, "CPU per plain", 0.85)
    assert found.samples.against == "sglang-router-rr"
    assert found.is_met is False


def test_windows_with_neighbours_count_only_where_there_are_no_others() -> None:
    noisy = window("ours", "plain-c32", 1, cpu_per_unit_s=9e-6, foreign_ratio=0.5)
    ours = [noisy, *costs("ours", "plain-c32", 0, 5, 5)[1:]]
    made = result(*ours, *costs("vllm-router-rr", "plain-c32", 10, 10, 10))
    assert verdict(made, "CPU per plain", 0.85).samples.values == [0.5, 0.5]
    made = result(noisy, *costs("vllm-router-rr", "plain-c32", 10))
    samples = verdict(made, "CPU per plain", 0.85).samples
    assert samples.values == pytest.approx([0.9])
    assert samples.is_noisy


def test_a_window_with_a_fault_is_no_figure() -> None:
    made = result(
        *costs("ours", "plain-c32", 1, 1),
        *costs("vllm-router-rr", "plain-c32", 10, faults=("events lost",)),
    )
    assert verdict(made, "CPU per plain", 0.85).middle is None
    assert made.faults == ["vllm-router-rr, plain-c32, round 1: events lost"]


def test_a_starved_window_is_no_figure_either() -> None:
    made = result(
        *costs("ours", "paced-c512", 1, is_starved=True), *costs("haproxy", "paced-c512", 10)
    )
    assert verdict(made, "CPU per event", 1.25).middle is None
    assert not made.faults


@pytest.mark.parametrize(
    ("foreign_s", "lag_ms", "starved"), [(1.0, 6.0, True), (1.0, 4.0, False), (0.1, 6.0, False)]
)
def test_who_is_late_on_a_cpu_of_others_is_starved(
    foreign_s: float, lag_ms: float, starved: bool
) -> None:
    told = {"foreign_s": foreign_s, "window_s": 1.0, "lag": {"p50_us": lag_ms * 1e3}}
    assert starves(told, SCENARIOS["paced-c512"]) is starved
    assert not starves(told, SCENARIOS["plain-c32"])


def test_runs_can_be_taken_together() -> None:
    one = result(*costs("ours", "plain-c32", 1, 2, 3), *costs("vllm-router-rr", "plain-c32", 4))
    two = result(*costs("vllm-router-rr", "plain-c32", 4), *costs("ours", "plain-c32", 2))
    both = Result.merged([one, two])
    assert both.rounds == 6
    assert verdict(both, "CPU per plain", 0.85).samples.values == [0.25, 0.5]


def test_added_ttft_is_beyond_what_it_takes_without_a_proxy() -> None:
    made = result(
        window("direct", "ttft-c1", 1, ttft_p50_s=0.001),
        window("ours", "ttft-c1", 1, ttft_p50_s=0.002),
        window("vllm-router-rr", "ttft-c1", 1, ttft_p50_s=0.003),
    )
    assert verdict(made, "added TTFT", 1.0).middle == pytest.approx(0.5)


def test_memory_and_loop_lag() -> None:
    made = result(
        window("ours", "paced-c512", 1, pss_bytes=61_000_000),
        window("ours", "giant", 1, loop_lag={"0.001": 98, "0.01": 2, "+Inf": 0}),
    )
    made.session_table = SessionTable(100_000, 150_000_000, 40_000_000)
    assert verdict(made, "PSS with 512", 60).is_met is False
    assert verdict(made, "PSS with 100,000", 200).middle == 150
    assert verdict(made, "loop lag p99, 4 MB", 5).middle == 10
    made.session_table = SessionTable(5_000, 50_000_000, 40_000_000)
    assert verdict(made, "PSS with 100,000", 200).is_met is None


def test_buckets_of_a_histogram_and_their_quantiles() -> None:
    text = "\n".join(
        ["# TYPE lag histogram"]
        + [f'lag_bucket{{le="{le}"}} {n}' for le, n in (("0.1", 3), ("1.0", 3), ("+Inf", 4))]
        + ["lag_sum 1", "lag_count 4", ""]
    )
    assert buckets(text, "lag") == {"0.1": 3, "1.0": 0, "+Inf": 1}
    assert quantile_bound_s([{"0.1": 3, "1.0": 0}, {"0.1": 0, "1.0": 1}], 0.5) == 0.1
    assert quantile_bound_s([{"0.1": 0}], 0.99) is None


def totals(**more: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(("bad_status", "errors", "miscounted"), 0)
    given = {"started": 2, "answered": 2, "events": 4, "stamp_sum": 2**64 - 1, "first_error": ""}
    return zeros | given | more


@pytest.mark.parametrize(
    ("client", "upstream", "says"),
    [
        ({}, {}, []),
        ({"answered": 1}, {}, ["requests lost"]),
        ({}, {"requests": 3}, ["requests differ"]),
        ({"events": 3}, {}, ["events lost"]),
        ({"stamp_sum": 5}, {}, ["events differ"]),
        ({"bad_status": 1, "first_error": "HTTP/1.1 503"}, {}, ["bad_status: 1 (HTTP/1.1 503)"]),
        ({}, {"aborted_streams": 1}, ["streams aborted"]),
    ],
)
def test_what_the_two_ends_say_must_be_the_same(
    client: dict[str, Any], upstream: dict[str, Any], says: list[str]
) -> None:
    sent = {"requests": 2, "events": 4, "stamp_sum": 2**64 - 1, "aborted_streams": 0} | upstream
    found = list(faults([totals(**client)], Counts(**sent)))
    assert len(found) == len(says)
    assert all(fault.startswith(start) for fault, start in zip(found, says, strict=True))


def test_counts_of_a_window_survive_the_wrap_of_the_stamps() -> None:
    assert Counts(2, 2, 5, 0).since(Counts(1, 1, 2**64 - 5, 0)).stamp_sum == 10


def test_a_result_comes_back_from_its_file_with_both_tables(tmp_path: Path) -> None:
    made = result(
        *costs("ours", "plain-c32", 10, 20), *costs("vllm-router-rr", "plain-c32", 40, 40)
    )
    made.session_table = SessionTable(100_000, 150_000_000, 40_000_000)
    made.save(tmp_path / "r.json")
    again = Result.load(tmp_path / "r.json")
    assert again == made
    text = tables.markdown(again)
    assert "| ours | 15.0 (10.0–20.0) |" in text
    assert (
        "| 2. CPU per plain request | vllm-router-rr | 0.38 (0.25–0.50) | 2 | 0.85 | yes |" in text
    )
    assert "| 1. CPU per event, 512 streams |  |  | 0 | 0.9 | not measured |" in text


def test_tables_go_between_the_marks_of_a_document(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"a\n{cli.MARK}\nold\n{cli.MARK}\nb\n")
    cli.write_between_marks(path, "new")
    assert path.read_text() == f"a\n{cli.MARK}\nnew\n{cli.MARK}\nb\n"
    path.write_text("no marks")
    with pytest.raises(BenchError, match="has no two lines"):
        cli.write_between_marks(path, "new")


def test_the_published_page_has_a_place_for_them() -> None:
    page = Path(__file__).parents[2] / cli.PUBLISHED
    assert page.read_text().count(cli.MARK) == 2


def test_names_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--peers", "nobody"]) == 1
    assert cli.main(["--scenarios", "nothing"]) == 1
    assert capsys.readouterr().err.count("no such") == 2
    assert cli.main(["--markdown", "no-such-result.json"]) == 1
    assert "bench: FAILED: no result:" in capsys.readouterr().err
    assert cli.main(["--list"]) == 0
    assert "paced-c512" in capsys.readouterr().out
