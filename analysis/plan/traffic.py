"""A load as the requests of a virtual run: of one that is made by name, or of a trace file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from replayer.arguments import InputError
from replayer.loads import LOADS, make, missing
from replayer.loads.load import Load, Request, Turn
from replayer.virtual.arrivals import Planned
from replayer.virtual.load import Source, TraceTurn, load_source


def load_of(name: str, seed: int, traces: Path | None, thin: int) -> Load:
    """Make a load by its name, or read it from a trace file; raises InputError, TraceError.

    Of a trace file all seeds are equal. `thin`: one request, or session, in so many is kept.
    """
    if name not in LOADS:
        return thinned(of_trace(Path(name)), thin, 0)
    if file := missing(name, traces):
        raise InputError(f"{name}: needs {file} in the folder of --traces")
    return thinned(make(name, seed, traces), thin, seed)


def thinned(load: Load, keep: int, seed: int) -> Load:
    """One request in `keep`, or one session with all its turns; `seed` says which ones."""
    if keep == 1:
        return load
    units: dict[str, int] = {}
    kept = []
    for number, request in enumerate(load.requests):
        unit = str(number) if request.turn is None else request.turn.play
        if units.setdefault(unit, len(units)) % keep == seed % keep:
            kept.append(request)
    if keep > len(units):
        raise InputError(f"--thin: must be at most {len(units)} for {load.name}, not {keep}")
    return replace(load, requests=kept)


def of_trace(path: Path) -> Load:
    """A trace file with its own arrivals; a turn waits for those before it."""
    source = load_source(path)
    if not any(source.starts_s):
        raise InputError(f"{path}: must have times of arrival")
    first_s = min(source.starts_s)
    requests = [
        request
        for number, (start_s, unit) in enumerate(zip(source.starts_s, source.units, strict=True))
        for request in _requests(source, number, start_s - first_s, unit)
    ]
    requests.sort(key=lambda one: one.at_s)
    return Load(
        name=path.name,
        seed=0,
        requests=requests,
        end_s=requests[-1].at_s + 1.0,
        block_tokens=source.block_tokens,
    )


def _requests(
    source: Source, number: int, start_s: float, unit: Sequence[TraceTurn]
) -> list[Request]:
    """The requests of a unit that begins at `start_s`; think times are the session's own."""
    made = []
    for at, turn in enumerate(unit):
        waits = source.replicable and turn.wait_for
        after = tuple((f"{number}.{other}", turn.delay_s) for other in turn.wait_for)
        place = Turn(f"{number}.{at}", str(number), turn.session, after)
        at_s = start_s if waits else start_s + turn.offset_s
        made.append(Request(at_s, turn.prompt_tokens, turn.output_tokens, turn.blocks, place))
    return made


def planned(load: Load) -> list[Planned]:
    """The requests of a virtual run, in the order of the load."""
    place = {one.turn.request: n for n, one in enumerate(load.requests) if one.turn is not None}
    seen: set[int] = set()
    made = []
    for number, one in enumerate(load.requests):
        # Ids may begin with 0 in a load, and a prompt's last block may not be full.
        blocks = tuple([block + 1 for block in one.blocks[: one.input_tokens // load.block_tokens]])
        known = sum(1 for _ in takewhile(seen.__contains__, blocks))
        seen.update(blocks)
        after = () if one.turn is None else one.turn.after
        session = str(number) if one.turn is None else one.turn.session
        turn = TraceTurn(
            session,
            prompt_tokens=one.input_tokens,
            output_tokens=one.output_tokens,
            new_tokens=max(1, one.input_tokens - known * load.block_tokens),
            blocks=blocks,
            shared=0,
            wait_for=tuple([place[name] for name, _ in after if name in place]),
            delay_s=max([delay_s for _, delay_s in after], default=0.0),
            offset_s=0.0,
        )
        made.append(Planned(turn, session, one.at_s, turn.delay_s, turn.wait_for))
    return made
