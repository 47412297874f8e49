"""What a replica tells: what has changed, all of it twice a second, and nothing of the others'."""

from __future__ import annotations

import pytest

from proxy.core.accounts.lease import Phase
from proxy.core.known.fleet_state import FleetState
from proxy.core.sharing.apply import Others
from proxy.core.sharing.batch import ALL_PREFILLS, MOST_PREFILLS, NOTHING, Batch
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


def test_of_a_long_queue_the_rest_is_told_as_one() -> None:
    writes, reads = known_fleet(), known_fleet()
    journal, others = Journal(writes.fleet.states, "w"), Others(reads, "r")
    latency, heard = writes.latency, reads.latency
    for key in range(1, 1001):
        latency.reserve_prefill(latency.of("e0"), key, 0.5, 10.0 + key / 1000)
    first = told(journal, 12.0)
    prefills = first.rows[0].prefills
    assert len(prefills) == MOST_PREFILLS
    assert [one.work_s for one in prefills[:-1]] == [0.5] * (MOST_PREFILLS - 1)
    assert prefills[-1].work_s == 0.5 * (1001 - MOST_PREFILLS)
    others.apply(first, 12.0)
    assert sum(heard.of("e0").pending.values()) == 500.0
    assert heard.of("e0").busy_until_s == pytest.approx(latency.of("e0").busy_until_s)
    latency.end_prefill(latency.of("e0"), 500, 12.5)
    latency.reserve_prefill(latency.of("e0"), 1001, 2.0, 12.5)
    others.apply(told(journal, 12.5), 12.5)
    assert sum(heard.of("e0").pending.values()) == 501.5
    for key in range(1, 1002):
        latency.end_prefill(latency.of("e0"), key, 13.0)
    others.apply(told(journal, 13.0), 13.0)
    assert not heard.of("e0").pending


def test_a_large_fleet_tells_few_prefills_of_each() -> None:
    known = FleetState(RouterConfig(prefill_throughput=20_000))
    for number in range(1024):
        known.add(Instance(f"e{number}", f"http://e{number}"))
        for key in range(1, 9):
            known.latency.reserve_prefill(known.latency.of(f"e{number}"), key, 1.0, 0.0)
    rows = told(Journal(known.fleet.states, "w"), 0.0).rows
    assert sum(len(row.prefills) for row in rows) == ALL_PREFILLS
    assert {sum(one.work_s for one in row.prefills) for row in rows} == {8.0}


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
