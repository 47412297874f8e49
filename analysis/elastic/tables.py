"""The tables of `analyze elastic`: a row per rule and load, and the founding text's claims."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.bench.progress import changed
from analysis.bench.stats import cells, change, figure
from analysis.bench.tables import number, table
from analysis.elastic.interference import (
    BATCHED_TOKENS,
    PROMPT_TOKENS,
    REAL_COLOCATED_P99_S,
    REAL_OFFLOADED_P99_S,
    Gaps,
)
from analysis.elastic.readings import BASELINE
from analysis.measures import grouped
from analysis.rivals.registry import DEFAULT

FOUNDING_SESSIONS = 8
"""Sessions at a time in the founding experiment; fewer are its low load, more its high load."""
HEURISTIC = "seed-heuristic"
EXPLAINED = (
    "TTFT and E2E: a failed request is infinitely late; 'answered': of the requests that were "
    "answered only, as the founding text has it. goodput: TTFT <= 2 s + 0.1 ms per new token and "
    "TPOT within --tpot-slo. Means over seeds."
)
Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure of the founding text: of a rule, relative to the baseline unless `absolute`."""

    what: str
    rule: str
    figure: str
    claimed: str
    absolute: bool = False


CLAIMS = (
    Claim("TTFT p50, of the answered", HEURISTIC, "ttft_ok_s.p50", "-49 %"),
    Claim("TTFT p90, of the answered", HEURISTIC, "ttft_ok_s.p90", "-56 %"),
    Claim("TTFT p50", HEURISTIC, "ttft_s.p50", "not told"),
    Claim("TTFT p90", HEURISTIC, "ttft_s.p90", "not told"),
    Claim("TPOT p90", HEURISTIC, "tpot_s.p90", "the same"),
    Claim("E2E p50", HEURISTIC, "e2e_s.p50", "-45 %"),
    Claim("requests answered", HEURISTIC, "success_ratio", "75 %", absolute=True),
    Claim("TTFT p50, of the answered", "always", "ttft_ok_s.p50", "-13 %"),
    Claim("TTFT p90, of the answered", "always", "ttft_ok_s.p90", "+59 %"),
)
REGIMES = ("most", "about half", "almost none")
"""Share of HEAVY requests that the heuristic is said to offload at low, medium and high load."""


def regime(sessions: int) -> str:
    """The founding text's claim for a number of sessions at a time."""
    return REGIMES[(sessions >= FOUNDING_SESSIONS) + (sessions > FOUNDING_SESSIONS)]


def summarise(rows: Sequence[Summary]) -> list[dict[str, Any]]:
    """Average rows over seeds, per load and rule in their first order; None is infinite."""
    return [
        {
            "sessions": sessions,
            "rule": rule,
            **{name: fmean(figure(row, name) for row in part) for name in _FIGURES},
            "requests": sum(row["requests"] for row in part),
            "heavy": sum(row["heavy"] for row in part),
            "offloaded_ratio": sum(row["heavy_offloaded"] for row in part)
            / max(1, sum(row["heavy"] for row in part)),
            "heavy_reasons": _added([row["heavy_reasons"] for row in part]),
            "beside_home": _added([row.get("beside_home") or {} for row in part]),
        }
        for (sessions, rule), part in grouped(rows, itemgetter("sessions", "rule")).items()
    ]


def sentence(rows: Sequence[Summary]) -> str:
    """Say in one line what the default rule, or the last one, did beside the baseline; or ""."""
    rules = [rule for rule in dict.fromkeys(row["rule"] for row in rows) if rule != BASELINE]
    ours = DEFAULT if DEFAULT in rules else next(reversed(rules), "")
    loads = cells(summarise(rows), ("sessions",), "rule")
    both = [(one[ours], one[BASELINE]) for one in loads if {ours, BASELINE} <= one.keys()]
    if not both:
        return ""
    ttft, goodput = (
        changed(fmean(change(mine[name], base[name]) for mine, base in both))
        for name in ("ttft_s.p90", "goodput_ratio")
    )
    over = f" (mean of {len(both)} loads)" if len(both) > 1 else ""
    return f"{ours}: TTFT p90 {ttft} to {BASELINE}, goodput {goodput}{over}"


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum numbers by name, largest first."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total.most_common())


_FIGURES = (
    *("ttft_s.p50", "ttft_s.p90", "ttft_ok_s.p50", "ttft_ok_s.p90", "tpot_s.p50", "tpot_s.p90"),
    *("e2e_s.p50", "success_ratio", "goodput_ratio", "hit_ratio"),
)


def print_experiment(rows: Sequence[Summary], console: Console) -> None:
    """Print a table per load, then the claims beside what was measured."""
    summary = summarise(rows)
    console.print(EXPLAINED, soft_wrap=True, markup=False)
    for sessions, part in grouped(summary, itemgetter("sessions")).items():
        console.print(_load_table(sessions, part))
    if any(one["beside_home"].get("offloaded") for one in summary):
        console.print(_home_table(summary))
    console.print(_claims_table(summary))


def _load_table(sessions: int, part: Sequence[Summary]) -> Table:
    columns = ["rule", "TTFT p50/p90 s", "to baseline %", "answered p50/p90 s", "TPOT p50/p90 ms"]
    columns += ["E2E p50 s", "answered %", "goodput %", "hit %", "HEAVY", "offloaded %"]
    shown = table(f"{sessions} sessions at a time", columns)
    shown.add_column("HEAVY requests that were not offloaded, %", no_wrap=True)
    base = next((one for one in part if one["rule"] == BASELINE), None)
    for one in part:
        shown.add_row(
            one["rule"],
            _pair(one, "ttft_s", 1.0, 2),
            "/".join(_relative(one, base, f"ttft_s.{at}") for at in ("p50", "p90")),
            _pair(one, "ttft_ok_s", 1.0, 2),
            _pair(one, "tpot_s", 1e3, 1),
            number(one["e2e_s.p50"], 2),
            number(one["success_ratio"] * 100, 1),
            number(one["goodput_ratio"] * 100, 1),
            number(one["hit_ratio"] * 100, 1),
            str(one["heavy"]),
            number(one["offloaded_ratio"] * 100, 0),
            _reasons(one),
        )
    return shown


def _home_table(summary: Sequence[Summary]) -> Table:
    """The offloaded requests beside the same ones of the baseline; means over requests."""
    columns = ["sessions, rule", "offloaded", "TTFT s", "at home s", "computed tokens", "at home"]
    title = f"Offloaded requests beside the same ones under {BASELINE}, means"
    shown = table(title, [*columns, "other requests' TTFT, change ms"])
    for one in summary:
        told = one["beside_home"]
        count, others = told.get("offloaded", 0), max(1, told.get("others", 1))
        if count:
            shown.add_row(
                f"{one['sessions']}, {one['rule']}",
                str(count),
                *(number(told[name] / count, 2) for name in ("ttft_s", "ttft_at_home_s")),
                number(told["computed_tokens"] / count, 0),
                number(told["computed_tokens_at_home"] / count, 0),
                f"{told['others_later_s'] / others * 1e3:+,.0f}",
            )
    return shown


def _claims_table(summary: Sequence[Summary]) -> Table:
    loads = list(dict.fromkeys(one["sessions"] for one in summary))
    names = [f"{sessions} sessions" for sessions in loads]
    shown = table("The founding text's claims", ["", "rule", "claimed", *names])
    found = {(one["sessions"], one["rule"]): one for one in summary}
    for claim in CLAIMS:
        cells = []
        for sessions in loads:
            one, base = found.get((sessions, claim.rule)), found.get((sessions, BASELINE))
            cells.append(_claim_cell(claim, one, base))
        shown.add_row(claim.what, claim.rule, claim.claimed, *cells)
    shares = [
        f"{number(one['offloaded_ratio'] * 100, 0)} % ({regime(sessions)})" if one else "-"
        for sessions in loads
        for one in [found.get((sessions, HEURISTIC))]
    ]
    shown.add_row("HEAVY offloaded (claimed)", HEURISTIC, "", *shares)
    return shown


def _claim_cell(claim: Claim, one: Summary | None, base: Summary | None) -> str:
    if one is None:
        return "-"
    if claim.absolute:
        return f"{number(one[claim.figure] * 100, 1)} %"
    return f"{_relative(one, base, claim.figure)} %" if base is not None else "-"


def _pair(one: Summary, name: str, factor: float, digits: int) -> str:
    return "/".join(number(one[f"{name}.{at}"] * factor, digits) for at in ("p50", "p90"))


def _relative(one: Summary, base: Summary | None, name: str) -> str:
    if base is None:
        return "-"
    mine, theirs = one[name], base[name]
    if not math.isfinite(theirs):
        return "-"
    return f"{round((mine / theirs - 1) * 100):+d}" if math.isfinite(mine) else "inf"


def _reasons(one: Summary) -> str:
    heavy = max(1, one["heavy"])
    shares = {name: round(count / heavy * 100) for name, count in one["heavy_reasons"].items()}
    return ", ".join(f"{name} {share}" for name, share in shares.items() if share)


def print_interference(colocated: Gaps, offloaded: Gaps, console: Console) -> None:
    """Print the gaps of a stream beside a long prompt, of the model and of real engines."""
    columns = ["", "gap p50 ms", "gap p99 ms", "real vLLM p99 ms", "TTFT of the prompt s"]
    what = f"A stream beside a prompt of {PROMPT_TOKENS:,} tokens, {BATCHED_TOKENS:,} per step"
    shown = table(what, columns)
    for name, gaps, real in (
        ("colocated", colocated, REAL_COLOCATED_P99_S),
        ("offloaded", offloaded, REAL_OFFLOADED_P99_S),
    ):
        seen = " to ".join(dict.fromkeys(number(one * 1e3, 1) for one in real))
        gap_ms = [number(one * 1e3, 1) for one in (gaps.p50_s, gaps.p99_s)]
        shown.add_row(name, *gap_ms, seen, number(gaps.ttft_s, 2))
    console.print(shown)
