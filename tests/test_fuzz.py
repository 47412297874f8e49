"""Every parser that is fed from outside, with bytes it does not expect: no error but its own.

`HYPOTHESIS_PROFILE=long pytest --timeout 0 tests/test_fuzz.py` gives each 10,000 examples.
"""

from __future__ import annotations

import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.runs import RunError, read_log, read_rows
from proxy.config.load import load
from proxy.config.sources import ConfigError
from proxy.config.values import InstanceSpec
from proxy.core.connectors.base import finished_by_length
from proxy.core.fleet.retries import busy_s
from proxy.core.kvcache.reuse import usage_ratio
from proxy.fleet.engine_metrics import parse
from proxy.net.upstream.bootstrap import read_engine_id
from proxy.net.upstream.client import model_cards
from proxy.protocol.endpoints import Dialect
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.framing import Chunked, FramingError, Length
from proxy.protocol.headers import answer_lines, forwarded
from proxy.protocol.names.session_names import bounded
from proxy.protocol.streams.sse import (
    Scanner,
    end_of_stream,
    events_end,
    first_event,
    is_error_event,
)
from proxy.telemetry.log import printable, printable_json
from proxy.telemetry.record import RequestRecord, note_usage
from proxy.telemetry.request_log import record_json
from replayer.trace.loaders import TraceRequest, read_trace
from replayer.trace.rows import TraceError
from tests.support.examples import USUAL, examples
from tests.support.harness import at_once

scalars = st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text()
few = settings(
    max_examples=examples(40) if settings().max_examples <= USUAL else settings().max_examples
)
CHUNKS = (
    b"5\r\nhello\r\n",
    b"5;a=b\r\nhel",
    b"lo\r\n",
    b"0\r\n",
    b"X: y\r\n",
    b"\r\n",
    b"\n",
    b"5",
)


def fed(framing: Any, data: list[bytes]) -> tuple[bytes, bool, int] | None:
    """The body, whether it is complete, and bytes up to its end; None where it is none."""
    body, taken = b"", 0
    for piece in data:
        if framing.is_done:
            break
        try:
            body += framing.feed(piece)
        except FramingError:
            return None
        taken += framing.end if framing.is_done else len(piece)
    return body, framing.is_done, taken


@given(st.lists(st.binary(max_size=40) | st.sampled_from(CHUNKS), max_size=8), st.integers(0, 100))
def test_framing_is_the_same_however_it_is_cut(data: list[bytes], length: int) -> None:
    whole = b"".join(data)
    bytewise = [whole[at : at + 1] for at in range(len(whole))]
    for made in (Chunked, lambda: Length(length)):
        found = fed(made(), [whole])
        assert fed(made(), data) == fed(made(), bytewise) == found
        if found is not None:
            body, is_done, taken = found
            assert len(body) <= taken <= len(whole)
            assert is_done or taken == len(whole)


@given(
    st.lists(
        st.binary(max_size=40)
        | st.sampled_from([b'"usage":{', b"data: ", b"\n\n", b'"error"', b"[DONE]", b'{"', b"}}"]),
        max_size=12,
    )
)
def test_sse(data: list[bytes]) -> None:
    scanner = Scanner()
    for piece in data:
        scanner.feed(piece)
    whole = b"".join(data)
    at_once = Scanner()
    at_once.feed(whole)
    for what in (Scanner.usage, Scanner.error):
        assert what(scanner) == what(at_once), "however it is cut"
    assert scanner.events == at_once.events
    end = events_end(whole)
    assert end == 0 or whole[:end].endswith((b"\n\n", b"\n\r\n"))
    assert end_of_stream(whole[:end]) <= end
    assert scanner.size == len(b"".join(data))
    if (event := first_event(b"".join(data))) is not None:
        is_error_event(event)


SERIES = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:cache_config_info",
)
LABELS: tuple[str, ...] = (
    "",
    '{source="external_kv_transfer"}',
    '{block_size="16",num_gpu_blocks="NaN"}',
    '{a="',
)
LABELS += ('{block_size="1e400",num_gpu_blocks="2"}', '{kv_cache_size_tokens="inf"}', "{}", "{,}")
VALUES = ("1", "NaN", "+Inf", "-Inf", "-5", "1e400", "", "x", "1 2", "0x1", "1_0", "٣")


@few
@given(
    st.lists(st.tuples(*map(st.sampled_from, (SERIES, LABELS, VALUES))), max_size=6),
    st.binary(max_size=30),
)
def test_an_engines_metrics(rows: list[tuple[str, str, str]], noise: bytes) -> None:
    text = "\n".join(f"{name}{labels} {value}" for name, labels, value in rows)
    stats = at_once(parse(text.encode() + b"\n" + noise))
    ratios = stats.hit_ratio, stats.external_hit_ratio, stats.combined_hit_ratio
    for value in (stats.kv_used_ratio, *ratios):
        assert value is None or 0 <= value <= 1
    for count in (stats.requests_running, stats.requests_waiting, stats.kv_total_tokens):
        assert count is None or count >= 0


@given(st.binary(max_size=60) | st.builds(orjson.dumps, st.dictionaries(st.text(), scalars)))
def test_an_engines_models(body: bytes) -> None:
    assert model_cards(body) is None, "no list of models"


cards = st.dictionaries(st.sampled_from(["id", "object", "root"]), scalars, max_size=3)


@given(st.lists(cards | scalars, max_size=4), st.lists(st.text(), max_size=3))
def test_models_among_others(odd: list[Any], names: list[str]) -> None:
    told = [*odd, *({"id": name} for name in names)]
    found = [card["id"] for card in model_cards(orjson.dumps({"data": told})) or ()]
    assert found[len(found) - len(names) :] == names
    assert all(isinstance(name, str) for name in found)
    assert len(found) <= len(told)


TOLD = "0 engine_id data id prompt_tokens completion_tokens prompt_tokens_details cached_tokens"
TOLD += " choices finish_reason usage"
told = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(TOLD.split()),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)


@given(told)
def test_what_an_engine_says_of_itself(value: Any) -> None:
    body = orjson.dumps(value)
    model_cards(body)
    with suppress(UpstreamFailure):
        assert isinstance(read_engine_id(body) or "", str)
    ratio = usage_ratio(orjson.loads(body))
    assert ratio is None or ratio >= 0
    if isinstance(value, dict):
        finished_by_length(orjson.loads(body))
        for dialect in Dialect:
            record = RequestRecord(request_id="r", endpoint="/", t_proxy_recv=0.0)
            note_usage(record, body, dialect, body)
            assert (record.prompt_tokens or 0) >= 0


@given(st.text(max_size=12) | st.sampled_from(["Sun, 06 Nov 1994 08:49:37 GMT", "-1", "1e9", "٣"]))
def test_retry_after(text: str) -> None:
    assert 0 < busy_s(text, 1.8e9) <= 60


@given(st.text(max_size=40) | st.text("a=:/;[]@.0123bootsrp,", max_size=30))
def test_an_instance(text: str) -> None:
    with suppress(ValueError):
        spec = InstanceSpec.parse(text)
        assert InstanceSpec.parse(str(spec)) == spec
        for url in (spec.url, spec.bootstrap_url or spec.url):
            parts = urlsplit(url)
            assert parts.scheme in ("http", "https")
            assert parts.hostname
            assert 0 < (parts.port or 0) < 65536
            assert parts.username is None
            assert (parts.path, parts.query, parts.fragment) == ("", "", "")


def complaint(arguments: list[str], environ: dict[str, str]) -> str:
    """What is said of these options; nothing when they are fine."""
    try:
        load(arguments, environ)
    except ConfigError as error:
        return str(error)
    return ""


OPTIONS = ("--port", "--instances", "--heavy-threshold", "--max-body-bytes", "--hedge", "--nope")


@given(
    st.lists(st.sampled_from(OPTIONS) | st.text(max_size=8)),
    st.dictionaries(
        st.sampled_from(["CACHE_PROXY_PORT", "CACHE_PROXY_INSTANCES", "CACHE_PROXY_TTFT_SLO"]),
        st.text(max_size=10),
    ),
)
def test_options(arguments: list[str], environ: dict[str, str]) -> None:
    wanted = [a for a in arguments if not a.startswith(("-h", "--h", "--v", "--p"))]
    assert "\n" not in complaint(wanted, environ)


@few
@given(text=st.binary(max_size=60) | st.text("port=1\n[]\"'{}#.", max_size=40).map(str.encode))
def test_a_configuration_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(text)
    assert "\n" not in complaint(["--instances", "a:1", "--config", str(path)], {})


FIELDS: tuple[str, ...] = (
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "hash_runs",
    "session_id",
)
FIELDS += ("request_id", "parent_request_id", "messages", "turn", "tools", "delay", "chat_id")
fields = st.dictionaries(
    st.sampled_from(FIELDS),
    scalars
    | st.lists(scalars, max_size=3)
    | st.lists(st.lists(st.integers(-1, 9), max_size=3), max_size=3),
)


def no_row(data: bytes) -> bytes:
    """These bytes as one line that is no JSON."""
    return b"}" + data.replace(b"\n", b"").replace(b"\r", b"")


def lines(rows: list[Any]) -> bytes:
    return b"\n".join(row if isinstance(row, bytes) else orjson.dumps(row) for row in rows)


def trace(path: Path) -> list[TraceRequest]:
    """What is read up to the first bad row."""
    found = []
    with suppress(TraceError):
        for one in read_trace(path):
            found.append(one)  # noqa: PERF402 - those before the error count
    return found


@few
@given(rows=st.lists(fields | st.binary(max_size=20), max_size=4))
def test_a_trace(tmp_path: Path, rows: list[Any]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(rows))
    found = trace(path)
    assert len({one.request_id for one in found}) == len(found) <= len(rows)
    assert all((one.input_tokens or 1) >= 1 <= one.output_tokens for one in found)
    path.write_bytes(lines(rows[:-1]))
    before = trace(path)
    assert found[: len(before)] == before, "what comes later changes nothing"


logged = st.builds(lambda turn: {"request_id": "a.run", "turn": turn}, st.integers(0, 9))
noise = fields.filter(lambda row: row.get("request_id") != "a.run") | scalars


@few
@given(rows=st.lists(logged | noise | st.binary(max_size=20).map(no_row), max_size=4))
def test_a_request_log(tmp_path: Path, rows: list[Any]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(rows))
    ours = [row for row in rows if isinstance(row, dict) and row.get("request_id") == "a.run"]
    assert read_log(path, {"a.run"}) == ({"a.run": ours[-1]} if ours else {})
    with suppress(RunError):
        assert read_rows(path) == [orjson.loads(orjson.dumps(row)) for row in rows]


header = st.tuples(st.binary(max_size=12) | st.just(b"Connection"), st.binary(max_size=12))


@given(st.lists(header, max_size=6))
def test_headers(fields: list[tuple[bytes, bytes]]) -> None:
    assert forwarded(fields, "id").startswith(b"X-Request-Id: id\r\n")
    answer_lines([(name.lower(), value) for name, value in fields])


@given(st.binary(max_size=30))
def test_a_session_of_any_bytes_can_be_logged_on_one_line(raw: bytes) -> None:
    name = bounded(raw.decode("utf-8", "surrogateescape"))
    record = RequestRecord(request_id="r", endpoint=f"/v1/{name}", t_proxy_recv=0.0)
    record.session_id = record.model = name
    line = record_json(record).decode()
    assert len(line.splitlines()) == 1
    assert not any(char < " " or "\x7f" <= char <= "\x9f" for char in line)
    assert orjson.loads(line)["session_id"] == name


UNSEEN: tuple[Literal["Cc", "Cf", "Cs", "Zl", "Zp"], ...] = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that are not seen, or change how others are."""


@given(st.text(st.characters(categories=UNSEEN) | st.characters(), max_size=20))
def test_a_log_line_stays_one_line_of_what_is_seen(text: str) -> None:
    shown = printable(text)
    assert len((shown + "x").splitlines()) == 1
    assert not [char for char in shown if unicodedata.category(char) in UNSEEN]
    if not set(text) & set('"\\') and not any("\ud800" <= c <= "\udfff" for c in text):
        assert orjson.loads(f'"{shown}"') == text, "escaped as in JSON"


@given(st.text(st.characters(categories=("Cf", "Zl", "Zp")), min_size=1, max_size=4))
def test_no_line_of_the_request_log_turns_around(text: str) -> None:
    record = RequestRecord(request_id="r", endpoint=f"/v1/{text}", t_proxy_recv=0.0)
    record.session_id = record.model = record.error = record.tenant = text
    line = record_json(record)
    assert line.isascii()
    assert orjson.loads(line)["error"] == text


@pytest.mark.parametrize(
    "char", ["\x1b", "\x9b", "\u2028", "\u2029", "\x85", "\x7f", "\u202e", "\ufeff", "\U000e0041"]
)
def test_json_says_the_same_once_printable(char: str) -> None:
    raw = orjson.dumps({"a": f"x{char}y"})
    assert printable_json(raw).isascii()
    assert orjson.loads(printable_json(raw)) == orjson.loads(raw)
