"""The summary of a run, `summary.json`: computed from its rows and facts.

Latencies are of requests that ended ok. `ttft_s_failures_as_inf` counts every other request,
skipped ones included, as an infinite wait, so that a run cannot look better by failing its slowest.
Times are the target's (`time_scale`), except schedule lag and `client`, which are real.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from analysis.bench import phases
from analysis.measures import METRICS, Row, in_target_time, is_good, is_ok, samples_of, spread
from analysis.report.engine_cache import engine_cache
from analysis.report.verdict import known_by_counters, known_ratio

LAG_LIMIT_S = 0.5  # above this p99 the load was not the trace's (AIPerf's limit, too)
LENGTH_TOLERANCE = 0.1
ERROR_KINDS = 10  # distinct errors listed in a summary; others are only counted
ERROR_CHARS = 160


def summarise(facts: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Compute the summary from rows as measured; ratios and times without data are None."""
    time_scale = facts.get("time_scale", 1.0)
    rows = in_target_time(rows, time_scale)
    facts = dict(facts)
    counters = engine_cache(facts.pop("engine_counters", None))
    ok = [row for row in rows if is_ok(row)]
    sent = [row for row in rows if row.get("sent_s") is not None]
    duration_s = max((row["end_s"] for row in sent), default=0.0)
    cache, known = _cache(sent, ok), known_ratio(sent)
    return {
        **facts,
        "time_scale": time_scale,
        "duration_s": duration_s,
        "requests": _requests(rows, sent),
        "refusals": refusals(sent),
        **errors(rows),
        "input_tokens": _total(ok, "prompt_tokens"),
        "output_tokens": _total(ok, "completion_tokens"),
        "requested_input_tokens": _total(sent, "input_length"),
        "throughput": {
            "requests_per_s": _rate(len(ok), duration_s),
            "output_tokens_per_s": _rate(_total(ok, "completion_tokens"), duration_s),
        },
        **{tag: spread(samples_of(tag, ok)) for tag in METRICS if tag != "schedule_lag_s"},
        "ttft_s_failures_as_inf": spread(ttft_failures_as_inf(rows)),
        "schedule_lag_s": spread(samples_of("schedule_lag_s", sent)),
        "tokens_per_event": _tokens_per_event(ok),
        "goodput": _goodput(sent, facts.get("slo_s") or {}, duration_s),
        "by_route_class": by_route_class(ok),
        "phases": phases.by_route_class(ok),
        "slowest": phases.slowest(rows),
        "offload_policies": sorted(_counts(rows, "policy")),
        "offload_decision_reasons": _counts(rows, "offload_decision_reason"),
        "cache": cache,
        "engine_cache": counters,
        "known_text_ratio": known_by_counters(cache, counters, len(sent))
        if known is None
        else known,
        "client": {
            "duration_s": duration_s / time_scale,
            "cpu_s": facts.get("client_cpu_s"),
            "cpu_ms_per_request": _per_request_ms(facts.get("client_cpu_s"), len(sent)),
        },
        "degraded": degraded(facts, rows),
    }


def refusals(sent: Sequence[Row]) -> dict[str, Any]:
    """Count answers with status 503, retries included, and the requests that met them.

    `given_up`: requests whose last answer was one; `waited_s`: per request that was sent again.
    """
    refused = [row for row in sent if row.get("refusals")]
    again = [row for row in refused if row["attempts"] > 1]
    return {
        "answers": _total(refused, "refusals"),
        "requests": len(refused),
        "retries": sum(row["attempts"] - 1 for row in again),
        "ok_after_retry": sum(is_ok(row) for row in again),
        "given_up": sum(row.get("status") == HTTPStatus.SERVICE_UNAVAILABLE for row in refused),
        "waited_s": spread(sum(row["retry_waits_s"]) for row in again),
    }


def errors(rows: Iterable[Row]) -> dict[str, Any]:
    """Count the distinct errors of requests that did not end ok, most frequent first."""
    kinds = Counter(
        (str(row["outcome"]), row.get("status"), _one_line(row["error"]))
        for row in rows
        if not is_ok(row) and row.get("error")
    )
    listed = [
        {"outcome": outcome, "status": status, "message": message, "count": number}
        for (outcome, status, message), number in kinds.most_common(ERROR_KINDS)
    ]
    shown = sum(number for _kind, number in kinds.most_common(ERROR_KINDS))
    return {"errors": listed, "errors_not_listed": kinds.total() - shown}


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= ERROR_CHARS else line[: ERROR_CHARS - 3] + "..."


def ttft_failures_as_inf(rows: Iterable[Row]) -> list[float]:
    """Return one TTFT per request of the trace: +inf where it did not end ok."""
    values: list[float] = []
    for row in rows:
        values += samples_of("ttft_s", [row]) if is_ok(row) else (math.inf,)
    return values


def by_route_class(ok: Sequence[Row]) -> dict[str, Any]:
    """Summarise latencies by the proxy's route class; empty if no row has one."""
    return {
        name: {
            "requests": len(members),
            "input_tokens": _total(members, "prompt_tokens"),
            "cached_tokens": _total(members, "cached_tokens"),
            **{tag: spread(samples_of(tag, members)) for tag in ("ttft_s", "tpot_s", "e2e_s")},
        }
        for name, members in phases.classes(ok)
    }


def degraded(facts: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """List the reasons to trust a run's figures less."""
    ok = [row for row in rows if is_ok(row)]
    found = []
    lag_p99 = spread(samples_of("schedule_lag_s", rows))["p99"]
    if lag_p99 is not None and lag_p99 > LAG_LIMIT_S:
        found.append(f"schedule lag p99 {lag_p99:.3f} s is above {LAG_LIMIT_S} s")
    if facts.get("interrupted"):
        found.append(f"interrupted after {len(rows)} of {facts.get('planned')} requests")
    if facts.get("rows_skipped"):
        found.append(f"{facts['rows_skipped']} lines of requests.jsonl are not complete rows")
    without = sum(row.get("completion_tokens") is None for row in ok)
    if without:
        found.append(f"{without} answers without usage: no TPOT, no token counts")
    other = sum(
        row["completion_tokens"] != row["output_length"]
        for row in ok
        if row.get("completion_tokens") is not None and row.get("output_length") is not None
    )
    if other:
        found.append(f"{other} answers whose length is not the trace's")
    ratio = _length_ratio(ok)
    if ratio is not None and abs(ratio - 1) > LENGTH_TOLERANCE:
        found.append(f"the server counts {ratio:.2f} tokens for each token of the trace's prompts")
    return found + _log_problems(facts)


def _log_problems(facts: Mapping[str, Any]) -> list[str]:
    """List what is wrong with the proxy's log."""
    found = []
    if facts.get("log_lines_skipped"):
        found.append(f"{facts['log_lines_skipped']} lines of the log are not complete records")
    if facts.get("proxy_log_missing"):
        found.append(f"{facts['proxy_log_missing']} requests are not in the proxy's log")
    if facts.get("proxy_log_problem"):
        found.append(facts["proxy_log_problem"])
    return found


def _requests(rows: Sequence[Row], sent: Sequence[Row]) -> dict[str, Any]:
    outcomes = Counter(str(row["outcome"]) for row in rows)
    rejected, ok = outcomes["rejected"], outcomes["ok"]
    return {
        "sent": len(sent),
        "ok": ok,
        "rejected": rejected,
        "failed": len(sent) - ok - rejected,
        "skipped": outcomes["skipped"],
        "by_outcome": dict(outcomes),
    }


def _goodput(sent: Sequence[Row], slo_s: Mapping[str, float], duration_s: float) -> dict[str, Any]:
    if not slo_s:
        return {"slo": {}, "kept": {}, "ratio_of_sent": None, "requests_per_s": None}
    good = sum(is_good(row, slo_s) for row in sent)
    return {
        "slo": dict(slo_s),
        "kept": {
            name: _rate(sum(is_good(row, {name: limit}) for row in sent), len(sent))
            for name, limit in slo_s.items()
        },
        "ratio_of_sent": _rate(good, len(sent)),
        "requests_per_s": _rate(good, duration_s),
    }


def _cache(sent: Sequence[Row], ok: Sequence[Row]) -> dict[str, Any]:
    """Return the prefix hit ratios: ideal, predicted by the proxy, and counted by the engines.

    External hits are tokens that a KV transfer brought: on requests with another prefill instance,
    the cached tokens beyond the local hit that the proxy predicted. Other cached tokens are local.
    """
    counted = [row for row in ok if row.get("cached_tokens") is not None]
    routed = [row for row in ok if row.get("hit_tokens") is not None]
    moved = [row for row in counted if row.get("prefill_instance") and "hit_tokens" in row]
    external = sum(max(0, row["cached_tokens"] - (row["hit_tokens"] or 0)) for row in moved)
    cached, prompt = _total(counted, "cached_tokens"), _total(counted, "prompt_tokens")
    told = [row for row in sent if row.get("ideal_hit_tokens") is not None]
    length = sum(row.get("input_length") or row.get("prompt_tokens") or 0 for row in told)
    return {
        "ideal_hit_ratio": _rate(_total(told, "ideal_hit_tokens"), length),
        "predicted_hit_ratio": _rate(_total(routed, "hit_tokens"), _total(routed, "isl_tokens")),
        "engine_hit_ratio": _rate(cached, prompt),
        "local_hit_ratio": _rate(cached - external, prompt) if routed else None,
        "external_hit_ratio": _rate(external, prompt) if routed else None,
    }


def _tokens_per_event(ok: Sequence[Row]) -> float | None:
    """Return the mean tokens per event with content, which is why ITL and TPOT differ."""
    counted = [row for row in ok if row.get("chunks") and row.get("completion_tokens")]
    return _rate(_total(counted, "completion_tokens"), _total(counted, "chunks"))


def _length_ratio(ok: Sequence[Row]) -> float | None:
    counted = [row for row in ok if row.get("prompt_tokens") and row.get("input_length")]
    return _rate(_total(counted, "prompt_tokens"), _total(counted, "input_length"))


def _counts(rows: Iterable[Row], field: str) -> dict[str, int]:
    return dict(Counter(row[field] for row in rows if row.get(field)))


def _total(rows: Iterable[Row], field: str) -> int:
    return sum(row.get(field) or 0 for row in rows)


def _rate(amount: float, whole: float) -> float | None:
    return amount / whole if whole else None


def _per_request_ms(cpu_s: float | None, requests: int) -> float | None:
    return None if cpu_s is None or not requests else cpu_s / requests * 1e3
