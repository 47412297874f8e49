"""Decisions that can be made again: the views of the last ones, and their form as JSON.

A view has values only, so the policy that decided finds the same choice again, and another one what
it would have chosen. KV that the cost policy has not priced counts as 0: another policy prices
none, so a first pricing by cost lacks it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import Any, Final

from proxy.core.latency.pace import FleetPace, Pace, Transfers
from proxy.core.placement.alternatives import Alternatives
from proxy.core.placement.candidates import Candidates
from proxy.core.placement.decision import AskedKv, PlacementView, asked_of
from proxy.core.types import Instance, Load, RouterConfig, TransferRules

KEPT: Final = 200
"""Views that are kept, each with some hundred bytes for an instance."""
_CONFIG: Final = (
    "warm_threshold",
    "heavy_threshold",
    "placement",
    "prefill_throughput",
    "kv_transfer_time_s",
    "offload_non_cached_tokens",
    "tpot_slo_s",
    "prefill_timeout_s",
)
"""Options that policies read."""
_COLUMNS: Final = (
    "names",
    "hit_tokens",
    "key_tokens",
    "kv_full",
    "kv_wait_s",
    "kv_tokens",
    "unreleased",
    "sessions",
    "last_placed",
    "has_failed",
    "doubts",
    "helps",
    "prefill_factors",
)
"""Columns of `Candidates` that are numbers, words or None."""
Json = dict[str, Any]


class Made:
    """The views of the last KEPT decisions, by their alternatives."""

    def __init__(self) -> None:
        self._last: deque[tuple[Alternatives, PlacementView]] = deque(maxlen=KEPT)

    def add(self, options: Alternatives, view: PlacementView) -> None:
        """A decision was made; `view` is the caller's no more."""
        view.keep()
        self._last.append((options, view))

    def of(self, options: object) -> PlacementView | None:
        """The view of a decision; None if it is older, or was none."""
        return next((view for known, view in self._last if known is options), None)


def as_json(view: PlacementView) -> Json:
    """A decision's input, for `from_json`."""
    config, fleet, rules, kv = view.config, view.fleet, view.transfers, view.session_kv
    asked = kv.asked() if kv is not None else None
    names = {*view.free.names}
    for one_role in (view.prefill_only, view.decode_only):
        names |= {*one_role.names} if one_role is not None else set()
    pairs = fleet.transfers.pairs.items()
    return {
        "config": {key: getattr(config, key) for key in _CONFIG},
        "prompt_tokens": view.free.prompt_tokens,
        "is_held": view.facts.holder is not None,
        "offloadable": view.facts.offloadable,
        "home": view.home,
        "now_s": view.now_s,
        "free": _columns(view.free),
        "prefill_only": _columns(view.prefill_only),
        "decode_only": _columns(view.decode_only),
        "busy_peers": [[one.name, one.bootstrap_url is not None] for one in view.busy_peers],
        "other_loads": [_load(load) for load in view.other_loads],
        "fleet": [fleet.way_s, fleet.alone_s, fleet.rest_s, fleet.output_tokens],
        "transfer": fleet.transfers.other,
        "transfers": [[*pair, *line] for pair, line in pairs if names.issuperset(pair)],
        "rules": asdict(rules),
        "slo_pressure": view.slo_pressure,
        "kv": None if asked is None else [asked.fullest, asked.too_much],
    }


def from_json(row: Json) -> PlacementView:
    """The view of `as_json`; KeyError, TypeError or ValueError for another form."""
    tokens, kv = row["prompt_tokens"], row["kv"]
    way_s, alone_s, rest_s, output_tokens = row["fleet"]
    pairs = {(p, d): (fixed, each) for p, d, fixed, each in row["transfers"]}
    free = _candidates(row["free"], tokens)
    if free is None:
        raise ValueError("free: no instances")
    view = PlacementView(
        RouterConfig(**row["config"]),
        asked_of(is_held=row["is_held"], may_split=row["offloadable"]),
        row["home"],
        free,
        [Load(*load) for load in row["other_loads"]],
        row["now_s"],
        FleetPace(way_s, alone_s, rest_s, output_tokens, Transfers(tuple(row["transfer"]), pairs)),
        TransferRules(**row["rules"]),
        row["slo_pressure"],
        _candidates(row["prefill_only"], tokens),
        _candidates(row["decode_only"], tokens),
        [_instance(*one) for one in row["busy_peers"]],
    )
    if kv is not None:
        view.session_kv = AskedKv(kv[0], {name: tuple(found) for name, found in kv[1].items()})
    return view


def _columns(free: Candidates | None) -> Json | None:
    if free is None:
        return None
    return {key: getattr(free, key) for key in _COLUMNS} | {
        "is_home_doubted": free.is_home_doubted,
        "has_bootstrap": [one.bootstrap_url is not None for one in free.instances],
        "loads": [_load(load) for load in free.loads],
        "paces": [pace.numbers() for pace in free.paces],
    }


def _candidates(row: Json | None, prompt_tokens: int) -> Candidates | None:
    if row is None:
        return None
    columns = {key: row[key] for key in _COLUMNS}
    columns["unreleased"] = [tuple(one) for one in row["unreleased"]]
    return Candidates(
        prompt_tokens=prompt_tokens,
        instances=list(map(_instance, row["names"], row["has_bootstrap"])),
        loads=[Load(*load) for load in row["loads"]],
        paces=[Pace.of(numbers) for numbers in row["paces"]],
        is_home_doubted=row["is_home_doubted"],
        **columns,
    )


def _instance(name: str, has_bootstrap: bool) -> Instance:
    return Instance(name, "", "" if has_bootstrap else None)


def _load(load: Load) -> list[int]:
    return [
        load.prefill_tokens,
        load.prefill_requests,
        load.inbound_tokens,
        load.inbound_requests,
        load.decode_tokens,
        load.decode_requests,
        load.pinned_tokens,
        load.pinned_requests,
        load.shared_tokens,
        load.shared_requests,
        load.cached_tokens,
    ]
