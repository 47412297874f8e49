"""Where a request's time went: phases that add up to all of it, whatever the log says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.bench.phases import PHASES, by_route_class, phases_of, slowest
from tests.support.runs import row

TIMES = ("queued", "decided", "prefill_sent", "prefill_done", "decode_sent", "first_token")
OFFLOAD = {"t_prefill_sent": 3.5, "t_prefill_done": 5.0, "t_decode_sent": 5.25}


def record(**fields: Any) -> dict[str, Any]:
    times = {"t_proxy_recv": 0.0, "t_decided": 0.5, "t_decode_sent": 0.5, "t_done": 9.0}
    return {**times, "t_first_token": 7.0, "stream": True, **fields}


@pytest.mark.parametrize(
    ("fields", "phases"),
    [
        ({}, {"decide": 0.5, "decode_wait": 0.0, "first_token": 6.5, "stream": 2.0}),
        (
            {"t_queued": 1.0, "t_decided": 3.0, **OFFLOAD},
            {
                "decide": 1.5,
                "queue": 2.0,
                "prefill_leg": 1.5,
                "decode_wait": 0.25,
                "transfer": 1.75,
                "stream": 2.0,
            },
        ),
        (  # P failed: D was asked instead
            {"t_prefill_sent": 0.5, "t_decode_sent": 4.0, "fallback": "p_timeout"},
            {
                "decide": 0.5,
                "prefill_leg": 3.5,
                "decode_wait": 0.0,
                "first_token": 3.0,
                "stream": 2.0,
            },
        ),
        (  # P was late, and D's own attempt won
            {"t_prefill_sent": 0.5, "t_decode_sent": 4.0, "t_prefill_done": 8.0, "hedge": "local"},
            {
                "decide": 0.5,
                "prefill_leg": 3.5,
                "decode_wait": 0.0,
                "first_token": 3.0,
                "stream": 2.0,
            },
        ),
        (  # an answer in one piece: when its first token was there nobody knows
            {"stream": False, "t_first_token": None},
            {"decide": 0.5, "decode_wait": 0.0, "stream": 8.5},
        ),
        ({"t_first_token": None}, {"decide": 0.5, "decode_wait": 0.0, "first_token": 8.5}),
        (  # refused after a wait
            {"t_queued": 1.0, "t_decided": 8.0, "t_decode_sent": None, "t_first_token": None},
            {"decide": 2.0, "queue": 7.0},
        ),
        (  # the client left the queue
            {"t_queued": 1.0, "t_decided": None, "t_decode_sent": None, "t_first_token": None},
            {"decide": 1.0, "queue": 8.0},
        ),
        ({"t_decided": None, "t_decode_sent": None, "t_first_token": None}, {"decide": 9.0}),
    ],
)
def test_each_moment_belongs_to_one_phase(fields, phases):
    found = phases_of(record(**fields))
    assert found is not None
    assert found == phases
    assert list(found) == [name for name in PHASES if name in found]


MOMENTS = st.none() | st.floats(0, 100) | st.just("soon")


@pytest.mark.long
@settings(max_examples=60)
@given(st.fixed_dictionaries({f"t_{name}": MOMENTS for name in TIMES}), st.data())
def test_the_phases_of_any_record_add_up_to_its_time(times, data):
    choice = {
        "stream": st.sampled_from([True, False, None]),
        "fallback": st.sampled_from([None, "p_error"]),
        "hedge": st.sampled_from([None, "local", "peer"]),
    }
    others = data.draw(st.fixed_dictionaries(choice))
    found = phases_of({"t_proxy_recv": 10.0, "t_done": 60.0, **times, **others})
    assert found is not None
    assert sum(found.values()) == pytest.approx(50.0)
    assert found.keys() <= PHASES.keys()
    assert all(seconds >= 0 for seconds in found.values())


@pytest.mark.parametrize("name", ["t_proxy_recv", "t_done"])
def test_a_record_without_its_ends_has_no_phases(name):
    assert phases_of(record(**{name: None})) is None


def placed(name, route_class, phases_s, **fields):
    return row(name, route_class=route_class, phases_s=phases_s, proxy_ttft_s=1.0, **fields)


COLO = {"decide": 0.5, "decode_wait": 0.0, "first_token": 3.0, "stream": 1.0}
P2P = {"decide": 0.5, "prefill_leg": 2.0, "decode_wait": 0.5, "transfer": 1.0, "stream": 2.0}


def test_means_by_class_add_up_and_predictions_stand_beside_what_came():
    predicted = {"predicted_ttft_s": 2.0, "predicted_prefill_s": 1.5}
    classes = by_route_class(
        [
            placed("a", "MEDIUM", COLO, **predicted),
            placed("b", "MEDIUM", COLO | {"queue": 2.0}),
            placed(
                "c", "HEAVY_P2P", P2P, prefill_instance="p", predicted_transfer_s=0.5, **predicted
            ),
            placed("d", "HEAVY_COLO", COLO, prefill_instance="p", fallback="p_error", **predicted),
            placed("e", "WARM", COLO, retries=1, **predicted),
            row("not in the log"),
            row("not placed", route_class=None, phases_s={"decide": 1.0}),
        ]
    )
    assert list(classes) == ["HEAVY_COLO", "HEAVY_P2P", "MEDIUM", "WARM"]
    times = classes["MEDIUM"]["time_s"]
    assert (classes["MEDIUM"]["requests"], list(times)) == (2, list(PHASES))
    assert sum(spread["mean"] for spread in times.values()) == pytest.approx(5.5)
    assert (times["queue"]["mean"], times["queue"]["p50"], times["queue"]["max"]) == (1.0, 0.0, 2.0)

    def compared(route_class):
        found = classes[route_class]["predicted"]
        return {
            name: (one["count"], one["predicted_s"]["mean"], one["realised_s"]["mean"])
            for name, one in found.items()
        }

    assert compared("MEDIUM") == {"ttft": (1, 2.0, 3.0), "first_token": (1, 1.5, 3.0)}
    assert classes["MEDIUM"]["predicted"]["ttft"]["ratio"]["p50"] == 1.5
    assert compared("HEAVY_P2P") == {
        "ttft": (1, 2.0, 3.5),
        "prefill_leg": (1, 1.5, 2.0),
        "transfer": (1, 0.5, 1.0),
    }
    # What a fall-back or a repetition took was not what had been predicted of its phase.
    # Of a repetition the log has the prediction of the last attempt.
    assert (compared("HEAVY_COLO").keys(), compared("WARM").keys()) == ({"ttft"}, set())


def test_the_slowest_are_those_that_waited_longest_for_a_token():
    rows = [
        placed("long", "WARM", {"decide": 0.1, "first_token": 1.0, "stream": 99.0}),
        placed("p", "HEAVY_P2P", P2P, prefill_instance="a", decode_instance="b"),
        placed("lost", None, {"decide": 0.1, "queue": 8.0}, outcome="rejected"),
        row("whole", phases_s={"decide": 0.5, "stream": 5.0}, proxy_ttft_s=None),
        row("not in the log"),
    ]
    found = slowest(rows, most=3)
    assert [one["request_id"] for one in found] == ["lost", "whole", "p"]
    assert [one["wait_s"] for one in found] == pytest.approx([8.1, 5.5, 4.0])
    assert found[2]["phases_s"] == P2P
    assert (found[2]["prefill_instance"], found[2]["decode_instance"]) == ("a", "b")


def test_a_record_with_half_of_a_prefill_leg_is_summed_up():
    times = {"t_prefill_done": 1.0, "t_decode_sent": 2.0, "t_first_token": 3.0}
    record = {"t_proxy_recv": 0.0, "t_done": 4.0} | times
    found = row("a", phases_s=phases_of(record), proxy_ttft_s=3.0, predicted_prefill_s=1.0)
    assert by_route_class([found])["WARM"]["time_s"]["transfer"]["mean"] == 1.0
