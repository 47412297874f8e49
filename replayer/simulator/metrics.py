"""An engine's /metrics, under the names and labels of current vLLM (>= 0.31).

Gauges and counters are read from the model at a scrape, so they cost nothing per step. So are the
histograms of steps, which the model counts; the others are updated per request. As in vLLM, no
success counter counts aborted requests.
"""

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from replayer.engine.engine import Engine
from replayer.engine.iterations import GAP_BOUNDS, Iterations, Spread
from replayer.engine.types import NULL_BLOCKS, SimRequest

Value = float | dict[str, int]
"""A number, or a number for each value of a label."""
Family = GaugeMetricFamily | CounterMetricFamily
_RANK = "0"
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


@lru_cache(maxsize=64)
def _template(name: str, help_: str, model: str, buckets: tuple[float, ...]) -> str:
    """A histogram as prometheus_client writes it, with a place for each number."""
    registry = CollectorRegistry()
    family = Histogram(name, help_, ["model_name", "engine"], buckets=buckets, registry=registry)
    family.labels(model, _RANK)
    lines = generate_latest(registry).decode().replace("%", "%%").splitlines()
    places = (ln if ln[0] == "#" else f"{ln.rpartition(' ')[0]} %r" for ln in lines)
    return "\n".join(places) + "\n"


class _Histogram:
    """Counts of values by their upper bounds; prometheus_client takes a hundred times as long."""

    def __init__(self, template: str, buckets: tuple[float, ...], started_unix_s: float) -> None:
        self._template, self._buckets, self._started_unix_s = template, buckets, started_unix_s
        self._counts = [0.0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1.0
        self._sum += value

    def text(self) -> str:
        counts = tuple(accumulate(self._counts))
        return self._template % (*counts, counts[-1], self._sum, self._started_unix_s)


class EngineMetrics(Collector):
    """All series of one engine, in its own registry. Durations in engine seconds."""

    def __init__(self, engine: Engine, model: str, started_unix_s: float) -> None:
        self._engine = engine
        self._iterations = engine.iterations = Iterations()
        self._labels = {"model_name": model, "engine": _RANK}
        self.rejected = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._started_unix_s = started_unix_s
        self._histograms: list[_Histogram] = []
        text = "Start time of the process since unix epoch in seconds."
        started = Gauge("process_start_time_seconds", text, registry=self._registry)
        started.set(started_unix_s)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean per request", GAP_BOUNDS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Arrival to end", _LATENCY_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to first scheduling", _LATENCY_BUCKETS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First scheduling to first token", _LATENCY_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First token to end", _LATENCY_BUCKETS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt length", _TOKEN_BUCKETS)
        self._output = self._histogram("request_generation_tokens", "Output length", _TOKEN_BUCKETS)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in KV", _TOKEN_BUCKETS
        )

    def render(self) -> bytes:
        """Return the exposition text."""
        histograms = "".join(histogram.text() for histogram in self._histograms)
        return generate_latest(self._registry) + histograms.encode()

    def first_token(self, request: SimRequest) -> None:
        """Observe the time to a request's first token."""
        if request.first_token_s is not None:
            self._ttft.observe(request.first_token_s - request.arrived_s)

    def finished(self, request: SimRequest) -> None:
        """Observe the times and lengths of a request that ended with an answer."""
        scheduled_s, first_s, end_s = request.scheduled_s, request.first_token_s, request.finished_s
        if request.finish_reason == "abort" or scheduled_s is None:
            return
        if first_s is None or end_s is None:
            return
        self._e2e.observe(end_s - request.arrived_s)
        self._queue.observe(scheduled_s - request.arrived_s)
        self._prefill.observe(first_s - scheduled_s)
        self._decode.observe(end_s - first_s)
        if request.output_tokens > 1:
            self._tpot.observe((end_s - first_s) / (request.output_tokens - 1))
        self._prompt.observe(request.job.prompt_tokens)
        self._output.observe(request.output_tokens)
        self._computed.observe(request.job.prompt_tokens - request.local_hit_tokens)

    def collect(self) -> Iterator[Metric]:
        """Yield the series that are read from the model at scrape time."""
        yield from self._load()
        yield from self._tokens()
        yield from self._transfers()
        yield from self._requests()
        done = self._iterations
        yield self._spread("iteration_tokens_total", "Tokens of a step", done.tokens)
        yield self._spread("inter_token_latency_seconds", "Gap between two tokens", done.gaps)

    def _load(self) -> Iterator[Metric]:
        engine, options = self._engine, self._engine.options
        fetching, waiting = len(engine.fetching), len(engine.waiting)
        yield self._gauge("num_requests_running", "Requests in the batch", len(engine.running))
        yield self._gauge("num_requests_waiting", "Requests queued", waiting + fetching)
        reasons = {"capacity": waiting, "deferred": fetching}
        yield self._gauge("num_requests_waiting_by_reason", "Requests queued", reasons, "reason")
        yield self._gauge("kv_cache_usage_perc", "KV in use, 0..1", engine.pool.usage_ratio)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "KV cache layout",
            labels=["engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens"],
        )
        blocks = options.num_blocks + NULL_BLOCKS
        layout = (options.block_size, blocks, options.block_size * blocks)
        config.add_metric([_RANK, *map(str, layout)], 1.0)
        yield config

    def _tokens(self) -> Iterator[Metric]:
        done = self._engine.counters
        yield self._counter("prefix_cache_queries", "Tokens looked up", done.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found", done.prefix_hits)
        yield self._counter(
            "external_prefix_cache_queries", "Tokens looked up elsewhere", done.external_queries
        )
        yield self._counter(
            "external_prefix_cache_hits", "Tokens to come from elsewhere", done.external_hits
        )
        by_source = {
            "local_compute": done.prompt_computed,
            "local_cache_hit": done.prompt_local_hits,
            "external_kv_transfer": done.prompt_external,
        }
        yield self._counter("prompt_tokens", "Prompt tokens in place", sum(by_source.values()))
        yield self._counter(
            "prompt_tokens_by_source", "Prompt tokens by origin", by_source, "source"
        )
        cached = done.prompt_local_hits + done.prompt_external
        yield self._counter("prompt_tokens_cached", "Prompt tokens not computed", cached)
        yield self._counter("generation_tokens", "Tokens generated", done.generated)

    def _transfers(self) -> Iterator[Metric]:
        sender, done = self._engine.sender, self._engine.counters
        if self._engine.options.reads_anything:
            yield self._counter("nixl_num_failed_transfers", "Loads failed", done.failed_receives)
            yield self._counter("nixl_num_kv_expired_reqs", "Pins never pulled", sender.expired)
            return
        yield self._counter("mooncake_bytes_transferred", "KV bytes sent", sender.bytes_sent)
        yield self._counter("mooncake_num_failed_transfers", "Pulls refused", sender.failed)
        yield self._counter("mooncake_num_failed_recvs", "Loads failed", done.failed_receives)
        yield self._counter("mooncake_num_kv_expired_reqs", "Pins never pulled", sender.expired)

    def _requests(self) -> Iterator[Metric]:
        done = self._engine.counters
        yield self._counter("num_preemptions", "Preemptions", done.preemptions)
        finished = {r: n for r, n in done.finished.items() if r != "abort"} | {"abort": 0}
        yield self._counter("request_success", "Requests finished", finished, "finished_reason")
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused", labels=["model_name", "reason"]
        )
        rejections.add_metric([self._labels["model_name"], "max_num_queued_reqs"], self.rejected)
        yield rejections

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> _Histogram:
        template = _template(f"vllm:{name}", help_, self._labels["model_name"], buckets)
        made = _Histogram(template, buckets, self._started_unix_s)
        self._histograms.append(made)
        return made

    def _spread(self, name: str, help_: str, spread: Spread) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", help_, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), list(spread.cumulated()), spread.sum)
        return family

    def _gauge(self, name: str, help_: str, value: Value, *label: str) -> Metric:
        return self._filled(GaugeMetricFamily, name, help_, value, *label)

    def _counter(self, name: str, help_: str, value: Value, *label: str) -> Metric:
        return self._filled(CounterMetricFamily, name, help_, value, *label)

    def _filled(
        self, kind: type[Family], name: str, help_: str, value: Value, *label: str
    ) -> Metric:
        """Make a series of one sample, or of one for each value of a further label."""
        family = kind(f"vllm:{name}", help_, labels=[*self._labels, *label])
        own = list(self._labels.values())
        for key, one in value.items() if isinstance(value, dict) else [((), value)]:
            family.add_metric([*own, key] if key else own, one)
        return family
