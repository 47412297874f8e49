"""The results of a run: rows for `requests.jsonl`, and facts about the run for the summary.

Rows are appended as requests end, behind the facts of the run, so that a run that is killed or
meets a full disk leaves what it has measured. At the end the whole takes their place.

Times in a row are real seconds from the origin of the run, whatever `--time-scale` is; null means
unknown or that it did not happen.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from replayer.arguments import replace_file
from replayer.replay.client import ROUTE_HEADERS, ReplayOutcome, TimedExchange
from replayer.replay.options import ReplayOptions
from replayer.replay.plan import BusyCache, IdealCache, Plan, digest
from replayer.replay.progress import Tally
from replayer.replay.run import Result, Run
from replayer.trace.loaders import TraceRequest

SETTINGS = ("endpoint", "chat", "prompt", "think_cap_s", "ramp_s")
"""Options that change what is sent, or when."""
GAPS = "itl_s"  # in the rows for the summary, but too long for the file


class OutputError(Exception):
    """The folder of a run cannot be written; the text is one line for the user."""


class RunFolder:
    """The folder of a run while it goes on; `tally` is told what happens."""

    def __init__(
        self, options: ReplayOptions, plan: Plan, started_unix_s: float, tally: Tally
    ) -> None:
        """Open nothing yet: what was there before stays until the run begins."""
        self._options, self._plan, self._tally = options, plan, tally
        self._started_unix_s = started_unix_s
        self._ideal = IdealCache()
        self._shares: dict[str, float] = {}
        self._file = -1
        self.is_full = False
        """A write has failed, and that was said."""

    def begun(self, run: Run) -> None:
        """Write the facts, begin the rows; raises OutputError."""
        out = self._options.out
        facts = run_facts(run, self._plan, self._started_unix_s, finished=False)
        try:
            (out / "report.html").unlink(missing_ok=True)
            replace_file(out / "summary.json", orjson.dumps(facts, option=orjson.OPT_INDENT_2))
            self._file = os.open(
                out / "requests.jsonl", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666
            )
        except OSError as error:
            raise OutputError(f"--out {out}: {error.strerror}") from None

    def due(self, request: TraceRequest) -> None:
        """Note how much of a prompt an ideal cache would have, in the order of the schedule."""
        self._shares[request.request_id] = self._ideal.add(request)

    def sent(self) -> None:
        """Tell the tally."""
        self._tally.sent()

    def ended(self, result: Result) -> str | None:
        """Append the row of a request; returns why the run should end, if it should."""
        if not self.is_full:
            share = self._shares.get(result.request.request_id)
            self._append(_line(row_of(result, share, save_text=self._options.save_text)))
        return self._tally.ended(result)

    def _append(self, line: bytes) -> None:
        """Write a whole line or none: one that is cut would spoil the next one too."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            self.failed(str(self._options.out / "requests.jsonl"), error)
            with suppress(OSError):  # of a device
                os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_CUR) - written)

    def failed(self, name: str, error: OSError) -> None:
        """Say on stderr what cannot be written, of the first that cannot."""
        if not self.is_full:
            sys.stderr.write(f"replay: {name}: {error.strerror or error}\n")
        self.is_full = True

    def close(self) -> None:
        """End the rows."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def rows_of(results: Sequence[Result], options: ReplayOptions) -> list[dict[str, Any]]:
    """Make one row per result, in the order of sending; skipped ones last."""
    sent = [result for result in results if result.exchange is not None]
    sent.sort(key=lambda result: result.exchange.sent_s if result.exchange else 0.0)
    cache = IdealCache()
    rows = [row_of(one, cache.add(one.request), save_text=options.save_text) for one in sent]
    _bound_hits(sent, rows)
    rest = (result for result in results if result.exchange is None)
    return [*rows, *(row_of(result, None, save_text=False) for result in rest)]


def _bound_hits(sent: Sequence[Result], rows: Sequence[dict[str, Any]]) -> None:
    """Add how much could be hit to rows with more hits than the ideal.

    An engine may begin requests in another order than that of sending.
    """
    above = [
        at
        for at, row in enumerate(rows)
        if (row["cached_tokens"] or 0) > (row["ideal_hit_tokens"] or 0)
    ]
    if not above:
        return
    cache = BusyCache((one.request, one.exchange.sent_s) for one in sent if one.exchange)
    for at in above:
        exchange = sent[at].exchange
        if exchange is not None:
            first_s = exchange.stream.first_token_s
            share = cache.share(sent[at].request, exchange.end_s if first_s is None else first_s)
            rows[at]["possible_hit_tokens"] = _tokens(sent[at], share)


def _tokens(result: Result, share: float | None) -> int | None:
    """Return a share of a prompt in tokens: the trace's, or the target's of a literal one."""
    tokens = result.request.input_tokens
    if tokens is None and result.exchange is not None:
        tokens = result.exchange.stream.prompt_tokens
    return None if tokens is None or share is None else round(share * tokens)


def row_of(result: Result, share: float | None, *, save_text: bool) -> dict[str, Any]:
    """Make the row of a result; `share`: of its prompt that an ideal cache would have."""
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
        "ideal_hit_tokens": _tokens(result, share),
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
    } | _told(exchange.headers)


def _told(headers: Mapping[str, str]) -> dict[str, str | None]:
    """Return what the proxy's headers say of a request's way.

    `reason` begins with why this instance; of a request that was placed, its last word is the
    reason of the offload decision.
    """
    told = {name: headers.get(header) for name, header in ROUTE_HEADERS.items()}
    reason = told["reason"] if told["route_class"] else None
    return told | {"offload_decision_reason": reason and reason.rpartition("; ")[2]}


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
        "seed": run.seed,
        "seed_is_given": options.seed is not None,
        "run_id": run.run_id,
        "plan_digest": digest(plan.requests),
        "settings": {name: getattr(options, name) for name in SETTINGS}
        | {"retry_503": "backoff" if options.retry_503.is_backoff else options.retry_503.most},
        "started_unix_s": started_unix_s,
        "notes": list(plan.notes),
        "planned": len(plan.requests),
        "interrupted": not finished,
        "stopped": run.stopped,
        "client_cpu_s": run.cpu_s,
        "slo_s": options.slo_s,
        "engine_counters": asdict(run.engine_counters),
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write `requests.jsonl` whole; raises OSError, and then what it had stays."""
    replace_file(path, b"".join(map(_line, rows)))


def _line(row: dict[str, Any]) -> bytes:
    kept = {name: value for name, value in row.items() if name != GAPS}
    return orjson.dumps(kept, option=orjson.OPT_APPEND_NEWLINE)
