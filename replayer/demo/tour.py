"""`make demo`: the default policy beside round robin, then an offload; each a table and a sentence.

Two fleets run the same requests at the same time, so whatever else the machine does slows both.
All figures are computed from the two runs' `summary.json`, in the engines' own time.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from replayer.demo.checks import Check, checks
from replayer.demo.fleet import Fleet
from replayer.demo.processes import Children
from replayer.demo.scene import PROMPTS, STREAMS, move_in, write_scene

Summary = Mapping[str, Any]
NEWS_S = 5.0
SCENE_SLOWER = 3.0
"""The streams' engines run this much slower: a pause between tokens is a short time."""
COST, ROUND_ROBIN = (
    ("--offload-policy", "cost"),
    (
        *("--offload-policy", "never"),
        *("--placement", "round-robin"),
    ),
)
NEXT = """
The page of this run with all its figures: {out}/report.html
Try next:
  make demo-kill       one server is killed in the middle: what had not begun to stream is not lost
  docs/try/README.md   two simulated servers by hand, then two of your own
  .venv/bin/analyze compare {out}/round-robin {out}   both runs, request by request"""
_log = logging.getLogger("demo")


def tour(children: Children, options: argparse.Namespace, load: tuple[str, ...]) -> bool:
    """Run both parts; True if every check of every run holds."""
    out = Path(options.out)
    held = _beside_round_robin(children, options, load, out)
    held &= _offload(children, options, out)
    _log.info(NEXT.format(out=out))
    return held


def _beside_round_robin(
    children: Children, options: argparse.Namespace, load: tuple[str, ...], out: Path
) -> bool:
    _log.info(
        "1. %d simulated servers behind the proxy, recorded sessions of coding agents;\n"
        "   beside them as many more, with the same requests in round robin.",
        options.engines,
    )
    lean = ("--no-html",)
    default = Fleet(out, children, COST, load, options.speed)
    other = Fleet(out / "round-robin", children, ROUND_ROBIN, (*load, *lean), options.speed)
    for fleet in (default, other):
        fleet.make_folder()
        fleet.start_engines(options.engines)
    for fleet in (default, other):
        fleet.wait_for_engines()
    held = _run([default, other], lambda fleet: fleet.start_proxy(fleet.instances))
    default.write_record()
    runs = [_summary(fleet) for fleet in (other, default)]
    for line in (*table(("round robin", "cost, the default"), ROUTING, runs), gain(*runs)):
        _log.info("%s", line)
    return held


def _offload(children: Children, options: argparse.Namespace, out: Path) -> bool:
    _log.info(
        "\n2. An offload: %d streams run on a server (D), %d long prompts arrive for it, and\n"
        "   another server (P) is idle. D computes the prompts, or P does and sends D their KV.",
        *(STREAMS, PROMPTS),
    )
    speed = options.speed / SCENE_SLOWER
    scene = write_scene(_made(out / "offload") / "scene.trace.jsonl")
    pace = ("--speedup", str(speed), "--time-scale", str(speed), "--seed", "0", "--no-html")
    load = (str(scene.resolve()), *pace)
    fleets = [
        Fleet(out / name, children, ("--offload-policy", policy), load, speed)
        for name, policy in (("no-offload", "never"), ("offload", "always"))
    ]
    for fleet in fleets:
        fleet.make_folder()
        fleet.start_engines(2)
    for fleet in fleets:
        fleet.wait_for_engines()
    held = _run(fleets, lambda fleet: fleet.start_proxy(fleet.instances[:1]), move_in)
    runs = [_summary(fleet) for fleet in fleets]
    lines = (*table(("D computes", "P computes"), OFFLOAD, runs), price(*runs))
    for line in (*lines, same_answers(*(fleet.out for fleet in fleets))):
        _log.info("%s", line)
    return held


def _run(
    fleets: Sequence[Fleet],
    start_proxy: Callable[[Fleet], Any],
    prepare: Callable[[Fleet], None] = lambda fleet: None,
) -> bool:
    """Run the client in front of each fleet at once, stop them, and say whether all held."""
    proxies = [start_proxy(fleet) for fleet in fleets]
    for fleet, proxy in zip(fleets, proxies, strict=True):
        fleet.wait_for_proxy(proxy)
        prepare(fleet)
    clients = [fleet.replay(in_view=False) for fleet in fleets]
    began_s = news_s = time.monotonic()
    while any(client.child.poll() is None for client in clients):
        time.sleep(0.1)
        if time.monotonic() - news_s >= NEWS_S:
            news_s = time.monotonic()
            done = " and ".join(str(_done(fleet)) for fleet in fleets)
            _log.info("   %2.0f s: %s requests done", news_s - began_s, done)
    for client in clients:
        if client.child.returncode:
            raise RuntimeError(f"replay failed; {client.said()}")
    results = [one for fleet in fleets for one in _checked(fleet)]
    for fleet in fleets:
        fleet.stop()
    failed = [text for ok, text in results if not ok]
    for text in failed:
        _log.info("FAILED %s", text)
    _log.info(
        "   checks of requests, tokens, moved KV, counters: %d ok\n", len(results) - len(failed)
    )
    return not failed


def _checked(fleet: Fleet) -> list[Check]:
    offloads = "always" in fleet.policy
    return list(checks(fleet.evidence(offloads=offloads)))


def _done(fleet: Fleet) -> int:
    log = fleet.out / "requests.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _summary(fleet: Fleet) -> Summary:
    found: Summary = orjson.loads((fleet.out / "summary.json").read_bytes())
    return found


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of a table: its title, where it is in a summary, and how it is shown."""

    title: str
    read: Callable[[Summary], float | None]
    form: str


def _ms(*path: str) -> Callable[[Summary], float | None]:
    def read(summary: Summary) -> float | None:
        value: Any = summary
        for key in path:
            value = None if value is None else value.get(key)
        return None if value is None else float(value) * 1e3

    return read


def _computed(summary: Summary) -> float | None:
    ratio = summary["cache"]["engine_hit_ratio"]
    return None if ratio is None else 100 * (1 - ratio)


def _prompts_wait(summary: Summary) -> float | None:
    """Median TTFT of the long prompts, whichever class they are of."""
    by_class = summary["by_route_class"]
    name = "HEAVY_P2P" if "HEAVY_P2P" in by_class else "HEAVY_COLO"
    return _ms(name, "ttft_s", "p50")(by_class)


TTFT_P90, TPOT_P90, ITL_P99 = (
    _ms("ttft_s", "p90"),
    _ms("tpot_s", "p90"),
    _ms("itl_s", "p99"),
)
ROUTING = (
    Figure("requests that ended well", lambda summary: float(summary["requests"]["ok"]), ",.0f"),
    Figure("TTFT mean, ms", _ms("ttft_s", "mean"), ",.0f"),
    Figure("TTFT p90, ms", TTFT_P90, ",.0f"),
    Figure("TPOT p90, ms", TPOT_P90, ",.1f"),
    Figure("prompt tokens computed, %", _computed, ",.0f"),
)
OFFLOAD = (
    Figure("ITL p50 of the streams, ms", _ms("itl_s", "p50"), ",.0f"),
    Figure("ITL p99 of the streams, ms", ITL_P99, ",.0f"),
    Figure("TTFT p50 of the long prompts, ms", _prompts_wait, ",.0f"),
)


def table(heads: Sequence[str], figures: Sequence[Figure], runs: Sequence[Summary]) -> list[str]:
    """Return the lines of a table: a figure per row, a run per column."""
    rows = [("", *heads)]
    for figure in figures:
        values = [figure.read(run) for run in runs]
        cells = ("-" if value is None else format(value, figure.form) for value in values)
        rows.append((figure.title, *cells))
    return ["   " + f"{row[0]:<34}" + "".join(f"{cell:>20}" for cell in row[1:]) for row in rows]


def gain(other: Summary, default: Summary) -> str:
    """Return the sentences about round robin: gain and price, whatever the run has shown."""
    ttft, tpot = _ratio(TTFT_P90, default, other), _ratio(TPOT_P90, default, other)
    why = "in this run the default gains nothing"
    if ttft is not None and ttft < 1:
        why = "sessions stay where their KV is"
    slower = ": later tokens come more slowly" if tpot is not None and round(tpot, 2) > 1 else ""
    return "\n".join((_beside("TTFT", ttft, f": {why}"), _beside("TPOT", tpot, slower)))


def _beside(name: str, ratio: float | None, said: str) -> str:
    if ratio is None:
        return f"   {name} was not measured in both runs."
    return f"   {name} p90 is {ratio:.2f} of round robin's{said}."


def price(without: Summary, offloaded: Summary) -> str:
    """Return the sentence about the offload: what the streams gain, what the prompts pay."""
    itl, ttft = _ratio(ITL_P99, offloaded, without), _ratio(_prompts_wait, offloaded, without)
    if itl is None or ttft is None:
        return "   ITL or TTFT was not measured in both runs."
    gains = "" if itl < 1 else ": in this run they gain nothing"
    return (
        f"   With the offload the streams' ITL p99 is {itl:.2f} of what it is without{gains};\n"
        f"   the long prompts' TTFT is {ttft:.2f} of it, with the transfer. The proxy was told to\n"
        "   offload here (`always`); `cost` does it where it saves time for all."
    )


def _ratio(read: Callable[[Summary], float | None], above: Summary, below: Summary) -> float | None:
    top, bottom = read(above), read(below)
    return top / bottom if top is not None and bottom else None


def same_answers(*outs: Path) -> str:
    """Return the sentence that compares the answers of two runs, request by request."""
    without, offloaded = (
        {row["request_id"]: row["output_digest"] for row in _rows(out)} for out in outs
    )
    same = sum(digest == offloaded.get(name) for name, digest in without.items())
    return f"   Answers that are the same, token by token: {same} of {len(without)}."


def _rows(out: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (out / "requests.jsonl").read_bytes().splitlines()]
