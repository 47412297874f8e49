"""The results of a run: rows for `requests.jsonl`, and facts about the run for the summary.

Times in a row are real seconds from the origin of the run, whatever `--time-scale` is; null means
unknown or that it did not happen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from replayer.replay.client import ReplayOutcome, TimedExchange
from replayer.replay.options import ReplayOptions
from replayer.replay.plan import Plan, ideal_hits
from replayer.replay.run import Result, Run

INSTANCE, ROUTE, REASON = (f"X-Cache-Proxy-{name}" for name in ("Instance", "Route", "Reason"))
GAPS = "itl_s"  # in the rows for the summary, but too long for the file


def rows_of(results: Sequence[Result], options: ReplayOptions) -> list[dict[str, Any]]:
    """Make one row per result, in the order of sending; skipped ones last."""
    sent = [result for result in results if result.exchange is not None]
    sent.sort(key=lambda result: result.exchange.sent_s if result.exchange else 0.0)
    hits = ideal_hits(result.request for result in sent)
    rest = [result for result in results if result.exchange is None]
    return [_row(result, hits, save_text=options.save_text) for result in (*sent, *rest)]


def _row(result: Result, hits: dict[str, int], *, save_text: bool) -> dict[str, Any]:
    request = result.request
    row: dict[str, Any] = {
        "request_id": request.request_id,
        "sent_as": result.sent_as,
        "session_id": request.session_id,
        "turn": request.turn,
        "outcome": ReplayOutcome.SKIPPED,
        "intended_s": result.intended_s,
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "ideal_hit_tokens": hits.get(request.request_id),
    }
    if result.exchange is not None:
        row |= _seen(result.exchange)
        if save_text:
            row["output_text"] = result.exchange.stream.text.decode()
    return row | ({"trace": request.extra} if request.extra else {})


def _seen(exchange: TimedExchange) -> dict[str, Any]:
    stream = exchange.stream
    return {
        "outcome": exchange.outcome,
        "status": exchange.status,
        "error": exchange.error,
        "attempts": exchange.attempts,
        "refusals": exchange.refusals,
        "retry_waits_s": exchange.retry_waits_s,
        "sent_s": exchange.sent_s,
        "first_byte_s": exchange.first_byte_s,
        "first_token_s": stream.first_token_s,
        "end_s": exchange.end_s,
        "last_token_s": stream.last_token_s,
        "prompt_tokens": stream.prompt_tokens,
        "completion_tokens": stream.completion_tokens,
        "cached_tokens": stream.cached_tokens,
        "finish_reason": stream.finish_reason,
        "chunks": stream.chunks,
        "max_gap_s": max(exchange.gaps_s, default=None),
        "output_digest": exchange.digest,
        GAPS: exchange.gaps_s,
        **_placed(exchange.headers),
    }


def _placed(headers: Mapping[str, str]) -> dict[str, str | None]:
    """Where the proxy says that it placed the request: of its reasons the last, of the offload."""
    instance, reason = headers.get(INSTANCE), headers.get(REASON)
    is_placed = instance is not None and reason is not None
    return {
        "instance": instance,
        "route_class": headers.get(ROUTE),
        "offload_decision_reason": reason.rpartition("; ")[2] if is_placed and reason else None,
    }


def run_facts(run: Run, plan: Plan, started_unix_s: float, *, finished: bool) -> dict[str, Any]:
    """Return the run's settings and circumstances, for the summary."""
    options = run.options
    return {
        "trace": str(options.trace),
        "target": options.target,
        "model": run.model,
        "mode": options.mode,
        "concurrency": options.concurrency if options.mode == "sessions" else None,
        "speedup": options.speedup,
        "time_scale": options.time_scale,
        "seed": options.seed,
        "run_id": run.run_id,
        "started_unix_s": started_unix_s,
        "notes": list(plan.notes),
        "planned": len(plan.requests),
        "interrupted": not finished,
        "client_cpu_s": run.cpu_s,
        "slo_s": options.slo_s,
        "engine_counters": asdict(run.engine_counters),
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write `requests.jsonl`."""
    with path.open("wb") as file:
        for row in rows:
            kept = {name: value for name, value in row.items() if name != GAPS}
            file.write(orjson.dumps(kept, option=orjson.OPT_APPEND_NEWLINE))
