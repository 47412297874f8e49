"""`analyze report` and `analyze compare` on folders as `replay` writes them."""

import orjson
import pytest

from analysis.cli import main
from analysis.report.compare import compare
from analysis.report.page import page
from analysis.report.summary import summarise
from analysis.runs import load_run, table
from tests.support.runs import failed, row, run, skipped


def folder(path, *rows):
    path.mkdir()
    (path / "summary.json").write_bytes(orjson.dumps(run(*rows)))
    (path / "requests.jsonl").write_bytes(b"\n".join(orjson.dumps(one) for one in rows))
    return path


def test_report_prints_the_table_and_writes_the_page(tmp_path, capsys):
    one = folder(tmp_path / "a", row("x"), failed("y", "rejected"), skipped("z"))
    assert main(["report", str(one)]) == 0
    printed = capsys.readouterr().out
    assert "1 rejected, 1 skipped" in printed
    assert "TTFT, failed = inf" in printed
    html = (one / "report.html").read_text()
    assert "<script src=" not in html
    assert "WARM (1)" in html


def test_report_reads_a_proxys_log_alone(tmp_path, capsys):
    log = tmp_path / "proxy.jsonl"
    times = {"t_proxy_recv": 1e9, "t_decided": 1e9 + 1, "t_decode_sent": 1e9 + 1}
    ok = {"request_id": "a", "outcome": "ok", "stream": True, "route_class": "WARM", **times}
    ok |= {"t_first_token": 1e9 + 3, "t_done": 1e9 + 7, "osl_tokens": 5, "decode_instance": "d"}
    refused = {"request_id": "b", "outcome": "rejected", "status": 503, "error": "busy"}
    refused |= {"t_proxy_recv": 1e9, "t_decided": 1e9 + 1, "t_done": 1e9 + 1}
    lines = [orjson.dumps(ok | {"predicted_ttft_s": 1.0}), orjson.dumps(refused), b'{"half']
    log.write_bytes(b"\n".join(lines))
    assert main(["report", str(log)]) == 0
    printed = capsys.readouterr().out
    assert "run: request log proxy.jsonl\n" in printed
    assert "requests: 2 sent, 1 ok, 1 rejected" in printed
    assert "WARM TTFT" in printed
    assert "slowest: a (WARM, ok, d) waited 3,000 ms; decide 1,000, first token 2,000" in printed
    assert "1 lines of the log are not complete records" in printed
    page = tmp_path / "proxy.jsonl.report.html"
    assert f"written: {page}" in printed
    assert "<title>Request log proxy.jsonl</title>" in page.read_text()


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("none.jsonl", (), "none.jsonl: neither the folder of a run nor a proxy's request log"),
        ("other.jsonl", (), "other.jsonl: has no record of the proxy's request log"),
        ("log.jsonl", ("--html", "{0}/no/x.html"), "no/x.html: cannot be written: No such file"),
    ],
)
def test_a_log_that_makes_no_report_is_one_line_and_status_2(tmp_path, capsys, name, more, said):
    (tmp_path / "other.jsonl").write_bytes(b'{"request_id":"a","sent_s":1}\n[1]\n')
    whole = {"request_id": "a", "outcome": "bad_request", "t_proxy_recv": 1.0, "t_done": 2.0}
    (tmp_path / "log.jsonl").write_bytes(orjson.dumps(whole))
    asked = [one.format(tmp_path) for one in more]
    assert main(["report", str(tmp_path / name), *asked]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"analyze: {tmp_path}/{said}")
    assert error.count("\n") == 1


def test_a_page_can_be_made_of_failures_alone():
    rows = [failed("x"), skipped("y")]
    assert "</html>" in page(run(*rows), table(rows))


def test_names_from_files_are_text_on_the_page():
    rows = [row("<script>x")]
    html = page(run(*rows, trace="<script>evil"), table(rows))
    assert "<script>evil" not in html


def test_compare_pairs_requests_and_counts_equal_outputs(tmp_path, capsys):
    a = folder(tmp_path / "a", row("x"), row("y"), failed("z"), row("only"))
    b = folder(
        tmp_path / "b", row("x", first_token_s=1.5), row("y", output_digest="other"), row("z")
    )
    result = compare(load_run(a, summarise), load_run(b, summarise))
    assert (result.common, result.only_a, result.only_b, result.comparable) == (3, 1, 0, 2)
    assert (result.identical, result.different) == (1, ("y",))
    ttft = result.differences[0]
    assert (ttft.tag, ttft.pairs, ttft.mean_s) == ("ttft_s", 2, 0.25)
    assert 0.0 <= ttft.low_s <= ttft.mean_s <= ttft.high_s <= 0.5
    assert main(["compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "identical output: 1 of 2 requests" in printed
    assert "different output: y" in printed


@pytest.mark.parametrize(("other", "status"), [(row("x"), 0), (row("x", output_digest="z"), 1)])
def test_identical_outputs_can_be_required(tmp_path, other, status):
    a, b = folder(tmp_path / "a", row("x")), folder(tmp_path / "b", other)
    assert main(["compare", str(a), str(b), "--require-identical"]) == status


def test_a_run_that_lost_a_request_is_not_identical(tmp_path):
    a, b = folder(tmp_path / "a", row("x"), row("y")), folder(tmp_path / "b", row("x"), failed("y"))
    assert main(["compare", str(a), str(b), "--require-identical"]) == 1


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), (b"{", "must be one JSON object")]
)
def test_a_bad_folder_is_one_line_and_status_2(tmp_path, capsys, content, said):
    if content is not None:
        (tmp_path / "summary.json").write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"analyze: {tmp_path}/summary.json: {said}")
    assert error.count("\n") == 1
