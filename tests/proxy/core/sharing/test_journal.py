"""What a replica tells: what has changed, all of it twice a second, and nothing of the others'."""

from __future__ import annotations

from proxy.core.accounts.lease import Phase
from proxy.core.known.fleet_state import FleetState
from proxy.core.sharing.apply import Others
from proxy.core.sharing.batch import NOTHING, Batch
from proxy.core.sharing.journal import WHOLE_S, Journal
from proxy.core.types import Instance, RouterConfig

TICK_S = 0.025


def known_fleet() -> FleetState:
    known = FleetState(RouterConfig(prefill_throughput=20_000))
    for name in ("e0", "e1"):
        known.add(Instance(name, f"http://{name}"))
    return known


def told(journal: Journal, now_s: float) -> Batch:
    batch = journal.batch(now_s)
    assert batch is not None
    return batch


def test_first_all_then_what_has_changed_then_nothing() -> None:
    known = known_fleet()
    journal = Journal(known.fleet.states, "w")
    first = told(journal, 10.0)
    assert (first.writer, first.number, first.is_whole) == ("w", 1, True)
    assert [(row.name, row.numbers) for row in first.rows] == [("e0", NOTHING), ("e1", NOTHING)]
    assert journal.batch(10.0 + TICK_S) is None
    known.ledger.open(known.ledger.charge("e1", Phase.INBOUND, 5))
    second = told(journal, 10.0 + 2 * TICK_S)
    assert (second.number, second.is_whole) == (2, False)
    assert [row.name for row in second.rows] == ["e1"]
    assert second.rows[0].numbers == (0, 0, 5, 1, 0, 0, 0, 0, 0, 0, 0)


def test_all_is_told_again_where_nothing_has_changed() -> None:
    journal = Journal(known_fleet().fleet.states, "w")
    told(journal, 10.0)
    again = told(journal, 10.0 + WHOLE_S)
    assert again.is_whole
    assert [row.name for row in again.rows] == ["e0", "e1"]


def test_a_prefill_is_told_with_its_age() -> None:
    known = known_fleet()
    journal, latency = Journal(known.fleet.states, "w"), known.latency
    latency.reserve_prefill(latency.of("e0"), 1, 2.0, 10.0, share_s=1.5)
    row = told(journal, 10.5).rows[0]
    (prefill,) = row.prefills
    assert (prefill.work_s, prefill.share_s, prefill.age_s) == (2.0, 1.5, 0.5)
    assert (row.recent, row.recent_s, row.recent_age_s) == (1.0, 1.5, 0.5)
    latency.end_prefill(latency.of("e0"), 1, 12.0)
    row = told(journal, 12.25).rows[0]
    assert (row.prefills, row.turn_age_s) == ((), 0.25)


def test_a_key_that_comes_back_is_another_prefill() -> None:
    known = known_fleet()
    journal, latency = Journal(known.fleet.states, "w"), known.latency
    keys = []
    for at_s in (10.0, 11.0):
        latency.reserve_prefill(latency.of("e0"), 7, 2.0, at_s)
        keys += [one.key for one in told(journal, at_s).rows[0].prefills]
        latency.end_prefill(latency.of("e0"), 7, at_s + 0.5)
    assert len(set(keys)) == 2


def test_what_was_heard_is_not_told_on() -> None:
    writes, reads = known_fleet(), known_fleet()
    writes.ledger.open(writes.ledger.charge("e0", Phase.DECODE, 5))
    writes.latency.reserve_prefill(writes.latency.of("e0"), 1, 2.0, 0.0)
    Others(reads, "r").apply(told(Journal(writes.fleet.states, "w"), 0.0), 0.0)
    row = told(Journal(reads.fleet.states, "r"), 0.0).rows[0]
    assert (row.numbers, row.prefills, row.recent) == (NOTHING, (), 0.0)
