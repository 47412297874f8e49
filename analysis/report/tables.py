"""The tables and sentences of a run's report, for the terminal and the page."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.bench.phases import PHASES
from analysis.measures import METRICS, PERCENTS
from analysis.report.verdict import BAD, DOUBTFUL, GOOD, verdict

COLUMNS = ("mean", *(f"p{percent}" for percent in PERCENTS))
FAILURES_AS_INF = "ttft_s_failures_as_inf"
TITLE_AS_INF = "TTFT, failed = inf"
PHASES_TITLE = "Where the time went at the proxy, mean / p90"
PREDICTED_TITLE = "Predicted at the decision and realised, mean"
LAG = "schedule_lag_s"
CLASSES = ("WARM", "MEDIUM", "HEAVY_P2P", "HEAVY_COLO")
CLASS_COLUMNS = (
    ("TTFT", "ttft_s", ("p50", "p90", "p99")),
    ("TPOT", "tpot_s", ("p50", "p90")),
    ("E2E", "e2e_s", ("p50",)),
)
PREDICTED_HEAD = ("", "n", "predicted", "realised", "ratio p50", "ratio p90")
SLOW_SHOWN = 3
WHOLE_FROM_MS = 1000
STYLES = {GOOD: "green", DOUBTFUL: "yellow", BAD: "bold red"}


def print_report(summary: Mapping[str, Any], console: Console) -> None:
    """Print the verdict on a run, then its tables, facts and warnings."""
    judged = verdict(summary)
    for at, line in enumerate(judged.lines):
        head = "  " if at else "verdict: "
        console.print(
            f"{head}{line}",
            style=STYLES[judged.level],
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    print_table(console, f"Latency of ok requests, {unit(summary)}", latency_table(summary))
    if summary.get("by_route_class"):
        print_table(console, f"By route class, {unit(summary)}", class_table(summary))
    if summary.get("phases"):
        print_table(console, f"{PHASES_TITLE}, {unit(summary)}", phase_table(summary))
        print_table(console, f"{PREDICTED_TITLE}, {unit(summary)}", predicted_table(summary))
    for line in facts(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for warning in summary.get("degraded", ()):
        console.print(f"degraded: {warning}", style="yellow", markup=False, soft_wrap=True)


def print_table(console: Console, title: str, shown: Table) -> None:
    """Print a table under a title that may be wider than it."""
    console.print(title, style="italic", highlight=False, markup=False, soft_wrap=True)
    console.print(shown)


def latency_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of latencies, in milliseconds."""
    shown = Table()
    shown.add_column("", no_wrap=True)
    for column in ("n", *COLUMNS):
        shown.add_column(column, justify="right", no_wrap=True)
    for tag in ("ttft_s", FAILURES_AS_INF, "tpot_s", "itl_s", "e2e_s", LAG):
        shown.add_row(*latency_cells(summary, tag))
    return shown


def latency_cells(summary: Mapping[str, Any], tag: str) -> list[str]:
    """Format one row: the metric's title, the number of samples, milliseconds."""
    title = TITLE_AS_INF if tag == FAILURES_AS_INF else METRICS[tag].title
    if tag == LAG and time_scale(summary) != 1:
        title = f"{title}, real"
    spread = summary.get(tag) or {}
    cells = (milliseconds(spread.get(column)) for column in COLUMNS)
    return [title, str(spread.get("count", 0)), *cells]


def class_table(summary: Mapping[str, Any]) -> Table:
    """Make the table by route class, in milliseconds; names of classes are never truncated."""
    shown = Table()
    widest = max(map(len, summary["by_route_class"]))
    shown.add_column("", no_wrap=True, min_width=widest)
    for column in class_columns():
        shown.add_column(column.replace(" ", "\n"), justify="right")
    for cells in class_cells(summary):
        shown.add_row(*cells)
    return shown


def class_columns() -> Iterator[str]:
    """Name the columns behind the one with the class."""
    yield "n"
    for title, _tag, names in CLASS_COLUMNS:
        yield from (f"{title} {name}" for name in names)


def class_cells(summary: Mapping[str, Any]) -> Iterator[list[str]]:
    """Format each route class: name, number of requests, milliseconds; lightest class first."""
    classes = summary.get("by_route_class") or {}
    for name in lightest_first(classes):
        spreads = ((classes[name][tag], names) for _title, tag, names in CLASS_COLUMNS)
        cells = (milliseconds(spread.get(one)) for spread, names in spreads for one in names)
        yield [name, str(classes[name]["requests"]), *cells]


def lightest_first(classes: Iterable[str]) -> list[str]:
    """Sort names of route classes, unknown ones last."""
    order = {name: at for at, name in enumerate(CLASSES)}
    return sorted(classes, key=lambda name: (order.get(name, len(order)), name))


def phase_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of phases, a column for each route class."""
    head, *lines = phase_cells(summary)
    shown = Table()
    shown.add_column("", no_wrap=True)
    for column in head[1:]:
        shown.add_column(column, justify="right", min_width=len(column))
    for cells in lines:
        shown.add_row(*cells)
    return shown


def phase_cells(summary: Mapping[str, Any]) -> list[list[str]]:
    """Format the mean and p90 of each phase by route class, in milliseconds, below a head.

    Only the means of a class add up, to the last line.
    """
    classes = summary["phases"]
    names = lightest_first(classes)
    lines = [["", *names], ["n", *(str(classes[name]["requests"]) for name in names)]]
    for phase in PHASES:
        spreads = [classes[name]["time_s"][phase] for name in names]
        lines.append([phase.replace("_", " "), *map(_mean_and_p90, spreads)])
    sums = (sum(classes[name]["time_s"][phase]["mean"] for phase in PHASES) for name in names)
    return [*lines, ["all", *map(milliseconds, sums)]]


def _mean_and_p90(spread: Mapping[str, Any]) -> str:
    if not spread["max"]:
        return "-"
    return f"{milliseconds(spread['mean'])} / {milliseconds(spread['p90'])}"


def predicted_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of predictions."""
    shown = Table()
    for at, column in enumerate(PREDICTED_HEAD):
        shown.add_column(column, justify="right" if at else "left", no_wrap=not at)
    for cells in predicted_cells(summary):
        shown.add_row(*cells)
    return shown


def predicted_cells(summary: Mapping[str, Any]) -> Iterator[list[str]]:
    """Format each class's predictions: times in milliseconds, and realised to predicted."""
    for name in lightest_first(summary["phases"]):
        for what, one in summary["phases"][name]["predicted"].items():
            means = (milliseconds(one[side]["mean"]) for side in ("predicted_s", "realised_s"))
            ratios = (_number(one["ratio"][rank]) for rank in ("p50", "p90"))
            label = "TTFT" if what == "ttft" else what.replace("_", " ")
            yield [f"{name} {label}", str(one["count"]), *means, *ratios]


def _slowest(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each of the slowest requests: its wait, and its phases."""
    for one in (summary.get("slowest") or ())[:SLOW_SHOWN]:
        way = " > ".join(filter(None, (one["prefill_instance"], one["decode_instance"])))
        what = ", ".join(filter(None, (one["route_class"], one["outcome"], way)))
        phases = ", ".join(
            f"{name.replace('_', ' ')} {milliseconds(seconds)}"
            for name, seconds in one["phases_s"].items()
            if milliseconds(seconds) != milliseconds(0.0)
        )
        wait = milliseconds(one["wait_s"])
        yield f"slowest: {one['request_id']} ({what}) waited {wait} ms; {phases}"


def milliseconds(value: float | str | None) -> str:
    """Format seconds as milliseconds; "inf" stays, None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    ms = value * 1e3
    return f"{ms:,.0f}" if abs(ms) >= WHOLE_FROM_MS else f"{ms:,.1f}"


def time_scale(summary: Mapping[str, Any]) -> float:
    """Return how many times faster than real the target's time ran."""
    scale: float = summary.get("time_scale", 1.0)
    return scale


def unit(summary: Mapping[str, Any]) -> str:
    """Name the unit of the tables; with a time scale, say that it is the target's time."""
    scale = time_scale(summary)
    return "ms" if scale == 1 else f"ms of the target's time (measured x {scale:g})"


def setting(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's settings by name; unknown ones are left out."""
    concurrency, mode = summary.get("concurrency"), summary.get("mode")
    slots = f", {concurrency} at a time" if concurrency else ""
    scale = time_scale(summary)
    known = {
        "trace": _name(summary.get("trace")),
        "request log": _name(summary.get("request_log")),
        "model": summary.get("model"),
        "mode": f"{mode}{slots}" if mode else None,
        "speedup": _factor(summary.get("speedup")),
        "seed": None if summary.get("seed") is None else f"{summary['seed']}",
        "time scale": None if scale == 1 else _factor(scale),
        "offload policy": ", ".join(summary.get("offload_policies") or ()),
    }
    return {name: str(value) for name, value in known.items() if value}


def title(summary: Mapping[str, Any]) -> str:
    """Name a run, or a log that was read alone."""
    if log := summary.get("request_log"):
        return f"Request log {_name(log)}"
    return f"Replay of {_name(summary.get('trace'))}"


def _name(path: Any) -> str | None:
    return Path(path).name if isinstance(path, str) else None


def facts(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per fact: the settings, then the findings."""
    yield "run: " + ", ".join(f"{name} {value}" for name, value in setting(summary).items())
    yield from findings(summary)


def findings(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per fact that the tables do not show."""
    yield from _requests(summary)
    yield _throughput(summary)
    if per_event := summary.get("tokens_per_event"):
        yield (
            "ITL is the pause between events, TPOT the time per token: "
            f"an event carried {per_event:.1f} tokens on average"
        )
    yield _cache(summary["cache"])
    yield from _engine_cache(summary.get("engine_cache") or {})
    if summary["goodput"]["slo"]:
        slo = summary["goodput"]["slo"].items()
        limits = ", ".join(f"{name} <= {limit:g} s" for name, limit in slo)
        yield (
            f"goodput: {_percent(summary['goodput']['ratio_of_sent'])} of those sent keep {limits}"
        )
    reasons = summary.get("offload_decision_reasons") or {}
    if reasons:
        listed = ", ".join(f"{name} {number}" for name, number in sorted(reasons.items()))
        yield f"offload decisions: {listed}"
    yield from _slowest(summary)
    subject = "log" if summary.get("request_log") else "trace"
    for note in summary.get("notes", ()):
        yield f"{subject}: {note}"


def _requests(summary: Mapping[str, Any]) -> Iterator[str]:
    requests = summary["requests"]
    others = {name: n for name, n in requests["by_outcome"].items() if name != "ok"}
    listed = "".join(f", {number} {name}" for name, number in sorted(others.items()))
    yield f"requests: {requests['sent']} sent, {requests['ok']} ok{listed}"
    refusals = summary.get("refusals") or {}
    if refusals.get("answers"):
        waited_s = refusals["waited_s"]["mean"]
        waits = f"; waited {waited_s:,.1f} s each on average" if waited_s is not None else ""
        yield (
            f"refused: {refusals['answers']} answers with status 503 to {refusals['requests']} "
            f"requests; {refusals['retries']} retries, {refusals['ok_after_retry']} ok after them, "
            f"{refusals['given_up']} given up{waits}"
        )
    for error in summary.get("errors", ()):
        status = "" if error["status"] is None else f" {error['status']}"
        yield f"  {error['count']} x {error['outcome']}{status}: {error['message']}"
    if summary.get("errors_not_listed"):
        yield f"  {summary['errors_not_listed']} more with other messages"


def _throughput(summary: Mapping[str, Any]) -> str:
    throughput, scale = summary["throughput"], time_scale(summary)
    over = f"{summary['duration_s']:.1f} s"
    if scale != 1:
        over += f" of the target's time, {summary['client']['duration_s']:.1f} s measured"
    return (
        f"throughput: {_number(throughput['requests_per_s'])} requests/s, "
        f"{_number(throughput['output_tokens_per_s'])} output tokens/s over {over}; "
        f"{summary['input_tokens']:,} tokens in, {summary['output_tokens']:,} out"
    )


def _cache(cache: Mapping[str, Any]) -> str:
    """Compare the hit ratios; the ideal is of a local cache, so KV sent by peers is separate."""
    ideal, local = cache["ideal_hit_ratio"], cache.get("local_hit_ratio")
    line = (
        f"prefix cache hit: ideal {_percent(ideal)}, predicted "
        f"{_percent(cache['predicted_hit_ratio'])}, engines {_percent(cache['engine_hit_ratio'])}"
    )
    if local is None:
        return line
    line += f" = own {_percent(local)} + from peers {_percent(cache.get('external_hit_ratio'))}"
    if ideal is not None and local > ideal:
        line += "; own is above ideal by text they held before, or by blocks finer than the trace's"
    return line


def _engine_cache(cache: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the engines' counters say, and which could not be read."""
    if cache.get("looked_up_tokens") is not None:
        by = ", as the proxy last read them" if cache.get("source") == "proxy" else ""
        kinds = ("combined", "local", "external")
        combined, local, external = (_percent(cache.get(f"{kind}_hit_ratio")) for kind in kinds)
        yield (
            f"engines' own counters{by}: {cache['looked_up_tokens']:,.0f} prompt tokens looked up "
            f"on {cache.get('engines_counted')} engines, "
            f"hit {combined} = local {local} + external {external}"
        )
    for name, reason in cache.get("unread", {}).items():
        yield f"engines' own counters: not of {name}: {reason}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _factor(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"
