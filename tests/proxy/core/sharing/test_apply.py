"""What replicas hear of each other: over a bus that loses, doubles, reorders and delays."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from proxy.core.accounts.lease import Lease, Numbers, OpenLeases, Phase, added
from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.sessions import Stay
from proxy.core.routing.lifecycle import BlockUses
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.sharing.apply import HASHES_MAX, OPEN_MAX, SILENT_S, WRITERS_MAX, Others
from proxy.core.sharing.batch import (
    MOST_EVENTS,
    MOST_HASHES,
    MOST_OPEN,
    NOTHING,
    Batch,
    Course,
    Event,
    Prompt,
    Row,
    Turn,
)
from proxy.core.sharing.journal import WHOLE_S, Journal
from proxy.core.types import Instance, Load, Reason, RequestFacts, RouteClass, RouterConfig
from replayer.virtual.replicas import BusFaults, MemoryBus, Replica
from tests.support.examples import examples

TICK_S = 0.025
ENGINES = ("e0", "e1")
WRITERS = ("a", "b", "c")
replicas = st.sampled_from(WRITERS)
engines = st.sampled_from(ENGINES)
tokens = st.integers(0, 100_000)


def known_fleet() -> FleetState:
    known = FleetState(RouterConfig(prefill_throughput=20_000))
    for name in ENGINES:
        known.add(Instance(name, f"http://{name}"))
    return known


def own(known: FleetState, name: str) -> Numbers:
    return known.fleet.states[name].account.own()


class Sharing(RuleBasedStateMachine):
    """The law: once it is quiet, what a replica takes others to have is what they have."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.known = {name: known_fleet() for name in WRITERS}
        self.bus = MemoryBus(WRITERS)
        self.replicas = {
            name: Replica(name, Router(known), self.bus) for name, known in self.known.items()
        }
        self.leases: list[Lease] = []
        self.prefills: list[tuple[str, str, int]] = []
        self.block_uses = {
            name: BlockUses(known.reuse, known.fleet.states) for name, known in self.known.items()
        }
        for name, block_uses in self.block_uses.items():
            block_uses.journal = self.replicas[name].journal
        self.uses: list[tuple[BlockUses, Route, RequestFacts]] = []
        self.turns: list[tuple[str, Lease, Stay]] = []

    @initialize(
        lost=st.floats(0.0, 0.9),
        doubled=st.floats(0.0, 1.0),
        delay_s=st.floats(0.0, 2.0),
        seed=st.integers(0, 1000),
    )
    def spoil(self, lost: float, doubled: float, delay_s: float, seed: int) -> None:
        self.bus.faults = BusFaults(lost, doubled, delay_s, seed)

    @rule(replica=replicas, engine=engines, phase=st.sampled_from(Phase), tokens=tokens)
    def begin(self, replica: str, engine: str, phase: Phase, tokens: int) -> None:
        ledger = self.known[replica].ledger
        self.leases.append(ledger.open(ledger.charge(engine, phase, tokens)))

    @rule(grown=tokens, data=st.data())
    def grow(self, grown: int, data: st.DataObject) -> None:
        if self.leases:
            data.draw(st.sampled_from(self.leases)).grow(grown)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            self.leases.remove(lease)
            lease.close()

    @rule(replica=replicas, engine=engines, work_s=st.floats(0.001, 10.0))
    def reserve(self, replica: str, engine: str, work_s: float) -> None:
        key, latency = len(self.prefills) + 1, self.known[replica].latency
        latency.reserve_prefill(latency.of(engine), key, work_s, self.now_s)
        self.prefills.append((replica, engine, key))

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        if self.prefills:
            replica, engine, key = data.draw(st.sampled_from(self.prefills))
            latency = self.known[replica].latency
            latency.end_prefill(latency.of(engine), key, self.now_s)

    @rule(replica=replicas, engine=engines, root=st.integers(1, 3), blocks=st.integers(1, 40))
    def use(self, replica: str, engine: str, root: int, blocks: int) -> None:
        """A prompt is placed; the shell may do with it whatever it likes, in any order."""
        uses, route, facts = self.block_uses[replica], self._route(engine), prompt(root, blocks)
        uses.begin_use(route, engine, facts)
        self.uses.append((uses, route, facts))

    @rule(how=st.sampled_from(("computed", "received", "completed", "end")), data=st.data())
    def go_on_with_a_use(self, how: str, data: st.DataObject) -> None:
        if not self.uses:
            return
        uses, route, facts = data.draw(st.sampled_from(self.uses))
        if how == "computed":
            uses.computed(route, facts, 0.5)
        elif how == "received":
            uses.received(route, facts)
        elif how == "completed":
            uses.completed(route, facts, None, 100)
        else:
            uses.end_use(route)

    @rule(replica=replicas, engine=engines, key=st.sampled_from("xyz"), size=tokens, shared=tokens)
    def place_turn(self, replica: str, engine: str, key: str, size: int, shared: int) -> None:
        known, lease = self.known[replica], OpenLeases().open(())
        cache = known.fleet.states[engine].cache
        stay = known.sessions.assign(key, cache, self.now_s, size, shared)
        assert stay is not None
        self.replicas[replica].journal.placed(lease, stay, "")
        self.turns.append((replica, lease, stay))

    @rule(engine=engines, data=st.data())
    def move_turn(self, engine: str, data: st.DataObject) -> None:
        if self.turns:
            replica, lease, stay = data.draw(st.sampled_from(self.turns))
            self.known[replica].sessions.move(stay, self.known[replica].fleet.states[engine].cache)
            self.replicas[replica].journal.moved(lease, engine)

    @rule(size=st.none() | tokens, data=st.data())
    def end_turn(self, size: int | None, data: st.DataObject) -> None:
        if self.turns:
            self._end_turn(data.draw(st.sampled_from(self.turns)), size)

    def _end_turn(self, turn: tuple[str, Lease, Stay], size: int | None) -> None:
        self.turns.remove(turn)
        replica, lease, stay = turn
        self.known[replica].sessions.ended(stay, size, self.now_s)
        self.replicas[replica].journal.over(lease, size)

    @rule(replica=replicas, engine=engines)
    def restart(self, replica: str, engine: str) -> None:
        """One replica takes the engine to be another process; the others may not, or later."""
        self.known[replica].fleet.states.add(engine)
        self.known[replica].fleet.members()

    @rule(ticks=st.integers(1, 5))
    def go_on(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += TICK_S
            for replica in self.replicas.values():
                replica.tick(self.now_s)

    @rule(replica=replicas, seconds=st.floats(0.0, 2 * SILENT_S))
    def stop(self, replica: str, seconds: float) -> None:
        """One replica is stopped for so long; the others go on."""
        for _ in range(int(seconds / TICK_S)):
            self.now_s += TICK_S
            for name, one in self.replicas.items():
                if name != replica:
                    one.tick(self.now_s)

    @rule()
    def be_quiet(self) -> None:
        """Batches that are late arrive, then each replica tells all that it has."""
        self.bus.faults, faults = BusFaults(), self.bus.faults
        self.now_s += faults.delay_s
        for _ in range(2 + int(WHOLE_S / TICK_S)):
            self.go_on(1)
        self.bus.faults = faults
        self._holds()

    def _route(self, engine: str) -> Route:
        """As much of a route as the uses of blocks need."""
        lease = OpenLeases().open(())
        instance = Instance(engine, f"http://{engine}")
        size, why = RouteClass.WARM, Reason.BELOW_THRESHOLD
        return Route(instance, None, size, why, "cost", 1, 0, 1, None, lease, None, 1.0)

    def _holds(self) -> None:
        for name, known in self.known.items():
            others = [other for of, other in self.known.items() if of != name]
            for engine in ENGINES:
                total, pending = NOTHING, []
                for other in others:
                    total = added(total, own(other, engine))
                    pending += [one[1] for one in other.latency.of(engine).own_pending()]
                account, times = known.fleet.states[engine].account, known.latency.of(engine)
                assert account.foreign == total
                assert account.load() == Load(*added(account.own(), total))
                foreign = [work_s for key, work_s in times.pending.items() if key < 0]
                assert sorted(foreign) == sorted(pending)
                assert times.pending.keys() == times._shares.keys()
            assert known.ledger.drift() == 0
            heard = self.replicas[name].others._writers
            for writer in set(WRITERS) - {name}:
                journal = self.replicas[writer].journal
                assert heard[writer].uses.keys() <= set(journal._uses.values())
                assert heard[writer].running.keys() <= set(journal._running.values())

    def teardown(self) -> None:
        """Nothing is in flight: every counter of every replica is zero."""
        for lease in self.leases:
            lease.close()
        for replica, engine, key in self.prefills:
            latency = self.known[replica].latency
            latency.end_prefill(latency.of(engine), key, self.now_s)
        for uses, route, _facts in self.uses:
            uses.end_use(route)
        for turn in list(self.turns):
            self._end_turn(turn, 100)
        self.be_quiet()
        for known in self.known.values():
            assert known.reuse.is_at_rest
            assert not any(stay.running for stay in known.sessions._homes.values())
            for engine in ENGINES:
                assert known.sessions.live(known.fleet.states[engine].cache).running == 0
                assert known.ledger.load(engine) == Load()
                assert not known.latency.of(engine).pending


Law = Sharing.TestCase
Law.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


def prompt(root: int, blocks: int) -> RequestFacts:
    hashes = [1000 * root + n for n in range(blocks)]
    return RequestFacts("m", None, 512 * blocks + 100, hashes, 512.0)


def two() -> tuple[FleetState, Journal, FleetState, Others]:
    """What a writer knows and tells, what a reader knows and hears."""
    writes, reads = known_fleet(), known_fleet()
    return writes, Journal(writes.fleet.states, "w"), reads, Others(reads, "r")


def told(journal: Journal, now_s: float) -> Batch:
    batch = journal.batch(now_s)
    assert batch is not None
    return batch


def test_a_decision_sees_what_another_replica_has_reserved() -> None:
    writes, journal, reads, others = two()
    writes.ledger.open(writes.ledger.charge("e0", Phase.DECODE, 1000))
    writes.latency.reserve_prefill(writes.latency.of("e0"), 1, 4.0, 10.0)
    others.apply(told(journal, 11.0), 21.0)
    assert reads.ledger.load("e0") == Load(decode_tokens=1000, decode_requests=1)
    assert own(reads, "e0") == NOTHING
    assert reads.latency.wait_s("e0", 21.0) == pytest.approx(3.0)
    assert reads.latency.of("e0").pace().busy_ratio(21.0) == pytest.approx(
        writes.latency.of("e0").pace().busy_ratio(11.0)
    )


def test_prefills_are_in_the_order_of_their_age_whoever_has_reserved_them() -> None:
    writes, journal, reads, others = two()
    latency = reads.latency
    latency.reserve_prefill(latency.of("e0"), 1, 1.0, 20.0)
    writes.latency.reserve_prefill(writes.latency.of("e0"), 1, 2.0, 9.0)
    others.apply(told(journal, 10.0), 20.0)
    assert list(latency.of("e0").pending.values()) == [2.0, 1.0]
    assert latency.wait_s("e0", 20.0) == pytest.approx(3.0)
    assert latency.end_prefill(latency.of("e0"), 1, 21.5) is None, "its begin is not known"
    writes.latency.end_prefill(writes.latency.of("e0"), 1, 11.0)
    others.apply(told(journal, 11.6), 21.6)
    assert latency.wait_s("e0", 21.6) == 0.0
    assert latency.of("e0").turn_s == 21.5, "the own one has ended after the other's"


def test_a_prefill_behind_a_foreign_one_is_not_timed_and_the_next_is() -> None:
    writes, journal, reads, others = two()
    writes.latency.reserve_prefill(writes.latency.of("e0"), 1, 2.0, 0.0)
    others.apply(told(journal, 0.0), 0.0)
    latency = reads.latency
    latency.reserve_prefill(latency.of("e0"), 1, 1.0, 0.5)
    writes.latency.end_prefill(writes.latency.of("e0"), 1, 1.8)
    others.apply(told(journal, 1.82), 1.82)
    latency.reserve_prefill(latency.of("e0"), 2, 1.0, 2.0)
    assert latency.wait_s("e0", 2.0) == pytest.approx(0.8 + 1.0)
    assert latency.end_prefill(latency.of("e0"), 1, 2.8) is None
    assert latency.end_prefill(latency.of("e0"), 2, 3.8) == 2.8


def test_a_silent_writer_goes_as_one() -> None:
    writes, journal, reads, others = two()
    for name in ENGINES:
        writes.ledger.open(writes.ledger.charge(name, Phase.PINNED, 10))
        writes.latency.reserve_prefill(writes.latency.of(name), 1, 60.0, 0.0)
    others.apply(told(journal, 0.0), 0.0)
    others.expire(SILENT_S)
    assert (others.writers, reads.ledger.load("e1").pinned_tokens) == (1, 10)
    others.expire(SILENT_S + TICK_S)
    assert others.writers == 0
    for name in ENGINES:
        assert reads.ledger.load(name) == Load()
        assert not reads.latency.of(name).pending


def test_of_two_rows_the_newer_one_counts_in_whatever_order_they_come() -> None:
    writes, journal, reads, others = two()
    batches = []
    for tick in range(3):
        writes.ledger.open(writes.ledger.charge("e0", Phase.DECODE, 10))
        batches.append(told(journal, tick * TICK_S))
    for batch in (batches[0], batches[2], batches[1], batches[0]):
        others.apply(batch, 1.0)
    assert reads.ledger.load("e0").decode_tokens == 30


def hits(known: FleetState, facts: RequestFacts) -> dict[str, int]:
    return {name: found for name, found in known.reuse.hits(facts).items() if found}


def test_the_course_of_a_prompt_is_followed_in_the_prefix_index() -> None:
    writes, journal, reads, others = two()
    facts, cache = prompt(1, 40), writes.fleet.states["e0"].cache
    use = writes.reuse.begin_use(cache, facts)
    journal.began(Course.BEGUN, use, facts)
    others.apply(told(journal, 0.0), 0.0)
    assert hits(reads, facts) == {"e0": 40}, "a sibling waits for what is being computed"
    assert not reads.prefixes.total_blocks
    writes.reuse.computed(use, facts)
    journal.went_on(Course.COMPUTED, use)
    others.apply(told(journal, TICK_S), TICK_S)
    assert (hits(reads, facts), reads.prefixes.holds) == ({"e0": 40}, 1)
    writes.reuse.released(use, facts, 1024)
    journal.went_on(Course.RELEASED, use, 1024)
    journal.went_on(Course.ENDED, use)
    others.apply(told(journal, 2 * TICK_S), 2 * TICK_S)
    assert reads.reuse.is_at_rest
    assert reads.fleet.states["e0"].cache.blocks == cache.blocks == 42


def test_what_came_from_a_peer_is_there_at_once() -> None:
    writes, journal, reads, others = two()
    facts = prompt(1, 4)
    use = writes.reuse.received(writes.fleet.states["e1"].cache, facts)
    journal.began(Course.RECEIVED, use, facts)
    others.apply(told(journal, 0.0), 0.0)
    assert hits(reads, facts) == {"e1": 4}


def test_a_cache_that_falls_short_is_as_large_for_all() -> None:
    writes, journal, reads, others = two()
    caches = writes.fleet.states["e0"].cache, reads.fleet.states["e0"].cache
    for root in (1, 2, 1, 2, 1, 2):
        facts = prompt(root, 40)
        use = writes.reuse.begin_use(caches[0], facts)
        journal.began(Course.BEGUN, use, facts)
        writes.reuse.reported(use, facts, 0.0)
        journal.went_on(Course.REPORTED, use, 0.0)
        writes.reuse.computed(use, facts)
        journal.went_on(Course.COMPUTED, use)
        writes.reuse.end_use(use)
        journal.went_on(Course.ENDED, use)
    others.apply(told(journal, 0.0), 0.0)
    assert caches[0].learned_tokens is not None
    assert caches[1].learned_tokens == caches[0].learned_tokens


def test_events_of_a_doubled_or_late_batch_count_once() -> None:
    writes, journal, reads, others = two()
    facts = prompt(1, 4)
    use = writes.reuse.received(writes.fleet.states["e0"].cache, facts)
    journal.began(Course.RECEIVED, use, facts)
    first = told(journal, 0.0)
    journal.went_on(Course.ENDED, use)
    second = told(journal, TICK_S)
    for batch in (first, first, second, first, second):
        others.apply(batch, TICK_S)
    assert reads.reuse.is_at_rest
    assert hits(reads, facts) == {"e0": 4}


def test_a_silent_writers_prompts_end_and_what_was_computed_stays() -> None:
    writes, journal, reads, others = two()
    facts = prompt(1, 4)
    use = writes.reuse.received(writes.fleet.states["e0"].cache, facts)
    journal.began(Course.RECEIVED, use, facts)
    others.apply(told(journal, 0.0), 0.0)
    assert reads.prefixes.holds == 1
    others.expire(SILENT_S + TICK_S)
    assert reads.reuse.is_at_rest
    assert hits(reads, facts) == {"e0": 4}


def test_a_session_is_at_home_where_another_replica_has_placed_it() -> None:
    writes, journal, reads, others = two()
    lease = OpenLeases().open(())
    stay = writes.sessions.assign("s", writes.fleet.states["e1"].cache, 0.0, 1000, 200)
    assert stay is not None
    journal.placed(lease, stay, "")
    others.apply(told(journal, 0.0), 50.0)
    cache = reads.fleet.states["e1"].cache
    assert reads.sessions.home("s", 50.0) == "e1"
    assert reads.sessions.live(cache).running == 800
    writes.sessions.move(stay, writes.fleet.states["e0"].cache)
    journal.moved(lease, "e0")
    writes.sessions.ended(stay, 1300, 1.0)
    journal.over(lease, 1300)
    others.apply(told(journal, 1.0), 51.0)
    assert reads.sessions.home("s", 51.0) == "e0"
    assert reads.sessions.live(cache).running == 0
    assert reads.sessions.live(reads.fleet.states["e0"].cache).idle_tokens == 1100


def test_a_silent_writers_turns_end_as_failed() -> None:
    writes, journal, reads, others = two()
    stay = writes.sessions.assign("s", writes.fleet.states["e1"].cache, 0.0, 1000)
    assert stay is not None
    journal.placed(OpenLeases().open(()), stay, "")
    others.apply(told(journal, 0.0), 0.0)
    others.expire(SILENT_S + TICK_S)
    assert reads.sessions.live(reads.fleet.states["e1"].cache).running == 0
    assert reads.sessions.home("s", SILENT_S + TICK_S) == "e1", "until its time to live is over"


def test_what_frees_load_wakes_the_queue() -> None:
    writes, journal, reads, others = two()
    lease = writes.ledger.open(writes.ledger.charge("e0", Phase.DECODE, 1000))
    others.apply(told(journal, 0.0), 0.0)
    woken: list[bool] = []
    reads.call_when_freed(lambda: woken.append(True))
    lease.close()
    others.apply(told(journal, TICK_S), TICK_S)
    assert woken


def test_rows_of_an_unknown_instance_wait_for_it() -> None:
    writes, journal, reads, others = two()
    for known in (writes, reads):
        known.remove("e1")
    writes.add(Instance("new", "http://new"))
    writes.ledger.open(writes.ledger.charge("new", Phase.DECODE, 7))
    others.apply(told(journal, 0.0), 0.0)
    reads.add(Instance("new", "http://new"))
    others.apply(told(journal, WHOLE_S), WHOLE_S)
    assert reads.ledger.load("new").decode_tokens == 7


def test_an_instance_that_a_whole_batch_lacks_has_nothing_of_its_writer() -> None:
    writes, journal, reads, others = two()
    writes.ledger.open(writes.ledger.charge("e1", Phase.DECODE, 7))
    others.apply(told(journal, 0.0), 0.0)
    writes.remove("e1")
    assert journal.batch(TICK_S) is None
    others.apply(told(journal, WHOLE_S), WHOLE_S)
    assert reads.ledger.load("e1") == Load()


def test_own_echo_and_too_many_writers_are_not_heard() -> None:
    reads = known_fleet()
    others = Others(reads, "r")
    row = Row("e0", (1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0), (), 0.0, 0.0, 0.0, 0.0)
    others.apply(Batch("r", 1, (row,), (), (), True, (), ()), 0.0)
    assert reads.ledger.load("e0") == Load()
    for number in range(2 * WRITERS_MAX):
        others.apply(Batch(f"w{number}", 1, (row,), (), (), True, (), ()), 0.0)
    assert others.writers == reads.ledger.load("e0").prefill_requests == WRITERS_MAX
    assert not others.hears("one more")


def test_a_batch_is_taken_in_by_steps_that_others_come_between() -> None:
    others = Others(known_fleet(), "r")
    prompt = Prompt("e0", [1, 2], 256.0, 512, "")
    begun = tuple(Event(Course.BEGUN, number, prompt, 0.0) for number in range(MOST_EVENTS))
    open_uses = tuple(range(MOST_EVENTS))
    begins = others.steps(Batch("w", 1, (), begun, (), True, open_uses, ()), 0.0)
    assert sum(1 for _ in begins) == MOST_EVENTS
    assert sum(1 for _ in others.steps(Batch("w", 2, (), (), (), True, (), ()), 0.0)) == MOST_EVENTS
    others.apply(Batch("w", 3, (), begun, (), False, (), ()), 0.0)
    assert sum(1 for _ in others.drop_silent(SILENT_S + 1.0)) == MOST_EVENTS
    assert others.writers == 0


def test_what_is_open_is_bounded_for_each_writer_and_for_all() -> None:
    known = known_fleet()
    others = Others(known, "r")
    numbers = range(MOST_OPEN + 5)
    prompt = Prompt("e0", [1], 256.0, 256, "")
    begun = tuple(Event(Course.BEGUN, number, prompt, 0.0) for number in numbers)
    placed = tuple(Turn(number, f"s{number}", "e0", 1, 0, "") for number in numbers)
    for number in range(OPEN_MAX // MOST_OPEN + 2):
        others.apply(Batch(f"w{number}", 1, (), begun, placed, False, (), ()), 0.0)
    assert [len(writer.uses) for writer in others._writers.values()] == [MOST_OPEN] * 4 + [0] * 2
    assert [len(writer.running) for writer in others._writers.values()] == [MOST_OPEN] * 4 + [0] * 2
    others.expire(SILENT_S + 1.0)
    assert (others._uses, others._hashes, others._turns) == (0, 0, 0)
    long = Prompt("e0", list(range(MOST_HASHES)), 256.0, 256, "")
    many = tuple(Event(Course.BEGUN, number, long, 0.0) for number in range(100))
    others.apply(Batch("w", 1, (), many, (), False, (), ()), 9.0)
    assert others._hashes == HASHES_MAX
    over = tuple(Event(Course.ENDED, number, None, 0.0) for number in range(100))
    others.apply(Batch("w", 2, (), over, (), False, (), ()), 9.0)
    assert (others._uses, others._hashes) == (0, 0)
    assert known.reuse.is_at_rest
