"""Engine models that share a store: who computes, who reads, and what is counted."""

from __future__ import annotations

import math

from replayer.engine.costs import TransferCost
from replayer.engine.engine import Engine
from replayer.engine.kvcache import SharedStore
from replayer.engine.types import EngineOptions, Job

WIRE = TransferCost(x0=0.5, bytes_per_token=100, bandwidth=10_000.0)
OPTIONS = EngineOptions(block_size=4, num_blocks=64, max_model_len=256, transfer=WIRE)
HASHES = list(range(64))


def job(tokens: int, output: int = 2) -> Job:
    return Job("r", tokens, HASHES[: tokens // 4], output)


def run(engine: Engine) -> None:
    while (due_s := engine.next_event_s()) < math.inf:
        engine.advance(due_s)


def test_one_computes_and_the_other_reads() -> None:
    store = SharedStore()
    one, other = Engine(OPTIONS, store=store), Engine(OPTIONS, store=store)
    one.submit(job(100), 0.0)
    run(one)
    assert len(store) == 25
    request = other.submit(job(100), 0.0)
    run(other)
    # Whole blocks, and never the full prompt: one token at least is computed.
    assert (request.external_tokens, request.prompt_computed_tokens) == (96, 4)
    assert request.first_token_s is not None
    assert request.first_token_s > WIRE.transfer_s(96)
    assert other.counters.prompt_external == other.counters.external_hits == 96
    other.pool.check()
    assert other.pool.free_blocks == OPTIONS.num_blocks


def test_only_what_is_not_there_already_is_read() -> None:
    store = SharedStore()
    one, other = Engine(OPTIONS, store=store), Engine(OPTIONS, store=store)
    other.submit(job(40), 0.0)
    run(other)
    one.submit(job(100), 0.0)
    run(one)
    request = other.submit(job(140), 100.0)
    run(other)
    assert (request.local_hit_tokens, request.external_tokens) == (40, 60)
    assert request.prompt_computed_tokens == 40


def test_who_leaves_while_reading_gives_its_blocks_back() -> None:
    store = SharedStore()
    store.write(HASHES)
    engine = Engine(OPTIONS, store=store)
    request = engine.submit(job(100), 0.0)
    engine.advance(0.0)
    assert request in engine.fetching
    engine.abort(request, 0.1)
    run(engine)
    assert engine.pool.free_blocks == OPTIONS.num_blocks
    assert not engine.fetching


def test_the_store_forgets_what_was_used_longest_ago() -> None:
    store = SharedStore(3)
    store.write([1, 2])
    store.write([3])
    store.write([1])
    store.write([4])
    assert [store.match([block], 1) for block in (1, 2, 3, 4)] == [1, 0, 1, 1]
