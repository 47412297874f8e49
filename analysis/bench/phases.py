"""Phases of requests, from the proxy's log: realised and predicted times.

The phases of a request partition its time at the proxy, from its receipt to its last byte. Each
moment belongs to one phase, so means of phases add up to the mean of the whole.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from analysis.measures import Row, grouped, is_number, spread

PHASES = {
    "decide": "from the receipt to the last decision, less the queue: body read, parsed, placed",
    "queue": "in the proxy's queue, while every instance was busy",
    "prefill_leg": "from P's leg being sent to P's answer, or until D was asked without it",
    "decode_wait": "from P's answer, or the decision, to D's leg being sent: repetitions, pauses",
    "transfer": "from D's leg being sent to a first token made of P's KV: fetch, and D's queue",
    "first_token": "the same where D computes the prompt: D's queue, and the prefill",
    "stream": "from the first token to the last byte; of an answer in one piece all of D's leg",
}
"""Each phase's definition, in the order of time."""
TO_FIRST_TOKEN = ("prefill_leg", "decode_wait", "transfer", "first_token")
SLOWEST = 20


def phases_of(record: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the seconds of each phase of a record of the proxy's log; None: it has no ends.

    A request that ended early has no later phases. Times out of order count as one moment.
    """
    start, end = time_of(record, "t_proxy_recv"), time_of(record, "t_done")
    if start is None or end is None:
        return None
    phases: dict[str, float] = {}
    at = start
    for name, until in _ends(record, end):
        after = min(max(until, at), max(start, end))
        phases[name] = phases.get(name, 0.0) + after - at
        at = after
    return {name: phases[name] for name in PHASES if name in phases}


def time_of(record: Mapping[str, Any], name: str) -> float | None:
    """Return one of a record's times, unix seconds; None where it is unknown or no number."""
    value = record.get(name)
    return value if is_number(value) and not isinstance(value, bool) else None


def _ends(record: Mapping[str, Any], end: float) -> Iterator[tuple[str, float]]:
    """Yield the phases in the order of time, each with the time at which it ended."""
    queued, decided = time_of(record, "t_queued"), time_of(record, "t_decided")
    prefill, decode = time_of(record, "t_prefill_sent"), time_of(record, "t_decode_sent")
    prefilled, first = time_of(record, "t_prefill_done"), time_of(record, "t_first_token")
    if queued is not None:
        yield "decide", queued
        yield "queue", end if decided is None else decided
    if prefill is not None:
        yield "decide", prefill
        yield "prefill_leg", min(t for t in (prefilled, decode, end) if t is not None)
    elif decided is not None:
        yield "decide", decided
    if decode is None:
        yield ("decide" if prefill is None else "decode_wait"), end
        return
    yield "decode_wait", decode
    is_moved = prefilled is not None and not record.get("fallback")
    name = "transfer" if is_moved and record.get("hedge") != "local" else "first_token"
    if first is not None:
        yield name, first
        yield "stream", end
    else:
        yield (name if record.get("stream") else "stream"), end


def classes(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows by route class, in the order of its name; rows without one do not count."""
    routed = (row for row in rows if row.get("route_class"))
    return sorted(grouped(routed, itemgetter("route_class")).items())


def by_route_class(ok: Iterable[Row]) -> dict[str, Any]:
    """Summarise phases and predictions by route class; only rows with phases count.

    A phase that a request did not have counts as 0 s.
    """
    return {
        name: {
            "requests": len(members),
            "time_s": {
                phase: spread(row["phases_s"].get(phase, 0.0) for row in members)
                for phase in PHASES
            },
            "predicted": _predicted(members),
        }
        for name, members in classes(row for row in ok if row.get("phases_s"))
    }


def _predicted(rows: Sequence[Row]) -> dict[str, Any]:
    """Compare predictions, by what was predicted; `ratio`: realised to predicted."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, predicted_s, realised_s in _predictions(row):
            if predicted_s is not None:
                pairs.setdefault(name, []).append((predicted_s, realised_s))
    return {
        name: {
            "count": len(found),
            "predicted_s": spread(predicted_s for predicted_s, _ in found),
            "realised_s": spread(realised_s for _, realised_s in found),
            "ratio": spread(realised / predicted for predicted, realised in found if predicted > 0),
        }
        for name, found in pairs.items()
    }


def _predictions(row: Row) -> Iterator[tuple[str, float | None, float]]:
    """Yield what was predicted of a request: the name, both times in seconds.

    The time to the first token counts from the decision, of which a repetition has another one. A
    phase is compared only where it went as planned, without fall-back or repetition.
    """
    phases = row["phases_s"]
    if row.get("proxy_ttft_s") is not None and (row.get("fallback") or not row.get("retries")):
        realised_s = sum(phases.get(name, 0.0) for name in TO_FIRST_TOKEN)
        yield "ttft", row.get("predicted_ttft_s"), realised_s
    if row.get("fallback") or row.get("retries"):
        return
    if "transfer" in phases and "prefill_leg" in phases:
        yield "prefill_leg", row.get("predicted_prefill_s"), phases["prefill_leg"]
        yield "transfer", row.get("predicted_transfer_s"), phases["transfer"]
    elif "first_token" in phases and not row.get("prefill_instance"):
        yield "first_token", row.get("predicted_prefill_s"), phases["first_token"]


def slowest(rows: Iterable[Row], most: int = SLOWEST) -> list[dict[str, Any]]:
    """Return the requests that waited longest at the proxy for a first token, or for their end."""
    kept = ("request_id", "outcome", "route_class", "prefill_instance", "decode_instance")
    waited = sorted((row for row in rows if row.get("phases_s")), key=_wait_s, reverse=True)
    return [
        {name: row.get(name) for name in kept}
        | {"wait_s": _wait_s(row), "phases_s": row["phases_s"]}
        for row in waited[:most]
    ]


def _wait_s(row: Row) -> float:
    phases: Mapping[str, float] = row["phases_s"]
    all_s = sum(phases.values())
    return all_s if row.get("proxy_ttft_s") is None else all_s - phases.get("stream", 0.0)
