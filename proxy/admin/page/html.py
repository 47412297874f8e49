"""The live page as HTML: its parts, the whole page, and the page of one decision.

Whatever comes from clients or engines passes `text` or an attribute of `tag`, which escape it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NewType
from urllib.parse import quote

from proxy.telemetry.explain import Explained, decimals, seconds, thousands, utc

Json = dict[str, Any]
Markup = NewType("Markup", str)
"""HTML that is safe as it is."""
WORDS = {"ok": "healthy", "warn": "degraded", "bad": "down"}
COLOURS = {
    "healthy": "ok",
    "suspect": "warn",
    "ejected": "bad",
    "probing": "warn",
    "draining": "idle",
    "asleep": "idle",
    "paused": "idle",
}
FLEET = (
    *("instance", "state", "since", "why", "prefill, decode", "ongoing", "prefill tokens"),
    *("engine runs, waits", "KV in use", "hits", "first token, predicted", "tokens/s"),
    "sessions",
)
"""The columns of the table of instances."""
NOTHING = Markup("")
# Read once, at the start: no request waits for a disk.
_PAGE, _DECISION = (
    Template(Path(__file__).with_name(name).read_text("utf-8"))
    for name in ("page.html", "decision.html")
)
_BLOCKS = dict(re.findall(r"<(style|script)>(.*?)</\1>", _PAGE.template, re.DOTALL))
_STYLE = Markup(_BLOCKS["style"])
"""The style of both pages."""
_HASHES = {
    kind: base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
    for kind, block in _BLOCKS.items()
}
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_HASHES['style']}'; "
    f"script-src 'sha256-{_HASHES['script']}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy: own style and script by their hashes, and nothing else."""


def text(value: object) -> Markup:
    """A text as HTML."""
    return Markup(escape(str(value)))


def join(children: Iterable[Markup], between: str = "") -> Markup:
    """Several in a row."""
    return Markup(between.join(children))


def tag(name: str, *children: Markup, **attributes: str) -> Markup:
    """An element; `class_` is the attribute `class`, `data_l` is `data-l`."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{told}>{''.join(children)}</{name}>")


class Parts:
    """The parts of the page; each, and each instance's row, is made when what it shows changes."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[object, Markup]] = {}
        """What was shown last and its HTML, by part or instance."""

    def of(self, seen: Json) -> dict[str, Markup]:
        """Each by its id. `verdict` is read aloud when it changes, `load` is not."""
        before, self._made = self._made, {}

        def once(key: str, shown: Any, make: Callable[[Any], Markup]) -> Markup:
            known = before.get(key)
            found = known if known is not None and known[0] == shown else (shown, make(shown))
            self._made[key] = found
            return found[1]

        rows = [once(f"row {row['name']}", row, _instance) for row in seen["instances"]]
        return {
            "verdict": once("verdict", seen["verdict"], _verdict),
            "load": once("load", seen["verdict"], _load),
            "numbers": once("numbers", seen["numbers"], _numbers),
            "fleet": _table_of("Instances", FLEET, rows),
            "moves": once("moves", seen["moves"], _moves),
            "decisions": once("decisions", seen["decisions"], _decisions),
            "queue": once("queue", seen["queue"], _queue),
            "predictions": once("predictions", seen["predictions"], _predictions),
            "asof": text(f"{utc(seen['at'])}, cache-proxy {seen['version']}"),
        }


def page(found: dict[str, Markup]) -> str:
    """The whole page."""
    return _PAGE.substitute(found)


def decision_page(explained: Explained, policies: Sequence[str], raw: str) -> str:
    """The page of one decision: its sentence, timeline, options, other policies, raw JSON."""
    has_columns = explained.record.get("columns") is not None
    head, rows = explained.candidates()
    title = "Instances past a limit" if explained.is_refused else "Options, the cheapest first"
    others = NOTHING
    if has_columns and policies:
        others = _plain_table("What other policies would have chosen", *explained.others(policies))
    timeline = [[f"{at_s:+.3f} s", what] for at_s, what in explained.timeline()]
    return _DECISION.substitute(
        {
            "style": _STYLE,
            "request": text(explained.record["request_id"]),
            "at": text(utc(explained.record["t_proxy_recv"])),
            "sentence": text(explained.sentence),
            "timeline": _plain_table("What happened", ["after", "what"], timeline),
            "candidates": _plain_table(title, head, rows) if rows else NOTHING,
            "others": others,
            "raw": text(raw),
        }
    )


def _verdict(seen: Json) -> Markup:
    word = tag("span", text(WORDS[seen["state"]]), class_=f"word {seen['state']}")
    return join((word, tag("strong", text(seen["fleet"]))), " ")


def _load(seen: Json) -> Markup:
    warnings = [tag("li", text(warning)) for warning in seen["warnings"]]
    told = tag("span", text(seen["load"]))
    return join((told, tag("ul", *warnings))) if warnings else told


def numbers(seen: Json) -> list[tuple[str, str, str]]:
    """The numbers of the page: each one's name, value, and of what it is."""
    of = f"in {seen['seconds']:.0f} s"
    return [
        ("requests", f"{seen['requests']}", of),
        ("in flight", f"{seen['in_flight']}", "now"),
        ("first token", seconds(seen["ttft_s"]), f"median; 90 %: {seconds(seen['ttft_p90_s'])}"),
        ("predicted hits", share(seen["hit_ratio"]), f"real: {share(seen['engine_hit_ratio'])}"),
        ("offloads", f"{seen['offloads']}", of),
        ("refused", f"{seen['refused']}", f"in {seen['refused_seconds']} s"),
        ("failed", f"{seen['failed']}", of),
    ]


def _numbers(seen: Json) -> Markup:
    return join(
        tag(
            "div",
            tag("dt", text(name)),
            tag(
                "dd",
                tag("b", text(value)),
                tag("small", text(note.replace(" %", "\N{NO-BREAK SPACE}%"))),
            ),
            class_="bad" if name in ("refused", "failed") and value != "0" else "plain",
        )
        for name, value, note in numbers(seen)
    )


def _instance(row: Json) -> Markup:
    marks = [tag("span", text(mark), class_="mark") for mark in row["marks"]]
    colour = COLOURS.get(row["state"], "idle")
    cells = [
        join((text(row["name"]), *marks), " "),
        tag("span", text(row["state"]), class_=f"word {colour}"),
        moment(row["since"], row["since_said"]),
        text(row["why"]),
        text(f"{row['prefilling']}, {row['decoding']}"),
        text(thousands(row["ongoing_tokens"])),
        _limited(thousands(row["prefill_tokens"]), row["prefill_tokens"], row["prefill_limit"]),
        text(f"{_count(row['running'])}, {_count(row['waiting'])}"),
        _limited(share(row["kv_ratio"]), row["kv_ratio"], row["kv_limit"], whole=1.0),
        text(share(row["hit_ratio"])),
        text(f"{seconds(row['ttft_s'])}, {seconds(row['predicted_ttft_s'])}"),
        text(thousands(row["prefill_tps"])),
        text(row["sessions"]),
    ]
    return _row(FLEET, cells)


def _limited(
    told: str, value: float | None, limit: float | None, whole: float | None = None
) -> Markup:
    """A value with its limit, and a bar of its share of that, or of the whole."""
    most = whole or limit
    if value is None or not most:
        return text(told)
    part = max(0, min(100, round(100 * value / most)))
    is_past = limit is not None and value > limit
    shown = f"{told} / {share(limit) if whole else thousands(limit)}" if limit else told
    bar = '<svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true" class="{}">'
    drawn = bar.format("bad" if is_past else "ok") + f'<rect width="{part}" height="4"/></svg>'
    return join((text(shown), Markup(drawn)))


def _moves(seen: Json) -> Markup:
    counts = ", ".join(
        f"{count} {kind}{'s' * (count != 1)}" for kind, count in seen["counts"].items()
    )
    gain_s, fell_back = seen["offload_gain_s"], seen["fell_back"]
    told = f"{counts} in the last minute"
    if seen["counts"]["offload"]:
        verb = "gain" if gain_s >= 0 else "lose"
        told += f"; offloads were predicted to {verb} {seconds(abs(gain_s))} in all"
    if fell_back:
        told += f"; {fell_back} fell back"
    head = ("at", "move", "from", "to", "tokens", "gain, s", "how it went")
    rows = [
        [
            _link(row["request_id"], moment(row["at"])),
            text(row["kind"]),
            text(row["from"]),
            text(row["to"] or "nowhere"),
            text(thousands(row["tokens"])),
            text(decimals(row["gain_s"])),
            text(row["ended"] or "-"),
        ]
        for row in seen["last"]
    ]
    return join((tag("p", text(told)), _table("Moves", head, rows) if rows else NOTHING))


def _decisions(rows: Sequence[Json]) -> Markup:
    if not rows:
        return tag("p", text("No request was placed or refused yet."))
    items = [
        tag(
            "li",
            _link(row["request_id"], moment(row["at"])),
            Markup(" "),
            text(row["sentence"]),
            class_="bad" if row["outcome"] not in (None, "ok", "client_gone") else "plain",
        )
        for row in rows
    ]
    return tag("ol", *items)


def _queue(seen: Json) -> Markup:
    count = seen["count"]
    told = "No request waits."
    if count:
        waits = "request waits" if count == 1 else "requests wait"
        longest, tokens = seconds(seen["longest_s"]), thousands(seen["tokens"])
        told = f"{count} {waits}, {tokens} tokens, longest {longest}."
    waiting = [
        [
            text("waits"),
            text(seconds(row["promised_s"])),
            text(seconds(row["waited_s"])),
            text(row["priority"]),
            text(thousands(row["tokens"])),
            text(row["tenant"] or "-"),
        ]
        for row in seen["waiting"]
    ]
    over = [
        [text(row["end"]), text(seconds(row["promised_s"])), text(seconds(row["waited_s"]))]
        + [text("-")] * 3
        for row in seen["last"]
    ]
    head = ("state", "promised", "waited", "priority", "tokens", "tenant")
    rows = [*waiting, *over]
    return join((tag("p", text(told)), _table("Waits", head, rows) if rows else NOTHING))


def _predictions(rows: Sequence[Json]) -> Markup:
    if not rows:
        return tag("p", text("No first token has come yet."))
    head = ("class", "requests", "10 %", "median", "90 %")
    return _table(
        "First token, as it came over as predicted",
        head,
        [
            [text(row["route_class"]), text(row["requests"])]
            + [text(decimals(row[name])) for name in ("p10", "p50", "p90")]
            for row in rows
        ],
    )


def _plain_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    return _table(caption, head, [[text(cell) for cell in row] for row in rows])


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Markup]]) -> Markup:
    return _table_of(caption, head, [_row(head, row) for row in rows])


def _table_of(caption: str, head: Sequence[str], rows: Sequence[Markup]) -> Markup:
    """A table of rows as `_row` makes them.

    Roles are written out: with `display: block` browsers forget those of the elements.
    """
    names = [tag("th", text(name), scope="col", role="columnheader") for name in head]
    return tag(
        "table",
        tag("caption", text(caption)),
        tag("thead", tag("tr", *names, role="row"), role="rowgroup"),
        tag("tbody", *rows, role="rowgroup"),
        role="table",
    )


def _row(head: Sequence[str], cells: Sequence[Markup]) -> Markup:
    """A row that its first cell names; on a phone it is a list of its cells."""
    named = zip(head[1:], cells[1:], strict=True)
    return tag(
        "tr",
        tag("th", cells[0], scope="row", role="rowheader", data_l=head[0]),
        *(tag("td", cell, role="cell", data_l=name) for name, cell in named),
        role="row",
    )


def _link(request_id: str, shown: Markup) -> Markup:
    """A link to a decision, relative to the page, as a path may be before it."""
    return tag("a", shown, href=f"ui/decisions/{quote(request_id, safe='')}", title=request_id)


def moment(unix_s: float, shown: str | None = None) -> Markup:
    """A time of the day, or as it is `shown`, with its date for machines."""
    told = text(shown or utc(unix_s, "%H:%M:%S"))
    return tag("time", told, datetime=utc(unix_s, "%Y-%m-%dT%H:%M:%SZ"))


def share(ratio: float | None) -> str:
    """A share in percent."""
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
