"""Traces that nobody measured: one line says what is wrong, and memory is bounded."""

import gzip
import resource
import subprocess
import sys

import pytest

from analysis.cli import main as analyze
from replayer.replay.cli import main as replay
from replayer.trace.loaders import MOST_BLOCKS, MOST_ROW_BLOCKS
from replayer.trace.rows import MOST_LINE_BYTES, MOST_TOKENS
from tests.support.traces import write

DEEP = "[" * 200 + "]" * 200
OBJECTS = '{"x":' * 150 + "1" + "}" * 150
TOO_LONG = f"must be an integer <= {MOST_TOKENS}"
TOO_LATE = "must be a number <= 1e+14"
BLOCKS = f"must be at most {MOST_ROW_BLOCKS} blocks"
DEPTH = "must be at most 100 lists and objects deep"


def row(**fields):
    """A row with these fields, as raw JSON."""
    usual = {"timestamp": "0", "input_length": "600", "output_length": "2"}
    return "{" + ",".join(f'"{name}":{raw}' for name, raw in (usual | fields).items()) + "}"


def turn(**fields):
    return row(session_id='"s"', **fields)


CIRCLE = [row(request_id=f'"{n}"', wait_for=f'["{(n + 1) % 5000}"]') for n in range(5000)]
MANY = [
    row(
        session_id=f'"{n}"',
        input_length="16000000",
        block_size="16",
        hash_runs=f"[[{n * 1_000_000},1000000]]",
    )
    for n in range(20)
]
HOSTILE = {
    "a prompt of 1e15": (row(input_length="1000000000000000"), TOO_LONG),
    "as a float": (row(input_length="1e15"), TOO_LONG),
    "a prompt of 1e308": (row(input_length="1e308"), TOO_LONG),
    "an output of 2^63": (row(output_length="9223372036854775808"), TOO_LONG),
    "in a table": ("num_prefill_tokens,num_decode_tokens\n999999999999999999,5", TOO_LONG),
    "1e9 blocks": (turn(hash_runs="[[0,1000000000]]"), "hash_runs: must be 2 ids"),
    "1e9 blocks of one token": (
        turn(input_length="1000000000", block_size="1", hash_runs="[[0,1000000000]]"),
        TOO_LONG,
    ),
    "2^63 blocks": (turn(hash_runs="[[0,9223372036854775808]]"), "hash_runs: must be 2 ids"),
    "2^63 from 2^63": (
        turn(hash_runs="[[9223372036854775808,9223372036854775808]]"),
        "hash_runs: must be 2 ids",
    ),
    "many blocks": (turn(input_length="16000000", block_size="1"), BLOCKS),
    "a block of 1e15": (turn(block_size="1000000000000000"), TOO_LONG),
    "a block of 1e15 for all": ('{"trace":{"block_size":1e15}}\n' + row(), TOO_LONG),
    "a time of 1e308": (row(timestamp="1e308"), TOO_LATE),
    "a time of 1e308 later": (row() + "\n" + row(timestamp="1e308"), TOO_LATE),
    "a pause of 1e308": (turn(delay="1e308"), TOO_LATE),
    "a tool of 1e308": (turn(tool_wait_ms="1e308"), TOO_LATE),
    "another time of 1e308": (row(timestamp="null", created_time="1e308"), TOO_LATE),
    "a turn of 1e300": (turn(turn="1e300"), "turn: must be an integer <= 9007199254740992"),
    "a deep time": (row(timestamp=DEEP), DEPTH),
    "a deep field": (turn(x=DEEP), DEPTH),
    "deep objects": (turn(x=OBJECTS), DEPTH),
    "a deep message": (turn(messages='[{"role":"user","content":' + DEEP + "}]"), DEPTH),
    "deep settings": ('{"trace":{"block_size":' + DEEP + "}}", DEPTH),
    "a long line": (row(x='"' + "a" * MOST_LINE_BYTES + '"'), "line: must be at most"),
    "a long name": (turn(request_id='"' + "a" * 5000 + '"'), "at most 4096 characters"),
    "a long unknown name": (turn(wait_for='["' + "a" * 100_000 + '"]'), "must name requests"),
    "a large circle": ("\n".join(CIRCLE), "must not form a circle"),
    "more blocks than fit": ("\n".join(MANY), f"more than {MOST_BLOCKS} different blocks"),
}


@pytest.mark.long
@pytest.mark.parametrize("command", ["replay", "league"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_trace_is_one_line_and_status_2(tmp_path, capsys, name, command):
    content, said = HOSTILE[name]
    trace = tmp_path / "t.jsonl"
    trace.write_text(content)
    if command == "replay":
        status = replay([str(trace), "--target", "127.0.0.1:1", "--out", str(tmp_path / "o")])
    else:
        if name == "a large circle":
            pytest.skip("the league's clock waits for no circle")
        status = analyze(["league", str(trace), "--policies", "cost", "--seeds", "1"])
    error = capsys.readouterr().err
    assert status == 2
    assert said in error
    assert error.count("\n") == 1
    assert len(error) < 400 + len(str(trace))
    assert "127.0.0.1:1" not in error


def test_an_endless_line_in_a_small_file_takes_little_memory(tmp_path):
    bomb = tmp_path / "t.gz"
    bomb.write_bytes(gzip.compress(b"a" * 1_000_000) * 300)  # members in a row are one text
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({1 << 29}, {1 << 29}))\n"
        "from replayer.trace.loaders import read_trace\nfrom pathlib import Path\n"
        "try:\n    list(read_trace(Path(sys.argv[1])))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(bomb)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{bomb}:1: line: must be at most {MOST_LINE_BYTES} bytes" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 1 << 29


@pytest.mark.long
def test_lines_without_end_are_not_read_to_their_end(tmp_path, capsys):
    trace = tmp_path / "t.gz"
    trace.write_bytes(gzip.compress(b"\n" * 3_000_000))
    assert replay([str(trace), "--out", str(tmp_path / "o")]) == 2
    assert "more than 1000000 lines are empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b" " * (2 << 20)), "must be at most 1048576 bytes"),
        (
            lambda path: path.write_text('{"block_size":' + "[" * 400 + "]" * 400 + "}"),
            "a deep list",
        ),
        (lambda path: path.write_bytes(b'{"block_size":1e308}'), TOO_LONG),
    ],
)
def test_settings_beside_a_trace_are_bounded_too(tmp_path, capsys, make, said):
    trace = write(tmp_path / "t.jsonl", {"timestamp": 0, "input_length": 5, "output_length": 1})
    make(tmp_path / "t.jsonl.meta.json")
    assert replay([str(trace), "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
