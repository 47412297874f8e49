"""Parse an engine's `/metrics` to EngineStats: the few series that decisions and dashboards use.

Only lines of those series are parsed, in turns: a whole vLLM exposition takes tens of milliseconds,
which would delay every stream. Older vLLM names of a series are accepted too. During a rename vLLM
exports both names with the same counts, so only the first name found is read. The same figures are
read from SGLang's engines. NVIDIA Dynamo's frontend reports the KV cache size of one worker, which
is too low with several workers behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping

from proxy.core.accounts.engine_reports import EngineStats
from proxy.net.peer_documents import Sample, sample_of, wanted_lines

MOST = 1 << 53
"""A larger value is ignored: floats beyond it do not hold whole numbers exactly."""
MOST_RANKS = 1024
"""An engine that names more data-parallel ranks is taken for one without."""
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_CONFIG = ("vllm:cache_config_info",)
_KV_TOKENS = "sglang:max_total_num_tokens"
_KV_BLOCKS = "dynamo_frontend_model_total_kv_blocks"
_BLOCK_TOKENS = "dynamo_frontend_model_kv_cache_block_size"
_SOURCES = ("vllm:prompt_tokens_by_source_total", "vllm:prompt_tokens_by_source")
_EXTERNAL = "external_kv_transfer"
"""The source of prompt tokens whose KV a connector brought."""
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_QUERIES = (
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    *("vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries"),
)
_HITS = (
    *("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    *("vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits"),
)
_EXTERNAL_QUERIES = (
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_queries",
)
_EXTERNAL_HITS = ("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_hits")
_STARTED = ("process_start_time_seconds",)
_SLEEP = ("vllm:engine_sleep_state",)
_AWAKE = "awake"
_STATES = (_AWAKE, "weights_offloaded", "discard_all")
"""Values of its label `sleep_state`; of a sleep of level 0 only `awake` tells."""
_WANTED = tuple(
    name.encode()
    for names in (
        *(_USAGE, _CONFIG, _SOURCES, _RUNNING, _WAITING, _STARTED, _SLEEP),
        *(_QUERIES, _HITS, _EXTERNAL_QUERIES, _EXTERNAL_HITS),
        (_KV_TOKENS, _KV_BLOCKS, _BLOCK_TOKENS),
    )
    for name in names
)


Samples = Mapping[str, list[Sample]]
"""The values of each series, by its name."""


def parse(exposition: bytes) -> Generator[None, None, EngineStats]:
    """Read an engine's metrics in turns; invalid lines and impossible values are ignored."""
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    for line in wanted_lines(exposition, _WANTED):
        if line is None:
            yield
        elif (sample := sample_of(line)) and 0 <= sample.value < MOST:
            found[sample.name].append(sample)
    return _stats(found)


def _stats(samples: Samples) -> EngineStats:
    used = [s.value for s in _named(samples, _USAGE) if s.value <= 1]
    total = [_kv_tokens(s.labels) for s in _named(samples, _CONFIG)] or _others_kv(samples)
    known = [tokens for tokens in total if tokens]
    return EngineStats(
        kv_used_ratio=max(used, default=None),
        kv_used_by_rank=_used_by_rank(samples),
        kv_total_tokens=_whole(sum(known)) if known else None,
        requests_running=_whole(_sum(samples, _RUNNING)),
        requests_waiting=_whole(_sum(samples, _WAITING)),
        looked_up_tokens=_looked_up(samples),
        local_hit_tokens=_sum(samples, _HITS),
        external_hit_tokens=_external_hits(samples),
        start_s=max((s.value for s in _named(samples, _STARTED)), default=None),
        is_asleep=_is_asleep(samples),
    )


def _named(samples: Samples, names: Iterable[str]) -> Iterable[Sample]:
    """The values of the series of these names."""
    return (sample for name in names for sample in samples.get(name, ()))


def _used_by_rank(samples: Samples) -> tuple[float | None, ...]:
    """The KV usage of each data-parallel rank; None for a rank that has a cache and tells none.

    Empty where no rank tells its usage. vLLM numbers the ranks in the label `engine`.
    """
    found: dict[int, float | None] = {}
    for sample in _named(samples, (*_USAGE, *_CONFIG)):
        rank = sample.labels.get("engine", "")
        if not (rank.isdecimal() and len(rank) < 9):
            continue
        used, known = found.setdefault(int(rank), None), sample.value
        if sample.name in _USAGE and known <= 1:
            found[int(rank)] = known if used is None else max(used, known)
    if len(found) > MOST_RANKS or all(used is None for used in found.values()):
        return ()
    return tuple(found[rank] for rank in sorted(found))


def _sum(samples: Samples, names: tuple[str, ...]) -> float | None:
    """The sum of a series over its ranks, under the first of its names that is there."""
    for name in names:
        if values := [s.value for s in samples.get(name, ())]:
            return sum(values)
    return None


def _is_asleep(samples: Samples) -> bool | None:
    """Whether any data-parallel rank sleeps; None where none tells."""
    told = [(s.labels.get("sleep_state"), s.value) for s in _named(samples, _SLEEP)]
    marks = [(v == 0) if state == _AWAKE else (v != 0) for state, v in told if state in _STATES]
    return any(marks) if marks else None


def _looked_up(samples: Samples) -> float | None:
    """Prompt tokens looked up: all of a prompt locally, and what is not there at the connector.

    Without a local prefix cache all of a prompt is looked up at the connector.
    """
    counts = (_sum(samples, _QUERIES), _sum(samples, _EXTERNAL_QUERIES))
    return max((count for count in counts if count is not None), default=None)


def _external_hits(samples: Samples) -> float | None:
    """Tokens that a connector brought: as they were in place, in older engines as they were due.

    `external_prefix_cache_hits` counts a transfer that never comes, too.
    """
    came = {
        name: [s for s in samples.get(name, ()) if s.labels.get("source") == _EXTERNAL]
        for name in _SOURCES
    }
    in_place = _sum(came, _SOURCES)
    return in_place if in_place is not None else _sum(samples, _EXTERNAL_HITS)


def _whole(value: float | None) -> int | None:
    return None if value is None or value >= MOST else int(value)


def _others_kv(samples: Samples) -> list[int | None]:
    """KV capacity in tokens of an engine that is not vLLM; empty where it tells none."""
    if stated := [s.value for s in samples.get(_KV_TOKENS, ())]:
        return [_whole(max(stated))]
    sizes = {tuple(s.labels.items()): s.value for s in samples.get(_BLOCK_TOKENS, ())}
    blocks = [(s.value, tuple(s.labels.items())) for s in samples.get(_KV_BLOCKS, ())]
    tokens = [count * sizes[labels] for count, labels in blocks if labels in sizes]
    return [_whole(max(tokens))] if tokens else []


def _kv_tokens(labels: Mapping[str, str]) -> int | None:
    """KV capacity in tokens: the value that the engine states, else blocks times block size."""
    try:
        if (stated := labels.get("kv_cache_size_tokens", "")) not in ("", "None"):
            tokens = int(float(stated))
        else:
            tokens = int(float(labels["num_gpu_blocks"]) * float(labels["block_size"]))
    except (KeyError, ValueError, OverflowError):
        return None
    return tokens if 0 <= tokens < MOST else None
