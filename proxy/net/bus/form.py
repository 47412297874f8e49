"""The byte form of a batch: a header, then sections of MessagePack, each with its length in front.

The header has the form's version, the writer, its number, and a fingerprint. Another form is
refused. A section of another name is skipped. Everything is read and checked before anything is
taken in: a batch is whole, or a BatchError.

An instance is named by its address, and by when its process started where that is known. Two
replicas learn the start at different times. So two names are the same as long as no two starts
differ.

Sections about prompts and sessions are sealed by the key of `--share-key`: the bytes are combined
with those that SHAKE-256 makes of key, writer and number. Whoever reads the stream without the key
sees load, and neither names of sessions nor hashes of prompts. Replicas with another key, or other
blocks, have another fingerprint: of each other's batches they take the rows only.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import shake_256
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder
from xxhash import xxh3_64_digest

from proxy.core.sharing.batch import (
    ALL_PREFILLS,
    MOST_EVENTS,
    MOST_HASHES,
    MOST_NAME,
    MOST_OPEN,
    MOST_PREFILLS,
    MOST_TURNS,
    NOTHING,
    Batch,
    Course,
    Event,
    Prefill,
    Prompt,
    Row,
    Turn,
)
from proxy.net.bus.base import MOST_BYTES
from proxy.protocol.prompt.facts import BLOCK_BYTES

FORM: Final = 1
MOST_INSTANCES: Final = 1024
START_S: Final = 1.5
"""Two starts of one process differ by less: engines round it, or it is made of an age."""
MOST_START_S: Final = 1e12
BLOCKS: Final = f"xxh3-64 chained over {BLOCK_BYTES} bytes, from model and salt".encode()
"""How hashes of prompts are made; another way is another text here."""
MOST_READ: Final = 64
_ID_BYTES = 8
_HASH_BYTES = 8
_TEXT_BYTES = 1024
"""Most bytes of what a writer says of itself."""
_Whole = Annotated[int, Meta(ge=0, le=10**15)]
_Span = Annotated[float, Meta(ge=0.0, le=1e9)]
_At = Annotated[int, Meta(ge=-1, lt=MOST_INSTANCES)]
_Id = Annotated[bytes, Meta(min_length=_ID_BYTES, max_length=_ID_BYTES)]
_Section = Annotated[bytes, Meta(max_length=MOST_BYTES)]
_Text = Annotated[bytes, Meta(max_length=_TEXT_BYTES)]
_Name = Annotated[bytes, Meta(max_length=MOST_NAME)]
_Opens = Annotated[list[_Whole], Meta(max_length=MOST_OPEN)]
_T = TypeVar("_T")
Kind = Literal["torn", "form", "range"]
Place = tuple[str, str, float | None]
"""An instance's name in this process, its URL, and when its process started, unix seconds."""


class BatchError(ValueError):
    """Bytes that are no batch. `kind`: torn, of another form, or out of range."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind: Kind = kind


class _Envelope(Struct):
    f: Annotated[int, Meta(ge=0)]
    writer: _Id
    number: Annotated[int, Meta(ge=1, le=10**15)]
    print: _Id
    whole: bool
    gone: bool
    about: _Text = b""
    instances: _Section = b""
    rows: _Section = b""
    events: _Section = b""
    turns: _Section = b""
    open: _Section = b""


class _Form(Struct):
    """As much of a batch as says which form it has."""

    f: int


class _Instance(Struct, array_like=True):
    address: _Id
    start_s: Annotated[float, Meta(ge=0.0, le=MOST_START_S)] | None


class _Prefill(Struct, array_like=True):
    key: _Whole
    since: _Whole
    work_s: _Span
    share_s: _Span
    age_s: _Span


class _Row(Struct, array_like=True):
    at: Annotated[int, Meta(ge=0, lt=MOST_INSTANCES)]
    numbers: Annotated[list[_Whole], Meta(min_length=len(NOTHING), max_length=len(NOTHING))]
    prefills: Annotated[list[_Prefill], Meta(max_length=MOST_PREFILLS)]
    recent: _Span
    recent_s: _Span
    recent_age_s: _Span
    turn_age_s: _Span | None


class _Prompt(Struct, array_like=True):
    at: Annotated[int, Meta(ge=0, lt=MOST_INSTANCES)]
    hashes: Annotated[bytes, Meta(max_length=_HASH_BYTES * MOST_HASHES)]
    block_tokens: Annotated[float, Meta(ge=1.0, le=1e6)]
    tokens: _Whole
    tenant: _Name


class _Event(Struct, array_like=True):
    course: Course
    use: _Whole
    prompt: _Prompt | None
    amount: Annotated[float, Meta(ge=0.0, le=1e12)]


class _Turn(Struct, array_like=True):
    number: _Whole
    key: _Name
    at: _At
    tokens: _Whole | None
    shared_tokens: _Whole
    tenant: _Name


class _Open(Struct, array_like=True):
    uses: _Opens
    running: _Opens


_ENVELOPE, _FORM = Decoder(_Envelope), Decoder(_Form)
_INSTANCES = Decoder(Annotated[list[_Instance], Meta(max_length=MOST_INSTANCES)])
_ROWS = Decoder(Annotated[list[_Row], Meta(max_length=MOST_INSTANCES)])
_EVENTS = Decoder(Annotated[list[_Event], Meta(max_length=MOST_EVENTS)])
_TURNS = Decoder(Annotated[list[_Turn], Meta(max_length=MOST_TURNS)])
_OPEN = Decoder(_Open)
_ENCODER = Encoder()


class Places:
    """The instances of this process, by the names that all replicas give them."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._by_address: dict[bytes, tuple[str, float | None]] = {}
        self.by_name: dict[str, _Instance] = {}
        self._read: dict[bytes, list[str | None]] = {}
        """Names by the sections that were read: a writer's are mostly the same."""
        for name, url, start_s in places:
            address = xxh3_64_digest(url.encode("utf-8", "surrogatepass"))
            self._by_address[address] = name, start_s
            self.by_name[name] = _Instance(address, start_s if _is_start(start_s) else None)

    def names(self, section: bytes) -> list[str | None]:
        """The names here of the instances of a section, in its order; raises BatchError."""
        found = self._read.get(section)
        if found is None:
            found = [self._name(instance) for instance in _section(_INSTANCES, section)]
            if len(self._read) >= MOST_READ:
                self._read.clear()
            self._read[section] = found
        return found

    def _name(self, instance: _Instance) -> str | None:
        """Its name here; None where it is unknown, or known to be another process."""
        found = self._by_address.get(instance.address)
        if found is None:
            return None
        name, start_s = found
        if start_s is None or instance.start_s is None:
            return name
        return name if abs(start_s - instance.start_s) <= START_S else None


@dataclass(slots=True)
class Decoded:
    """A batch as it came. `about`: its writer, for people.

    `is_readable`: its prompts and sessions are in it; else they were sealed by another key, or are
    of other blocks. `unknown`: instances that are not known here.
    """

    batch: Batch
    about: str
    is_readable: bool
    unknown: int


class BatchForm:
    """Batches to bytes and back. `key`: of `--share-key`, empty without."""

    def __init__(self, key: bytes = b"", about: str = "") -> None:
        self._key = key
        self._about = about.encode()[:_TEXT_BYTES]
        self._print = shake_256(BLOCKS + b"\0" + key).digest(_ID_BYTES)

    def encode(self, batch: Batch, places: Places) -> bytes:
        """The bytes of a batch; instances that are not among the places are left out.

        Raises BatchError where they are more than MOST_BYTES.
        """
        named = list(places.by_name.items())[:MOST_INSTANCES]
        at = {name: index for index, (name, _) in enumerate(named)}
        writer = int(batch.writer, 16).to_bytes(_ID_BYTES, "big")
        opens = _Open(list(batch.uses[:MOST_OPEN]), list(batch.running[:MOST_OPEN]))
        events = [_event(event, at) for event in batch.events if _is_told(event.prompt, at)]
        turns = [_turn(turn, at) for turn in batch.turns if _is_turn_told(turn, at)]
        envelope = _Envelope(
            f=FORM,
            writer=writer,
            number=batch.number,
            print=self._print,
            whole=batch.is_whole,
            gone=batch.is_gone,
            about=self._about if batch.is_whole else b"",
            instances=_ENCODER.encode([instance for _, instance in named]),
            rows=_ENCODER.encode([_row(row, at[row.name]) for row in batch.rows if row.name in at]),
            events=self._sealed(b"events", _ENCODER.encode(events), writer, batch.number),
            turns=self._sealed(b"turns", _ENCODER.encode(turns), writer, batch.number),
            open=_ENCODER.encode(opens),
        )
        data = _ENCODER.encode(envelope)
        if len(data) > MOST_BYTES:
            raise BatchError("range", f"{len(data)} bytes, at most {MOST_BYTES}")
        return data

    def decode(self, data: bytes, places: Places) -> Decoded:
        """What the bytes say, of the instances that are known here; raises BatchError."""
        if len(data) > MOST_BYTES:
            raise BatchError("range", f"{len(data)} bytes, at most {MOST_BYTES}")
        if (form := _read(_FORM, data).f) != FORM:
            raise BatchError("form", f"form {form}, {FORM} is known here")
        told = _read(_ENVELOPE, data)
        is_readable = told.print == self._print
        names = places.names(told.instances)
        rows = _rows(_section(_ROWS, told.rows), names)
        events: list[Event] = []
        turns: list[Turn] = []
        opens = _read(_OPEN, told.open) if told.open else _Open([], [])
        if is_readable:
            sealed = told.writer, told.number
            events = _events(
                _section(_EVENTS, self._sealed(b"events", told.events, *sealed)), names
            )
            turns = _turns(_section(_TURNS, self._sealed(b"turns", told.turns, *sealed)), names)
        batch = Batch(
            told.writer.hex(),
            told.number,
            tuple(rows),
            tuple(events),
            tuple(turns),
            told.whole,
            tuple(opens.uses),
            tuple(opens.running),
            told.gone,
        )
        about = told.about.decode("utf-8", "replace")
        return Decoded(batch, about, is_readable, names.count(None))

    def _sealed(self, section: bytes, data: bytes, writer: bytes, number: int) -> bytes:
        """A section sealed, or opened again: both are the same.

        No two sections are combined with the same bytes, as a writer gives no number twice.
        """
        if not self._key or not data:
            return data
        about = b"\0".join((len(self._key).to_bytes(4, "big") + self._key, writer, section))
        pad = shake_256(about + number.to_bytes(8, "big")).digest(len(data))
        mixed = int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")
        return mixed.to_bytes(len(data), "big")


def _read(decoder: Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise BatchError("range", str(error)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError("torn", str(error)) from error


def _section(decoder: Decoder[list[_T]], data: bytes) -> list[_T]:
    return _read(decoder, data) if data else []


def _rows(told: list[_Row], names: list[str | None]) -> list[Row]:
    """Rows of the instances that are known here."""
    if (count := sum(len(row.prefills) for row in told)) > ALL_PREFILLS:
        raise BatchError("range", f"{count} prefills, at most {ALL_PREFILLS}")
    found = [(row, _name(row.at, names)) for row in told]
    return [_row_of(row, name) for row, name in found if name is not None]


def _name(at: int, names: list[str | None]) -> str | None:
    if at >= len(names):
        raise BatchError("range", f"instance {at} of {len(names)}")
    return names[at]


def _events(told: list[_Event], names: list[str | None]) -> list[Event]:
    found: list[Event] = []
    for event in told:
        prompt = None
        begins = event.course in (Course.BEGUN, Course.RECEIVED)
        if begins is (event.prompt is None):
            raise BatchError("range", f"{event.course.name} with or without a prompt")
        if event.prompt is not None:
            prompt = _prompt_of(event.prompt, _name(event.prompt.at, names))
            if prompt is None:
                continue
        if event.course is Course.REPORTED and event.amount > 1.0:
            raise BatchError("range", f"cached ratio {event.amount:g}")
        found.append(Event(event.course, event.use, prompt, event.amount))
    return found


def _prompt_of(told: _Prompt, name: str | None) -> Prompt | None:
    if len(told.hashes) % _HASH_BYTES:
        raise BatchError("range", f"{len(told.hashes)} bytes of hashes")
    if name is None:
        return None
    hashes = array("Q", told.hashes).tolist()
    return Prompt(name, hashes, told.block_tokens, told.tokens, _text(told.tenant))


def _turns(told: list[_Turn], names: list[str | None]) -> list[Turn]:
    found: list[Turn] = []
    for turn in told:
        name = "" if turn.at < 0 else _name(turn.at, names)
        if bool(turn.key) and not name:
            if turn.at < 0:
                raise BatchError("range", "a turn is placed nowhere")
            continue
        if name is not None:
            key, tenant = _text(turn.key), _text(turn.tenant)
            found.append(Turn(turn.number, key, name, turn.tokens, turn.shared_tokens, tenant))
    return found


def _is_told(prompt: Prompt | None, at: dict[str, int]) -> bool:
    return prompt is None or (prompt.name in at and _is_short(prompt.tenant))


def _is_turn_told(turn: Turn, at: dict[str, int]) -> bool:
    return (not turn.name or turn.name in at) and _is_short(turn.key) and _is_short(turn.tenant)


def _is_short(name: str) -> bool:
    return len(name) <= MOST_NAME // 4 or len(_bytes(name)) <= MOST_NAME


def _is_start(start_s: float | None) -> bool:
    """Whether it may be told: an engine says it, and others drop a batch with another one."""
    return start_s is not None and 0.0 <= start_s <= MOST_START_S


def _row(row: Row, at: int) -> _Row:
    prefills = [_prefill(one) for one in row.prefills]
    turn_age_s = _span(row.turn_age_s) if math.isfinite(row.turn_age_s) else None
    recent = _span(row.recent), _span(row.recent_s), _span(row.recent_age_s)
    return _Row(at, list(map(_whole, row.numbers)), prefills, *recent, turn_age_s)


def _prefill(one: Prefill) -> _Prefill:
    (key, since), work_s, share_s, age_s = one
    return _Prefill(key, _whole(since), _span(work_s), _span(share_s), _span(age_s))


def _row_of(row: _Row, name: str) -> Row:
    prefills = [
        Prefill((one.key, one.since), one.work_s, one.share_s, one.age_s) for one in row.prefills
    ]
    a = row.numbers
    numbers = (a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10])
    turn_age_s = math.inf if row.turn_age_s is None else row.turn_age_s
    recent = row.recent, row.recent_s, row.recent_age_s
    return Row(name, numbers, tuple(prefills), *recent, turn_age_s)


def _event(event: Event, at: dict[str, int]) -> _Event:
    if (prompt := event.prompt) is None:
        most = 1.0 if event.course is Course.REPORTED else 1e12
        amount = min(most, max(0.0, float(event.amount)))
        return _Event(event.course, event.use, None, amount)
    hashes = array("Q", prompt.hashes).tobytes()
    block_tokens = min(1e6, max(1.0, prompt.block_tokens))
    told = _Prompt(
        at[prompt.name], hashes, block_tokens, _whole(prompt.tokens), _bytes(prompt.tenant)
    )
    return _Event(event.course, event.use, told, 0.0)


def _turn(turn: Turn, at: dict[str, int]) -> _Turn:
    place = at[turn.name] if turn.name else -1
    told = None if turn.tokens is None else _whole(turn.tokens), _whole(turn.shared_tokens)
    return _Turn(turn.number, _bytes(turn.key), place, *told, _bytes(turn.tenant))


def _whole(value: int) -> int:
    """Within the range: others drop a batch with one number out of it."""
    return min(10**15, max(0, value))


def _span(value: float) -> float:
    """Within the range: what is longer ago is as good as never."""
    return min(1e9, max(0.0, value))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise BatchError("range", "a name that is no text") from error
