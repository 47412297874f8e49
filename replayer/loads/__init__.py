"""Loads whose rate changes, by name, to judge planners by; recorded ones need a trace's file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from replayer.loads import recorded, synthetic
from replayer.loads.load import Load

SYNTHETIC: dict[str, Callable[[int], Load]] = {
    "ramp": synthetic.ramp,
    "step": synthetic.step,
    "spike": synthetic.spike,
    "day": synthetic.day,
    "late": synthetic.late,
}
RECORDED: dict[str, tuple[str, Callable[[Path, int], Load]]] = {
    "azure-code": (recorded.AZURE_CODE, recorded.azure_code),
    "azure-conv": (recorded.AZURE_CHAT, recorded.azure_conv),
    "mooncake": (recorded.MOONCAKE, recorded.mooncake),
    "mooncake-day": (recorded.MOONCAKE, recorded.mooncake_day),
    "agentic": (recorded.AGENTIC, recorded.agentic),
}
LOADS = (*SYNTHETIC, *RECORDED)


def missing(name: str, traces: Path | None) -> str:
    """The file that a load needs and the folder lacks; empty if it can be made."""
    if name in SYNTHETIC:
        return ""
    file = RECORDED[name][0]
    return "" if recorded.found(traces, file) else file


def make(name: str, seed: int, traces: Path | None) -> Load:
    """Make a load; raises FileNotFoundError where its trace is not there."""
    if name in SYNTHETIC:
        return SYNTHETIC[name](seed)
    file, of = RECORDED[name]
    path = recorded.found(traces, file)
    if path is None:
        raise FileNotFoundError(2, "no such trace", file)
    return of(path, seed)
