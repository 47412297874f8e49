"""A run that would mislead says so, one that is cut keeps what it has, one in vain stops."""

import subprocess
import sys
from itertools import count

import orjson
import pytest

from analysis.cli import main as analyze
from bench.measuring.processes import Child
from replayer.replay.cli import main
from replayer.simulator.host import SimFleet
from tests.support.replays import run, session
from tests.support.serving_thread import in_thread
from tests.support.sse_server import Engine

KNEW = "these engines had cached this text"


def written(path, rows):
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path


@pytest.fixture
def agentic(tmp_path):
    """Sessions that share most of their text, so that the ideal hit is high."""
    return written(
        tmp_path / "a.jsonl", [row for name in "abcd" for row in session(name, 4, block=64)]
    )


@pytest.fixture
def sim():
    with in_thread(SimFleet(1, speed=200.0)) as fleet:
        yield fleet.engines[0]


@pytest.mark.parametrize("block", [16, 64])
def test_the_same_text_again_is_said_and_is_not_compared(tmp_path, capsys, sim, block):
    rows = [row for name in "abcd" for row in session(name, 3, block=block)]
    trace = written(tmp_path / "a.jsonl", rows)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert run(trace, sim, tmp_path / name, "--seed", "7")[0] == 0
        said = capsys.readouterr().out
        assert (KNEW in said.splitlines()[0]) == (name == "two"), said
    folders = [str(tmp_path / name / "out") for name in ("one", "two")]
    assert analyze(["compare", *folders]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert KNEW in error
    assert f"{folders[1]}: " in error


def test_each_run_has_words_of_its_own(tmp_path, capsys, agentic, sim):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert run(agentic, sim, tmp_path / name)[0] == 0
        assert KNEW not in capsys.readouterr().out
    folders = [str(tmp_path / name / "out") for name in ("one", "two")]
    assert analyze(["compare", *folders]) == 0
    said = capsys.readouterr().out
    assert "outputs are not compared" in said
    assert "identical output" not in said
    assert analyze(["compare", *folders, "--require-identical"]) == 2
    assert "--seed" in capsys.readouterr().err


@pytest.mark.long
def test_literal_text_is_new_in_each_run_too(tmp_path, capsys, sim):
    def said(number):
        text = f"{number} " + "word " * 200
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        literal = {"messages": messages} if number % 2 else {"prompt": text}
        return {"timestamp": 0, "output_length": 2, **literal}

    trace = written(tmp_path / "l.jsonl", map(said, range(4)))
    for endpoint in ("chat", "completions"):
        for knows, seed in (
            (False, []),
            (False, []),
            (False, ["--seed", "1"]),
            (True, ["--seed", "1"]),
        ):
            more = ("--format", "superset", "--endpoint", endpoint, *seed)
            assert run(trace, sim, tmp_path, *more)[0] == 0
            assert (KNEW in capsys.readouterr().out) == knows


def command(trace, engine, out, *more):
    where = ["--target", engine.url, "--out", str(out), "--no-progress"]
    return [sys.executable, "-m", "replayer.replay", str(trace), *where, *more]


@pytest.mark.long
def test_what_ended_before_a_kill_is_kept_and_can_be_read(trace, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.json").write_text('{"requests":{"sent":99}}')
    (out / "report.html").write_text("an old page")
    with in_thread(Engine(plan={"s:1": "hang"})) as engine:
        with Child(command(trace, engine, out, "--goodput", "ttft:60")) as process:
            for _ in count():
                lines = (out / "requests.jsonl").read_bytes() if engine.seen else b""
                if lines.count(b"\n") == 3:
                    break
                engine.news.wait(0.02)
            process.kill()
    assert not (out / "report.html").exists()
    with (out / "requests.jsonl").open("ab") as file:
        file.write(b'{"request_id":"cut"')
    assert analyze(["report", str(out)]) == 0
    said = capsys.readouterr().out
    assert "3 sent, 3 ok" in said
    assert "interrupted after 3 of 5 requests" in said
    assert "TTFT" in said.splitlines()[1]
    assert "3 of 5" in said.splitlines()[0]
    assert "</html>" in (out / "report.html").read_text()


def test_a_full_disk_is_one_line_and_the_tables_are_printed(trace, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "requests.jsonl").symlink_to("/dev/full")
    (out / "report.html.new").symlink_to("/dev/full")
    with in_thread(Engine()) as engine:
        status = main([str(trace), "--target", engine.url, "--out", str(out), "--no-progress"])
    said, error = capsys.readouterr()
    assert "5 sent, 5 ok" in said
    assert error.count("requests.jsonl") == 1
    assert "No space left on device" in error
    assert "Traceback" not in error
    assert status != 0


def test_a_full_disk_at_the_start_sends_nothing(trace, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.json.new").symlink_to("/dev/full")
    with in_thread(Engine()) as engine:
        assert main([str(trace), "--target", engine.url, "--out", str(out)]) == 2
        assert not engine.seen
    error = capsys.readouterr().err
    assert error == f"replay: --out {out}: No space left on device\n"


@pytest.mark.long
def test_a_run_leaves_whole_lines_when_the_disk_fills_in_it(tmp_path, sim):
    """A limit on a file's size stands for the disk: the write that meets it is cut in a line."""
    rows = [{"timestamp": 0, "input_length": 20, "output_length": 1} for _ in range(40)]
    trace = written(tmp_path / "m.jsonl", rows)
    out = tmp_path / "out"
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "from replayer.replay.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    told = command(trace, sim, out, "--no-html")[3:]
    done = subprocess.run(
        [sys.executable, "-c", code, *told], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert "40 sent, 40 ok" in done.stdout
    lines = (out / "requests.jsonl").read_bytes().splitlines(keepends=True)
    assert 2 < len(lines) < 40
    assert all(orjson.loads(line)["outcome"] == "ok" and line.endswith(b"\n") for line in lines)
    assert done.stderr.count("requests.jsonl") == 1
    assert analyze(["report", str(out)]) == 0


def test_the_first_line_is_the_verdict_and_the_last_one_names_the_page(trace, tmp_path, capsys):
    out = tmp_path / "out"
    with in_thread(Engine()) as engine:
        more = ["--out", str(out), "--no-progress", "--goodput", "ttft:60,tpot:9"]
        assert main([str(trace), "--target", engine.url, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("verdict: 5 of 5 ok")
    head = " ".join(lines[:6])
    for said in ("TTFT p90", "of 60 s", "TPOT p90", "of 9 s", "hits", "slowest phase"):
        assert said in head, (said, head)
    assert lines[-1] == f"written: {out / 'report.html'}"
    page = (out / "report.html").read_text()
    assert page.index("5 of 5 ok") < page.index("<dl>") < page.index("<table>")


def test_a_run_without_one_ok_says_the_cause_first_and_in_red(tmp_path, capsys):
    rows = [{"timestamp": 0, "input_length": 5, "output_length": 1} for _ in range(4)]
    trace = written(tmp_path / "m.jsonl", rows)
    plan = {f"line:{at}": "http_error" for at in range(1, 5)}
    with in_thread(Engine(plan=plan)) as engine:
        status = main(
            [str(trace), "--target", engine.url, "--out", str(tmp_path / "o"), "--no-progress"]
        )
    assert status == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("verdict: 0 of 4 ok: ")
    assert "http_error 500: broken" in first
    page = (tmp_path / "o/report.html").read_text()
    assert "class='verdict bad'" in page
    assert page.index("http_error 500: broken") < page.index("<dl>")


@pytest.mark.parametrize("allowed", [(), ("--max-failures", "5"), ("--max-failures", "50")])
def test_a_wrong_model_stops_after_the_first_answers(tmp_path, capsys, allowed):
    rows = [{"timestamp": 40 * at, "input_length": 5, "output_length": 1} for at in range(40)]
    trace = written(tmp_path / "m.jsonl", rows)
    plan = {f"line:{at}": "refuse" for at in range(1, 41)}
    engine = Engine(plan=plan, refusal=b'{"error":{"message":"The model nope does not exist"}}')
    with in_thread(engine):
        status, summary, _rows = run(trace, engine, tmp_path, "--model", "nope", *allowed)
    said = capsys.readouterr().out
    assert "The model nope does not exist" in said.splitlines()[0]
    if allowed == ("--max-failures", "50"):
        assert (status, summary["requests"]["sent"]) == (0, 40)
        return
    assert status == 1
    assert summary["requests"]["sent"] < 20
    assert "stopped" in said
    assert "tiny" in said  # what the target does serve


def test_a_target_that_dies_before_it_answers_ends_the_run(tmp_path, capsys):
    rows = [{"timestamp": 40 * at, "input_length": 5, "output_length": 1} for at in range(60)]
    trace = written(tmp_path / "m.jsonl", rows)
    plan = {f"line:{at}": "close_before" for at in range(1, 61)}
    with in_thread(Engine(plan=plan)) as engine:
        status, summary, _rows = run(trace, engine, tmp_path)
    assert status == 1
    assert summary["requests"]["sent"] < 30
    assert "stopped" in capsys.readouterr().out


def test_a_target_that_answers_one_of_the_first_is_replayed_to_the_end(tmp_path):
    rows = [{"timestamp": at, "input_length": 5, "output_length": 1} for at in range(40)]
    trace = written(tmp_path / "m.jsonl", rows)
    plan = {f"line:{at}": "refuse" for at in range(2, 41)}
    engine = Engine(plan=plan, refusal=b"{}")
    with in_thread(engine):
        _status, summary, _rows = run(trace, engine, tmp_path)
    assert summary["requests"]["sent"] == 40


@pytest.mark.long
def test_a_full_disk_behind_the_console_is_one_line_too(trace, tmp_path):
    out = tmp_path / "out"
    with in_thread(Engine()) as engine, open("/dev/full", "w") as full:
        done = subprocess.run(
            command(trace, engine, out, "--no-html"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "replay: standard output: No space left on device\n"
    assert done.returncode == 1
    assert analyze(["report", str(out)]) == 0


def test_an_odd_event_costs_one_request(tmp_path, capsys):
    trace = written(tmp_path / "a.jsonl", [row for name in "abc" for row in session(name, 1)])
    with in_thread(Engine(plan={"b:0": "odd_event"})) as engine:
        status, summary, rows = run(trace, engine, tmp_path)
    assert status == 1
    assert summary["requests"]["by_outcome"] == {"ok": 2, "stream_error": 1}
    assert summary["output_tokens"] == 6
    [odd] = [row for row in rows.values() if row["outcome"] != "ok"]
    assert odd["error"].startswith("event is of another form: ")
    assert odd["completion_tokens"] is None
    capsys.readouterr()
