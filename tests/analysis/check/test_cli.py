"""`analyze check`: its status and what it refuses."""

import orjson
import pytest

from analysis.check import check
from analysis.check.fit import NAMES, Fit
from analysis.cli import main
from tests.support.checked_runs import SLOW, write_run_to_fit
from tests.support.recorded import read_lines, write_lines


def test_the_command_tells_by_its_status(tmp_path, capsys, monkeypatch):
    """The constants are known; that a fit finds them is shown by test_check.py and test_fit.py."""
    monkeypatch.setattr(check, "fit", lambda *_: Fit(SLOW, frozenset(NAMES), {}, 0))
    write_run_to_fit(tmp_path, SLOW, limit=16)
    out = tmp_path / "out" / "check.json"
    assert main(["check", str(tmp_path), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "TTFT p90" in printed
    assert "ok     realised TTFT within 15% of the prediction" in printed
    document = orjson.loads(out.read_bytes())
    assert document["within"] is True
    assert [one["name"] for one in document["times"]][:2] == ["ttft_s p50", "ttft_s p90"]
    rows = read_lines(tmp_path / "requests.jsonl")
    for row in rows[::3]:
        row["first_token_s"] += 5.0
    for row in rows:
        row["intended_s"] = row["sent_s"] - 0.25
    write_lines(tmp_path / "requests.jsonl", rows)
    assert main(["check", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED realised TTFT" in printed
    assert "schedule lag of the run: p50 250.0 ms, p99 250.0 ms, max 250.0 ms" in printed


@pytest.mark.parametrize("text", ["0", "x", "nan"])
def test_a_bad_bound_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["check", "x", "--within", text])
    assert "must be a ratio" in capsys.readouterr().err
