"""Logs and records of a run: what is wrong with one is said in one line."""

import orjson
import pytest

from analysis.cli import main
from tests.support.checked_runs import PROXY, SLOW
from tests.support.recorded import read_lines, write_lines, write_run
from tests.support.traces import SAMPLE


def edit(path, change):
    record = orjson.loads(path.read_bytes())
    change(record)
    path.write_bytes(orjson.dumps(record))


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("engines"), "must be as the demo writes it"),
        (lambda r: r.update(engines=[]), "engines: must not be empty"),
        (lambda r: r.update(engines=[{"sped": 1}]), "must be as the demo writes it"),
        (lambda r: r.update(replay=["--nonsense"]), "must be arguments of replay"),
        (lambda r: r.update(replay=[str(SAMPLE), "--mode", "sessions"]), "must be --mode open"),
        (lambda r: r["proxy"].pop("scrape_interval"), "must have numbers for scrape_interval"),
        (lambda r: r["proxy"].pop("prefill_throughput"), "must be the proxy's options"),
        (lambda r: r["proxy"].update(instances=["a=b"]), "1 instances for 2 engines"),
        (lambda r: r.update(replay=[str(SAMPLE), "--limit", "5"]), "not of one run"),
    ],
)
def test_a_bad_record_is_one_line(tmp_path, capsys, change, words):
    write_run(tmp_path, SLOW, PROXY, limit=20)
    edit(tmp_path / "run.json", change)
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("requests.jsonl", lambda row: row.update(outcome="timeout"), "1 of 20 requests are not"),
        ("proxy.jsonl", lambda row: row.update(t_done=None), "1 of 20 requests are missing"),
        ("proxy.jsonl", lambda row: row.pop("fallback"), "1 of 20 requests are missing"),
        ("proxy.jsonl", lambda row: row.update(decode_instance="x"), "run.json does not know"),
    ],
)
def test_a_bad_log_is_one_line(tmp_path, capsys, name, change, words):
    write_run(tmp_path, SLOW, PROXY, limit=20)
    rows = read_lines(tmp_path / name)
    change(rows[3])
    write_lines(tmp_path / name, rows)
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["run.json", "requests.jsonl", "proxy.jsonl"])
def test_a_missing_file_is_one_line(tmp_path, capsys, name):
    write_run(tmp_path, SLOW, PROXY, limit=20)
    (tmp_path / name).unlink()
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert said.count("\n") == 1
