"""`replay export`: rows for AIPerf, which `replay` reads back as the same load."""

from itertools import combinations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.survey.cli import main
from replayer.survey.export import AiperfRows
from replayer.trace.loaders import read_trace, shared_blocks
from tests.support.traces import EXAMPLES, SAMPLE, write

ROW = {"timestamp": 5, "input_length": 7, "output_length": 2, "block_size": 4}


@pytest.fixture
def export(tmp_path, capsys):
    """Export rows; returns the status, what was written, and what was said."""

    def of(*rows):
        out = tmp_path / "out.jsonl"
        out.unlink(missing_ok=True)
        path = write(tmp_path / "t.jsonl", *rows)
        status = main(["export", str(path), "--for", "aiperf", "--out", str(out)])
        lines = out.read_bytes().splitlines() if out.exists() else []
        told = capsys.readouterr()
        return status, list(map(orjson.loads, lines)), told.out + told.err

    return of


def load(request):
    sizes = request.input_tokens, request.output_tokens, request.block_tokens
    return request.arrival_s, *sizes, request.names_blocks, request.prompt, request.messages


def same_load(made, back):
    """Whether two traces have the same requests, and each two share the same whole blocks."""
    assert list(map(load, back)) == list(map(load, made))
    for (one, again), (other, too) in combinations(zip(made, back, strict=True), 2):
        whole = min(one.full_blocks, other.full_blocks)
        found = min(whole, shared_blocks(again.runs, too.runs))
        assert found == min(whole, shared_blocks(one.runs, other.runs))


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.integers(1, 4)))


@given(PROMPTS.filter(len))
def test_rows_are_read_back_as_the_same_load(tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("t")
    rows = [
        ROW | {"input_length": 4 * len(ids) + tail, "timestamp": at * 1.5,
               "hash_ids": [10 * at + 7 if i > 3 else one for i, one in enumerate([*ids, 9])]}
        for at, (ids, tail) in enumerate(prompts)
    ]  # fmt: skip
    made = list(read_trace(write(folder / "t.jsonl", *rows)))
    maker = AiperfRows(folder / "t.jsonl")
    written = [maker.row(one) for one in made]
    same_load(made, list(read_trace(write(folder / "a.jsonl", *written))))
    sizes: dict[int, set[int]] = {}
    for row in written:
        for place, block in enumerate(row["hash_ids"]):
            sizes.setdefault(block, set()).add(min(4, row["input_length"] - 4 * place))
    assert all(len(found) == 1 for found in sizes.values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_format_with_times_is_written(export, name, tmp_path):
    status, rows, told = export(EXAMPLES[name])
    if name == "vidur":
        assert (status, rows) == (2, [])
        assert "t.jsonl:1: timestamp: must be given" in told
        return
    assert status == 0
    assert rows[0].keys() <= {
        *("timestamp", "input_length", "block_size", "hash_ids", "output_length")
    }
    same_load(*(list(read_trace(tmp_path / one)) for one in ("t.jsonl", "out.jsonl")))
    assert f"--isl-block-size {rows[0]['block_size']} " in told


def test_sessions_are_not_written_but_said(export):
    first = ROW | {"session_id": "s", "hash_ids": [1, 2]}
    status, rows, told = export(first, first | {"timestamp": 1005.5, "hash_ids": [1, 3]})
    assert status == 0
    assert rows[1] == {
        "timestamp": 1005.5,
        "input_length": 7,
        "block_size": 4,
        "hash_ids": [0, 2],
        "output_length": 2,
    }
    assert "note: 2 rows are of a session" in told


def test_messages_keep_their_session(export, tmp_path):
    said = [{"role": "user", "content": "hi"}]
    first = {"session_id": "s", "messages": said, "output_length": 2, "timestamp": 5}
    later = {"session_id": "s", "messages": said, "output_length": 2, "delay": 30}
    assert export(first, later)[:2] == (0, [first, later])
    turns = [one.wait_for for one in read_trace(tmp_path / "out.jsonl")]
    assert turns == [(), ("s:0",)]


def test_text_is_text_input(export):
    _status, rows, _told = export({"prompt": "say it", "output_length": 3, "timestamp": 0})
    assert rows == [{"timestamp": 0, "text_input": "say it", "output_length": 3}]


def test_a_bad_row_leaves_no_file(export):
    status, rows, told = export(ROW, ROW | {"block_size": 2})
    assert (status, rows) == (2, [])
    assert "t.jsonl:2: block_size: must be 4 as before, not 2" in told
    assert export(ROW, b"{")[:2] == (2, [])


def test_what_exists_is_not_overwritten(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"mine")
    assert main(["export", str(SAMPLE), "--for", "aiperf", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"replay: --out {out}: File exists\n"
    assert out.read_bytes() == b"mine"


def test_a_folder_that_is_not_there_is_one_line(tmp_path, capsys):
    out = tmp_path / "no" / "out.jsonl"
    assert main(["export", str(SAMPLE), "--for", "aiperf", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"replay: --out {out}: No such file or directory\n"


def test_a_turn_without_a_timestamp_cannot_be_sent(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["export", str(SAMPLE), "--for", "aiperf", "--out", str(out)]) == 2
    assert f"{SAMPLE}:3: timestamp: must be given" in capsys.readouterr().err
    assert not out.exists()
