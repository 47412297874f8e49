"""KV transfers between engine models: pins, sender slots, waits, failures."""

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.engine.costs import TransferCost
from replayer.engine.engine import Engine, deliver
from replayer.engine.types import (
    EngineOptions,
    Event,
    Job,
    Pull,
    PullServed,
    RemoteKv,
    SimRequest,
    Unpinned,
)
from tests.support.examples import examples

WIRE = TransferCost(x0=0.5, bytes_per_token=100, bandwidth=10_000.0)
OPTIONS = EngineOptions(
    block_size=4,
    num_blocks=256,
    max_model_len=512,
    transfer=WIRE,
    sender_slots=2,
    abort_timeout_s=30.0,
)
HASHES = list(range(128))


@dataclass
class Pair:
    """Two engines and what links them."""

    options: EngineOptions = OPTIONS
    events: list[Event] = field(default_factory=list)

    def __post_init__(self):
        self.p, self.d = Engine(self.options), Engine(self.options)
        self.engines = {"p": self.p, "d": self.d}

    def run(self, until_s: float = math.inf) -> float:
        """Run both engines up to (not including) a time; return the last event's time."""
        now_s = 0.0
        while (due_s := min(e.next_event_s() for e in self.engines.values())) < until_s:
            now_s = due_s
            for engine in list(self.engines.values()):
                for event in engine.advance(now_s):
                    self.events.append(event)
                    deliver(event, engine, self.engines, now_s)
        return now_s

    def check(self):
        for engine in self.engines.values():
            engine.pool.check()
            assert engine.pool.free_blocks == self.options.num_blocks
            assert not engine.fetching
            assert engine.sender.busy_slots == 0


def _leg(tokens: int, transfer_id: str = "x", *, stops: bool = False) -> Job:
    job = Job("leg", tokens, HASHES[: tokens // 4], 1, send_as=transfer_id)
    return replace(job, finish_reason="stop") if stops else job


def _decode(tokens: int, transfer_id: str = "x", engine_id: str = "p", output: int = 3) -> Job:
    remote = RemoteKv(engine_id, transfer_id)
    return Job("decode", tokens, HASHES[: tokens // 4], output, fetch=remote)


def _first_s(request: SimRequest) -> float:
    assert request.first_token_s is not None
    return request.first_token_s


def test_an_offload_moves_the_whole_prompt_and_both_sides_keep_it():
    pair = Pair()
    leg = pair.p.submit(_leg(100), 0.0)
    pair.run(10.0)
    assert pair.p.sender.pinned == [leg]
    assert pair.p.pool.usage_ratio > 0
    decode = pair.d.submit(_decode(100), 10.0)
    pair.run(10.0 + WIRE.transfer_s(100) - 1e-6)
    assert decode.first_token_s is None
    assert list(pair.d.fetching) == [decode]
    pair.run(30.0)
    assert _first_s(decode) > 10.0 + WIRE.transfer_s(100)
    assert (decode.external_tokens, decode.local_hit_tokens, decode.prompt_computed_tokens) == (
        *(100, 0, 0),
    )
    assert leg.sent_tokens == 100
    assert pair.p.sender.bytes_sent == 100 * WIRE.bytes_per_token
    assert pair.d.counters.prompt_external == 100
    pair.check()
    for engine in (pair.p, pair.d):
        again = engine.submit(Job("again", 100, HASHES[:25], 1), 40.0)
        pair.run()
        assert again.local_hit_tokens == 96


def test_local_hits_reduce_what_is_moved():
    pair = Pair()
    pair.d.submit(Job("turn 1", 60, HASHES[:15], 1), 0.0)
    leg = pair.p.submit(_leg(100), 0.0)
    pair.run(5.0)
    decode = pair.d.submit(_decode(100), 5.0)
    pair.run(20.0)
    assert (decode.local_hit_tokens, decode.external_tokens) == (60, 40)
    assert leg.sent_tokens == 40
    pair.check()


def test_legs_may_overlap():
    pair = Pair()
    decode = pair.d.submit(_decode(100), 0.0)
    pair.run(1.0)
    assert pair.p.sender.busy_slots == 1
    pair.p.submit(_leg(100), 1.0)
    pair.run()
    assert decode.external_tokens == 100
    pair.check()


def test_a_leg_that_stops_by_itself_keeps_nothing():
    pair = Pair()
    leg = pair.p.submit(_leg(100, stops=True), 0.0)
    pair.run(1.0)
    assert leg.finish_reason == "stop"
    assert pair.p.sender.pinned == []
    decode = pair.d.submit(_decode(100), 1.0)
    end_s = pair.run()
    # The pull is an orphan: it holds a slot for the abort timeout, then D computes by itself.
    assert _first_s(decode) >= 1.0 + OPTIONS.abort_timeout_s
    assert end_s < 1.0 + OPTIONS.abort_timeout_s + 1.0
    assert (decode.external_tokens, decode.prompt_computed_tokens) == (0, 100)
    assert pair.d.counters.prompt_external == 0
    assert pair.d.counters.external_hits == 100
    pair.check()


def test_unclaimed_kv_is_let_go_after_the_abort_timeout():
    pair = Pair()
    leg = pair.p.submit(_leg(100), 0.0)
    pair.run(20.0)
    assert pair.p.pool.free_blocks < OPTIONS.num_blocks
    end_s = pair.run()
    assert leg.finished_s is not None
    assert end_s == pytest.approx(leg.finished_s + OPTIONS.abort_timeout_s)
    assert pair.p.sender.expired == 1
    assert Unpinned(end_s, leg) in pair.events
    pair.check()


def test_orphan_pulls_starve_the_good_ones_until_the_timeout():
    pair = Pair()
    for index in range(OPTIONS.sender_slots):
        pair.p.pull(Pull(f"nobody {index}", 10, None), 0.0)
    pair.p.submit(_leg(100), 0.0)
    decode = pair.d.submit(_decode(100), 5.0)
    pair.run()
    assert _first_s(decode) > OPTIONS.abort_timeout_s
    assert decode.external_tokens == 100
    pair.check()


def test_a_transfer_id_serves_once():
    pair = Pair()
    pair.p.submit(_leg(40), 0.0)
    one = pair.d.submit(_decode(40), 1.0)
    pair.run(10.0)
    pair.d.submit(Job("evict", 500, [10_000 + i for i in range(125)], 1), 10.0)
    other = pair.d.submit(_decode(44), 11.0)
    pair.run()
    assert one.external_tokens == 40
    assert other.external_tokens == 0
    pair.check()


def test_a_shorter_prompt_on_the_sender_is_refused_at_once():
    pair = Pair()
    leg = pair.p.submit(_leg(8), 0.0)
    decode = pair.d.submit(_decode(100), 1.0)
    pair.run()
    assert decode.external_tokens == 0
    assert leg.sent_tokens == 0
    assert _first_s(decode) < 2.0
    pair.check()


def test_an_empty_pull_lets_the_sender_go():
    pair = Pair()
    leg = pair.p.submit(_leg(100), 0.0)
    pair.run(1.0)
    pair.p.pull(Pull("x", 0, None), 1.0)
    pair.run(1.1)
    assert leg.sent_tokens == 0
    assert [e.ok for e in pair.events if isinstance(e, PullServed)] == [True]
    pair.check()


def test_an_unknown_engine_means_recompute_at_once():
    pair = Pair()
    decode = pair.d.submit(_decode(100, engine_id="gone"), 0.0)
    pair.run()
    assert _first_s(decode) < 1.0
    assert decode.external_tokens == 0
    assert pair.d.counters.failed_receives == 1
    pair.check()


def test_the_fail_policy_ends_the_request_with_an_error():
    pair = Pair(replace(OPTIONS, recompute_failed_loads=False))
    decode = pair.d.submit(_decode(100, engine_id="gone"), 0.0)
    pair.run()
    assert (decode.finish_reason, decode.output_tokens) == ("error", 0)
    pair.check()


def test_a_sender_that_dies_leaves_the_receiver_waiting_for_its_timeout():
    pair = Pair()
    decode = pair.d.submit(_decode(100), 0.0)
    pair.d.advance(0.0)
    del pair.engines["p"]
    pair.run()
    assert _first_s(decode) >= OPTIONS.abort_timeout_s + OPTIONS.receive_grace_s
    assert decode.prompt_computed_tokens == 100


def test_an_abort_in_mid_transfer_keeps_the_blocks_until_it_ends():
    pair = Pair()
    pair.p.submit(_leg(100), 0.0)
    decode = pair.d.submit(_decode(100), 1.0)
    pair.run(1.2)
    pair.d.abort(decode, 1.2)
    assert decode.finish_reason == "abort"
    assert pair.d.pool.usage_ratio > 0
    pair.run()
    assert decode.first_token_s is None
    pair.check()


def test_an_abort_before_scheduling_leaves_the_sender_pinned():
    pair = Pair()
    leg = pair.p.submit(_leg(100), 0.0)
    pair.run(1.0)
    decode = pair.d.submit(_decode(100), 1.0)
    pair.d.abort(decode, 1.0)
    pair.run(20.0)
    assert pair.p.sender.pinned == [leg]
    pair.run()
    pair.check()


@settings(deadline=None, max_examples=examples(60))
@given(
    legs=st.lists(
        st.tuples(
            st.floats(0.0, 5.0),  # begin, s
            st.integers(1, 300),  # tokens
            st.booleans(),  # the prefill leg is sent
            st.one_of(st.none(), st.floats(0.0, 40.0)),  # decode leg aborted after, s
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_happens_to_the_legs_nothing_stays_behind(legs):
    pair = Pair()
    acts: list[tuple[float, int, int, Job | None]] = []
    for index, (at_s, tokens, sent, abort_s) in enumerate(legs):
        if sent:
            acts.append((at_s, index, 0, _leg(tokens, str(index))))
        acts.append((at_s + 1.0, index, 1, _decode(tokens, str(index))))
        if abort_s is not None:
            acts.append((at_s + 1.0 + abort_s, index, 2, None))
    decodes: dict[int, SimRequest] = {}
    for at_s, index, kind, job in sorted(acts, key=lambda act: act[:3]):
        pair.run(at_s)
        if job is None:
            pair.d.abort(decodes[index], at_s)
        elif kind == 0:
            pair.p.submit(job, at_s)
        else:
            decodes[index] = pair.d.submit(job, at_s)
    pair.run()
    pair.check()
    assert all(d.finish_reason in ("length", "abort") for d in decodes.values())
    moved = sum(e.pull.tokens for e in pair.events if isinstance(e, PullServed) and e.ok)
    assert pair.p.sender.bytes_sent == moved * WIRE.bytes_per_token
