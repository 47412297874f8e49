"""`analyze what-if`, which is also `replay what-if`: its options, verdict and table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from analysis.bench.options import flag, named
from analysis.bench.progress import EQUAL_RATIO, Steps
from analysis.bench.runner import Experiment, Result
from analysis.bench.stats import INTERVAL_PERCENT
from analysis.bench.tables import number, say, table
from analysis.check.logged import MOST_INSTANCES, LoggedLoad, read_load
from analysis.check.what_if import (
    BOUND,
    Figure,
    Fleet,
    WhatIf,
    compare,
    fitted,
    read_options,
    size_of,
)
from analysis.rivals.registry import RIVALS
from analysis.runs import RunError
from replayer.arguments import positive_count

LAST = 20_000
FEW_SESSIONS = 10
EXIT_NOT_TO_BE_TRUSTED = 1


@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """The options of `what-if`."""

    log: Path = flag(Path, "request log of one proxy (--request-log)", name="")
    policy: str | None = flag(
        str, f"another policy, of {', '.join(RIVALS)} (default: the one that ran)", None
    )
    instances: int | None = flag(
        positive_count, "so many instances (default: as many as the log has)", None
    )
    config: Path | None = flag(
        Path,
        "the proxy's options in the log's time, as cache-proxy --print-config writes them "
        "(default: the defaults)",
        None,
    )
    other_config: Path | None = flag(Path, "other options, in the same form", None)
    kv_tokens: int | None = flag(
        positive_count,
        "KV of an instance in tokens, as the engine prints it at its start (default: 393,216, and "
        "room for two of the log's longest requests)",
        None,
    )
    model: str | None = flag(str, "the model, where the log has several", None)
    last: int = flag(positive_count, "take so many requests, the last ones", LAST)
    json: Path | None = flag(Path, "file to write all figures to", None)


def _perform(options: WhatIfOptions, console: Console) -> Result:
    if options.instances is not None and options.instances > MOST_INSTANCES:
        raise RunError(f"--instances: must be 1 to {MOST_INSTANCES}, not {options.instances}")
    load = read_load(options.log, options.model, options.kv_tokens, options.last)
    if load.policy not in RIVALS:
        raise RunError(f"{options.log}: ran with {load.policy}, which virtual time does not have")
    size, fleets = size_of(load, options.kv_tokens), _fleets(options, load)
    steps = Steps("what-if")
    steps.say(f"{len(load.requests):,} requests read; the engines are fitted, a minute or two")
    engine = fitted(load, size), size
    steps.say("the engines are fitted")
    result = compare(load, *fleets, engine, steps)
    say(console, verdict(result))
    for line in (reproduced(result), *notes(result, options)):
        say(console, line)
    print_figures(result, console)
    status = 0 if result.trusted else EXIT_NOT_TO_BE_TRUSTED
    return Result(result.document() | {"verdict": verdict(result)}, status=status)


def _fleets(options: WhatIfOptions, load: LoggedLoad) -> tuple[Fleet, Fleet]:
    """Return what ran, and what is asked: all is as it was but for what was given."""
    ran = Fleet.of(load.policy, len(load.names), options.config)
    if (had := _policy_of(options.config) or load.policy) != load.policy:
        raise RunError(f"{options.config}: has offload_policy {had}, but the log {load.policy}")
    path = options.other_config
    policy = options.policy or _policy_of(path) or load.policy
    named("policy", (policy,), RIVALS, RunError)
    asked = Fleet.of(policy, options.instances or ran.instances, path)
    return ran, asked if path else replace(asked, options=ran.options, file=ran.file)


def _policy_of(path: Path | None) -> str | None:
    found = None if path is None else read_options(path).get("offload_policy")
    return None if found is None else str(found)


WHAT_IF = Experiment(
    WhatIfOptions,
    _perform,
    text="Repeats a proxy's request log in virtual time, under another policy or with more or "
    "fewer instances, on engines that are fitted to the log. Exit status: 0 the policy that ran is "
    "reproduced, 1 it is not, so the verdict is not to be trusted, 2 bad input.",
)
declare, run = WHAT_IF.declare, WHAT_IF.run


def verdict(result: WhatIf) -> str:
    """Say in one sentence what would have been."""
    doubt = "" if result.trusted else "Not to be trusted: "
    if result.ran == result.asked:
        kept = "is reproduced" if result.trusted else "is not reproduced"
        return f"{doubt}{result.ran.policy}, the policy that ran, {kept}: {_off(result)}."
    ran, asked = _named(result)
    ttft, goodput = result.figures[1], result.figures[-1]
    low, high = _percent(ttft.low), _percent(ttft.high)
    bounds = f"{INTERVAL_PERCENT} % interval {low} to {high} %"
    if ttft.low <= 0.0 <= ttft.high:
        told = f"a TTFT p90 that cannot be told from that of {ran} ({bounds})"
    else:
        more = "higher" if ttft.change > 0 else "lower"
        told = f"TTFT p90 {_percent(abs(ttft.change), '')} % {more} than {ran} ({bounds})"
    return f"{doubt}{asked} would have had {told}, {_goodput(goodput)}."


def _named(result: WhatIf) -> tuple[str, str]:
    """Name what ran and what was asked, by what differs."""
    ran, asked = result.ran, result.asked
    names = [ran.policy, asked.policy]
    if ran.instances != asked.instances:
        names = [
            f"{name} on {one.instances}" for name, one in zip(names, (ran, asked), strict=True)
        ]
    if ran.options != asked.options:
        names[1] += f" with {asked.file}"
    return names[0], names[1]


def _goodput(one: Figure) -> str:
    if abs(one.change) < EQUAL_RATIO:
        return "goodput equal"
    more = "higher" if one.change > 0 else "lower"
    bounds = f"{one.low * 100:+.1f} to {one.high * 100:+.1f}"
    return f"goodput {abs(one.change) * 100:.1f} points {more} ({bounds})"


def reproduced(result: WhatIf) -> str:
    """Say how near virtual time is to the log, under the policy that ran."""
    kept = "within" if result.trusted else "not within"
    return (
        f"virtual time beside the log, under {result.ran.policy}: {_off(result)}, {kept} "
        f"{BOUND * 100:.0f} % ({result.judged:,} requests of {result.sessions:,} sessions)"
    )


def _off(result: WhatIf) -> str:
    p50, p90 = result.figures[:2]
    return f"TTFT p50 {_percent(p50.off)} %, p90 {_percent(p90.off)} %"


def notes(result: WhatIf, options: WhatIfOptions) -> Iterator[str]:
    """Say what may make a verdict worth less."""
    if result.left_out:
        yield f"note: {result.left_out:,} lines left out: not served, or tokens not counted"
    if (unjudged := result.requests - result.judged) > 0:
        yield (
            f"note: {unjudged:,} requests are load only: their answer came in one piece, or their "
            "session began before the log"
        )
    if result.sessions < FEW_SESSIONS:
        yield f"note: {result.sessions} sessions are few for an interval"
    if result.offloads[2] and "x0" not in result.fitted.seen:
        yield "note: the log has no offload: transfers take what engine-sim's take"
    if options.kv_tokens is None:
        yield f"note: without --kv-tokens an instance counts with {result.kv_tokens:,} tokens of KV"
    if options.config is None:
        yield "note: without --config the proxy's options count as the defaults"


def print_figures(result: WhatIf, console: Console) -> None:
    """Print the table."""
    ran, asked = _named(result)
    columns = ["", "log", f"{ran}", f"{asked}", "change", f"{INTERVAL_PERCENT} % interval"]
    shown = table(None, columns)
    for one in result.figures:
        is_share = one.name == "goodput"
        factor, digits, unit = (100.0, 1, "%") if is_share else (1e3, 1, "ms")
        values = [number(value, digits, factor) for value in (one.logged, one.ran, one.other)]
        bounds = f"{_percent(one.low)} to {_percent(one.high)}"
        name = f"{one.name.replace('_s', '').upper().replace(' P', ' p')} {unit}"
        shown.add_row(
            f"goodput {unit}" if is_share else name, *values, _percent(one.change), bounds
        )
    counts = [number(value, 0) for value in result.offloads]
    shown.add_row("offloads", *counts, "", "")
    shown.add_row("not served", "-", "-", number(result.unserved, 1), "", "")
    console.print(shown)


def _percent(ratio: float, sign: str = "+") -> str:
    return f"{ratio * 100:{sign}.0f}" if math.isfinite(ratio) else f"{ratio:{sign}}"
