"""The ring of ended requests: what it keeps, what it tells a reader that comes late."""

from __future__ import annotations

from proxy.core.types import Outcome
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.samples import FIELDS, ROWS_AT_ONCE, Samples


def ended(number: int) -> RequestRecord:
    """A record with as many tokens as its number."""
    return RequestRecord(request_id="r", t_proxy_recv=float(number), isl_tokens=number)


def kept(most: int, count: int) -> Samples:
    samples = Samples(most, 7.0)
    for number in range(1, count + 1):
        samples.write(ended(number))
    return samples


def numbers(samples: Samples, after: int) -> list[tuple[object, object]]:
    return [(row[0], row[2]) for row in samples.after(after)]


def test_an_empty_ring_names_the_first_to_come() -> None:
    samples = kept(3, 0)
    assert (samples.first, samples.last, samples.after(0)) == (1, 0, [])


def test_the_oldest_makes_way_and_sequences_go_on() -> None:
    samples = kept(3, 3)
    assert (samples.first, samples.last) == (1, 3)
    samples = kept(3, 5)
    assert (samples.first, samples.last) == (3, 5)
    assert numbers(samples, 0) == numbers(samples, 2) == [(3, 3), (4, 4), (5, 5)]
    assert numbers(samples, 4) == [(5, 5)]
    assert numbers(samples, 5) == numbers(samples, 10**12) == []


def test_a_ring_of_one() -> None:
    samples = kept(1, 4)
    assert (samples.first, samples.last, numbers(samples, 0)) == (4, 4, [(4, 4)])


def test_an_answer_is_bounded_and_the_next_goes_on() -> None:
    samples = kept(3000, 2500)
    at, found = 0, list[int]()
    while rows := samples.after(at):
        assert len(rows) <= ROWS_AT_ONCE
        found += [int(str(row[2])) for row in rows]
        at = int(str(rows[-1][0]))
    assert found == [*range(1, 2501)]


def test_a_sample_has_plain_numbers_of_the_record_and_no_more() -> None:
    record = RequestRecord(request_id="id", session_id="who", tenant="team", model="m")
    record.isl_tokens, record.hit_tokens, record.new_tokens, record.osl_tokens = 90, 60, 30, 5
    record.t_proxy_recv, record.t_queued, record.t_decided = 10.0, 10.5, 11.0
    record.t_first_token, record.t_done, record.outcome = 12.0, 14.0, Outcome.OK
    samples = Samples(2, 7.0)
    samples.write(record)
    (row,) = samples.after(0)
    assert row == (1, 10.0, 90, 60, 30, 5, 0.5, 2.0, 0.5, "ok")
    assert len(row) == len(FIELDS)


def test_what_has_no_prompt_displaces_nothing() -> None:
    samples = kept(2, 2)
    samples.write(RequestRecord(request_id="no key", outcome=Outcome.BAD_REQUEST))
    assert numbers(samples, 0) == [(1, 1), (2, 2)]
