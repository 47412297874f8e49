"""vLLM's batches of KV events: MessagePack to the core's values.

A batch is `[time, events, rank]`. An event is an object with a `type`, or in vLLM before 0.26 an
array that begins with it. What has its default is left out. A block's name is a number of 64 bits,
or a whole digest, of which those 64 bits are the end (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`).
Fields that are not known here are ignored, and an event of an unknown type is counted. Source:
vllm/distributed/kv_events.py of vLLM 0.11 to 0.33.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.msgpack import Decoder
from xxhash import xxh3_64_intdigest

from proxy.core.kvcache.published import CacheEvent, Cleared, Removed, Stored
from proxy.protocol.prompt.facts import ID_BYTES, mixed
from proxy.protocol.prompt.rendered import IDS

_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
MOST_EVENTS = 1 << 14
"""Events of a batch; an engine removes so many blocks in no step."""
LEAST_EVENT_BYTES = 16
"""The shortest event is the name of a type."""
MOST_NAMES, MOST_IDS = 1 << 16, 1 << 17
"""Blocks of an event, and token ids. One of more ids is taken in without them."""
_NONE = Raw(b"\xc0")
_VALUE_BYTES = 1024
"""A longer member that should be a number or a name is not read."""
_GPU = (None, "GPU")
"""The tier that an engine's prefix cache is in; None in versions that know no other."""
_KEEPS_ALL = (None, "full_attention", "mla_attention")
"""Kinds of KV cache groups that keep all tokens of a prompt."""
_NAME_BITS = (1 << 64) - 1
_NAME_BYTES = 8
MOST_BLOCK_TOKENS = 1 << 16
MOST_BLOCKS = 512
"""An event of more blocks is taken for several, so that other tasks have a turn between them."""
_MOST_TEXT = 256


class BatchError(ValueError):
    """A payload that is not a batch of KV events."""


@dataclass(slots=True)
class Batch:
    """One batch. `t`: when it was made, unix seconds by the engine's clock.

    `other_tier`: events on tiers that are not the prefix cache; `unknown`: events of other types.
    """

    t: float = 0.0
    events: list[CacheEvent] = field(default_factory=list)
    other_tier: int = 0
    unknown: int = 0


class _Batch(Struct, array_like=True):
    t: Raw
    events: Annotated[list[Raw], Meta(max_length=MOST_EVENTS)]


class _Event(Struct):
    """An event that is an object, its members as they came: none of another name is made."""

    type: Raw = _NONE
    block_hashes: Raw = _NONE
    parent_block_hash: Raw = _NONE
    token_ids: Raw = _NONE
    block_size: Raw = _NONE
    medium: Raw = _NONE
    lora_name: Raw = _NONE
    extra_keys: Raw = _NONE
    group_idx: Raw = _NONE
    kv_cache_spec_kind: Raw = _NONE
    session_id: Raw = _NONE


class _Kind(Struct, array_like=True):
    type: Raw


class _StoredArray(Struct, array_like=True):
    type: Raw
    block_hashes: Raw = _NONE
    parent_block_hash: Raw = _NONE
    token_ids: Raw = _NONE
    block_size: Raw = _NONE
    lora_id: Raw = _NONE
    medium: Raw = _NONE
    lora_name: Raw = _NONE
    extra_keys: Raw = _NONE
    group_idx: Raw = _NONE
    kv_cache_spec_kind: Raw = _NONE


class _RemovedArray(Struct, array_like=True):
    type: Raw
    block_hashes: Raw = _NONE
    medium: Raw = _NONE
    group_idx: Raw = _NONE


_ARRAYS: Mapping[str, type[Struct]] = {"BlockStored": _StoredArray, "BlockRemoved": _RemovedArray}
_BATCH = Decoder(_Batch)
_EVENT, _KIND = Decoder(_Event), Decoder(_Kind)
_NAMES = Decoder(Annotated[list[int | bytes], Meta(max_length=MOST_NAMES)])
_TOKENS = Decoder(Annotated[list[int], Meta(max_length=MOST_IDS)])
_EXTRA = Decoder(Annotated[list[Raw], Meta(max_length=MOST_NAMES)])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read(payload: bytes, batch: Batch) -> Generator[None]:
    """Read a payload into a batch, in steps; raises BatchError.

    How many events, blocks and ids there are is known before any is made. A step is short, so that
    other tasks can have a turn behind each.
    """
    try:
        told = _BATCH.decode(payload)
        if len(told.events) > 1 + len(payload) // LEAST_EVENT_BYTES:
            raise BatchError("its events are too short to be any")
        t = _value(told.t)
        batch.t = float(t) if isinstance(t, int | float) else 0.0
        yield
        for given in told.events:
            yield from _add(batch, given)
            yield
    except _UNREADABLE as error:
        raise BatchError(f"no batch: [time, events, rank] is expected: {error}") from error


def _add(batch: Batch, given: Raw) -> Generator[None]:
    """Take in an event."""
    event = _event(given)
    kind = _text(_value(event.type))
    if kind not in _KINDS:
        batch.unknown += 1
    elif _value(event.medium) not in _GPU:
        batch.other_tier += 1
    elif kind == "BlockStored":
        yield from _store(batch, event)
    elif kind == "BlockRemoved":
        group = _group(event)
        for names in _parts(event):
            batch.events.append(Removed(names, group))
            yield
    else:
        batch.events.append(Cleared())


def _event(given: Raw) -> _Event:
    """An event of either form."""
    first = bytes(memoryview(given)[:1])
    if first and (0x90 <= first[0] <= 0x9F or first in (b"\xdc", b"\xdd")):
        kind = _KIND.decode(given).type
        form = _ARRAYS.get(_text(_value(kind)))
        found = _Event(kind)
        if form is not None:
            told = msgspec.msgpack.decode(given, type=form)
            for name in form.__struct_fields__:
                if name != "lora_id":
                    setattr(found, name, getattr(told, name))
        return found
    return _EVENT.decode(given)


def _value(raw: Raw) -> Any:
    """A member that is a number or a name; None for one that is too long to be any."""
    view = memoryview(raw)
    return msgspec.msgpack.decode(raw) if 0 < len(view) <= _VALUE_BYTES else None


def _text(value: Any) -> str:
    return value[:_MOST_TEXT] if isinstance(value, str) else ""


def _name(value: Any) -> int:
    """A block's name, of either form, as a key of tables."""
    if isinstance(value, bytes) and len(value) >= _NAME_BYTES:
        return mixed(int.from_bytes(value[-_NAME_BYTES:], "big"))
    if isinstance(value, int):
        return mixed(value & _NAME_BITS)
    raise BatchError("a block's hash is neither a number nor 8 bytes or more")


def _parts(event: _Event) -> Generator[list[int]]:
    """The names of its blocks, MOST_BLOCKS at a time; one empty list where it has none."""
    told = _NAMES.decode(event.block_hashes)
    for at in range(0, len(told) or 1, MOST_BLOCKS):
        yield [_name(value) for value in told[at : at + MOST_BLOCKS]]


def _group(event: _Event) -> int | None:
    group = _value(event.group_idx)
    return group if isinstance(group, int) else None


def _store(batch: Batch, event: _Event) -> Generator[None]:
    """Take in stored blocks, as events of at most MOST_BLOCKS blocks each, in order."""
    size, parent = _value(event.block_size), _value(event.parent_block_hash)
    if not isinstance(size, int) or not 1 <= size <= MOST_BLOCK_TOKENS:
        raise BatchError(f"block_size is not within 1 to {MOST_BLOCK_TOKENS}")
    parts: list[list[int]] = []
    for names in _parts(event):
        parts.append(names)
        yield
    before = None if parent is None else _name(parent)
    lora = _text(_value(event.lora_name))
    plain, salt = yield from _plain_blocks(event.extra_keys, lora, begins=before is None)
    ids = _ids(event.token_ids, size, sum(map(len, parts)))[: plain * size * ID_BYTES]
    yield
    mark, group = xxh3_64_intdigest(lora.encode()) if lora else 0, _group(event)
    is_full = _value(event.kv_cache_spec_kind) in _KEEPS_ALL
    session, at = _text(_value(event.session_id)), 0
    for names in parts:
        end = at + len(names) * size * ID_BYTES
        some = ids[at:end]
        batch.events.append(
            Stored(
                names,
                before,
                size,
                some,
                salt,
                lora,
                mark,
                group,
                is_full=is_full,
                session=session,
            )
        )
        before, salt, at = names[-1] if names else before, "", end


def _ids(given: Raw, size: int, blocks: int) -> bytes:
    """The token ids of an event's blocks; empty unless there are as many as the blocks hold."""
    try:
        ids = _TOKENS.decode(given)
        return array(IDS, ids).tobytes() if len(ids) == size * blocks else b""
    except (*_UNREADABLE, OverflowError):
        return b""


def _plain_blocks(extra: Raw, lora: str, *, begins: bool) -> Generator[None, None, tuple[int, str]]:
    """Number of leading blocks that depend only on ids, adapter and salt; and the salt.

    `extra`: per block what else its hash depends on: the adapter's name, places of images or
    sounds, and in a prompt's first block the salt.
    """
    try:
        told = _EXTRA.decode(extra)
    except msgspec.ValidationError:
        return MOST_BLOCK_TOKENS, ""
    salt = ""
    for at, raw in enumerate(told):
        if not at % MOST_BLOCKS:
            yield
        if len(memoryview(raw)) > _VALUE_BYTES:
            return at, salt
        keys = _value(raw)
        left = list(keys) if isinstance(keys, list) else []
        if lora and left[:1] == [lora]:
            del left[0]
        if not at and begins and len(left) == 1 and isinstance(left[0], str):
            salt = left.pop()
        if left:
            return at, salt
    return MOST_BLOCK_TOKENS, salt
