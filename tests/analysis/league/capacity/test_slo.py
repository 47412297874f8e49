"""`analyze slo`: what it prints and writes, and what it refuses."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from analysis.cli import main
from analysis.league.capacity.search import Search
from analysis.league.capacity.slo import Limit, SloOptions, sentences
from tests.support.traces import SAMPLE

FLEET = "--instances 2 --scale 6:300000 --horizon 40 --jobs 1"


def limit(policy: str, *tried: tuple[float, list[float]], tries: int = 20) -> Limit:
    search = Search(0.95, 0.05, 4.0, tries=tries)
    for load, shares in tried:
        search.told(load, shares)
    return Limit(policy, search, {load: 4.0 * load for load, _shares in tried})


def said(*limits: Limit, **options: Any) -> str:
    first, *_more = sentences(limits, SloOptions(SAMPLE, **options))
    return first.removeprefix("cost keeps TTFT <= 2 s and TPOT <= 50 ms for 95 % of requests ")


COST = limit("cost", (0.87, [0.96, 0.98]), (0.88, [0.9, 0.96]))
STICKY = limit("session-sticky", (0.72, [0.97, 0.98]), (0.73, [0.9, 0.91]))
NEVER = ((0.05, [0.7, 0.9]),)
ALWAYS = ((4.0, [1.0, 1.0]),)


def test_the_answer_is_a_sentence() -> None:
    told = "up to 3.48 requests/s (load 0.87, by seed 0.872 to 0.88)"
    more = "21 % more than session-sticky (more in 2 of 2 seeds)"
    assert said(COST, STICKY) == said(STICKY, COST) == f"{told}, {more}."
    one_seed = limit("cost", (0.87, [0.9991]), (0.88, [0.9]))
    assert sentences([one_seed], SloOptions(SAMPLE, ttft_per_token_s=1e-4, share=0.999))[0] == (
        "cost keeps TTFT <= 2 s + 0.1 ms per new token and TPOT <= 50 ms for 99.9 % of requests "
        "up to 3.48 requests/s (load 0.87)."
    )
    slow = limit("cost", (0.5, [0.96, 0.97]), (0.6, [0.9, 0.94]))
    assert "31 % less than session-sticky (less in 2 of 2 seeds)" in said(slow, STICKY)
    assert said(COST, limit("always", (0.87, [0.96, 0.98]), (0.88, [0.9, 0.9]))).endswith(
        ", as far as always: their brackets overlap."
    )


def test_never_and_always_are_said() -> None:
    lowest = "at no load that was tried: at load 0.05, the lowest (0.2 requests/s), 80.0 % have it"
    highest = "up to 16 requests/s (load 4, the highest that was tried)"
    never, always = limit("cost", *NEVER), limit("cost", *ALWAYS)
    assert said(never, limit("always", *NEVER)) == f"{lowest}; always at none either."
    assert said(never, STICKY) == (
        f"{lowest}; session-sticky up to 2.88 requests/s (load 0.72, by seed 0.723 to 0.724)."
    )
    assert said(always, limit("always", *ALWAYS)) == f"{highest}, as does always."
    assert said(always, limit("always", *NEVER)) == f"{highest}; always {lowest}."


def test_a_search_that_was_cut_is_said() -> None:
    cut = limit("cost", (0.5, [1.0, 1.0]), (1.0, [0.5, 0.5]), tries=2)
    assert sentences([cut, STICKY], SloOptions(SAMPLE, tries=2))[1] == (
        "not searched to the end, by --tries 2: cost"
    )


def test_one_late_request_is_within_the_share() -> None:
    found = [SloOptions(SAMPLE, share=share).needed for share in (0.5, 0.9, 0.95, 0.99, 1.0)]
    assert found == [2, 10, 20, 100, 100]


@pytest.mark.parametrize(
    "wrong",
    [
        *("--ttft 0", "--ttft 2s", "--tpot -1", "--share 0", "--share 1.5", "--share nan"),
        *("--ttft-per-token -1", "--width 0", "--width 0.6", "--tries 0", "--tries 101"),
        *(
            "--within 1",
            "--within 2,1",
            "--within 0,1",
            "--within 1,101",
            "--policies nobody",
            "--policies ,",
        ),
        *("--profile x", "--seeds 0", "--horizon 0.001", "--within 0.001,0.01"),
    ],
)
def test_bad_input_is_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    status: Any
    try:
        status = main(["slo", str(SAMPLE), *FLEET.split(), *wrong.split()])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    *progress, told = capsys.readouterr().err.splitlines()
    assert wrong.split()[0] in told
    assert not progress or [line.partition(":")[0] for line in progress] == ["slo"]


@pytest.mark.long
def test_the_command_finds_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "slo.json"
    words = f"{FLEET} --seeds 2 --width 0.3 --within 0.1,1 --ttft 4 --share 0.9 --json {out}"
    assert main(["slo", str(SAMPLE), *words.split()]) == 0
    printed = capsys.readouterr()
    document = orjson.loads(out.read_bytes())
    assert document["slo"] == {
        "ttft_s": 4.0,
        "per_new_token_s": 0.0,
        "tpot_s": 0.05,
        "share": 0.9,
    }
    cost, sticky = document["policies"]
    assert (cost["policy"], sticky["policy"]) == ("cost", "session-sticky")
    for one in (cost, sticky):
        own = [row for row in document["rows"] if row["policy"] == one["policy"]]
        assert len(own) == 2 * len(one["tried"])
        assert not one["is_cut"]
        low, high = one["holds"], one["first_not"]
        assert 0.1 <= low["load"] < high["load"] <= 1.3 * low["load"] + 1e-9
        assert low["smooth"] >= 0.9 > high["smooth"]
        assert low["requests_per_s"] > 0
    first = printed.out.splitlines()[0]
    assert first.startswith("cost keeps TTFT <= 4 s and TPOT <= 50 ms for 90 % of requests up to ")
    assert "session-sticky" in first
    runs = len(document["rows"])
    assert f"slo: {runs} of about" in printed.err
