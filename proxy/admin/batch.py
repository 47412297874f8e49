"""POST, GET and DELETE /v1/admin/batch: operators' caps on hot instances, and evictions.

Request and answer are those of the founding document on thermal batching. Added are `instance`,
`ttl_s`, `reason`, `if_version`, three policies, and in the answer `decision_id`, `version`, `state`
and `plan`. The paths are on the admin listener only, and only with `--enable-admin-api`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from aiohttp import web

from proxy.admin.auth import BodyError, small_object
from proxy.config.in_force import OptionsInForce
from proxy.core.known.fleet_state import FleetState
from proxy.core.thermal.orders import (
    TARGET_CELSIUS,
    TTL_LEAST_S,
    TTL_MOST_S,
    TTL_S,
    BatchOrder,
)
from proxy.core.thermal.victims import VICTIMS
from proxy.net.server.responses import error_response, json_response
from proxy.net.timeouts import Clock
from proxy.state.thermal import Decision, ThermalControl

BATCH = "/v1/admin/batch"
EVERY_INSTANCE = "*"
ORDER_EVERY_S = 1.0
"""Orders that change something are taken once in this time: a script that evicts in a loop would
end more than the heat does."""
MOST_SEQS = 10**6
REASON_CHARS = 200
NAMES = 1000
_FIELDS = (
    *("max_num_seqs", "force_evict", "target_temp_c", "policy", "dry_run"),
    *("instance", "ttl_s", "reason", "if_version"),
)
_log = logging.getLogger(__name__)


class Batch:
    """Handlers for the thermal control of one known."""

    def __init__(
        self, thermal: ThermalControl, known: FleetState, options: OptionsInForce, clock: Clock
    ) -> None:
        self._thermal, self._known = thermal, known
        self._options, self._clock = options, clock
        self._ordered_s = -math.inf

    async def get(self, request: web.Request) -> web.Response:
        """State, limits and order of every instance."""
        del request
        control = self._thermal.control
        rows = [self._status(name) for name in self._names()]
        return json_response({"version": control.version, "instances": rows})

    async def post(self, request: web.Request) -> web.Response:
        """Obey an order, or with dry_run say what it would do."""
        try:
            body = await small_object(request, self._options.settings.body_timeout)
            order = order_of(body)
            names = self._named(body.get("instance", EVERY_INSTANCE))
            dry_run = _flag(body, "dry_run")
            self._check_version(_whole(body, "if_version", 0, None))
            if order.target_celsius is not None:
                self._check_sensors(names)
            if not dry_run:
                self._take_turn()
        except BodyError as error:
            # What is wrong with the body itself is 400 here, as it is for its fields.
            return _refusal(400 if error.status == 422 else error.status, str(error))
        decision = self._thermal.order(names, order, dry_run=dry_run)
        _log.warning("admin: batch%s: %s", " (dry run)" if dry_run else "", _text(decision, order))
        return json_response(_answer(decision) | ({"dry_run": True} if dry_run else {}))

    async def delete(self, request: web.Request) -> web.Response:
        """End the orders on ?instance=NAME, or on all with ?instance=*."""
        given = request.query.get("instance")
        if given is None:
            return _refusal(400, "instance: missing; give ?instance=NAME, or ?instance=* for all")
        try:
            names = self._named(given)
        except BodyError as error:
            return _refusal(error.status, str(error))
        cleared = self._thermal.clear(names)
        _log.warning("admin: batch: orders ended on %s", ", ".join(cleared) or "none")
        rows = [self._status(name) for name in names]
        version = self._thermal.control.version
        return json_response({"version": version, "cleared": cleared, "instances": rows})

    def _names(self) -> list[str]:
        return [member.instance.name for member in self._known.fleet.members()]

    def _named(self, given: object) -> list[str]:
        """The instances that a request names; raises BodyError."""
        known = self._names()
        if given == EVERY_INSTANCE:
            return known
        named = [given] if isinstance(given, str) else given
        if not isinstance(named, list) or not 0 < len(named) <= NAMES:
            raise BodyError(400, f'instance: "*", a name, or a list of 1 to {NAMES} names')
        for name in named:
            if name not in known:
                raise BodyError(404, f"instance: {str(name)[:64]} is not known")
        return list(dict.fromkeys(named))

    def _check_version(self, wanted: int | None) -> None:
        version = self._thermal.control.version
        if wanted is not None and wanted != version:
            raise BodyError(409, f"if_version: the version is {version}, not {wanted}")

    def _check_sensors(self, names: Sequence[str]) -> None:
        """Refuse a target temperature without a sensor."""
        blind = [name for name in names if not self._thermal.gpus.of(name)]
        if blind:
            raise BodyError(400, f"target_temp_c: no GPU sensor of {blind[0]} has reported yet")

    def _take_turn(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._ordered_s < ORDER_EVERY_S:
            raise BodyError(429, f"one order in {ORDER_EVERY_S:g} s; dry_run is not limited")
        self._ordered_s = now_s

    def _status(self, name: str) -> dict[str, object]:
        control, known, now_s = self._thermal.control, self._known, self._clock.now_s()
        status = control.status(name)
        shown: dict[str, object] = {
            "instance": name,
            "state": status.state,
            "running": known.ledger.load(name).running_requests,
            "max_num_seqs": status.limits.cap,
            "headroom_celsius": status.headroom_celsius,
            "watts_per_seq": status.watts_per_seq,
            "order": None,
        }
        if (standing := status.order) is not None:
            shown["order"] = {
                "decision_id": standing.decision_id,
                "max_num_seqs": standing.order.max_num_seqs,
                "force_evict": standing.order.force_evict,
                "target_temp_c": standing.order.target_celsius,
                "is_reached": standing.is_reached,
                "policy": standing.order.policy,
                "reason": standing.order.reason,
                "ends_in_s": round(standing.until_s - now_s, 1),
            }
        return shown


def order_of(body: Mapping[str, object]) -> BatchOrder:
    """The order that a body asks for; raises BodyError with the first thing that is wrong."""
    if unknown := set(body) - set(_FIELDS):
        raise BodyError(400, f"{min(unknown)[:64]}: unknown; known: {', '.join(_FIELDS)}")
    target = _number(body, "target_temp_c", *TARGET_CELSIUS)
    most = _whole(body, "max_num_seqs", 1, MOST_SEQS)
    evict = _whole(body, "force_evict", 0, MOST_SEQS) or 0
    if most is None and not evict and target is None:
        raise BodyError(400, "max_num_seqs, force_evict or target_temp_c: one of them is needed")
    policy = body.get("policy", "lru")
    if not isinstance(policy, str) or policy not in VICTIMS:
        raise BodyError(400, f"policy: one of {', '.join(VICTIMS)}; got {str(policy)[:64]}")
    reason = body.get("reason", "")
    is_text = isinstance(reason, str) and reason.isprintable()
    if not isinstance(reason, str) or not is_text or len(reason) > REASON_CHARS:
        raise BodyError(400, f"reason: printable text of up to {REASON_CHARS} characters")
    ttl_s = _number(body, "ttl_s", TTL_LEAST_S, TTL_MOST_S)
    return BatchOrder(most, evict, target, policy, TTL_S if ttl_s is None else ttl_s, reason)


def _whole(body: Mapping[str, object], field: str, least: int, most: int | None) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not isinstance(value, int) or not least <= value <= (most or value):
        allowed = f">= {least}" if most is None else f"{least} to {most}"
        raise BodyError(400, f"{field}: a whole number, {allowed}; got {str(value)[:64]}")
    return value


def _number(body: Mapping[str, object], field: str, least: float, most: float) -> float | None:
    value = body.get(field)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isinstance(value, int | float) or not least <= value <= most:
        raise BodyError(400, f"{field}: a number, {least:g} to {most:g}; got {str(value)[:64]}")
    return float(value)


def _flag(body: Mapping[str, object], field: str) -> bool:
    value = body.get(field, False)
    if not isinstance(value, bool):
        raise BodyError(400, f"{field}: true or false; got {str(value)[:64]}")
    return value


def _refusal(status: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 429 else {}
    return error_response(status, message, headers)


def _answer(decision: Decision) -> dict[str, object]:
    """The founding fields summed over the instances, then those of each one."""
    results = decision.results
    caps = [result.new_max_num_seqs for result in results]
    return {
        "previous_running": sum(result.previous_running for result in results),
        "new_running": sum(result.new_running for result in results),
        "evicted_request_ids": [one for result in results for one in result.evicted_request_ids],
        "estimated_watts_saved": math.fsum(result.estimated_watts_saved for result in results),
        "new_max_num_seqs": None if None in caps else sum(cap for cap in caps if cap is not None),
        "decision_id": decision.decision_id,
        "version": decision.version,
        "state": results[0].state if len({result.state for result in results}) == 1 else "MIXED",
        "plan": [asdict(row) for row in decision.plan],
        "instances": [asdict(result) for result in results],
    }


def _text(decision: Decision, order: BatchOrder) -> str:
    """An order in one line for the log."""
    rows = ", ".join(
        f"{r.instance} cap {r.new_max_num_seqs} running {r.previous_running}->{r.new_running}"
        for r in decision.results[:8]
    )
    return (
        f"{decision.decision_id} version {decision.version}: max_num_seqs {order.max_num_seqs}, "
        f"force_evict {order.force_evict}, target_temp_c {order.target_celsius}, {order.policy}, "
        f"{order.ttl_s:g} s, reason {order.reason!r}: {rows}"
    )
