"""What is read from an engine's metrics, also from old or broken ones."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from proxy.core.accounts.engine_reports import EngineStats
from proxy.fleet import engine_metrics
from proxy.fleet.instances import Instances
from proxy.net.peer_documents import sample_of
from tests.support.harness import at_once, chat, proxied, until


def parse(exposition: bytes) -> EngineStats:
    """What is read from an exposition."""
    return at_once(engine_metrics.parse(exposition))


NEW = b"""# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",cache_dtype="auto"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000",cache_dtype="auto"} 1.0
vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 400.0
vllm:prompt_tokens_by_source_total{source="local_compute"} 50.0
vllm:prompt_tokens_by_source_total{source="local_cache_hit"} 25.0
vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 25.0
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 7
process_start_time_seconds 1.7951760001e+09
"""


def test_two_ranks_of_a_new_engine() -> None:
    assert parse(NEW) == EngineStats(
        kv_used_ratio=0.75,
        kv_used_by_rank=(0.25, 0.75),
        kv_total_tokens=32_000,
        requests_running=7,
        requests_waiting=1,
        looked_up_tokens=1000.0,
        local_hit_tokens=400.0,
        external_hit_tokens=25.0,
        start_s=1795176000.1,
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b'kv_cache_usage_perc{engine="1"} 0.5|kv_cache_usage_perc{engine="0"} 0.25', (0.25, 0.5)),
        (b'kv_cache_usage_perc{engine="10"} 1|kv_cache_usage_perc{engine="9"} 0', (0.0, 1.0)),
        (b'kv_cache_usage_perc{engine="0"} 0.5|cache_config_info{engine="1"} 1', (0.5, None)),
        (b'kv_cache_usage_perc{engine="0"} 0.5|cache_config_info{block_size="16"} 1', (0.5,)),
        (b'kv_cache_usage_perc{engine="0"} 0.5|kv_cache_usage_perc{engine="1"} 7', (0.5, None)),
        (b"kv_cache_usage_perc 0.5", ()),
        (b'kv_cache_usage_perc{engine="x"} 0.5', ()),
        (b"|".join(b'kv_cache_usage_perc{engine="%d"} 0' % n for n in range(1025)), ()),
    ],
)
def test_usage_is_kept_per_rank(lines: bytes, expected: tuple[float | None, ...]) -> None:
    text = b"".join(b"vllm:%b\n" % line for line in lines.split(b"|"))
    assert parse(text).kv_used_by_rank == expected


def test_old_names() -> None:
    assert parse(b"vllm:gpu_cache_usage_perc 0.5\n").kv_used_ratio == 0.5


LOCAL = """
vllm:prefix_cache_queries_total{engine="0"} 600
vllm:prefix_cache_queries_total{engine="1"} 400
vllm:prefix_cache_hits_total{engine="0"} 100
vllm:prefix_cache_hits_total{engine="1"} 150
"""
EXTERNAL = """
vllm:external_prefix_cache_queries_total{engine="0"} 750
vllm:external_prefix_cache_hits_total{engine="0"} 500
"""
IN_PLACE = """
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 300
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 250
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 250
vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 50
"""
CREATED = "vllm:prefix_cache_queries_created 1.7e9\nvllm:prefix_cache_hits_created 1.7e9\n"


@pytest.mark.parametrize(
    ("exposition", "ratios"),
    [
        (LOCAL + EXTERNAL + IN_PLACE, (0.25, 0.3, 0.55)),
        (LOCAL + EXTERNAL, (0.25, 0.5, 0.75)),
        (LOCAL + CREATED, (0.25, None, None)),
        (LOCAL.replace(":prefix", ":gpu_prefix"), (0.25, None, None)),
        (LOCAL + LOCAL.replace(":prefix", ":gpu_prefix"), (0.25, None, None)),
        ((LOCAL + EXTERNAL).replace("_total", ""), (0.25, 0.5, 0.75)),
        (EXTERNAL, (None, pytest.approx(2 / 3), None)),
        ((LOCAL + EXTERNAL).translate(str.maketrans("123456789", "0" * 9)), (None, None, None)),
        (IN_PLACE, (None, None, None)),
    ],
    ids=[
        "newest: transfers that came",
        "until there were sources: transfers that were due",
        "until connectors were counted",
        "the oldest names",
        "both names while one was given up",
        "counters without their suffix",
        "no local prefix cache",
        "nothing served yet",
        "nothing that says what was looked up",
    ],
)
def test_hits_of_every_version_have_one_denominator(
    exposition: str, ratios: tuple[float | None, ...]
) -> None:
    """All per prompt token looked up, so that local and external may be added."""
    stats = parse(exposition.encode())
    assert (stats.hit_ratio, stats.external_hit_ratio, stats.combined_hit_ratio) == ratios


def test_counts_under_two_names_are_counted_once() -> None:
    both = parse((LOCAL + LOCAL.replace(":prefix", ":gpu_prefix")).encode())
    assert (both.looked_up_tokens, both.local_hit_tokens) == (1000.0, 250.0)


def test_stated_size_wins() -> None:
    stated = b'vllm:cache_config_info{kv_cache_size_tokens="777",block_size="16"} 1\n'
    assert parse(stated).kv_total_tokens == 777


def test_nothing_is_unknown_not_zero() -> None:
    assert parse(b"") == parse(b"<html>hello</html>") == EngineStats()


@given(st.binary(max_size=300), st.integers(0, len(NEW)))
def test_garbage_never_raises(noise: bytes, at: int) -> None:
    assert isinstance(parse(NEW[:at] + noise + NEW[at:]), EngineStats)


@pytest.mark.parametrize(
    "lines",
    [
        b'vllm:num_requests_running{engine="%d"} 1e308\n',
        b'vllm:num_requests_running{engine="%d"} 9e15\n',
        b'vllm:num_requests_running{engine="%d"} 1e15\n' * 9,
        b'vllm:cache_config_info{engine="%d",kv_cache_size_tokens="1e308"} 1\n',
        b'vllm:cache_config_info{engine="%d",kv_cache_size_tokens="9e15"} 1\n',
        b'vllm:cache_config_info{engine="%d",num_gpu_blocks="1e300",block_size="9"} 1\n',
    ],
)
def test_what_is_too_large_is_not_known(lines: bytes) -> None:
    """Their sum neither: it would be no number that JSON has."""
    assert parse(lines.replace(b"%d", b"0") + lines.replace(b"%d", b"1")) == EngineStats()


async def test_a_look_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def fails(*args: object) -> None:
        nonlocal looks
        looks += 1
        raise OverflowError("too much")

    monkeypatch.setattr(Instances, "observe_report", fails)
    async with proxied(tmp_path, 1, scrape_interval=0.01) as (proxy, _):
        await until(lambda: looks > 2, "looked at again and again")
        assert (await proxy.post(chat("x"))).status == 200
    lines = [r for r in caplog.records if "a periodic task failed" in r.getMessage()]
    assert len(lines) == 1, "once per while"


def asleep(*states: tuple[str, str, float]) -> bytes:
    line = 'vllm:engine_sleep_state{engine="%s",model_name="m",sleep_state="%s"} %s\n'
    return "".join(line % state for state in states).encode()


@pytest.mark.parametrize(
    ("metrics", "is_asleep"),
    [
        (NEW, None),
        (
            asleep(("0", "awake", 1.0), ("0", "weights_offloaded", 0), ("0", "discard_all", 0)),
            False,
        ),
        (asleep(("0", "awake", 0.0), ("0", "weights_offloaded", 1), ("0", "discard_all", 0)), True),
        (asleep(("0", "awake", 0), ("0", "weights_offloaded", 0), ("0", "discard_all", 1)), True),
        (asleep(("0", "awake", 0), ("0", "weights_offloaded", 0), ("0", "discard_all", 0)), True),
        (asleep(("0", "discard_all", 1)), True),
        (asleep(("0", "awake", 1), ("1", "awake", 0)), True),
        (asleep(("0", "awake", 1), ("1", "awake", 1)), False),
        (asleep(("0", "dozing", 1)), None),
        (asleep(("0", "awake", float("nan"))), None),
    ],
)
def test_whether_it_sleeps(metrics: bytes, is_asleep: bool | None) -> None:
    assert parse(metrics).is_asleep is is_asleep


LABEL = st.text('abcXYZ_09 {},="\\\n\tä', max_size=12)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["vllm:num_requests_running", "sglang:num_queue_reqs"]),
            st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), LABEL, max_size=3),
            st.floats() | st.integers(-5, 10**18),
        ),
        max_size=5,
    )
)
def test_lines_are_read_as_prometheus_reads_them(
    rows: list[tuple[str, dict[str, str], float]],
) -> None:
    def shown(value: str) -> str:
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    for name, labels, value in rows:
        inner = ",".join(f'{key}="{shown(text)}"' for key, text in labels.items())
        line = f"{name}{{{inner}}} {value}" if labels else f"{name} {value}"
        (family,) = text_string_to_metric_families(line + "\n")
        (theirs,), ours = family.samples, sample_of(line.encode())
        assert ours is not None
        assert (ours.name, dict(ours.labels)) == (theirs.name, theirs.labels)
        assert ours.value == float(theirs.value) or math.isnan(theirs.value)


MIB = 1 << 20
WANTED = b"vllm:num_requests_running"
HEAVY = {
    "one line of labels": WANTED + b"{" + b",".join(b'a%d=""' % n for n in range(140_000)) + b"} 1",
    "escaped quotes": (WANTED + b'{a="' + b'\\"' * 200_000 + b'"} 1\n') * 2,
    "an open label": (WANTED + b'{a="' + b'\\"' * 2_000 + b"\n") * 250,
    "blanks": (WANTED + b" " * 4_000 + b"1" + b" " * 50 + b"x y z\n") * 250,
    "plain lines": (WANTED + b" 1\n") * 38_000,
    "labels within the limit": (WANTED + b"{" + b'a="",' * 800 + b"} 1\n") * 250,
    "empty lines": b"\n" * MIB,
    "carriage returns": WANTED + b"\r" * MIB,
    "braces": (WANTED + b"{" * 3_000 + b"\n") * 340,
}


@pytest.mark.parametrize("kind", HEAVY)
def test_no_document_takes_long(kind: str) -> None:
    """CPU time per MiB: a quadratic one takes seconds, and of one made of objects a tenth."""
    document = (HEAVY[kind] + b"\n")[:MIB]
    begun_s = time.thread_time()
    parse(document)
    assert time.thread_time() - begun_s < 0.5
    assert parse(document[: len(document) // 2] + b"\n" + NEW) is not None


@pytest.mark.parametrize("kind", HEAVY)
def test_no_turn_takes_long(kind: str) -> None:
    """CPU time between two pauses, the worst of a document and the best of three tries."""
    document = (HEAVY[kind] + b"\n")[:MIB]
    assert min(max(_turns_s(document)) for _ in range(3)) < 0.005


def _turns_s(document: bytes) -> Iterator[float]:
    begun_s = time.thread_time()
    for _ in engine_metrics.parse(document):
        yield time.thread_time() - begun_s
        begun_s = time.thread_time()
    yield time.thread_time() - begun_s
