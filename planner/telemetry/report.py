"""The report of a run of the planner: one HTML file with twelve panels, and nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import orjson

from planner.telemetry.metrics import PARTS
from planner.telemetry.recorder import Recorder

POINTS = 2000
"""Most points of a series; more are thinned evenly."""
LOOPS = ("load", "throughput", "reserve")
Document = Mapping[str, Any]
Trace = dict[str, Any]


def report_html(recorder: Recorder) -> str:
    """The page. Plotly's script is a part of it, so it can be read anywhere."""
    ticks = list(recorder.every(-(-len(recorder) // POINTS) or 1))
    panels = orjson.dumps(panels_of(ticks)).decode().replace("</", "<\\/")
    page = (files("planner.telemetry") / "report.html").read_text("utf-8")
    script = (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")
    span = "no tick yet" if not ticks else f"{_time(ticks[0])} to {_time(ticks[-1])}"
    page = page.replace("__TITLE__", span).replace("__PANELS__", panels)
    return page.replace("__PLOTLY__", script)


def panels_of(ticks: Sequence[Document]) -> list[dict[str, Any]]:
    """The panels with their points, in the order of the founding design's report."""
    draw = _Ticks(ticks)
    ttft_s, itl_s = draw.target("ttft_s"), draw.target("itl_s")
    panels: list[tuple[str, str, list[Trace]]] = [
        ("Replicas", "", draw.replicas()),
        ("Requests per window", "", draw.both("requests", "next_num_req")),
        ("Observed TTFT", "s", [draw.traffic("observed", "ttft_s"), ttft_s]),
        ("Observed time per token", "s", [draw.traffic("observed", "itl_s"), itl_s]),
        ("Estimated TTFT", "s", [*draw.engines("ttft_s"), ttft_s]),
        ("Estimated time per token", "s", [*draw.engines("itl_s"), itl_s]),
        ("Waiting prompts", "tokens", draw.engines("queued_prefill_tokens")),
        ("KV of running streams", "tokens", draw.engines("decode_kv_tokens")),
        ("Needed replicas", "", draw.needs()),
        ("Prompt", "tokens", draw.both("isl_tokens", "next_isl")),
        ("Answer", "tokens", draw.both("osl_tokens", "next_osl")),
        ("Decisions", "", [trace for loop in LOOPS for trace in draw.decided(loop)]),
    ]
    return [{"title": title, "unit": unit, "traces": traces} for title, unit, traces in panels]


class _Ticks:
    """Draws figures of ticks as traces of Plotly."""

    def __init__(self, ticks: Sequence[Document]) -> None:
        self._ticks = ticks
        self._x = [_time(tick) for tick in ticks]
        self._components = sorted({name for tick in ticks for name in tick["targets"]})

    def _trace(self, name: str, values: Sequence[Any], dash: str = "solid") -> Trace:
        words = any(isinstance(value, str) for value in values)
        mode = "markers" if words else "lines"
        return {"name": name, "x": self._x, "y": values, "mode": mode, "line": {"dash": dash}}

    def _path(self, name: str, *path: str, dash: str = "solid") -> Trace:
        return self._trace(name, [_at(tick, *path) for tick in self._ticks], dash)

    def target(self, figure: str) -> Trace:
        return self._path("target", "decided", "slo", figure, dash="dot")

    def traffic(self, name: str, figure: str) -> Trace:
        return self._path(name, "seen", "traffic", figure)

    def both(self, seen: str, predicted: str) -> list[Trace]:
        """A figure of traffic as it was seen, and as it was predicted for the next window."""
        path = ("decided", "prediction", predicted)
        return [self.traffic("observed", seen), self._path("predicted", *path, dash="dash")]

    def replicas(self) -> list[Trace]:
        found = []
        for name in self._components:
            found += [
                self._path(f"{name}: wanted", "targets", name),
                self._path(f"{name}: ready", "seen", "replicas", name, "ready"),
                self._path(f"{name}: lower bound", "decided", "floors", name, dash="dot"),
            ]
        return found

    def needs(self) -> list[Trace]:
        """What the strategy reserve adds up."""
        return [
            self._path(f"{name}: {part}", "decided", "needs", name, part)
            for name in self._components
            for part in PARTS
        ]

    def decided(self, loop: str) -> list[Trace]:
        """What was decided of each component."""
        return [self._path(f"{loop}: {name}", "decided", loop, name) for name in self._components]

    def engines(self, figure: str) -> list[Trace]:
        """A figure of every instance."""
        told = [
            {one["name"]: one.get(figure) for found in engines.values() for one in found}
            for engines in (_at(tick, "seen", "engines") or {} for tick in self._ticks)
        ]
        names = sorted({name for one in told for name in one})
        return [self._trace(name, [one.get(name) for one in told]) for name in names]


def _at(document: Any, *path: str) -> Any:
    """The value behind these keys; None where one of them is not there."""
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _time(tick: Document) -> str:
    return datetime.fromtimestamp(tick["at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
