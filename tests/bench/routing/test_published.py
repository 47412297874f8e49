"""The published figures: page, chart and README say what the JSON of the runs says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.cost.cli import MARK, write_between_marks
from bench.measuring.peers import ROOT
from bench.routing import cli
from bench.routing.environments import RoutingError
from bench.routing.measured import Run
from bench.routing.report import chart, published
from bench.routing.systems import RIVALS
from tests.bench.routing.runs_for_tests import result, run


def runs(mean_s: float, seed: int = 1) -> Iterator[Run]:
    """A comparison with every rival, which all take ten times as long."""
    yield run("cache-proxy", seed, [mean_s, mean_s], "gauges")
    for system in RIVALS:
        yield run(system, seed, [10 * mean_s, 10 * mean_s])


@pytest.mark.long
def test_a_result_becomes_medians_and_ratios(tmp_path: Path) -> None:
    made = result(*runs(1.0), *runs(3.0, 2), *runs(5.0, 3))
    made.save(tmp_path / "raw.json.gz")
    [one] = published.read([tmp_path / "raw.json.gz"])
    assert one.systems["cache-proxy gauges"]["ttft_mean_s"] == 3.0
    assert one.systems["vllm-router-cache"]["ttft_p90_s"] == 30.0
    assert (one.seeds, one.speedups, one.is_whole) == ([1, 2, 3], [2.0], True)
    mean = next(ratio for ratio in one.ratios if ratio.figure == "TTFT mean")
    assert (mean.median, mean.at_most, mean.is_met, mean.together[0]) == (0.1, 1.0, True, 0.1)
    assert "--shapes 4x262k --loads low" in one.command
    assert "--modes gauges --seeds 1-3 --speedup 2" in one.command


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    made = published.comparisons(result(*runs(1.0)))
    published.save(tmp_path / "a.json", made)
    assert published.read([tmp_path / "a.json"]) == made


@pytest.mark.parametrize("text", ["", "[1", '{"comparisons": [{}]}', '{"comparisons": 1}', "[]"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RoutingError, match=r"a\.json: must be"):
        published.read([tmp_path / "a.json"])


def test_runs_of_several_files_are_one_comparison(tmp_path: Path) -> None:
    """The rivals ran first, this proxy later; another speedup is another comparison."""
    ours, *rivals = runs(1.0)
    result(*rivals).save(tmp_path / "rivals.json")
    result(ours).save(tmp_path / "ours.json.gz")
    slower = result(ours)
    slower.speedup = 1.0
    slower.save(tmp_path / "slower.json")
    names = ("rivals.json", "slower.json", "ours.json.gz")
    one, other = published.read([tmp_path / name for name in names])
    assert (one.is_whole, one.speedups) == (True, [2.0])
    assert (other.is_whole, other.speedups) == (False, [1.0])


@pytest.mark.long
def test_a_later_run_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    [old], [new] = (published.comparisons(result(*runs(mean_s))) for mean_s in (1.0, 2.0))
    [other] = published.comparisons(result(*runs(1.0, seed=9)))
    published.save(tmp_path / "old.json", [old, other])
    published.save(tmp_path / "new.json", [new])
    assert published.read([tmp_path / "old.json", tmp_path / "new.json"]) == [new, other]


@pytest.mark.long
def test_a_missed_target_and_what_was_not_measured_are_said() -> None:
    rivals = [one for one in runs(1.0) if one.system != "cache-proxy"]
    slow = result(*rivals, run("cache-proxy", 1, [20.0, 20.0], "gauges"))
    few = result(run("dynamo-kv", 1, [1.0]), run("cache-proxy", 1, [0.5], "gauges"))
    text = published.markdown([*published.comparisons(slow), *published.comparisons(few)])
    assert "| TTFT mean | 1 | 2.00, missed |" in text
    assert "| 4 engines, low | 20.0 / 20.0 | 10.0 / 10.0 |" in text
    assert "| 4 engines, low, seed 1, clock x2 | 0.50 / 0.50 | 1.00 / 1.00 |  |  |  |" in text
    assert "| TTFT mean | 1 | 0.50 |" in text


def test_the_longest_bar_is_that_of_the_slowest() -> None:
    made = published.comparisons(result(*runs(1.0)))
    tree = ElementTree.fromstring(chart.svg(made))
    widths = [float(bar.attrib["width"]) for bar in tree.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths == [chart.BAR_WIDTH / 10, *[chart.BAR_WIDTH] * 4]
    assert chart.svg([]).count("<rect") == 0


def test_the_chart_needs_nothing_from_elsewhere() -> None:
    text = (ROOT / published.CHART).read_text("utf-8")
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"<script|@import|url\(|href", text)


@pytest.mark.long
def test_publishing_makes_all_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    published.PAGE.parent.mkdir(parents=True)
    published.PAGE.write_text(f"{MARK}\n{MARK}\n")
    published.save(published.FIGURES, published.comparisons(result(*runs(1.0))))
    result(*runs(2.0)).save(Path("new.json.gz"))
    assert cli.main(["--publish", "new.json.gz"]) == 0
    [one] = published.read([published.FIGURES])
    assert one.systems["cache-proxy gauges"]["ttft_mean_s"] == 2.0
    assert "| 2.00 / 2.00 |" in published.PAGE.read_text()
    assert ">20.0</text>" in published.CHART.read_text()
    assert cli.main(["--chart", "other.svg", "new.json.gz"]) == 0
    assert Path("other.svg").read_text() == published.CHART.read_text()
    assert cli.main(["--chart", "other.svg", "none.json"]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


def test_page_and_chart_are_made_from_the_published_figures(tmp_path: Path) -> None:
    # To renew them: python -m bench.routing --publish
    made = published.read([ROOT / published.FIGURES])
    page = (ROOT / published.PAGE).read_text("utf-8")
    (tmp_path / "page.md").write_text(page)
    write_between_marks(tmp_path / "page.md", published.markdown(made))
    assert (tmp_path / "page.md").read_text() == page
    assert (ROOT / published.CHART).read_text("utf-8") == chart.svg(made)
