"""Loaders of trace files: Mooncake's format, the project's superset of it, and tables of lengths.

Rows are *cumulative*: a row's lengths and block ids describe its whole prompt, not only the part
that is new since the previous turn. Files of the other kind (deltas) are recognised and refused:
read as cumulative, they would be a different, far lighter load. Timestamps and delays are
milliseconds in the file and seconds in `TraceRequest`.

Tables have a line of column names and no block ids. They are Azure's LLM inference traces (clock
times), BurstGPT's (seconds), and Vidur's pairs of lengths (no times). Bailian's rows are in seconds
too.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
import xxhash

from replayer.trace.foreign import HEAD_BYTES, fields_of, refused, seen_in
from replayer.trace.rows import (
    MOST_COUNT,
    Meta,
    Row,
    Runs,
    TraceError,
    ends_reading,
    head_of,
    read_meta,
    read_sidecar,
    rows,
    short,
)

MOONCAKE_BLOCK_TOKENS = 512
# Of these the one that fits is named where a file's ids do not.
BLOCK_SIZES = tuple(1 << bits for bits in range(14))
# Ids of blocks of one row only are above every id that a file can hold (64 bits).
PRIVATE_ID = 1 << 64
PRIVATE_IDS_PER_ROW = 1 << 32
# If a larger part of later turns shares no block with the turn before, the file holds deltas.
DELTA_RATIO = 0.5
MOST_ROWS = 2_000_000
"""All requests of a trace are in memory, and so are the ids of its blocks."""
MOST_ROW_BLOCKS = 1 << 20
MOST_BLOCKS = 1 << 24
"""Blocks with ids that do not follow from the turn before."""
COMMON_FIELDS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
SUPERSET_FIELDS = frozenset(
    {
        *("session_id", "turn", "request_id", "wait_for", "parent_session_id"),
        *("created_time", "delay", "delay_ms", "tool_wait_ms"),
        *("input_tokens", "output_tokens", "hash_runs", "block_size", "messages", "prompt"),
        *("text_input", "payload"),
    }
)
LITERAL_FIELDS = ("messages", "prompt", "text_input", "payload")
PROMPT_FIELDS = frozenset({"input_length", "input_tokens", *LITERAL_FIELDS})
OUTPUT_FIELDS = (
    *("output_length", "output_tokens"),
    *("GeneratedTokens", "num_decode_tokens", "Response tokens"),
)
BAILIAN_BLOCK_TOKENS = 16


class TooMuchError(TraceError):
    """A file that would not fit into memory; no more of it is read."""


class Watch:
    """Who is told what a file has while it is read. This one lets a bad row end the reading."""

    def detected(self, name: str, line: int, fields: Collection[str]) -> None:
        """Note the format, and by which fields of which line it is known."""

    def refused(self, error: TraceError) -> None:
        """Note a row that cannot be replayed; unless this raises, the next one is read."""
        ends_reading(error)

    def changed(self, line: int, what: str) -> None:
        """Note that a row is not replayed as it is written."""


STRICT = Watch()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `arrival_s` None: due only after the requests in `wait_for`."""

    request_id: str
    session_id: str | None
    turn: int
    arrival_s: float | None
    input_tokens: int | None
    output_tokens: int
    runs: Runs
    block_tokens: int
    line: int
    wait_for: tuple[str, ...] = ()
    delay_s: float | None = None
    parent_session_id: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def full_blocks(self) -> int:
        """Count the whole blocks of the prompt; only those can be shared."""
        return (self.input_tokens or 0) // self.block_tokens

    @property
    def names_blocks(self) -> bool:
        """Whether the file has ids for the whole blocks of the prompt."""
        return bool(self.full_blocks and self.runs) and self.runs[0][0] < PRIVATE_ID


@dataclass(frozen=True, slots=True)
class Loader:
    """A row format: `claims` names the fields that tell it in a first row, `read` reads a row.

    `is_dated`: its times are of the calendar; those of a trace count from its first row.
    `has_all_parents`: a file has every request that one of it waits for.
    """

    claims: Callable[[Mapping[str, Any]], Collection[str]]
    read: Callable[[Row, Meta], TraceRequest]
    is_dated: bool = False
    has_all_parents: bool = True


def block_ids(runs: Runs) -> list[int]:
    """Expand runs to the list of block ids."""
    return [block for start, count in runs for block in range(start, start + count)]


def shared_blocks(one: Runs, other: Runs) -> int:
    """Count the leading blocks that two prompts have in common."""
    shared = 0
    for (start, count), (other_start, other_count) in zip(one, other, strict=False):
        if start != other_start:
            return shared
        shared += min(count, other_count)
        if count != other_count:
            return shared
    return shared


def _read_mooncake(row: Row, meta: Meta) -> TraceRequest:
    arrival_ms = row.number("timestamp")
    if arrival_ms is None:
        raise row.fail("timestamp", "a number >= 0 (milliseconds)")
    return _read_lengths(row, meta, "input_length", "output_length", arrival_ms / 1e3)


def _read_azure(row: Row, meta: Meta) -> TraceRequest:
    arrival_s = row.moment_s("TIMESTAMP")
    return _read_lengths(row, meta, "ContextTokens", "GeneratedTokens", arrival_s)


def _read_vidur(row: Row, meta: Meta) -> TraceRequest:
    return _read_lengths(row, meta, "num_prefill_tokens", "num_decode_tokens", None)


def _read_burstgpt(row: Row, meta: Meta) -> TraceRequest:
    arrival_s = row.number("Timestamp")
    if arrival_s is None:
        raise row.fail("Timestamp", "a number >= 0 (seconds)")
    return _read_lengths(row, meta, "Request tokens", "Response tokens", arrival_s)


def _read_bailian(row: Row, meta: Meta) -> TraceRequest:
    """Read a row whose clock is in seconds and whose conversation is told by the chat before it."""
    arrival_s = row.number("timestamp")
    name, parent = row.name("chat_id"), row.name("parent_chat_id")
    if arrival_s is None or name is None:
        raise row.fail("timestamp" if name else "chat_id", "given")
    blocks = replace(meta, block_tokens=meta.block_tokens or BAILIAN_BLOCK_TOKENS)
    request = _read_lengths(row, blocks, "input_length", "output_length", arrival_s)
    turn = row.integer("turn", at_least=1, at_most=MOST_COUNT) or 1
    wait_for = (parent,) if parent not in (None, "-1") else ()
    return replace(request, request_id=name, turn=turn - 1, wait_for=wait_for)


def _read_lengths(
    row: Row, meta: Meta, prompt: str, output: str, arrival_s: float | None
) -> TraceRequest:
    """Read a request of no known session; `prompt` and `output` name the fields of its lengths."""
    input_tokens = _required(row, prompt)
    block_tokens = meta.block_tokens or MOONCAKE_BLOCK_TOKENS
    return TraceRequest(
        request_id=f"line:{row.line}",
        session_id=None,
        turn=0,
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=_output(row, output),
        runs=_runs(row, meta, input_tokens, block_tokens),
        block_tokens=block_tokens,
        line=row.line,
    )


def _with_text(row: Row) -> Row:
    """Give a row of AIPerf's its text where others have it, and the length of its answer."""
    fields = dict(row.fields)
    payload = fields.pop("payload", None)
    if payload is not None and not isinstance(payload, dict):
        raise row.fail("payload", "an object")
    for name in ("messages", "prompt"):
        if payload and fields.get(name) is None:
            fields[name] = payload.get(name)
    most = (
        [payload.get(name) for name in ("max_completion_tokens", "max_tokens")] if payload else []
    )
    if row.name_of("output_length", "output_tokens") is None:
        fields["output_length"] = next((one for one in most if one is not None), None)
    text = fields.pop("text_input", None)
    fields["prompt"] = text if fields.get("prompt") is None else fields["prompt"]
    return replace(row, fields=fields)


def _read_superset(row: Row, meta: Meta) -> TraceRequest:
    if row.name_of("text_input", "payload"):
        row = _with_text(row)
    literal = row.name_of("messages", "prompt")
    input_tokens = row.integer("input_length", "input_tokens", at_least=1)
    if input_tokens is None and literal is None:
        raise row.fail("input_length", "an integer >= 1")
    block_tokens = row.integer("block_size", at_least=1) or meta.block_tokens
    block_tokens = block_tokens or MOONCAKE_BLOCK_TOKENS
    known = COMMON_FIELDS | SUPERSET_FIELDS
    arrival_ms = row.number("timestamp", "created_time")
    delay_ms, tool_ms = row.number("delay", "delay_ms"), row.number("tool_wait_ms")
    return TraceRequest(
        request_id=row.name("request_id") or f"line:{row.line}",
        session_id=row.name("session_id"),
        turn=row.integer("turn", at_least=0, at_most=MOST_COUNT) or 0,
        arrival_s=None if arrival_ms is None else arrival_ms / 1e3,
        input_tokens=input_tokens,
        output_tokens=_output(row, "output_length", "output_tokens"),
        runs=() if literal else _runs(row, meta, input_tokens or 1, block_tokens),
        block_tokens=block_tokens,
        line=row.line,
        wait_for=row.names("wait_for") or (),
        delay_s=_seconds(delay_ms, tool_ms),
        parent_session_id=row.name("parent_session_id"),
        messages=row.objects("messages"),
        prompt=row.text("prompt"),
        extra={key: value for key, value in row.fields.items() if key not in known},
    )


def _superset_fields(first: Mapping[str, Any]) -> Collection[str]:
    if "chat_id" in first or not PROMPT_FIELDS & first.keys():
        return ()
    return [name for name in first if name in SUPERSET_FIELDS]


def _fields(*names: str, without: str = "") -> Callable[[Mapping[str, Any]], Collection[str]]:
    """Claim a first row that has all of some fields, and not another."""
    return lambda first: names if first.keys() >= set(names) and without not in first else ()


LOADERS: dict[str, Loader] = {
    "superset": Loader(_superset_fields, _read_superset),
    "mooncake": Loader(_fields("timestamp", "input_length", without="chat_id"), _read_mooncake),
    "azure": Loader(_fields("ContextTokens"), _read_azure, is_dated=True),
    "vidur": Loader(_fields("num_prefill_tokens"), _read_vidur),
    "burstgpt": Loader(_fields("Request tokens"), _read_burstgpt),
    "bailian": Loader(_fields("chat_id"), _read_bailian, has_all_parents=False),
}


def _required(row: Row, *names: str, at_least: int = 1) -> int:
    value = row.integer(*names, at_least=at_least)
    if value is None:
        raise row.fail(names[0], f"an integer >= {at_least}")
    return value


def _output(row: Row, *names: str) -> int:
    """Read the output's length. A request without any has failed, and is sent for one token."""
    return max(1, _required(row, *names, at_least=0))


def _seconds(delay_ms: float | None, tool_ms: float | None) -> float | None:
    if delay_ms is None and tool_ms is None:
        return None
    return ((delay_ms or 0.0) + (tool_ms or 0.0)) / 1e3


def _runs(row: Row, meta: Meta, input_tokens: int, block_tokens: int) -> Runs:
    """Read the block ids; blocks without an id (all, or a partial tail) get private ones."""
    blocks = -(-input_tokens // block_tokens)
    if blocks > MOST_ROW_BLOCKS:
        found_in = f"{blocks} blocks of {block_tokens} tokens"
        raise TraceError(
            f"{row.file}:{row.line}: must be at most {MOST_ROW_BLOCKS} blocks, not {found_in}"
        )
    private = PRIVATE_ID + row.line * PRIVATE_IDS_PER_ROW
    runs = row.runs()
    if runs is None:
        return ((private, blocks),)
    found = sum(count for _start, count in runs)
    if found not in _whole_and_all(input_tokens, block_tokens):
        name = row.name_of("hash_ids", "hash_runs") or "hash_ids"
        fits = (size for size in BLOCK_SIZES if found in _whole_and_all(input_tokens, size))
        size = next(fits, "N")
        raise TraceError(
            f"{row.file}:{row.line}: {name}: must be {blocks} ids for input_length {input_tokens} "
            f"in blocks of {block_tokens}, not {found}; of another size say it, "
            f'{{"trace":{{"block_size":{size}}}}} as the first line, or block_size in each row'
        )
    if meta.hash_scope == "session":
        runs = _scoped(row, runs)
    return runs if found == blocks else (*runs, (private, 1))


def _whole_and_all(input_tokens: int, block_tokens: int) -> tuple[int, int]:
    """The whole blocks of a prompt, and all with the last one that may be partial."""
    return input_tokens // block_tokens, -(-input_tokens // block_tokens)


def _scoped(row: Row, runs: Runs) -> Runs:
    """Move ids that are local to a session and its sub-agents to a range of their own."""
    scope = row.name("parent_session_id") or row.name("session_id") or f"line:{row.line}"
    offset = xxhash.xxh32_intdigest(scope.encode()) << 32
    return tuple((offset + start, count) for start, count in runs)


@dataclass(slots=True)
class _Checks:
    """Checks across rows: turns, unique ids, references, deltas."""

    file: str
    meta: Meta
    last: dict[str, TraceRequest] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    awaited: dict[str, int] = field(default_factory=dict)
    later_turns: int = 0
    unshared: int = 0
    rows: int = 0
    blocks: int = 0

    def add(self, request: TraceRequest, row: Row) -> TraceRequest:
        """Complete one request from the earlier rows, and check it against them."""
        previous = self.last.get(request.session_id) if request.session_id is not None else None
        request = _completed(request, previous, row)
        if request.request_id in self.ids:
            raise row.fail("request_id", f"unique ({short(request.request_id)!r} came before)")
        self.ids.add(request.request_id)
        for other in request.wait_for:
            self.awaited.setdefault(other, request.line)
        if request.session_id is not None:
            self.last[request.session_id] = request
        shared = 0
        if previous is not None and previous.names_blocks and request.names_blocks:
            shared = shared_blocks(previous.runs, request.runs)
            self.later_turns += 1
            self.unshared += shared == 0
        self._count(request, shared)
        return request

    def _count(self, request: TraceRequest, shared: int) -> None:
        """Refuse a file that would not fit into memory."""
        self.rows += 1
        self.blocks += sum(count for start, count in request.runs if start < PRIVATE_ID) - shared
        where = f"{self.file}:{request.line}"
        if self.rows > MOST_ROWS:
            raise TooMuchError(f"{where}: more than {MOST_ROWS} rows: cut the file")
        if self.blocks > MOST_BLOCKS:
            raise TooMuchError(f"{where}: more than {MOST_BLOCKS} different blocks: cut the file")

    def finish(self) -> Iterator[TraceError]:
        """Check the whole file: unknown references, and deltas."""
        for other, line in self.awaited.items():
            if other not in self.ids:
                yield TraceError(
                    f"{self.file}:{line}: wait_for: must name requests of this file, "
                    f"not {short(other)!r}"
                )
        if not self.meta.cumulative and self.unshared > DELTA_RATIO * self.later_turns:
            yield TraceError(
                f"{self.file}: rows must be cumulative (whole prompts), but {self.unshared} of "
                f"{self.later_turns} later turns share no block with the turn before: they look "
                'like deltas (say {"trace":{"cumulative":true}} in the first line if they are not)'
            )


def _completed(request: TraceRequest, previous: TraceRequest | None, row: Row) -> TraceRequest:
    """Fill in turn, id and dependency of a session's row from the row before it."""
    if request.session_id is None:
        return request
    turn, wait_for = request.turn, request.wait_for
    if row.fields.get("turn") is None:
        turn = 0 if previous is None else previous.turn + 1
    if previous is not None and row.fields.get("wait_for") is None:
        wait_for = (previous.request_id,)
    request_id = row.name("request_id") or f"{request.session_id}:{turn}"
    return replace(request, request_id=request_id, turn=turn, wait_for=wait_for)


@dataclass(slots=True)
class _Reader:
    """Reads the rows of one file: `loader` reads each alone, `checks` beside the others."""

    loader: Loader
    meta: Meta
    checks: _Checks
    watch: Watch
    is_detected: bool
    start_s: float | None = None

    def request(self, row: Row) -> TraceRequest:
        """Read one row; raises TraceError."""
        odd = self.loader is LOADERS["mooncake"] and SUPERSET_FIELDS & row.fields.keys()
        if odd and self.is_detected:
            raise TraceError(
                f"{row.file}:{row.line}: {min(odd)}: the first row has no such field, so the "
                "format was taken for mooncake: give --format superset"
            )
        request = self.loader.read(row, self.meta)
        if self.loader.is_dated and request.arrival_s is not None:
            request = self._from_the_first(request, request.arrival_s)
        if not self.loader.has_all_parents:
            request = self._without_unknown(request)
        request = self.checks.add(request, row)
        output = row.name_of(*OUTPUT_FIELDS)
        if output is not None and row.fields[output] == 0:
            self.watch.changed(row.line, "an output of 0 tokens is sent for 1")
        return request

    def _from_the_first(self, request: TraceRequest, at_s: float) -> TraceRequest:
        """Count a date from that of the first row."""
        self.start_s = at_s if self.start_s is None else self.start_s
        if at_s < self.start_s:
            self.watch.changed(request.line, "a time before that of the first row counts as that")
        return replace(request, arrival_s=max(0.0, at_s - self.start_s))

    def _without_unknown(self, request: TraceRequest) -> TraceRequest:
        """Leave out parents that the file lacks."""
        known = tuple(one for one in request.wait_for if one in self.checks.ids)
        if known != request.wait_for:
            self.watch.changed(request.line, "a parent that no row before has is not waited for")
        return replace(request, wait_for=known)


def read_trace(
    path: Path, loader_name: str | None = None, watch: Watch = STRICT
) -> Iterator[TraceRequest]:
    """Read a trace row by row, plain or gzipped; raises TraceError at the first bad row.

    `loader_name` None: the first row decides on the format. A `watch` is told of it, and may let
    bad rows pass.
    """
    meta = read_sidecar(path)
    found = _known_rows(path, watch)
    first = next(found, None)
    if first is not None and "trace" in first.fields and "output_length" not in first.fields:
        meta, first = read_meta(first, first.fields["trace"]), next(found, None)
    if first is None:
        raise TraceError(f"{path}: no rows")
    loader = LOADERS[loader_name] if loader_name else _detect(first, watch)
    reader = _Reader(loader, meta, _Checks(str(path), meta), watch, not loader_name)
    for row in chain((first,), found):
        try:
            request = reader.request(row)
        except TooMuchError:
            raise
        except TraceError as error:
            watch.refused(error)
        else:
            yield request
    for problem in reader.checks.finish():
        watch.refused(problem)


def _known_rows(path: Path, watch: Watch) -> Iterator[Row]:
    """Yield a file's rows; where the first one is none, say what the file is instead of a trace."""
    has_row = False

    def told(error: TraceError) -> None:
        (watch.refused if has_row else ends_reading)(error)

    found = rows(path, told)
    try:
        first = next(found, None)
    except TraceError as error:
        kind = seen_in(head_of(path, HEAD_BYTES))
        raise TraceError(f"{error}{refused(kind)}" if kind else str(error)) from None
    if first is not None:
        has_row = True
        yield first
        yield from found


def _detect(row: Row, watch: Watch) -> Loader:
    for name, loader in LOADERS.items():
        if fields := loader.claims(row.fields):
            watch.detected(name, row.line, fields)
            return loader
    kind = seen_in(orjson.dumps(row.fields)[:HEAD_BYTES]) or fields_of(row.fields)
    raise TraceError(
        f"{row.file}:{row.line}: format: must be one of {', '.join(LOADERS)}{refused(kind)}"
    )
