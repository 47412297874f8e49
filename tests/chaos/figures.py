"""Figures of this session, printed beneath the tests' results."""

from __future__ import annotations

from analysis.measures import percentile

lines: list[str] = []
turns_s: list[tuple[float, float, float, str]] = []
"""Of each test the longest turn of the loop in the proxy, its bound, how many times slower than at
the bound's measurement the machine was, and where that was."""

flow_s: list[float] = []
"""How long each request of the healthy flows took, whatever was wrong beside it."""


def say(name: str, text: str) -> None:
    """Note a figure."""
    lines.append(f"{name}: {text}")


def turns() -> list[str]:
    """The longest turn of all, and of those that may take longer."""
    bounds = sorted({bound_s for _, bound_s, _, _ in turns_s})
    return [_longest([turn for turn in turns_s if turn[1] == bound_s]) for bound_s in bounds]


def _longest(of: list[tuple[float, float, float, str]]) -> str:
    longest_s, bound_s, slowness, where = max(of)
    bound = f"bound: {1e3 * bound_s:.0f}"
    if slowness > 1:
        bound += f" x {slowness:.2f}, as slow as the machine was then"
    return (
        f"R22: longest turn of the loop in the proxy: {1e3 * longest_s:.1f} ms computed ({bound}), "
        f"in {where}; no blocking call in any row (blockbuster)"
    )


def flow() -> list[str]:
    """What the healthy flows felt."""
    if not flow_s:
        return []
    ordered = sorted(flow_s)
    p50, p99 = (1e3 * percentile(ordered, percent) for percent in (50, 99))
    return [f"I9: {len(flow_s)} requests beside the faults, p50 {p50:.1f} ms, p99 {p99:.1f} ms"]
