"""The verdict on a run: the first lines of its report, and whether its figures are valid.

A run misleads where its engines already knew its text: they hit more than a cache could that began
empty. What such a cache could hit at most is known from the trace. Only requests that were served
in one go, where they were computed, are judged: KV that a peer has sent counts as cached too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.bench.phases import PHASES
from analysis.measures import Row

GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"
KNOWN_RATIO = 0.1
"""From this share of the new text on, engines count as having known it."""
TEMPLATE_TOKENS = 128
"""Most tokens that a chat template puts around a prompt; all prompts share those."""
LEAST_OK = 0.9
"""Share of the requests that end ok, below which a run is bad."""
LEAST_KEPT = 0.9
"""Share of the requests that keep a limit, below which the run is doubtful."""
KNEW = "these engines had cached this text"
KNEW_WHY = "measure on fresh engines, or without --seed: each run then has new words"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`level`: good, doubtful or bad; `lines`: the most important first."""

    level: str
    lines: tuple[str, ...]


def known_ratio(sent: Iterable[Row]) -> float | None:
    """Return the share of the new text of a run that its engines knew; None: it cannot be told."""
    known = new = 0.0
    for row in sent:
        if not _is_judged(row):
            continue
        prompt, possible = row["prompt_tokens"], _possible(row)
        known += min(max(0.0, row["cached_tokens"] - possible), prompt)
        new += max(0.0, prompt - possible)
    return min(1.0, known / new) if new else None


def _is_judged(row: Row) -> bool:
    cached = row.get("cached_tokens")
    if cached is None or not cached <= (row.get("prompt_tokens") or -1):
        return False
    moved = row.get("prefill_instance") or row.get("route_class") == "HEAVY_P2P"
    again = row.get("retries") or (row.get("attempts") or 1) > 1
    return bool(not moved and not again and row.get("ideal_hit_tokens") is not None)


def _possible(row: Row) -> float:
    """Return how many tokens of a prompt an engine may have that began empty, as it counts them."""
    ideal = max(row.get("possible_hit_tokens") or 0, row["ideal_hit_tokens"])
    prompt, asked = row["prompt_tokens"], row.get("input_length")
    if not asked:
        return float(ideal + TEMPLATE_TOKENS)
    template = min(TEMPLATE_TOKENS, max(0, prompt - asked))
    return float(ideal * max(1.0, (prompt - template) / asked) + template)


def known_by_counters(
    cache: Mapping[str, Any], engines: Mapping[str, Any], sent: int
) -> float | None:
    """Return the same of the engines' own counters, where answers do not say what was cached."""
    ideal, local = cache["ideal_hit_ratio"], engines.get("local_hit_ratio")
    if ideal is None or local is None or ideal >= 1.0:
        return None
    template = TEMPLATE_TOKENS * sent / engines["looked_up_tokens"]
    known: float = (local - ideal - template) / (1.0 - ideal)
    return min(1.0, max(0.0, known))


def knew(summary: Mapping[str, Any]) -> str | None:
    """Say that the engines of a run knew its text; None where they did not, as far as is known."""
    ratio = summary.get("known_text_ratio")
    if ratio is None or ratio <= KNOWN_RATIO:
        return None
    return f"{KNEW} ({ratio:.0%} of its new text was in their caches)"


def verdict(summary: Mapping[str, Any]) -> Verdict:
    """Judge a run by its summary."""
    requests = summary["requests"]
    ok = requests["ok"]
    all_ = max(summary.get("planned") or 0, requests["sent"] + requests["skipped"])
    first = f"{ok} of {all_} ok"
    if cause := _cause(summary):
        first += f": {cause}"
    lines = [first, *_said(summary)]
    if text := knew(summary):
        lines = [f"{text}: {KNEW_WHY}", *lines]
    if not ok or text or summary.get("stopped") or ok < LEAST_OK * all_:
        level = BAD
    elif ok < all_ or summary.get("degraded") or _missed(summary):
        level = DOUBTFUL
    else:
        level = GOOD
    return Verdict(level, tuple(lines))


def _cause(summary: Mapping[str, Any]) -> str:
    """Say what most of the requests that are not ok met, and why the run was stopped."""
    causes = []
    for error in (summary.get("errors") or ())[:1]:
        status = "" if error["status"] is None else f" {error['status']}"
        causes.append(f"{error['outcome']}{status}: {error['message']} ({error['count']} x)")
    if not causes:
        by_outcome = sorted(summary["requests"]["by_outcome"].items())
        causes = [", ".join(f"{number} {name}" for name, number in by_outcome if name != "ok")]
    if summary.get("stopped"):
        causes.append(summary["stopped"])
    return "; ".join(filter(None, causes))


def _said(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield latencies against their limits, hits, and the slowest phase."""
    limits = (summary.get("goodput") or {}).get("slo") or {}
    kept = (summary.get("goodput") or {}).get("kept") or {}
    parts = []
    for name in dict.fromkeys(("ttft", "tpot", *limits)):
        p90 = (summary.get(f"{name}_s") or {}).get("p90")
        told = f"{name.upper()} p90 {_seconds(p90)}"
        if name in limits:
            told += f" of {limits[name]:g} s"
            told += f" ({kept[name]:.0%} keep it)" if kept.get(name) is not None else ""
        parts.append(told)
    yield "; ".join(parts) + ("" if limits else "; no limits given (--goodput)")
    yield f"{_hits(summary)}; {slowest_phase(summary)}"


def _hits(summary: Mapping[str, Any]) -> str:
    cache = summary["cache"]
    found = cache.get("local_hit_ratio")
    found = cache["engine_hit_ratio"] if found is None else found
    found = (summary.get("engine_cache") or {}).get("local_hit_ratio") if found is None else found
    return (
        f"hits {_percent(found)} of all prompt tokens, ideal {_percent(cache['ideal_hit_ratio'])}"
    )


def slowest_phase(summary: Mapping[str, Any]) -> str:
    """Name the phase that took most of the time, of all classes together."""
    classes = (summary.get("phases") or {}).values()
    total_s = {
        phase: sum(one["requests"] * (one["time_s"][phase]["mean"] or 0.0) for one in classes)
        for phase in PHASES
    }
    if not any(total_s.values()):
        ttft_s, e2e_s = ((summary.get(tag) or {}).get("mean") for tag in ("ttft_s", "e2e_s"))
        if not ttft_s or not e2e_s:
            return "slowest phase -"
        total_s = {"first_token": ttft_s, "stream": max(0.0, e2e_s - ttft_s)}
    name = max(total_s, key=lambda one: total_s[one])
    return f"slowest phase: {name.replace('_', ' ')}, {total_s[name] / sum(total_s.values()):.0%}"


def _missed(summary: Mapping[str, Any]) -> bool:
    kept: Sequence[float | None] = tuple(
        ((summary.get("goodput") or {}).get("kept") or {}).values()
    )
    return any(one is not None and one < LEAST_KEPT for one in kept)


def _seconds(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    return f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.1f} ms"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"
