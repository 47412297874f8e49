"""Counts that the commands about a trace share."""

from replayer.survey.figures import Sessions, spread
from replayer.trace.loaders import read_trace
from tests.support.traces import EXAMPLES, write


def test_percentiles_are_values_that_occur():
    assert spread([3, 1, 2, 10], 25, 50, 90) == {"p25": 1, "p50": 2, "p90": 10, "max": 10}
    assert spread([7], 50) == {"p50": 7, "max": 7}
    assert spread([], 50) == {}


def test_a_chat_is_of_the_session_of_its_parent(tmp_path):
    row = EXAMPLES["bailian"]
    parents = {1: -1, 2: 1, 3: 2, 4: -1}
    rows = [row | {"chat_id": chat, "parent_chat_id": of} for chat, of in parents.items()]
    sessions = Sessions()
    names = [sessions.add(one) for one in read_trace(write(tmp_path / "t.jsonl", *rows))]
    assert names == ["1", "1", "1", "4"]
    assert sessions.turns == {"1": 3, "4": 1}
    assert sessions.several
