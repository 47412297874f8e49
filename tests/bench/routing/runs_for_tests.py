"""Runs with figures that a test chooses."""

from __future__ import annotations

from typing import Any

from bench.routing.measured import Answered, Result, Run


def run(system: str, seed: int, ttft_s: list[float], mode: str = "", **more: Any) -> Run:
    """A run with one session per two answers."""
    answered = tuple(
        Answered(f"s{number // 2}", one, one / 100, 1_000, 750) for number, one in enumerate(ttft_s)
    )
    given: dict[str, Any] = {
        "shape": "4x262k",
        "load": "low",
        "sent": len(answered),
        "lost": 0,
        "makespan_s": 100 * sum(ttft_s),
        "busy_ratio": 0.4,
    }
    return Run(seed=seed, system=system, mode=mode, answered=answered, **(given | more))


def result(*runs: Run) -> Result:
    """A result that consists of these runs."""
    return Result("2 CPUs", "t.jsonl", 2.0, "compiled", list(runs))
