"""`replay analyze-trace`: its lines and its JSON."""

import orjson
import pytest

from replayer.survey.cli import main
from tests.support.traces import EXAMPLES, SAMPLE, write


def test_the_console_has_every_part(capsys):
    assert main(["analyze-trace", str(SAMPLE), "--served", "ttft:1,tpot:0.02"]) == 0
    out = capsys.readouterr().out
    for part in ("prompt, tokens", "prompt, new tokens", "output, tokens", "turns of a session"):
        assert part in out
    for line in ("arrivals: ", "sessions: 24", "under way, served", "prefixes: an endless cache"):
        assert f"\n{line}" in out


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_format_is_described(name, tmp_path, capsys):
    path = write(tmp_path / "t.jsonl", EXAMPLES[name])
    assert main(["analyze-trace", str(path)]) == 0
    out = capsys.readouterr().out
    assert "requests: 1; arrivals: no timestamps that differ" in out
    known = name in ("mooncake", "superset", "bailian")
    assert ("prefixes: an endless cache hits 0.0%" in out) is known


def test_json_alone_or_beside_the_table(tmp_path, capsys):
    assert main(["analyze-trace", str(SAMPLE), "--json", "-"]) == 0
    alone = orjson.loads(capsys.readouterr().out)
    assert (alone["trace"], alone["requests"]) == (str(SAMPLE), 227)
    file = tmp_path / "f.json"
    assert main(["analyze-trace", str(SAMPLE), "--json", str(file)]) == 0
    assert orjson.loads(file.read_bytes()) == alone
    assert f"written: {file}" in capsys.readouterr().out.replace("\n", "")


def test_bad_input_is_one_line(tmp_path, capsys):
    bad = write(tmp_path / "t.jsonl", EXAMPLES["mooncake"], b"{")
    for arguments in ([bad], [tmp_path / "none"], [SAMPLE, "--json", tmp_path / "no" / "f.json"]):
        assert main(["analyze-trace", *map(str, arguments)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    circle = EXAMPLES["superset"] | {"wait_for": ["a"], "request_id": "a"}
    path = str(write(tmp_path / "t.jsonl", circle))
    assert main(["analyze-trace", path, "--served", "e2e:1"]) == 2
    assert "must not form a circle" in capsys.readouterr().err
