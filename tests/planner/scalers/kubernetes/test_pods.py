"""Who goes, in which order, and who may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scalers.base import Member
from planner.scalers.kubernetes.pods import (
    COST,
    LEAVES,
    Mark,
    Pod,
    Seat,
    allowed,
    going,
    seated,
)


def pod(name: str, *, ready: bool = True, owner: str = "ReplicaSet/r", **of: Any) -> Pod:
    return Pod(name, f"10.0.0.{len(name)}", ready, owner, **of)


def member(name: str, tokens: int = 0, **of: Any) -> Member:
    return Member(name, f"http://{name}:8000", **{"is_ready": True, "held_tokens": tokens, **of})


def names(seats: list[Seat]) -> list[str]:
    return [seat.pod.name for seat in seats]


def raw(**meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "vllm-2", **meta},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.9",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def test_a_pod_is_read() -> None:
    owner = {"kind": "StatefulSet", "name": "vllm", "controller": True}
    notes = {LEAVES: "a http://a:1", COST: "-2147483648"}
    told = Pod.read(raw(ownerReferences=[owner], annotations=notes))
    assert told == Pod(
        *("vllm-2", "10.0.0.9", True, "StatefulSet/vllm"),
        ordinal=2,
        mark=Mark("a", "http://a:1"),
        is_cheap=True,
    )
    assert Pod.read(raw(deletionTimestamp="2026-01-01T00:00:00Z")) is None
    assert Pod.read({**raw(), "status": {"phase": "Failed"}}) is None
    bare = Pod.read({"metadata": {"name": "vllm-2"}})
    assert bare == Pod("vllm-2", "", False, "")


@pytest.mark.parametrize("mark", [Mark(), Mark("a"), Mark("a", "http://a:1")])
def test_a_mark_is_read_as_it_was_written(mark: Mark) -> None:
    assert Mark.read(str(mark)) == mark


@pytest.mark.parametrize(
    ("name", "url", "is_of"),
    [
        ("x", "http://10.0.0.9:8000", True),
        ("x", "http://vllm-2.vllm.inference.svc:8000", True),
        ("vllm-2", "http://10.9.9.9:8000", True),
        ("x", "http://10.0.0.8:8000", False),
        ("x", "http://10:8000", False),
    ],
)
def test_an_instance_is_found_by_address_or_name(name: str, url: str, is_of: bool) -> None:
    found = Pod.read(raw())
    assert found is not None
    assert found.is_of(Member(name, url, is_ready=True)) is is_of


def test_a_pod_without_an_address_is_no_instances() -> None:
    assert not Pod("a", "", False, "").is_of(Member("x", "http:///", is_ready=True))


def test_pods_that_are_not_ready_go_first_and_need_no_drain() -> None:
    seats = seated([pod("a"), pod("b", ready=False)], [member("a")], [])
    gone = going(seats, 1)
    assert names(gone) == ["b"]
    assert allowed(seats, gone, 1) == 1


def test_one_that_works_though_it_is_not_ready_is_waited_for() -> None:
    """A ReplicaSet takes it first, and another one that drained in vain would stay."""
    busy = member("b", is_ready=False, requests=1)
    seats = seated([pod("a"), pod("b", ready=False), pod("c", ready=False)], [busy], [])
    assert names(going(seats, 1)) == ["b", "c"]
    assert allowed(seats, going(seats, 1), 1) == 3


def test_who_has_least_to_lose_goes_first_and_is_drained() -> None:
    seats = seated(
        [pod("a"), pod("b"), pod("c")], [member("a", 9), member("b", 1), member("c", 5)], []
    )
    gone = going(seats, 1)
    assert names(gone) == ["b", "c"]
    assert allowed(seats, gone, 1) == 3, "nobody has left"


def test_who_was_chosen_stays_chosen() -> None:
    chosen = pod("a", mark=Mark("a", "http://a:8000"))
    seats = seated([chosen, pod("b")], [member("a", 9, is_draining=True), member("b", 1)], [])
    assert names(going(seats, 1)) == ["a"]
    seats = seated([chosen, pod("b")], [member("b", 1)], ["a"])
    assert allowed(seats, going(seats, 1), 1) == 1


def test_one_that_no_proxy_knows_may_go_only_at_the_next_look() -> None:
    """It may have joined since the last one."""
    unknown = pod("a")
    seats = seated([unknown, pod("b")], [member("b")], [])
    assert names(going(seats, 1)) == ["a"]
    assert allowed(seats, going(seats, 1), 1) == 2
    marked = replace(unknown, mark=Mark())
    seats = seated([marked, pod("b")], [member("b")], [])
    assert allowed(seats, going(seats, 1), 1) == 1
    seats = seated([marked, pod("b")], [member("a"), member("b")], [])
    assert allowed(seats, going(seats, 1), 1) == 2, "by now a proxy sends it requests"


def test_as_many_go_as_have_left() -> None:
    left = pod("a", mark=Mark("a", "u"))
    drains = pod("b", mark=Mark("b", "u"))
    seats = seated([left, drains, pod("c")], [member("b", is_draining=True), member("c")], ["a"])
    gone = going(seats, 1)
    assert names(gone) == ["a", "b"]
    assert allowed(seats, gone, 1) == 2


def test_a_statefulset_takes_the_highest_ordinals() -> None:
    pods = [pod(f"s-{n}", owner="StatefulSet/s", ordinal=n) for n in (0, 2, 10)]
    seats = seated(pods, [member("s-10"), member("s-2"), member("s-0")], [])
    assert names(going(seats, 1)) == ["s-10", "s-2"]
    assert allowed(seats, going(seats, 1), 1) == 11
    pods[1] = replace(pods[1], mark=Mark("s-2", "u"))
    seats = seated(pods, [member("s-10"), member("s-0")], ["s-2"])
    assert allowed(seats, going(seats, 1), 1) == 11, "a lower one has left, the highest has not"
    assert names(going(seats, 1, start=2)) == ["s-10"]
    assert allowed(seats, going(seats, 1, start=2), 1, start=2) == 9


def test_grove_takes_the_newest() -> None:
    pods = [pod(f"g{n}", owner="PodClique/g", created=f"2026-01-0{n}") for n in (1, 3, 2)]
    seats = seated(pods, [member("g3", tokens=99)], [])
    assert names(going(seats, 1)) == ["g3", "g2"]


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Seat], int]:
    numbered = draw(st.booleans())
    seats = []
    for at in range(draw(st.integers(0, 6))):
        name = f"p-{at}"
        mark = draw(st.sampled_from([None, Mark(), Mark(name, "u"), Mark("x", "u")]))
        one = pod(
            name,
            ready=draw(st.booleans()),
            owner="StatefulSet/p" if numbered else "ReplicaSet/r",
            ordinal=at if numbered else None,
            mark=mark,
        )
        of = member(name, draw(st.integers(0, 3)), is_ready=draw(st.booleans()))
        seats.append(Seat(one, draw(st.sampled_from([None, of])), draw(st.booleans())))
    return seats, draw(st.integers(0, 6))


@given(fleets())
def test_whatever_is_allowed_takes_only_pods_that_may_go(of: tuple[list[Seat], int]) -> None:
    seats, target = of
    gone = going(seats, target)
    count = allowed(seats, gone, target)
    assert target <= count <= max(target, len(seats))
    assert len(gone) == max(0, len(seats) - target)
    taken = [seat for seat in going(seats, count) if seat in gone]
    assert all(seat.may_go for seat in taken)
