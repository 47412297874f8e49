"""Batches of KV events in every form that vLLM has had, and what is none."""

from __future__ import annotations

import tracemalloc
from array import array
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.kvcache.published import Cleared, Removed, Stored
from proxy.net.kv_events.batches import MOST_BLOCKS, Batch, BatchError, read

IDS = list(range(100, 108))
STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": IDS,
    "block_size": 4,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def decode(payload: bytes) -> Batch:
    found = Batch()
    for _ in read(payload, found):
        pass
    return found


def batch(*events: Any) -> Batch:
    return decode(msgspec.msgpack.encode([12.5, list(events), 0]))


def only(event: Any) -> Any:
    (found,) = batch(event).events
    return found


def fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__slots__}


def test_an_object_and_an_array_are_the_same() -> None:
    """The second is what vLLM before 0.26 sends; fields were added at its end."""
    array_ = ["BlockStored", [11, 12], 10, IDS, 4, None, "GPU"]
    one = only(STORED)
    for more in ([], [None], [None, None]):
        assert fields(only(array_ + more)) == fields(one)
    other = only([*array_, None, None, 0, "full_attention", None])
    assert fields(other) == fields(one) | {"group": 0}
    assert one.ids == array("I", IDS).tobytes()
    assert (one.hashes, one.parent, one.block_tokens) == ([11, 12], 10, 4)


@given(st.integers(0, (1 << 256) - 1))
def test_a_digest_is_known_by_its_last_64_bits(digest: int) -> None:
    """So vLLM makes a number of it."""
    whole = digest.to_bytes(32, "big")
    number = digest & ((1 << 64) - 1)
    (by_bytes,), (by_number,) = (
        only({"type": "BlockRemoved", "block_hashes": [given_]}).hashes
        for given_ in (whole, number)
    )
    assert by_bytes == by_number == number


@given(st.integers(1, 4 * MOST_BLOCKS), st.integers(0, 4 * MOST_BLOCKS))
def test_a_long_event_is_taken_in_by_pieces(count: int, with_ids: int) -> None:
    """Each behind the one before, with its own ids; the leading blocks only may have some."""
    names, ids = list(range(1, count + 1)), list(range(4 * count))
    extra: list[Any] = [None] * count
    if with_ids < count:
        extra[with_ids] = [["an image", 3]]
    given_ = STORED | {"block_hashes": names, "token_ids": ids, "extra_keys": extra}
    pieces: list[Any] = batch(given_ | {"parent_block_hash": None}).events
    assert [name for piece in pieces for name in piece.hashes] == names
    assert max(len(piece.hashes) for piece in pieces) <= MOST_BLOCKS
    assert [piece.parent for piece in pieces] == [None, *[p.hashes[-1] for p in pieces[:-1]]]
    plain = 4 * min(count, with_ids)
    assert b"".join(piece.ids for piece in pieces) == array("I", ids[:plain]).tobytes()
    gone: list[Any] = batch({"type": "BlockRemoved", "block_hashes": names}).events
    assert [name for piece in gone for name in piece.hashes] == names
    assert len(gone) == len(pieces)


def test_removed_and_cleared() -> None:
    events = batch({"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU"}).events
    events += batch(["BlockRemoved", [1, 2], "GPU", 0], {"type": "AllBlocksCleared"}).events
    events += batch(["AllBlocksCleared"]).events
    kinds = [type(event) for event in events]
    assert kinds == [Removed, Removed, Cleared, Cleared]
    removed = [event for event in events if isinstance(event, Removed)]
    assert [(event.hashes, event.group) for event in removed] == [([1, 2], None), ([1, 2], 0)]


def test_other_tiers_and_unknown_events_are_counted_and_left_out() -> None:
    found = batch(
        STORED | {"medium": "CPU"},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE"},
        {"type": "BlockPromoted", "block_hashes": [1]},
        ["Something", 1, 2],
        STORED | {"a field that is new": {"x": [1]}, "locality": "LOCAL"},
    )
    assert (found.other_tier, found.unknown, len(found.events), found.t) == (2, 2, 1, 12.5)


def test_kv_cache_groups() -> None:
    kinds = ("full_attention", "mla_attention", None, "sliding_window", "mamba")
    found = [only(STORED | {"group_idx": 3, "kv_cache_spec_kind": kind}) for kind in kinds]
    assert [event.is_full for event in found] == [True, True, True, False, False]
    assert {event.group for event in found} == {3}


@pytest.mark.parametrize(
    ("extra", "lora", "parent", "plain", "salt"),
    [
        (None, None, None, 2, ""),
        ([None, None], None, None, 2, ""),
        ([["tenant-a"], None], None, None, 2, "tenant-a"),
        ([["ad", "tenant-a"], ["ad"]], "ad", None, 2, "tenant-a"),
        ([["ad"], ["ad"]], "ad", None, 2, ""),
        ([None, [["image", 3]]], None, None, 1, ""),
        ([[["image", 3]], None], None, None, 0, ""),
        ([["tenant-a"], None], None, 10, 0, ""),
    ],
)
def test_what_else_a_block_depends_on(
    extra: Any, lora: str | None, parent: int | None, plain: int, salt: str
) -> None:
    """Blocks behind an image are not known by their token ids."""
    told = {"extra_keys": extra, "lora_name": lora, "parent_block_hash": parent}
    event = only(STORED | told)
    assert isinstance(event, Stored)
    assert (len(event.ids) // 16, event.salt, event.lora) == (plain, salt, lora or "")
    assert bool(event.mark) == bool(lora)


def test_ids_that_do_not_fit_the_blocks_are_none() -> None:
    assert only(STORED | {"token_ids": IDS[:7]}).ids == b""
    assert only(STORED | {"token_ids": [*IDS[:7], -1]}).ids == b""
    assert only(STORED | {"token_ids": None}).ids == b""


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, [STORED | {"block_size": 0}]]),
        msgspec.msgpack.encode([1.0, [STORED | {"block_hashes": ["x"]}]]),
        msgspec.msgpack.encode([1.0, [STORED | {"block_hashes": None}]]),
        msgspec.msgpack.encode([1.0, [STORED | {"parent_block_hash": b"short"}]]),
    ],
)
def test_what_is_no_batch_is_an_error(payload: bytes) -> None:
    with pytest.raises(BatchError):
        decode(payload)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_an_error(payload: bytes) -> None:
    for raw in (payload, b"\x93\xcb" + bytes(8) + b"\x91" + payload + b"\x00"):
        with suppress(BatchError):
            assert isinstance(decode(raw), Batch)


MIB = 1 << 20
HEAD = b"\x93\xcb" + bytes(8)


def many(value: bytes, count: int) -> bytes:
    """An array of so many of these."""
    return b"\xdd" + count.to_bytes(4, "big") + value * count


def member(name: str, value: bytes) -> bytes:
    """A batch of one event with this member."""
    told = msgspec.msgpack.encode(STORED | {name: None})
    at = told.index(name.encode()) + len(name)
    return HEAD + b"\x91" + told[:at] + value + told[at + 1 :] + b"\x00"


COSTLY = {
    "empty maps": HEAD + many(b"\x80", MIB) + b"\x00",
    "empty arrays": HEAD + many(b"\x90", MIB) + b"\x00",
    "arrays of arrays": HEAD + many(b"\x91\x90", MIB // 2) + b"\x00",
    "maps in an unknown member": member("lora_id", many(b"\x80", MIB)),
    "maps for names": member("block_hashes", many(b"\x80", MIB)),
    "small names": member("block_hashes", many(b"\x01", MIB)),
    "small ids": member("token_ids", many(b"\x01", MIB)),
    "maps for ids": member("token_ids", many(b"\x80", MIB)),
    "maps for a parent": member("parent_block_hash", many(b"\x80", MIB)),
    "keys": member("extra_keys", many(b"\x91\x90", MIB // 2)),
    "maps for a type": HEAD + b"\x91\x81\xa4type" + many(b"\x80", MIB) + b"\x00",
    "deep": HEAD + b"\x91" * MIB + b"\x00",
}


@pytest.mark.parametrize("kind", COSTLY)
def test_no_batch_costs_much_memory(kind: str) -> None:
    payload = COSTLY[kind]
    tracemalloc.start()
    try:
        with suppress(BatchError):
            decode(payload)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 12 * MIB, f"{most >> 20} MiB"


def test_a_batch_of_one_long_prompt_is_read() -> None:
    """131,072 tokens in one step."""
    names, ids = list(range(1, 8193)), [150_000] * 131_072
    told = STORED | {"block_hashes": names, "token_ids": ids, "block_size": 16}
    events: list[Any] = batch(told).events
    assert sum(len(event.ids) for event in events) == 4 * len(ids)
    removed = [{"type": "BlockRemoved", "block_hashes": [1 << 63]} for _ in range(8192)]
    assert len(batch(*removed).events) == 8192
