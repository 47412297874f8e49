"""`analyze elastic`: its tables, its file, what it refuses."""

from pathlib import Path

import orjson
import pytest

from analysis.cli import main


@pytest.mark.parametrize(
    "wrong",
    [
        *("--seeds 0", "--sessions x", "--sessions 0", "--sessions ,", "--instances 0"),
        *("--think-cap -1", "--timeout 0", "--tpot-slo nan", "--kv-tokens 0", "--jobs 0"),
    ],
)
def test_bad_options_are_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["elastic", *wrong.split()])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.count("\n") == 1
    assert wrong.split()[0] in told


def test_an_unknown_rule_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["elastic", "--rules", "nobody"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("analyze: --rules: must be of cost, ")
    assert told.count("\n") == 1


def test_the_command_prints_its_tables_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    options = "--sessions 2 --rules never,always --seeds 1 --jobs 1"
    assert main(["elastic", *options.split(), "--json", str(out)]) == 0
    rows = orjson.loads(out.read_bytes())
    assert [(row["rule"], row["sessions"], row["seed"]) for row in rows] == [
        *(("never", 2, 0), ("always", 2, 0))
    ]
    printed = capsys.readouterr().out
    assert "real vLLM p99 ms" in printed
    assert "2 sessions at a time" in printed
    assert "The founding text's claims" in printed
    assert f"written: {out}" in printed.replace("\n", "")


@pytest.mark.long
def test_the_command_says_how_far_it_is_and_ends_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--sessions 2 --rules never,cost --seeds 2 --jobs 1"
    assert main(["elastic", *options.split()]) == 0
    said = capsys.readouterr()
    assert [line.partition(",")[0] for line in said.err.splitlines()] == [
        "elastic: 1 of 2 runs",
        "elastic: 2 of 2 runs",
    ]
    last = said.out.splitlines()[-1]
    assert last.startswith("cost: TTFT p90 ")
    assert " to never, goodput " in last
