"""The command `report`: an audit log becomes a page, and anything else one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import cli
from planner.telemetry.audit import read_audit
from planner.telemetry.report import panels_of
from replayer.arguments import InputError
from tests.planner.test_run import Stage

LINE: dict[str, Any] = {"at": 5.0, "targets": {"combined": 1}}


async def test_a_page_is_made_of_an_audit_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path)
    await stage.ticks(4)
    audit, out = tmp_path / "audit.jsonl", tmp_path / "page.html"
    assert cli.main(["report", str(audit), "--out", str(out)]) == 0
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert f"{len(lines)} lines of" in capsys.readouterr().out
    page = out.read_text("utf-8")
    panels = json.loads(re.findall(r"^const panels = (.*);$", page, re.MULTILINE)[0])
    assert panels == panels_of(lines)
    wanted = {one["name"]: one["y"] for one in panels[0]["traces"]}["combined: wanted"]
    assert wanted == [line["targets"]["combined"] for line in lines]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "there is no line in it"),
        (b"\n", ":1: not a line of an audit log"),
        (json.dumps(LINE).encode() + b"\n{", ":2: not a line of an audit log"),
        (b"[1]", ":1: not a line of an audit log: Expected `object`, got `array`"),
        (json.dumps(LINE | {"at": 1e30}).encode(), "Expected `float` <= 250000000000.0"),
        (json.dumps(LINE | {"seen": {"engines": {"a": [1]}}}).encode(), "$.seen.engines"),
        (b"[" * 100_000, ":1: not a line of an audit log"),
        (b"\xff\xfe", ":1: not a line of an audit log"),
        (b" " * (4 << 20) + b" ", "has at most 4194304 bytes"),
    ],
)
def test_what_is_no_audit_log_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    path = tmp_path / "audit"
    path.write_bytes(content)
    assert cli.main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_what_cannot_be_read_or_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit"
    assert cli.main(["report", str(path)]) == 2
    assert "audit: No such file" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "it is no regular file" in capsys.readouterr().err
    path.write_text(json.dumps(LINE))
    assert cli.main(["report", str(path), "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "page.html: No such file" in capsys.readouterr().err


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["traffic", "a"]) | st.text(), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    st.sampled_from(["seen", "decided", "targets", "at", "other"]),
)
def test_any_line_is_drawn_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, key: str
) -> None:
    path = tmp_path_factory.mktemp("audit") / "audit"
    path.write_text(json.dumps(LINE | {key: value}))
    try:
        ticks = list(read_audit(path).every())
    except InputError:
        return
    assert len(orjson.loads(orjson.dumps(panels_of(ticks)))) == 12
