"""Figures of this session, printed beneath the tests' results."""

from __future__ import annotations

lines: list[str] = []
turns_s: list[tuple[float, float, str]] = []
"""Of each test the longest turn of the loop in the proxy, its bound, and where that was."""

flow_s: list[float] = []
"""How long each request of the healthy flows took, whatever was wrong beside it."""


def say(name: str, text: str) -> None:
    """Note a figure."""
    lines.append(f"{name}: {text}")


def percentile(values: list[float], ratio: float) -> float:
    """The value that this ratio of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(ratio * len(ordered)))]


def turns() -> list[str]:
    """The longest turn of all, and of those that may take longer."""
    most = {bound_s: max(t for t in turns_s if t[1] == bound_s) for _, bound_s, _ in turns_s}
    return [
        f"R22: longest turn of the loop in the proxy: {1e3 * s:.1f} ms computed (bound: "
        f"{1e3 * bound_s:.0f}), in {where}; no blocking call in any row (blockbuster)"
        for bound_s, (s, _, where) in sorted(most.items())
    ]


def flow() -> list[str]:
    """What the healthy flows felt."""
    if not flow_s:
        return []
    p50, p99 = (1e3 * percentile(flow_s, ratio) for ratio in (0.5, 0.99))
    return [f"I9: {len(flow_s)} requests beside the faults, p50 {p50:.1f} ms, p99 {p99:.1f} ms"]
