"""`analyze thermal`: its tables, its files, what it refuses."""

from pathlib import Path

import orjson
import pytest

from analysis.cli import main


def test_the_harness_s_rows_stand_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figures = tmp_path / "rows.json", tmp_path / "figures"
    arguments = ["thermal", "--plant", "harness", "--json", str(out), "--figures", str(figures)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for words in ("as it prints it", "174", "332", "97", "181", "ours, law power", "simulated"):
        assert words in printed
    rows = orjson.loads(out.read_bytes())
    assert [row["law"] for row in rows] == ["none", "harness", "power"]
    assert (figures / "thermal-harness.html").exists()


def test_scenarios_with_options_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "thermal.toml", tmp_path / "rows.json"
    config.write_text("target_celsius = 78\nmax_running = 128\n")
    wanted = "--scenario cool,quiet --seconds 60 --seeds 1 --law power,pi"
    arguments = ["thermal", *wanted.split(), "--thermal", str(config)]
    assert main([*arguments, "--json", str(out)]) == 0
    assert "target of 78 C" in capsys.readouterr().out
    rows = orjson.loads(out.read_bytes())
    assert [(row["scenario"], row["law"]) for row in rows] == [
        (scenario, law) for scenario in ("cool", "quiet") for law in ("none", "power", "pi")
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--law pid", ("--law", "power", "pid")),
        ("--scenario hail", ("--scenario", "noise", "hail")),
        ("--seconds 5", ("--seconds", "30", "5")),
        ("--plant harness --scenario air", ("--scenario", "harness")),
        ("--thermal nowhere.toml", ("--thermal", "nowhere.toml")),
        ("--thermal {bad}", ("--thermal", "target_celsius", "95", "99")),
    ],
)
def test_what_is_refused_is_one_line(
    wrong: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("target_celsius = 99\n")
    assert main(["thermal", *wrong.format(bad=bad).split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert all(word in told for word in words), told
