"""A run on the terminal and as a page."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from analysis.metrics import METRICS, PERCENTS

COLUMNS = ("mean", *(f"p{percent}" for percent in PERCENTS))
FAILURES_AS_INF = "ttft_s_failures_as_inf"
TITLE_AS_INF = "TTFT, failed = inf"


def print_report(summary: Mapping[str, Any], console: Console) -> None:
    """Print the tables and the facts around them."""
    console.print(latency_table(summary))
    if summary.get("by_route_class"):
        console.print(class_table(summary["by_route_class"]))
    for line in facts(summary):
        console.print(line, highlight=False, soft_wrap=True)
    for warning in summary.get("degraded", ()):
        console.print(f"[yellow]degraded: {escape(warning)}[/yellow]", soft_wrap=True)


def latency_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of latencies, in milliseconds."""
    shown = Table(title="Latency of requests that ended ok, ms", title_justify="left")
    shown.add_column("", no_wrap=True)
    for column in ("n", *COLUMNS):
        shown.add_column(column, justify="right")
    titles = {tag: metric.title for tag, metric in METRICS.items()}
    titles[FAILURES_AS_INF] = TITLE_AS_INF
    for tag in ("ttft_s", FAILURES_AS_INF, "tpot_s", "itl_s", "e2e_s", "schedule_lag_s"):
        spread = summary.get(tag) or {}
        cells = (milliseconds(spread.get(column)) for column in COLUMNS)
        shown.add_row(titles[tag], str(spread.get("count", 0)), *cells)
    return shown


def class_table(classes: Mapping[str, Any]) -> Table:
    """Make the table by route class, in milliseconds."""
    shown = Table(title="By route class, ms", title_justify="left")
    shown.add_column("")
    for column in ("n", "TTFT p50", "TTFT p90", "TTFT p99", "TPOT p50", "TPOT p90", "E2E p50"):
        shown.add_column(column, justify="right")
    for name, values in classes.items():
        cells = [
            *(values["ttft_s"].get(column) for column in ("p50", "p90", "p99")),
            *(values["tpot_s"].get(column) for column in ("p50", "p90")),
            values["e2e_s"].get("p50"),
        ]
        shown.add_row(name, str(values["requests"]), *(milliseconds(cell) for cell in cells))
    return shown


def milliseconds(value: float | str | None) -> str:
    """Write seconds as milliseconds; "inf" stays, unknown is a dash."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value * 1e3:,.1f}"


def facts(summary: Mapping[str, Any]) -> Iterator[str]:
    """Say in a line each what else a run shows."""
    requests = summary["requests"]
    others = {name: n for name, n in requests["by_outcome"].items() if name != "ok"}
    listed = "".join(f", {number} {name}" for name, number in sorted(others.items()))
    yield f"requests: {requests['sent']} sent, {requests['ok']} ok{listed}"
    throughput = summary["throughput"]
    yield (
        f"throughput: {_number(throughput['requests_per_s'])} requests/s, "
        f"{_number(throughput['output_tokens_per_s'])} output tokens/s over "
        f"{summary['duration_s']:.1f} s; {summary['input_tokens']:,} tokens in, "
        f"{summary['output_tokens']:,} out"
    )
    cache = summary["cache"]
    names = ("ideal", "predicted", "engine", "external")
    ratios = (f"{name} {_percent(cache[f'{name}_hit_ratio'])}" for name in names)
    yield f"prefix cache hit: {', '.join(ratios)}"
    if summary["goodput"]["slo"]:
        limits = ", ".join(f"{name} <= {limit:g} s" for name, limit in _slo(summary).items())
        yield (
            f"goodput: {_percent(summary['goodput']['ratio_of_sent'])} of those sent keep {limits}"
        )
    reasons = summary.get("offload_decision_reasons") or {}
    if reasons:
        listed = ", ".join(f"{name} {number}" for name, number in sorted(reasons.items()))
        yield f"offload decisions: {listed}"
    for note in summary.get("notes", ()):
        yield f"trace: {note}"


def write_html(folder: Path, summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write `report.html`, a page that needs no network."""
    # Drawing libraries are loaded here and not above: printing a table must not wait for them.
    from analysis.html import page
    from analysis.load import table

    (folder / "report.html").write_text(page(summary, table(rows)), encoding="utf-8")


def _slo(summary: Mapping[str, Any]) -> Mapping[str, float]:
    limits: Mapping[str, float] = summary["goodput"]["slo"]
    return limits


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"
