"""Explains one decision from its record: in a sentence, as tables, as JSON. Pure.

A record is a line of the request log, or an answer of `GET /decisions/{request_id}`, which has the
`columns` that another policy needs to decide again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from proxy.core.placement.decision import route_class
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.stored import KEPT, from_json
from proxy.core.placement.wrappers import failing_open
from proxy.telemetry.log import printable

Json = dict[str, Any]
NEEDED: Final = (
    "request_id",
    "decode_instance",
    "prefill_instance",
    "place",
    "offload_decision_reason",
    "t_proxy_recv",
    "candidates",
    "outcome",
)
"""Fields that every record has had since it can be explained."""
TERMS: Final = {
    "ttft_s": "first token",
    "harm_s": "streams",
    "behind_s": "behind",
    "decode_s": "output",
    "next_s": "next turns",
    "memory_s": "memory",
    "heat_s": "heat",
}
"""The terms of a price, in seconds, and what tables call them."""
PLACES: Final = {
    "home": "where its session lives",
    "home_left": "better now than its session's home",
    "home_away": "as its session's home cannot be chosen now",
    "prefix": "which has most of the prompt cached",
    "load": "which has the least to do",
    "only": "the only one that could be chosen",
    "holder": "which holds the stored response",
    "retry": "as another one had failed",
}
REASONS: Final = {
    "p_idle_d_busy": "offloaded, as the prompt would delay streams",
    "p_overloaded": "not offloaded, as every peer has too much to do",
    "d_idle": "not offloaded, as no stream would be delayed",
    "below_threshold": "not offloaded, as few tokens are new",
    "p_busier_than_d": "not offloaded, as the peer has more to do",
    "kv_pull": "offloaded, as the peer has most of the prompt cached",
    "margin": "not offloaded, as that would gain too little",
    "no_peer": "not offloaded, as no other instance could prefill",
    "peer_past_threshold": "not offloaded, as every peer is busy",
    "split_roles": "offloaded, as no instance was free for both",
    "no_connector": "not offloaded, as there is no KV connector",
    "not_offloadable": "not offloaded, as two legs could give another answer",
    "policy_always": "offloaded, as the policy always does",
    "policy_never": "not offloaded, as the policy never does",
    "non_cached_tokens": "offloaded, as enough tokens are new",
    "policy_failed": "placed by load, as the policy failed",
    "prefill_failed": "offloaded at first, but the peer gave no KV",
    "transfer_failed": "offloaded at first, but the KV could not be fetched",
}
_TIMES: Final = (
    ("t_proxy_recv", "received"),
    ("t_queued", "waits for an instance"),
    ("t_decided", "decided"),
    ("t_prefill_sent", "prompt sent to {p}"),
    ("t_prefill_done", "{p} has computed it"),
    ("t_decode_sent", "sent to {d}"),
    ("t_first_token", "first token"),
    ("t_done", "over"),
)
NO_COLUMNS: Final = (
    "policy: this record has no columns to decide again with; a running proxy (--target) keeps "
    f"those of its last {KEPT} decisions"
)
NO_CHOICE: Final = "policy: the request was refused, so no policy had a choice"


class Explained:
    """One decision, explained. Raises ValueError for a record that cannot be: of another form."""

    def __init__(self, record: Json) -> None:
        _check(record)
        self.record = record
        rows = record["candidates"] or []
        self.is_refused = bool(rows and "past" in rows[0]) or record["decode_instance"] is None
        self.rows: list[Json] = [] if self.is_refused else rows
        self.past: list[Json] = rows if self.is_refused else []
        moves = record.get("migrations")
        self.decode: str | None = moves[0]["from_instance"] if moves else record["decode_instance"]
        self.chosen = self._row(self.decode, record["prefill_instance"])
        self.second = self._second()

    def _row(self, decode: str | None, prefill: str | None) -> Json | None:
        """The option with this D and P; without P's where its pair has none of its own."""
        on_d = [row for row in self.rows if row.get("instance") == decode]
        pair = [row for row in on_d if row.get("prefill") == prefill]
        return next(iter(pair or on_d), None)

    def _second(self) -> Json | None:
        """The cheapest of the other options."""
        others = [row for row in self.rows if row is not self.chosen]
        return min(others, key=price, default=None) if self.margin_known(others) else None

    def margin_known(self, others: Sequence[Json]) -> bool:
        """Whether the choice and one of `others` have a price."""
        priced = [price(row) for row in others]
        mine = price(self.chosen) if self.chosen is not None else math.inf
        return math.isfinite(mine) and any(math.isfinite(one) for one in priced)

    @property
    def margin_s(self) -> float | None:
        """Seconds by which the next best option costs more; less than 0: it costs less."""
        if self.second is None or self.chosen is None:
            return None
        return round(price(self.second) - price(self.chosen), 4)

    @property
    def sentence(self) -> str:
        """Where it went and why, what that was to take, and what it took."""
        parts = self._refusal() if self.is_refused else [*self._placed(), self._margin()]
        return "; ".join(part for part in (*parts, self._time(), self._end()) if part)

    def _placed(self) -> list[str]:
        record = self.record
        d, p = record["decode_instance"], record["prefill_instance"]
        place, reason = record["place"], record["offload_decision_reason"]
        where = f"{d}, {PLACES.get(place, 'as the log says')} ({place})"
        if p is not None:
            where = f"{p} computes the prompt for {where}"
        hit, tokens = record.get("hit_tokens"), record.get("isl_tokens")
        cached = f", {thousands(hit)} of {thousands(tokens)} tokens cached" if tokens else ""
        why = f"{REASONS.get(reason, 'as the log says')} ({reason})" if reason else ""
        return [f"{where}{cached}", why]

    def _refusal(self) -> list[str]:
        record = self.record
        why = record.get("error") or "refused"
        past = [f"{one['instance']} ({', '.join(one['past'])})" for one in self.past[:4]]
        more = f" and {len(self.past) - 4} more" if len(self.past) > 4 else ""
        return [f"refused ({why})", f"busy: {', '.join(past)}{more}" if past else ""]

    def _margin(self) -> str:
        if (margin_s := self.margin_s) is None or self.second is None:
            return ""
        other = option(self.second)
        if margin_s < 0:
            return f"{seconds(-margin_s)} dearer than {other}"
        return f"{seconds(margin_s)} cheaper than {other}" if margin_s else f"as cheap as {other}"

    def _time(self) -> str:
        """What was predicted, beside what came."""
        predicted_s, came_s = self.record.get("predicted_ttft_s"), self.ttft_s
        if self.is_refused:
            return ""
        if predicted_s is None:
            return "" if came_s is None else f"first token after {seconds(came_s)}"
        came = "" if came_s is None else f", came in {seconds(came_s)}"
        return f"first token predicted in {seconds(predicted_s)}{came}"

    def _end(self) -> str:
        outcome = self.record["outcome"]
        waited_s = difference(self.record, "t_queued", "t_decided")
        waited = f"waited {seconds(waited_s)}" if waited_s is not None else ""
        if outcome is None:
            return "; ".join(filter(None, (waited, "not over yet")))
        end = "" if outcome in ("ok", "rejected") else f"ended: {outcome}"
        error = self.record.get("error") if end else None
        return "; ".join(filter(None, (waited, f"{end} ({error})" if error else end)))

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the prediction to the first token, as the proxy's metrics count them."""
        record = self.record
        whole_s = difference(record, "t_proxy_recv", "t_first_token")
        again_s = difference(record, "t_decode_sent", "t_first_token")
        if record.get("retries") and not record.get("fallback") and again_s is not None:
            return again_s
        queue_s = difference(record, "t_queued", "t_decided") or 0.0
        return None if whole_s is None else whole_s - queue_s

    def timeline(self) -> list[tuple[float, str]]:
        """Seconds since the request came, and what happened."""
        record, found = self.record, list[tuple[float, str]]()
        p, d = record["prefill_instance"], record["decode_instance"]
        for name, text in _TIMES:
            at_s = difference(record, "t_proxy_recv", name)
            if at_s is not None:
                found.append((at_s, text.format(p=p, d=d)))
        decided_s = difference(record, "t_proxy_recv", "t_decided")
        if decided_s is not None and (ttft_s := record.get("predicted_ttft_s")) is not None:
            found.append((decided_s + ttft_s, "first token, as predicted"))
        return sorted(found, key=lambda one: one[0])

    def instead(self, policy: str) -> Json:
        """What another policy would have chosen; ValueError where that cannot be known."""
        decide, columns = POLICIES.get(policy), self.record.get("columns")
        if decide is None:
            raise ValueError(f"policy: {policy[:60]!r} is none of {', '.join(POLICIES)}")
        if columns is None:
            raise ValueError(NO_CHOICE if self.is_refused else NO_COLUMNS)
        try:
            choice = failing_open(decide)(from_json(columns))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("columns: of another form than this version stores") from error
        d, p = choice.decode.instance.name, choice.prefill
        prefill = p.instance.name if p is not None else None
        agrees = (d, prefill) == (self.decode, self.record["prefill_instance"])
        priced = next((row for row in self.rows if _pair(row) == (d, prefill)), None)
        more_s = None
        if priced is not None and self.chosen is not None:
            more_s = round(price(priced) - price(self.chosen), 4)
        return {
            "policy": policy,
            "agrees": agrees,
            "decode_instance": d,
            "prefill_instance": prefill,
            "route_class": route_class(choice.size, offloaded=p is not None),
            "reason": choice.reason,
            "predicted_ttft_s": round(choice.predicted_ttft_s, 4),
            "costs_more_s": more_s if more_s is None or math.isfinite(more_s) else None,
            "mistake": choice.mistake,
        }

    def as_json(self, policies: Sequence[str] = ()) -> Json:
        """All of it."""
        record = self.record
        happened = {
            "ttft_s": self.ttft_s,
            "queue_s": difference(record, "t_queued", "t_decided"),
            "prefill_s": difference(record, "t_prefill_sent", "t_prefill_done"),
            "e2e_s": difference(record, "t_proxy_recv", "t_done"),
            "cached_tokens": record.get("cached_tokens"),
            "outcome": record["outcome"],
        }
        predicted = ("ttft_s", "ttft_bound_s", "prefill_s", "transfer_s")
        return {
            "request_id": record["request_id"],
            "sentence": self.sentence,
            "chosen": self.chosen,
            "second": self.second,
            "margin_s": self.margin_s,
            "predicted": {name: record.get(f"predicted_{name}") for name in predicted},
            "happened": happened,
            "timeline": [{"at_s": round(at_s, 6), "what": what} for at_s, what in self.timeline()],
            "instead": [self.instead(policy) for policy in policies],
            "record": {name: value for name, value in record.items() if name != "columns"},
        }

    def candidates(self) -> tuple[list[str], list[list[str]]]:
        """The head and the rows of the table of options; the first cell marks the choice."""
        if self.is_refused:
            head = ["instance", "past its", "free in"]
            return head, [
                [one["instance"], ", ".join(one["past"]), seconds(one.get("free_in_s"))]
                for one in self.past
            ]
        head = [
            "choice",
            "decodes",
            "prompt on",
            "price",
            *TERMS.values(),
            "cached",
            "new",
            "ongoing",
        ]
        return head, [
            [
                self._part(row),
                str(row.get("instance")),
                str(row.get("prefill") or "itself"),
                *(decimals(row.get(name)) for name in ("cost_s", *TERMS)),
                *(thousands(row.get(f"{name}_tokens")) for name in ("hit", "new", "ongoing")),
            ]
            for row in self.rows
        ]

    def _part(self, row: Json) -> str:
        """What an option has of the choice: all, or a role where its policy prices no pairs."""
        p = self.record["prefill_instance"]
        if self.chosen is None or self.chosen.get("prefill") == p:
            return "chosen" if row is self.chosen else ""
        return "decodes" if row is self.chosen else "prefills" if row["instance"] == p else ""

    def others(self, policies: Sequence[str]) -> tuple[list[str], list[list[str]]]:
        """The head and the rows of the table of what other policies would have chosen."""
        head = ["policy", "decodes", "prompt on", "first token", "price, more", "reason"]
        found = [self.instead(policy) for policy in policies]
        return head, [
            [
                one["policy"],
                one["decode_instance"],
                one["prefill_instance"] or "itself",
                decimals(one["predicted_ttft_s"]),
                "same choice" if one["agrees"] else decimals(one["costs_more_s"]),
                one["reason"],
            ]
            for one in found
        ]

    def text(self, policies: Sequence[str] = ()) -> str:
        """All of it for a terminal."""
        record = self.record
        at = utc(record["t_proxy_recv"])
        about = [f"request {record['request_id']}", at]
        about += [f"{name} {record[name]}" for name in ("model", "policy") if record.get(name)]
        timeline = [[f"{at_s:+.3f} s", what] for at_s, what in self.timeline()]
        blocks = [printable(", ".join(about)), printable(self.sentence)]
        title = "Instances past a limit" if self.is_refused else "Options, the cheapest first; s"
        head, rows = self.candidates()
        if rows:
            blocks.append(f"{title}\n{table(head, rows)}")
        blocks.append(f"What happened\n{table([], timeline)}")
        if policies:
            blocks.append(f"Other policies\n{table(*self.others(policies))}")
        return "\n\n".join(blocks) + "\n"


def _check(record: Json) -> None:
    """Raise ValueError for a record of another form."""
    if (lacks := next((name for name in NEEDED if name not in record), None)) is not None:
        raise ValueError(f"it has no {lacks}: a line of an older form, or of another log")
    for name, value in record.items():
        is_number = name.startswith(("t_", "predicted_")) or name.endswith("_tokens")
        if is_number and not isinstance(value, int | float | None):
            raise ValueError(f"{name}: not a number")
    rows = record["candidates"]
    if not isinstance(rows, list | None) or not all(map(_is_row, rows or ())):
        raise ValueError("candidates: not a list of options")
    if not (isinstance(record["t_proxy_recv"], int | float) and _is_moves(record)):
        raise ValueError("t_proxy_recv or migrations: of another form")


def _is_row(row: object) -> bool:
    """Whether an option has words and numbers only."""
    if not isinstance(row, dict) or not isinstance(row.get("instance"), str):
        return False
    if "past" in row:
        past = row["past"]
        return isinstance(past, list) and all(isinstance(one, str) for one in past)
    told = (value for name, value in row.items() if name.endswith(("_s", "_tokens")))
    return all(isinstance(value, int | float | None) for value in told)


def _is_moves(record: Json) -> bool:
    moves = record.get("migrations") or ()
    if not isinstance(moves, list | tuple):
        return False
    return all(isinstance(one, dict) and "from_instance" in one for one in moves)


def price(row: Json) -> float:
    """An option's price in seconds; infinite where the policy that chose prices none."""
    cost_s = row.get("cost_s")
    return math.inf if cost_s is None else float(cost_s)


def option(row: Json) -> str:
    """An option in words."""
    d, p = row.get("instance"), row.get("prefill")
    return f"{d}" if p is None else f"{d} with the prompt on {p}"


def _pair(row: Json) -> tuple[object, object]:
    return row.get("instance"), row.get("prefill")


def difference(record: Json, start: str, end: str) -> float | None:
    """Seconds between two times of a record; None where one of them is not known."""
    begun_s, ended_s = record.get(start), record.get(end)
    return None if begun_s is None or ended_s is None else float(ended_s - begun_s)


def seconds(value: float | None) -> str:
    """Seconds in words, for people."""
    if value is None:
        return "-"
    if 0 < value < 0.0995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.0f} s"


def decimals(value: float | None) -> str:
    """Seconds in a column."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def thousands(value: float | None) -> str:
    """Tokens in words: 41k."""
    if value is None:
        return "-"
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 9950 else f"{value / 1000:.0f}k"


def utc(unix_s: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """A moment in words."""
    return datetime.fromtimestamp(unix_s, UTC).strftime(form)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what is in them, safe for a terminal; numbers to the right."""
    cells = [[printable(cell) for cell in row] for row in ([head, *rows] if head else rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    columns = zip(*[[cell[:1] for cell in map(str.strip, row)] for row in rows], strict=True)
    is_right = [set(firsts) <= set("+-0123456789") for firsts in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_right, strict=True)
        )
        for row in cells
    ]
    return "\n".join(f"  {line}".rstrip() for line in lines)
