"""GET, POST and DELETE /busy_threshold: read and change the gate's limits at run time.

Requests and answers are NVIDIA Dynamo's, so existing scripts work. A null or omitted value is kept;
a POST without any value reads. Model names are compared without case, and an error is a string.
Added are `unset`, `dry_run`, the model `*` for all models, and DELETE. Answers have the limits in
force, with what a model takes over from its base model or from `*`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict

from aiohttp import web

from proxy.admin.auth import BodyError, small_object
from proxy.config.in_force import OptionsInForce
from proxy.core.known.fleet_state import FleetState
from proxy.core.types import THRESHOLD_FIELDS, Thresholds
from proxy.net.server.responses import json_response
from proxy.net.timeouts import Clock

DECODE, TOKENS, FRAC = THRESHOLD_FIELDS
_KNOWN = ("model", *THRESHOLD_FIELDS, "unset", "dry_run")
_KEYS = frozenset(_KNOWN)
_log = logging.getLogger(__name__)


class BusyThreshold:
    """Handlers for the gate of one known."""

    def __init__(self, known: FleetState, options: OptionsInForce, clock: Clock) -> None:
        self._known, self._options, self._clock = known, options, clock

    async def get(self, request: web.Request) -> web.Response:
        """List the limits in force of every model that has its own; `*` is for all others."""
        del request
        configured = self._known.gate.configured()
        return json_response({"thresholds": [_row(m, t) for m, t in configured.items()]})

    async def post(self, request: web.Request) -> web.Response:
        """Overwrite the given limits; without any, return the present ones."""
        try:
            seconds = self._options.settings.body_timeout
            return json_response(self._update(await small_object(request, seconds)))
        except BodyError as error:
            return json_response({"error": str(error)}, error.status)

    async def delete(self, request: web.Request) -> web.Response:
        """Remove all limits of a model, or with &field= one of them."""
        model, field = request.query.get("model", ""), request.query.get("field")
        gate = self._known.gate
        if not model:
            # No default model: a caller that puts the model into a body, as in POST, would
            # otherwise remove all limits.
            return json_response(
                {"error": "model: missing; give ?model=NAME, or ?model=* for all"}, 400
            )
        if field is not None and field not in THRESHOLD_FIELDS:
            message = f"field must be one of {', '.join(THRESHOLD_FIELDS)}; got {field[:64]}"
            return json_response({"error": message}, 400)
        known = self._known_name(model)
        if known is None:
            return json_response({"error": f"Model '{model[:64]}' not found."}, 404)
        own = Thresholds() if field is None else gate.own(known).merged({field: None})
        gate.set(known, own)
        now = gate.thresholds(known)
        _log.info("busy thresholds of %s: %s", known[:64], _as_text(now))
        return json_response(_row(known, now))

    def _update(self, body: Mapping[str, object]) -> dict[str, object]:
        gate, model = self._known.gate, _model(body)
        given = {f: body[f] for f in THRESHOLD_FIELDS if body.get(f) is not None}
        changes: dict[str, float | int | None] = dict.fromkeys(_unset(body), None)
        changes |= {field: _checked(field, value) for field, value in given.items()}
        known = self._known_name(model)
        if not changes:
            return _row(known or model, gate.thresholds(model))
        if known is None:
            raise BodyError(
                404,
                f"Model '{model}' not found. Thresholds can only be set for discovered models.",
            )
        own = gate.own(known).merged(changes)
        wanted = gate.as_if(known, own)
        if body.get("dry_run") is True:
            return {**_row(known, wanted), "dry_run": True, "busy": self._busy(known, own)}
        gate.set(known, own)
        _log.info("busy thresholds of %s: %s", known, _as_text(wanted))
        without = self._without_effect() if DECODE in given else []
        return _row(known, wanted) | ({"without_effect_on": without} if without else {})

    def _known_name(self, model: str) -> str | None:
        """The model as engines spell it; None if it is not served and has no limits."""
        configured = self._options.settings.model
        served = self._known.fleet.models() | ({configured} if configured else set())
        names = [*sorted(served), *self._known.gate.configured()]
        same = [name for name in names if name.lower() == model.lower()]
        return model if model in same else next(iter(same), None)

    def _without_effect(self) -> list[str]:
        """The instances whose engines have told no KV cache size."""
        names = [member.instance.name for member in self._known.fleet.members()]
        return [name for name in names if self._known.lacks_kv_size(name)]

    def _busy(self, model: str, own: Thresholds) -> list[str]:
        """The instances that would be busy if a model had these limits of its own."""
        known, now_s = self._known, self._clock.now_s()
        loads = {m.instance.name: known.ledger.load(m.instance.name) for m in known.fleet.members()}
        gate = known.gate
        wanted = {name: gate.as_if(model, own, name) for name in loads}
        return [n for n, load in loads.items() if gate.busy(n, model, load, now_s, wanted[n])]


def _row(model: str, thresholds: Thresholds) -> dict[str, object]:
    return {"model": model, **asdict(thresholds)}


def _as_text(thresholds: Thresholds) -> str:
    limits = asdict(thresholds).items()
    return ", ".join(f"{name} {'off' if value is None else value}" for name, value in limits)


def _model(body: Mapping[str, object]) -> str:
    unknown = set(body) - _KEYS
    if unknown:
        raise BodyError(422, f"unknown field {min(unknown)[:64]}; known: {', '.join(_KNOWN)}")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BodyError(422, "model must be a non-empty string")
    return model


def _unset(body: Mapping[str, object]) -> list[str]:
    names = body.get("unset") or []
    if not isinstance(names, list) or not all(name in THRESHOLD_FIELDS for name in names):
        raise BodyError(422, f"unset must be a list of {', '.join(THRESHOLD_FIELDS)}")
    return names


def _checked(field: str, value: object) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BodyError(422, f"{field} must be a number, got {type(value).__name__}")
    if field == TOKENS:
        if not isinstance(value, int) or value < 0:
            raise BodyError(422, f"{field} must be a whole number >= 0, got {value}")
        return value
    high = 1.0 if field == DECODE else math.inf
    if not 0.0 <= value <= high or not math.isfinite(value):
        allowed = "between 0 and 1" if field == DECODE else "finite and >= 0"
        raise BodyError(400, f"{field} must be {allowed}, got {value}")
    return float(value)
