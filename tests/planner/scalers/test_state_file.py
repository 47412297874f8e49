"""The state file: kept whole, of one planner, begun anew where it cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.scalers.base import Decision
from planner.scalers.state_file import Kept, StateError, StateFile

KEPT = Kept(
    Decision(4, {"combined": 3}, 12.5, "load"), {"floors": {}}, {"acknowledged": 4}, {"a": 2}
)


def test_what_is_kept_is_there_for_the_next_process(tmp_path: Path) -> None:
    first = StateFile(tmp_path / "folder" / "state.json")
    assert first.load() == (Kept(), "")
    first.save(KEPT)
    first.close()
    assert StateFile(tmp_path / "folder" / "state.json").load() == (KEPT, "")


def test_a_second_planner_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    first = StateFile(path)
    with pytest.raises(StateError, match="another planner holds it"):
        StateFile(path)
    first.close()
    StateFile(path).close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "torn or of another form"),
        ('{"form": 1, "kept": {"decision": ', "torn or of another form"),
        ('{"form": 1, "kept": {"decision": {"decision_id": "x"}}}', "torn or of another form"),
        ('{"form": 1, "kept": []}', "torn or of another form"),
        ('{"form": 9, "kept": {}}', "of form 9, not 1"),
        ("\x00\x01", "torn or of another form"),
    ],
)
def test_a_torn_file_or_another_form_is_begun_anew(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    kept, said = StateFile(path).load()
    assert kept == Kept()
    assert why in said
    assert "\n" not in said


def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.mkdir()
    found = StateFile(path)
    with pytest.raises(StateError, match="no regular file"):
        found.load()
    with pytest.raises(StateError, match="directory"):
        found.save(KEPT)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    found = StateFile(tmp_path / "state.json")
    found.save(KEPT)
    (tmp_path / "state.json.new").mkdir()
    with pytest.raises(StateError):
        found.save(Kept())
    assert found.load() == (KEPT, "")
