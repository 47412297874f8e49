"""One look at the proxy for its live page: plain values, as `GET /ui` has them as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import orjson

from proxy import __version__
from proxy.core.admission.gate import ANY_MODEL
from proxy.core.admission.overload import WINDOW_S
from proxy.core.fleet.health import State
from proxy.core.fleet.members import Member
from proxy.core.placement.alternatives import Alternatives
from proxy.fleet.instances import ANSWERS, Instances
from proxy.state.in_flight import InFlight
from proxy.state.overload import OverloadWatch
from proxy.state.queue import WaitingRoom
from proxy.telemetry.explain import Explained, seconds, utc
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import MayFail, record_json
from proxy.telemetry.requests import DECISIONS_KEPT, REFUSED_KEPT, RequestTelemetry

MINUTE_S, DAY_S = 60.0, 86_400.0
DECISIONS_SHOWN = MOVES_SHOWN = 20
REFUSED_SHOWN = 5
"""Refused requests among the decisions: in an overload they would displace all others."""
WAITING_SHOWN = WAITS_SHOWN = 10
WORDS_CHARS, OUT_NAMED = 160, 3
LEAST_REQUESTS, LEAST_TOKENS, HOT = 3, 1000, 2.0
"""An instance stands out by this factor over the median, from so many requests or tokens on."""
DOUBTFUL = (State.SUSPECT, State.EJECTED, State.PROBING)
SERVES = (State.HEALTHY, State.SUSPECT)
Json = dict[str, Any]


class Look:
    """Looks at what the proxy has in memory, and changes nothing; `parts`: what may fail alone."""

    def __init__(
        self,
        instances: Instances,
        telemetry: RequestTelemetry,
        waiting: WaitingRoom,
        in_flight: InFlight,
        overload: OverloadWatch,
        parts: Sequence[MayFail],
    ) -> None:
        self._instances, self._known, self._clock = instances, instances.known, instances.clock
        self._telemetry, self._waiting = telemetry, waiting
        self._in_flight, self._overload, self._parts = in_flight, overload, parts
        self._said: dict[int, tuple[RequestRecord, Json]] = {}
        """What is said of the last decisions that are over, by their records' identity."""

    def snapshot(self) -> Json:
        """What there is to see now, in the order of the page."""
        now_s = self._clock.now_s()
        unix_s = self._clock.unix(now_s)
        kept = self._telemetry.last(DECISIONS_KEPT + REFUSED_KEPT)
        lately = [one for one in kept if moment(one) >= unix_s - MINUTE_S]
        placed: dict[str | None, list[RequestRecord]] = {}
        for one in lately:
            placed.setdefault(one.decode_instance, []).append(one)
        members = self._known.fleet.members()
        rows = [self._row(m, placed.get(m.instance.name, []), now_s) for m in members]
        mark(rows)
        queue = self._queue(now_s)
        covers_s, decisions = MINUTE_S, self._telemetry.decisions
        if len(decisions) == DECISIONS_KEPT:
            covers_s = min(MINUTE_S, unix_s - moment(decisions[0]))
        return {
            "at": round(unix_s, 3),
            "version": __version__,
            "verdict": self._verdict(rows, queue, now_s),
            "numbers": self._numbers(lately, covers_s, now_s),
            "instances": rows,
            "moves": moves(lately),
            "decisions": self._decisions(last_of(kept)),
            "queue": queue,
            "predictions": predictions(kept),
        }

    def _row(self, member: Member, mine: Sequence[RequestRecord], now_s: float) -> Json:
        """An instance, and `mine`: its requests of the last minute."""
        name, health = member.instance.name, member.health
        known, load = self._known, self._known.ledger.load(member.instance.name)
        report, state = self._instances.reports.get(name), health.state(now_s)
        limits = known.gate.thresholds(ANY_MODEL, name)
        since_s = self._clock.unix(health.since_s(now_s))
        return {
            "name": name,
            "state": "draining" if member.is_draining else str(state),
            "serves": state in SERVES and not member.is_draining,
            "since": round(since_s, 3),
            "since_said": said(since_s, self._clock.unix(now_s)),
            "why": self._why(member, state, now_s),
            "prefilling": load.prefill_requests,
            "decoding": load.decode_requests,
            "ongoing_tokens": load.ongoing_tokens,
            "prefill_tokens": load.prefill_tokens,
            "prefill_limit": limits.active_prefill_tokens_threshold,
            "running": report.requests_running if report else None,
            "waiting": report.requests_waiting if report else None,
            "kv_ratio": report.kv_used_ratio if report else None,
            "kv_limit": limits.active_decode_blocks_threshold,
            "hit_ratio": report.hit_ratio if report else None,
            "sessions": member.state.cache.sessions,
            "ttft_s": middle(one.predictable_ttft_s() for one in mine),
            "predicted_ttft_s": middle(one.predicted_ttft_s for one in mine),
            "requests": len(mine),
            "prefill_tps": round(known.latency.prefill_tps(name)),
        }

    def _why(self, member: Member, state: State, now_s: float) -> str:
        """What an operator should know of an instance, the worst first."""
        name, health = member.instance.name, member.health
        told: list[str] = []
        if state is not State.HEALTHY and health.last_error:
            told.append(health.last_error)
        busy = self._known.busy_by_model(name, now_s).values()
        told += [f"busy: {one.check}" for one in busy if one is not None][:1]
        why_hollow = health.hollow.why
        is_told = bool(why_hollow) and any(why_hollow in one for one in told)
        warnings = self._instances.warnings.get(name, {})
        told += [text for topic, text in warnings.items() if topic != ANSWERS or not is_told]
        return "; ".join(told)[:WORDS_CHARS]

    def _verdict(self, rows: Sequence[Json], queue: Json, now_s: float) -> Json:
        """`state`: ok, warn or bad; `fleet` and `load`: sentences; `warnings`: more of them."""
        serving = sum(row["serves"] for row in rows)
        out = [row for row in rows if not row["serves"]]
        fleet = f"{serving} of {len(rows)} instances serve{'s' * (len(rows) == 1)}"
        named = [_out(row) for row in out[:OUT_NAMED]]
        if len(out) > OUT_NAMED:
            named.append(f"{len(out) - OUT_NAMED} more are out")
        count, longest_s = queue["count"], queue["longest_s"]
        waits = "no request waits"
        if count:
            verb = "requests wait" if count > 1 else "request waits"
            waits = f"{count} {verb}, longest {seconds(longest_s)}"
        overload, of_fleet = self._overload.warning, self._instances.fleet_warning
        texts = [text for text, _ in filter(None, (overload, of_fleet))]
        texts += [fault[0] for part in self._parts if (fault := part.fault) is not None]
        is_odd = any(row["state"] in DOUBTFUL for row in rows)
        state = "bad" if not serving else "warn" if is_odd or texts else "ok"
        if self._in_flight.is_draining:
            texts.insert(0, "the proxy drains: it stops once its requests are over")
        return {
            "state": state,
            "fleet": "; ".join((fleet, *named)),
            "load": f"{self._in_flight.count} in flight; {waits}",
            "warnings": texts,
        }

    def _numbers(self, lately: Sequence[RequestRecord], covers_s: float, now_s: float) -> Json:
        """Counts over the last minute, or over what is kept of it: `seconds`."""
        placed = [one for one in lately if one.decode_instance is not None]
        tokens = sum(one.isl_tokens or 0 for one in placed)
        hits = sum(one.hit_tokens or 0 for one in placed)
        cached = [one for one in placed if one.cached_tokens is not None and one.prompt_tokens]
        return {
            "seconds": round(covers_s, 1),
            "requests": len(placed),
            "in_flight": self._in_flight.count,
            "ttft_s": middle(one.ttft_s() for one in placed),
            "ttft_p90_s": quantile([one.ttft_s() for one in placed], 0.9),
            "hit_ratio": hits / tokens if tokens else None,
            "engine_hit_ratio": _ratio(
                sum(one.cached_tokens or 0 for one in cached),
                sum(one.prompt_tokens or 0 for one in cached),
            ),
            "offloads": sum(one.prefill_instance is not None for one in placed),
            "refused": self._telemetry.overload.refused_lately(now_s),
            "refused_seconds": WINDOW_S,
            "failed": sum(one.outcome not in (None, "ok", "client_gone") for one in placed),
        }

    def _decisions(self, records: Sequence[RequestRecord]) -> list[Json]:
        said = {id(one): self._said.get(id(one)) or (one, decision(one)) for one in records}
        self._said = {key: told for key, told in said.items() if told[0].outcome is not None}
        return [row for _, row in said.values()]

    def _queue(self, now_s: float) -> Json:
        """Who waits, the oldest first, and the last waits that are over, the newest first."""
        entries = sorted(self._waiting.queue.entries(), key=lambda entry: entry.queued_s)
        longest_s = now_s - entries[0].queued_s if entries else None
        return {
            "count": len(entries),
            "longest_s": longest_s,
            "tokens": self._waiting.queue.tokens,
            "waiting": [
                {
                    "priority": entry.priority.name.lower(),
                    "tenant": entry.tenant or None,
                    "tokens": entry.tokens,
                    "promised_s": round(entry.promised_s, 3),
                    "waited_s": round(now_s - entry.queued_s, 3),
                }
                for entry in entries[:WAITING_SHOWN]
            ],
            "last": [
                {
                    "promised_s": round(wait.promised_s, 3),
                    "waited_s": round(wait.waited_s, 3),
                    "end": wait.end,
                }
                for wait in list(self._waiting.last)[: -WAITS_SHOWN - 1 : -1]
            ],
        }


def mark(rows: Sequence[Json]) -> None:
    """Name what stands out among the instances that serve: `marks`."""
    serving = [row for row in rows if row["serves"]]
    ongoing = middle(row["ongoing_tokens"] for row in serving) or 0
    tps = middle(row["prefill_tps"] for row in serving) or 0
    known = [row for row in serving if row["requests"] >= LEAST_REQUESTS and row["ttft_s"]]
    late_s = HOT * (middle(row["ttft_s"] for row in known) or 0)
    for row in rows:
        told = row["marks"] = list[str]()
        if not row["serves"] or len(serving) < 2:
            continue
        if row["ongoing_tokens"] >= max(LEAST_TOKENS, HOT * ongoing):
            told.append("hot")
        if (row in known and row["ttft_s"] >= late_s) or row["prefill_tps"] * HOT <= tps:
            told.append("slow")


def moment(record: RequestRecord) -> float:
    """When a request was placed or refused, unix seconds."""
    return record.t_decided or record.t_proxy_recv


def last_of(kept: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The last placed requests, with a few of the refused ones, the newest first."""
    refused = [one for one in kept if one.decode_instance is None][:REFUSED_SHOWN]
    placed = [one for one in kept if one.decode_instance is not None]
    return sorted([*refused, *placed[: DECISIONS_SHOWN - len(refused)]], key=moment, reverse=True)


def decision(record: RequestRecord) -> Json:
    """A decision in a sentence."""
    return {
        "request_id": record.request_id,
        "at": round(moment(record), 3),
        "model": record.model,
        "outcome": record.outcome,
        "sentence": Explained(orjson.loads(record_json(record))).sentence,
    }


def moves(lately: Iterable[RequestRecord]) -> Json:
    """Offloads, re-homes and migrations: how many, and the last ones, the newest first."""
    rows = [row for record in lately for row in _moves_of(record)]
    kinds = ("offload", "re-home", "migration")
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in kinds}
    gains = [row["gain_s"] for row in rows if row["kind"] == "offload"]
    return {
        "counts": counts,
        "fell_back": sum(row["ended"].startswith("fell back") for row in rows),
        "offload_gain_s": round(sum(gain for gain in gains if gain is not None), 3),
        "last": rows[:MOVES_SHOWN],
    }


def _moves_of(record: RequestRecord) -> list[Json]:
    """The moves of one request. `gain_s`: seconds of its price, as predicted."""
    d, p, options = record.decode_instance, record.prefill_instance, record.candidates
    priced = options if isinstance(options, Alternatives) else None
    found: list[Json] = []
    if p is not None:
        ended = f"fell back: {record.fallback}" if record.fallback else _transferred(record)
        gain_s = priced.gain_s() if priced is not None and not record.fallback else None
        found.append(_move(record, "offload", (p, d), record.new_tokens, gain_s, ended))
    if record.rehomed:
        gain_s = priced.gain_s(record.home_instance) if priced is not None else None
        way, kept, why = (record.home_instance, d), record.hit_tokens, record.place or ""
        found.append(_move(record, "re-home", way, kept, gain_s, why))
    for one in record.migrations or ():
        ended = f"{one.cause}: {one.ended}, the client waited {seconds(one.seconds)}"
        way = one.from_instance, one.to_instance
        found.append(_move(record, "migration", way, one.tokens_kept, None, ended))
    return found


def _move(
    record: RequestRecord,
    kind: str,
    way: tuple[str | None, str | None],
    tokens: int | None,
    gain_s: float | None,
    ended: str,
) -> Json:
    return {
        "request_id": record.request_id,
        "at": round(moment(record), 3),
        "kind": kind,
        "from": way[0],
        "to": way[1],
        "tokens": tokens,
        "gain_s": None if gain_s is None else round(gain_s, 3),
        "ended": ended,
    }


def _transferred(record: RequestRecord) -> str:
    """What the transfer of an offload took, beside what was predicted."""
    predicted_s, came_s = record.predicted_transfer_s, record.transfer_s()
    if came_s is None:
        return "runs" if record.outcome is None else ""
    told = "" if predicted_s is None else f", predicted {seconds(predicted_s)}"
    return f"KV and first token in {seconds(came_s)}{told}"


def predictions(kept: Iterable[RequestRecord]) -> list[Json]:
    """Time to the first token, as it came over as predicted, by route class."""
    ratios: dict[str, list[float]] = {}
    for record in kept:
        came_s, predicted_s = record.predictable_ttft_s(), record.predicted_ttft_s
        if came_s is not None and predicted_s and record.route_class is not None:
            ratios.setdefault(record.route_class, []).append(came_s / predicted_s)
    return [
        {"route_class": name, "requests": len(found)}
        | {f"p{round(100 * q)}": quantile(found, q) for q in (0.1, 0.5, 0.9)}
        for name, found in sorted(ratios.items())
    ]


def _out(row: Json) -> str:
    """An instance that does not serve, in words."""
    why = f": {row['why']}" if row["why"] else ""
    return f"{row['name']} is {row['state']} since {row['since_said']}{why}"


def said(unix_s: float, now_s: float) -> str:
    """A moment as short as is clear: the time of the day, with its date after a day."""
    is_today = now_s - unix_s < DAY_S
    return utc(unix_s, "%H:%M:%S" if is_today else "%Y-%m-%d %H:%M")


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what is known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def quantile(values: Sequence[float | None], part: float) -> float | None:
    """The value that this part of what is known does not exceed."""
    known = sorted(value for value in values if value is not None)
    return known[min(len(known) - 1, int(part * len(known)))] if known else None
