"""vLLM's batches of KV events: MessagePack to the core's values.

A batch is `[time, events, rank]`. An event is an object with a `type`, or in vLLM before 0.26 an
array that begins with it; what has its default is left out. A block's name is a number of 64 bits,
or a whole digest, of which those 64 bits are the end (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`).
Fields that are not known here are ignored, and an event of an unknown type is counted. Source:
vllm/distributed/kv_events.py of vLLM 0.11 to 0.33.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from proxy.core.kvcache.published import CacheEvent, Cleared, Removed, Stored
from proxy.protocol.prompt.facts import ID_BYTES
from proxy.protocol.prompt.rendered import IDS

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""The members of an event that is an array, behind its type."""
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
    """A payload that is no batch of KV events."""


@dataclass(slots=True)
class Batch:
    """One batch. `t`: when it was made, unix seconds by the engine's clock.

    `other_tier`: events on tiers that are not the prefix cache; `unknown`: events of other types.
    """

    t: float
    events: list[CacheEvent]
    other_tier: int = 0
    unknown: int = 0


def decode(payload: bytes) -> Batch:
    """A batch's payload; raises BatchError."""
    try:
        parts = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError(f"not MessagePack: {error}") from error
    if not isinstance(parts, list) or len(parts) < 2 or not isinstance(parts[1], list):
        raise BatchError("no batch: [time, events, rank] is expected")
    t = parts[0] if isinstance(parts[0], int | float) else 0.0
    batch = Batch(float(t), [])
    for given in parts[1]:
        kind, fields = _named(given)
        if kind not in _FIELDS:
            batch.unknown += 1
        elif fields.get("medium") not in _GPU:
            batch.other_tier += 1
        elif kind == "BlockStored":
            batch.events += _pieces(_stored(fields))
        elif kind == "BlockRemoved":
            names, group = _names(fields), _group(fields)
            batch.events += [Removed(part, group) for part in _parts(names)]
        else:
            batch.events.append(Cleared())
    return batch


def _named(given: Any) -> tuple[str, Mapping[str, Any]]:
    """An event's type and members, of either form."""
    if isinstance(given, dict):
        return _text(given.get("type")), given
    if isinstance(given, list) and given:
        kind = _text(given[0])
        return kind, dict(zip(_FIELDS.get(kind, ()), given[1:], strict=False))
    raise BatchError("an event is neither an object nor an array")


def _text(value: Any) -> str:
    return value[:_MOST_TEXT] if isinstance(value, str) else ""


def _name(value: Any) -> int:
    """A block's name, of either form."""
    if isinstance(value, bytes) and len(value) >= _NAME_BYTES:
        return int.from_bytes(value[-_NAME_BYTES:], "big")
    if isinstance(value, int):
        return value & _NAME_BITS
    raise BatchError("a block's hash is neither a number nor 8 bytes or more")


def _names(fields: Mapping[str, Any]) -> list[int]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise BatchError("block_hashes is no array")
    return [_name(value) for value in hashes]


def _group(fields: Mapping[str, Any]) -> int | None:
    group = fields.get("group_idx")
    return group if isinstance(group, int) else None


def _stored(fields: Mapping[str, Any]) -> Stored:
    names, size = _names(fields), fields.get("block_size")
    if not isinstance(size, int) or not 1 <= size <= MOST_BLOCK_TOKENS:
        raise BatchError(f"block_size is not within 1 to {MOST_BLOCK_TOKENS}")
    parent = fields.get("parent_block_hash")
    lora = _text(fields.get("lora_name"))
    plain, salt = _plain_blocks(fields.get("extra_keys"), lora, begins=parent is None)
    return Stored(
        names,
        None if parent is None else _name(parent),
        size,
        _ids(fields.get("token_ids"), size, len(names))[: plain * size * ID_BYTES],
        salt,
        lora,
        xxh3_64_intdigest(lora.encode()) if lora else 0,
        _group(fields),
        is_full=fields.get("kv_cache_spec_kind") in _KEEPS_ALL,
        session=_text(fields.get("session_id")),
    )


def _parts(names: list[int]) -> list[list[int]]:
    return [names[at : at + MOST_BLOCKS] for at in range(0, len(names), MOST_BLOCKS)] or [[]]


def _pieces(whole: Stored) -> list[Stored]:
    """The same as events of at most MOST_BLOCKS blocks each, every one behind the one before."""
    if len(whole.hashes) <= MOST_BLOCKS:
        return [whole]
    pieces: list[Stored] = []
    parent, salt, ids, ids_bytes = whole.parent, whole.salt, whole.ids, 0
    for names in _parts(whole.hashes):
        end = ids_bytes + len(names) * whole.block_tokens * ID_BYTES
        pieces.append(
            Stored(
                names,
                parent,
                whole.block_tokens,
                ids[ids_bytes:end],
                salt,
                whole.lora,
                whole.mark,
                whole.group,
                is_full=whole.is_full,
                session=whole.session,
            )
        )
        parent, salt, ids_bytes = names[-1], "", end
    return pieces


def _ids(given: Any, size: int, blocks: int) -> bytes:
    """The token ids of an event's blocks; empty unless there are as many as the blocks hold."""
    if not isinstance(given, list) or len(given) != size * blocks:
        return b""
    try:
        return array(IDS, given).tobytes()
    except (TypeError, OverflowError):
        return b""


def _plain_blocks(extra: Any, lora: str, *, begins: bool) -> tuple[int, str]:
    """How many leading blocks depend on nothing but ids, adapter and salt; and the salt.

    `extra`: per block what else its hash depends on: the adapter's name, places of images or
    sounds, and in a prompt's first block the salt.
    """
    if not isinstance(extra, list):
        return MOST_BLOCK_TOKENS, ""
    salt = ""
    for at, keys in enumerate(extra):
        left = list(keys) if isinstance(keys, list) else []
        if lora and left[:1] == [lora]:
            del left[0]
        if not at and begins and len(left) == 1 and isinstance(left[0], str):
            salt = left.pop()
        if left:
            return at, salt
    return MOST_BLOCK_TOKENS, salt
