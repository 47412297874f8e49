"""Result folders whose files have other types than a replay writes."""

import copy
import io
from typing import Any

import orjson
import pytest
from rich.console import Console

from analysis.bench.result_forms import FACTS, RESULTS, FormError, check
from analysis.report.confounders import confounders
from analysis.report.page import page
from analysis.report.summary import summarise
from analysis.report.tables import print_report
from analysis.runs import RunError, read_run, table
from tests.support.runs import failed, placed, row, run, skipped

WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    1e14,
    1 << 60,
    "x",
    "",
    [],
    {},
    [[]],
    {"a": {"b": 1}},
    "inf",
    [None],
]
GONE = object()
COUNTERS = {"source": "proxy", "layouts": {"a": "x"}, "unread": {"b": "gone"}} | {
    when: {"a": {"start_s": 1.0, "local_queries": 9.0 * n, "local_hits": 3.0 * n}}
    for n, when in enumerate(("before", "after"), 1)
}
ROWS = [
    placed("a"),
    placed("b", "HEAVY_P2P", policy="cost", offload_decision_reason="offloaded"),
    row("c", refusals=1, attempts=2, retry_waits_s=[0.5], itl_s=[0.1, 0.2]),
    failed("d", status=503, error="timeout"),
    skipped("e"),
]
RUN = run(*ROWS, engine_counters=COUNTERS, slo_s={"ttft": 1.0}, notes=["sampled"], time_scale=2.0)


READ = orjson.loads(orjson.dumps(RUN))


def places(value, at=()):
    """The place of each value within another."""
    if at:
        yield at
    if isinstance(value, dict | list):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*at, name))


def changed(document, at, value):
    found = copy.deepcopy(document)
    inner = found
    for name in at[:-1]:
        inner = inner[name]
    if value is GONE:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return found


def cases(document, every=1):
    """Each place with one of the wrong values, the same one each time."""
    values = [*WRONG, GONE]
    for n, at in enumerate(places(document)):
        if n % every == 0:
            yield changed(document, at, values[n * 7 % len(values)])


def shown(summary, rows):
    print_report(summary, Console(file=io.StringIO()))
    confounders(summary, RUN)
    table(rows, summary.get("time_scale", 1.0))


def test_what_a_run_writes_has_the_form():
    for facts in (RUN, run(), {}, {"time_scale": 1.0, "stopped": None}):
        check(facts, FACTS)
    check(READ, RESULTS)
    check(run(), RESULTS)


@pytest.mark.long
def test_a_summary_of_other_types_is_refused_or_shown(tmp_path):
    (tmp_path / "requests.jsonl").write_bytes(b"\n".join(map(orjson.dumps, ROWS)))
    refused = 0
    for summary in cases(READ, every=2):
        (tmp_path / "summary.json").write_bytes(orjson.dumps(summary))
        try:
            found, rows = read_run(tmp_path, summarise)
        except RunError as error:
            refused += "\n" not in str(error)
        else:
            shown(found, rows)
    assert refused


@pytest.mark.long
def test_rows_of_other_types_are_refused_or_shown(tmp_path):
    (tmp_path / "summary.json").write_bytes(orjson.dumps({"time_scale": 2.0}))
    for n, one in enumerate(ROWS):
        for wrong in cases(one):
            rows = [*ROWS[:n], wrong, *ROWS[n + 1 :]]
            (tmp_path / "requests.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
            shown(*read_run(tmp_path, summarise))


@pytest.mark.long
def test_the_page_takes_what_was_let_in():
    for summary in filter(fits, cases(READ, every=64)):
        assert "</html>" in page(summary, table(ROWS, 2.0))


def fits(summary):
    try:
        check(summary, {**FACTS, **RESULTS})
    except FormError:
        return False
    return True


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        (("phases", "WARM", "predicted", "ttft", "realised_s"), True, "an object, not True"),
        (("phases", "WARM", "time_s", "queue", "max"), "9", "a number >= 0, not '9'"),
        (("requests", "sent"), None, "a number >= 0, not null"),
        (("time_scale",), 0, "a number > 0, not 0"),
        (("errors", 0, "message"), "x" * 99, None),
        (("errors", 0), "x" * 99, "an object, not 'xxx"),
    ],
)
def test_an_error_names_the_place(at, value, told):
    summary = changed(RUN, at, value)
    if told is None:
        check(summary, RESULTS)
        return
    with pytest.raises(FormError, match=r"must be") as caught:
        check(summary, {**FACTS, **RESULTS})
    assert str(caught.value).startswith(".".join(map(str, at)) + f": must be {told}")
    assert len(str(caught.value)) < 150
