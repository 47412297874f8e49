"""The live page as text for a terminal."""

from __future__ import annotations

from typing import Any

from proxy.admin.page.html import WORDS, numbers, share
from proxy.telemetry.explain import decimals, seconds, table, thousands, utc
from proxy.telemetry.log import printable

Json = dict[str, Any]


def page(seen: Json) -> str:
    """All parts, in the order of the page."""
    verdict, queue = seen["verdict"], seen["queue"]
    blocks = [
        f"{utc(seen['at'])}, cache-proxy {seen['version']}",
        "\n".join(
            [
                f"{WORDS[verdict['state']]}: {verdict['fleet']}",
                verdict["load"],
                *verdict["warnings"],
            ]
        ),
        _block("Numbers", [["what", "value", "of"], *map(list, numbers(seen["numbers"]))]),
        _block("Instances", _instances(seen["instances"])),
        _block("Moves of the last minute", _moves(seen["moves"]["last"])),
        _block("Last decisions", _decisions(seen["decisions"])),
        _block("Waits", _waits([*queue["waiting"], *queue["last"]])),
        _block("First token, as it came over as predicted", _predictions(seen["predictions"])),
    ]
    return "\n\n".join(_lines(block) for block in blocks) + "\n"


def _lines(block: str) -> str:
    return "\n".join(printable(line) for line in block.split("\n"))


def _block(title: str, rows: list[list[str]]) -> str:
    """A table under its title; the first row is the head."""
    return f"{title}\n{table(rows[0], rows[1:])}" if len(rows) > 1 else f"{title}: none"


def _instances(rows: list[Json]) -> list[list[str]]:
    head = ["instance", "state", "since", "ongoing", "prefill", "KV", "hits", "first token"]
    return [
        [*head, "tokens/s", "why"],
        *(
            [
                " ".join((row["name"], *row["marks"])),
                row["state"],
                row["since_said"],
                thousands(row["ongoing_tokens"]),
                thousands(row["prefill_tokens"]),
                share(row["kv_ratio"]),
                share(row["hit_ratio"]),
                seconds(row["ttft_s"]),
                thousands(row["prefill_tps"]),
                row["why"],
            ]
            for row in rows
        ),
    ]


def _moves(rows: list[Json]) -> list[list[str]]:
    return [
        ["at", "move", "from", "to", "gain", "how it went"],
        *(
            [
                utc(row["at"], "%H:%M:%S"),
                row["kind"],
                str(row["from"]),
                str(row["to"]),
                decimals(row["gain_s"]),
                row["ended"],
            ]
            for row in rows
        ),
    ]


def _decisions(rows: list[Json]) -> list[list[str]]:
    told = [[utc(row["at"], "%H:%M:%S"), row["request_id"], row["sentence"]] for row in rows]
    return [["at", "request", "where and why"], *told]


def _waits(rows: list[Json]) -> list[list[str]]:
    told = [
        [row.get("end", "waits"), seconds(row["promised_s"]), seconds(row["waited_s"])]
        for row in rows
    ]
    return [["state", "promised", "waited"], *told]


def _predictions(rows: list[Json]) -> list[list[str]]:
    told = [
        [
            row["route_class"],
            str(row["requests"]),
            *(decimals(row[p]) for p in ("p10", "p50", "p90")),
        ]
        for row in rows
    ]
    return [["class", "requests", "10 %", "median", "90 %"], *told]
