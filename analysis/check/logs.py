"""A run's logs as legs: each leg's engine, sending time and durations.

Read from the proxy's request log and the client's `requests.jsonl`, which a run on real engines has
too, not from the simulated engines' logs. Times are seconds since the run's first request; a
duration is a difference of two times of one clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.runs import RunError, read_log, read_rows
from replayer.virtual.legs import RecordedLeg
from replayer.virtual.recorded import Recorded, Seen, blocks_of

MIN_DECODED = 16
"""Outputs with fewer tokens than this give no time per token."""
NEEDED = (
    *("decode_instance", "route_class", "prompt_tokens", "osl_tokens"),
    *("t_proxy_recv", "t_decode_sent", "t_first_token", "t_done"),
)
P = "prefill_instance"
NULLABLE = (P, "t_prefill_sent", "t_prefill_done", "fallback", "retries")


@dataclass(frozen=True, slots=True)
class CheckSample:
    """A leg and its durations by the log in seconds; None if not usable.

    `first_s`: from sending to the first token at the proxy (of a prefill leg: to its answer);
    `tpot_s`: per output token after that. `kind` groups `first_s`: prefill, first, or moved (KV).
    """

    leg: RecordedLeg
    kind: str
    first_s: float | None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Overhead:
    """One request's seconds outside its legs: in the client, both sockets and the proxy."""

    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run's rows by request id, joined, in the order of the trace."""

    client: Mapping[str, Mapping[str, Any]]
    proxy: Mapping[str, Mapping[str, Any]]

    def seen(self) -> dict[str, Seen]:
        """Return the prompts' lengths by request id."""
        return {
            name: Seen(row["prompt_tokens"], row.get("isl_tokens") or row["prompt_tokens"])
            for name, row in self.proxy.items()
        }

    def overheads(self) -> list[Overhead]:
        """Return how long each client waited for its first token beyond the legs."""
        found = []
        for name, row in self.proxy.items():
            client = self.client[name]
            legs_s = row["t_first_token"] - (row["t_prefill_sent"] or row["t_decode_sent"])
            waited_s = client["first_token_s"] - client["sent_s"]
            found.append(Overhead(row["prompt_tokens"], waited_s - legs_s))
        return found


def read_run_log(folder: Path, recorded: Recorded) -> RunLog:
    """Read both logs; raises RunError for an incomplete run."""
    rows = read_rows(folder / "requests.jsonl")
    not_ok = [row for row in rows if row.get("outcome") != "ok"]
    if not_ok or not rows:
        raise RunError(f"{folder}: {len(not_ok)} of {len(rows)} requests are not ok: no whole run")
    client = {row["request_id"]: row for row in rows}
    wanted = {request.request_id for request in recorded.requests}
    if wanted != set(client):
        raise RunError(f"{folder}: requests.jsonl and run.json are not of one run")
    log = folder / "proxy.jsonl"
    try:
        records = read_log(log, {row["sent_as"] for row in rows})
    except OSError as error:
        raise RunError(f"{log}: cannot be read: {error.strerror}") from None
    proxy = {name: records.get(row["sent_as"], {}) for name, row in client.items()}
    lacking = sum(not _whole(row) for row in proxy.values())
    if lacking:
        problem = "requests are missing, or have no times and tokens"
        raise RunError(f"{log}: {lacking} of {len(proxy)} {problem}")
    ordered = [request.request_id for request in recorded.requests]
    return RunLog({name: client[name] for name in ordered}, {name: proxy[name] for name in ordered})


def _whole(row: Mapping[str, Any]) -> bool:
    named = all(key in row for key in NULLABLE)
    return named and all(row.get(key) is not None for key in NEEDED)


def samples_of(recorded: Recorded, log: RunLog, names: Sequence[str]) -> list[CheckSample]:
    """Return every leg of the run; `names` are the instances in the order of the engines."""
    number = {name: at for at, name in enumerate(names)}
    used = {row[key] for row in log.proxy.values() for key in ("decode_instance", P)}
    if unknown := used - {None, *names}:
        raise RunError(f"proxy.jsonl: instances that run.json does not know: {sorted(unknown)}")
    origin_s = min(row["t_proxy_recv"] for row in log.proxy.values())
    samples: list[CheckSample] = []
    for request in recorded.requests:
        row, name = log.proxy[request.request_id], request.request_id
        samples += legs_of(row, name, blocks_of(request), number, origin_s)
    return samples


def legs_of(
    row: Mapping[str, Any],
    name: str,
    blocks: tuple[int, ...],
    number: Mapping[str, int],
    origin_s: float,
) -> Iterator[CheckSample]:
    """Yield a request's legs: P's, where the offload went as planned, and the last one on D."""
    whole = row["fallback"] is None and not row["retries"]
    moved = name if row[P] and whole and row["t_prefill_sent"] and row["t_prefill_done"] else None
    p = number[row[P]] if moved else None
    if p is not None:
        sent_s = row["t_prefill_sent"]
        leg = RecordedLeg(p, sent_s - origin_s, row["prompt_tokens"], blocks, 1, sends=moved)
        yield CheckSample(leg, "prefill", row["t_prefill_done"] - sent_s)
    sent_s, osl, begun_s = row["t_decode_sent"], row["osl_tokens"], row["t_first_token"]
    leg = RecordedLeg(
        number[row["decode_instance"]],
        sent_s - origin_s,
        row["prompt_tokens"],
        blocks,
        osl,
        fetches=moved,
        fetches_from=p,
    )
    kind = "moved" if moved else "first"
    if begun_s is None:
        yield CheckSample(leg, kind, None)
        return
    # A retried request stays in the load, but its times span two engines.
    first_s = begun_s - sent_s if whole else None
    tpot_s = (row["t_done"] - begun_s) / (osl - 1) if osl >= MIN_DECODED else None
    yield CheckSample(leg, kind, first_s, tpot_s)
