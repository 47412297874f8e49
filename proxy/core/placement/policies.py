"""POLICIES: the values of `--offload-policy` and `--shadow-policy`, all of one signature."""

from __future__ import annotations

from proxy.core.placement.cost import by_cost
from proxy.core.placement.decision import Decide
from proxy.core.placement.rules import OFFLOAD_RULES, ruled

POLICIES: dict[str, Decide] = {"cost": by_cost, **{name: ruled(name) for name in OFFLOAD_RULES}}
