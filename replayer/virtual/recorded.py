"""Reads a run through real sockets from `run.json`, to repeat it in virtual time.

`run.json` (written by `replayer.demo.processes`) holds the engines' options, the proxy's options
and the arguments of `replay`. They give the same requests and schedule, router and engines. Times
are real seconds of the run, as in the proxy's options, so an engine at speed six has constants six
times smaller. Multiplied by `time_scale`, they are engine seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from proxy.core.types import RouterConfig, Thresholds
from replayer.replay.options import parse_options
from replayer.replay.plan import ideal_hits, make_plan
from replayer.replay.run import header_safe, pace_rules
from replayer.replay.schedule import PaceRules
from replayer.simulator.options import SimOptions
from replayer.trace.loaders import TraceRequest, block_ids
from replayer.trace.rows import TraceError
from replayer.virtual.arrivals import Planned
from replayer.virtual.load import TraceTurn

RECORD = "run.json"
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
THRESHOLDS = (
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
)
TIMEOUTS = ("prefill_timeout", "transfer_timeout", "ttft_timeout", "scrape_interval")


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt's length in the run: counted by the engine, and estimated by the proxy."""

    prompt_tokens: int
    estimated_tokens: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """The parts of a run. `proxy`: its options by name, as `--print-config` writes them."""

    engines: tuple[SimOptions, ...]
    proxy: Mapping[str, Any]
    requests: tuple[TraceRequest, ...]
    rules: PaceRules
    time_scale: float

    @property
    def block_tokens(self) -> int:
        """Tokens per block id of the trace."""
        return self.requests[0].block_tokens

    def config(self) -> RouterConfig:
        """Return the router's options as they were in the run."""
        return router_config(self.proxy)

    def timeouts(self) -> dict[str, float]:
        """Return the proxy's time limits that the virtual driver applies, in seconds."""
        return {name: float(self.proxy[name]) for name in TIMEOUTS}

    def planned(self, seen: Mapping[str, Seen]) -> list[Planned]:
        """Return the requests with their schedule; `seen` has prompt lengths by request id."""
        place = {request.request_id: at for at, request in enumerate(self.requests)}
        hits = ideal_hits(self.requests)
        return [self._one(one, place, hits, seen[one.request_id]) for one in self.requests]

    def _one(
        self,
        request: TraceRequest,
        place: Mapping[str, int],
        hits: Mapping[str, int],
        seen: Seen,
    ) -> Planned:
        session = header_safe(request.session_id or request.request_id)
        turn = TraceTurn(
            session=session,
            prompt_tokens=seen.prompt_tokens,
            output_tokens=request.output_tokens,
            new_tokens=max(1, seen.prompt_tokens - hits[request.request_id]),
            blocks=blocks_of(request),
            shared=0,
            wait_for=(),
            delay_s=0.0,
            offset_s=0.0,
        )
        return Planned(
            turn,
            session,
            earliest_s=self.rules.earliest_s(request),
            delay_s=self.rules.pause_s(request),
            wait_for=tuple(sorted({place[one] for one in request.wait_for if one in place})),
            estimate_factor=seen.estimated_tokens / seen.prompt_tokens,
        )


def router_config(proxy: Mapping[str, Any]) -> RouterConfig:
    """Return the router's options, of the proxy's by name; raises ValueError or TypeError."""
    usual = RouterConfig(prefill_throughput=1.0)
    given: dict[str, Any] = {}
    for field in fields(RouterConfig):
        option = field.name.removesuffix("_s")
        if option in proxy:
            given[field.name] = _value(proxy[option])
            if not _is_alike(given[field.name], getattr(usual, field.name)):
                raise ValueError(f"{option}: must not be {proxy[option]!r}")
    limits = [_value(proxy.get(name, "none")) for name in THRESHOLDS]
    for name, limit in zip(THRESHOLDS, limits, strict=True):
        if limit is not None and not _is_alike(limit, 1.0):
            raise ValueError(f"{name}: must not be {limit!r}")
    return RouterConfig(**given, thresholds=Thresholds(*limits))


def _is_alike(value: Any, usual: Any) -> bool:
    """Whether a value is of the type of an option's default."""
    if isinstance(usual, bool):
        return isinstance(value, bool)
    if isinstance(usual, int | float):
        return isinstance(value, int | float) and 0 <= value < float("inf")
    return value is None or isinstance(value, str)


def blocks_of(request: TraceRequest) -> tuple[int, ...]:
    """Return the ids of a prompt's whole blocks."""
    return tuple(block_ids(request.runs)[: request.full_blocks])


def read_recorded(folder: Path) -> Recorded:
    """Read `run.json` and the trace it names; raises TraceError."""
    path = folder / RECORD
    try:
        record = orjson.loads(path.read_bytes())
        engines = tuple(SimOptions(**given) for given in record["engines"])
        proxy, load = dict(record["proxy"]), [str(one) for one in record["replay"]]
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{path}: must be as the demo writes it ({error})") from None
    if not engines:
        raise TraceError(f"{path}: engines: must not be empty")
    return _with_load(path, engines, proxy, load)


def _with_load(
    path: Path, engines: tuple[SimOptions, ...], proxy: dict[str, Any], load: Sequence[str]
) -> Recorded:
    try:
        options = parse_options(load)
    except SystemExit:
        raise TraceError(f"{path}: replay: must be arguments of replay") from None
    missing = [name for name in TIMEOUTS if not isinstance(proxy.get(name), int | float)]
    if missing:
        raise TraceError(f"{path}: proxy: must have numbers for {', '.join(missing)}")
    if options.mode != "open":
        raise TraceError(f"{path}: replay: must be --mode open, the schedule known beforehand")
    requests = make_plan(options).requests
    if len({request.block_tokens for request in requests}) > 1:
        raise TraceError(f"{options.trace}: must have blocks of one size")
    recorded = Recorded(engines, proxy, requests, pace_rules(options), options.time_scale)
    try:
        recorded.config()
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: proxy: must be the proxy's options ({error})") from None
    return recorded


def _value(text: Any) -> Any:
    """Read an option's value: "none" means None, "256MiB" a number of bytes."""
    if text == "none":
        return None
    if isinstance(text, str) and text[-3:] in _SIZES and text[:-3].isdecimal():
        return int(text[:-3]) * _SIZES[text[-3:]]
    return text
