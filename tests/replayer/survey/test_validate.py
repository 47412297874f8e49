"""`replay validate`: what it says of a trace, and its exit status."""

import gzip

import orjson
import pytest

from replayer.survey import validate
from replayer.survey.cli import main
from tests.support.traces import EXAMPLES, GOOD, SAMPLE, write

ROW = {"session_id": "s", "input_length": 4, "output_length": 2, "timestamp": 0}


@pytest.fixture
def said(tmp_path, capsys):
    """Validate rows; returns the status and the lines."""

    def of(*rows, options=()):
        status = main(["validate", str(write(tmp_path / "t.jsonl", *rows)), *options])
        out = capsys.readouterr()
        return status, (out.out + out.err).replace(f"{tmp_path}/", "").splitlines()

    return of


def test_a_good_trace_is_described(said):
    rows = [ROW | {"timestamp": 1500 * turn, "input_length": 4 + turn} for turn in range(3)]
    assert said({"trace": {"block_size": 16}}, *rows, ROW | {"session_id": "u"}) == (
        0,
        [
            "format: superset, as line 2 has session_id",
            "rows: 4 that can be replayed",
            "time: 0.000 to 3.000 s",
            "sessions: 2, of p50 1, p90 3, max 3 turns",
            "prompts: p50 4, p90 6, max 6 tokens",
            "outputs: p50 2, p90 2, max 2 tokens",
        ],
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_format_is_named_with_its_fields(said, name):
    status, (first, *_) = said(EXAMPLES[name])
    assert status == 0
    assert first.startswith(f"format: {name}, as line 1 has ")
    assert set(first.partition(" has ")[2].split(", ")) <= EXAMPLES[name].keys()


def test_every_bad_row_is_a_problem_and_the_others_are_counted(said):
    bad = [ROW | {"input_length": -1}, b"{", ROW | {"wait_for": ["nobody"], "request_id": "x"}]
    status, lines = said(ROW, *bad, ROW, b"[]")
    assert status == 2
    assert "rows: 3 that can be replayed" in lines
    problems = [line for line in lines if line.startswith("problem: ")]
    assert [line.split(":")[1:4] for line in problems] == [
        [" t.jsonl", "2", " input_length"],
        [" t.jsonl", "3", " line"],
        [" t.jsonl", "6", " line"],
        [" t.jsonl", "4", " wait_for"],
    ]


def test_of_many_problems_a_handful_is_shown(said):
    _status, lines = said(ROW, *[ROW | {"output_length": "x"}] * 40)
    assert len([line for line in lines if "output_length: must be" in line]) == 5
    assert lines[-1] == "problem: 35 more problems of this kind"


def test_far_too_many_problems_end_the_reading(said, monkeypatch):
    monkeypatch.setattr(validate, "MOST_REFUSED", 10)
    _status, lines = said(ROW, *[b"{"] * 40)
    assert "problem: more than 10 problems: no more is read" in lines


def test_rows_that_are_changed_are_notes(said):
    failed = EXAMPLES["burstgpt"] | {"Response tokens": 0}
    status, lines = said(EXAMPLES["burstgpt"], *[failed] * 7)
    assert status == 0
    assert lines[-1] == (
        "note: an output of 0 tokens is sent for 1: lines 2, 3, 4, 5, 6 and 2 more"
    )
    early = EXAMPLES["azure"] | {"TIMESTAMP": "2023-11-16 18:17:02"}
    assert said(EXAMPLES["azure"], early)[1][-1] == (
        "note: a time before that of the first row counts as that: line 2"
    )
    orphan = EXAMPLES["bailian"] | {"chat_id": 2, "parent_chat_id": 99}
    assert said(EXAMPLES["bailian"], orphan)[1][-1] == (
        "note: a parent that no row before has is not waited for: line 2"
    )
    assert said(EXAMPLES["vidur"])[1][-1] == (
        "note: no timestamp and nothing to wait for, due at once: line 1"
    )


def test_prompts_too_long_for_the_engines_are_problems(said):
    rows = [ROW | {"input_length": size} for size in (14, 15, 99)]
    status, lines = said(*rows, options=["--max-model-len", "16"])
    assert (status, lines[-1]) == (
        2,
        "problem: prompt and output exceed --max-model-len 16: lines 2, 3",
    )
    assert said(*rows, options=["--max-model-len", "101"])[0] == 0


def test_literal_prompts_have_no_length(said):
    row = {"prompt": "say it", "output_length": 3, "timestamp": 0}
    status, lines = said(row, options=["--max-model-len", "16"])
    assert status == 0
    assert lines[-3:] == [
        "prompts: unknown tokens",
        "outputs: p50 3, p90 3, max 3 tokens",
        "note: literal prompts whose tokens nobody has counted: line 1",
    ]


def test_a_circle_and_deltas_are_problems(said):
    one = ROW | {"request_id": "a", "wait_for": ["b"]}
    status, lines = said(one, ROW | {"request_id": "b", "wait_for": ["a"]})
    assert status == 2
    assert lines[-1].startswith("problem: wait_for: must not form a circle: ")
    deltas = [GOOD | {"hash_ids": [turn, 90 + turn], "input_length": 1024} for turn in range(4)]
    assert "3 of 3 later turns share no block" in said(*deltas)[1][-1]


@pytest.mark.parametrize("row", [b"hello", {"text": "x"}, b"", {"trace": {}}, {"trace": []}])
def test_what_is_no_trace_is_one_line(said, row):
    status, lines = said(row)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith("replay: t.jsonl")


def test_a_file_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["validate", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("none: cannot be read: No such file or directory\n")


def test_a_file_that_breaks_off_is_a_problem(tmp_path, capsys):
    path = tmp_path / "t.jsonl.gz"
    lines = b"\n".join(orjson.dumps(ROW) for _ in range(5000))
    path.write_bytes(gzip.compress(lines, 0)[:-2000])
    assert main(["validate", str(path)]) == 2
    assert "problem: " in capsys.readouterr().out


def test_the_shipped_sample_can_be_replayed_whole(capsys):
    assert main(["validate", str(SAMPLE)]) == 0
    assert "rows: 227 that can be replayed\n" in capsys.readouterr().out


def test_the_format_can_be_given(said):
    status, lines = said(EXAMPLES["mooncake"], options=["--format", "superset"])
    assert (status, lines[0]) == (0, "format: superset, as given by --format")
