"""Other readings of the founding heuristic, and the fixed division."""

import pytest

from analysis.elastic.readings import (
    READINGS,
    RULES,
    Heuristic,
    all_tokens,
    idlest,
    in_turn,
    most_cached,
    queued_tokens,
    split,
)
from analysis.rivals.registry import RIVALS
from proxy.core.placement.candidates import Candidate
from proxy.core.types import Reason
from tests.support.scenes import PROMPT, candidate, scene_of

D = candidate("d", decode_tokens=9_000, prefill_tokens=1_000, decode_requests=1)
IDLE = candidate("idle", placed=3)
BUSY = candidate("busy", placed=1, decode_tokens=6_000, decode_requests=1)
CACHED = candidate("cached", placed=2, hit=8_000, decode_tokens=4_000, decode_requests=1)


def _at_home(heuristic: Heuristic, *peers: Candidate) -> tuple[str | None, Reason]:
    choice = heuristic(scene_of(D, *peers, home="d"))
    assert choice.decode.instance.name == "d"
    return _name(choice.prefill), choice.reason


def _name(p: Candidate | None) -> str | None:
    return None if p is None else p.instance.name


@pytest.mark.parametrize(
    ("heuristic", "expected"),
    [
        (Heuristic(), ("idle", Reason.P_IDLE_D_BUSY)),
        (Heuristic(in_turn), ("busy", Reason.P_IDLE_D_BUSY)),
        (Heuristic(most_cached), ("cached", Reason.P_IDLE_D_BUSY)),
        (Heuristic(tokens=queued_tokens), ("cached", Reason.P_IDLE_D_BUSY)),
    ],
)
def test_p_is_the_readings(heuristic: Heuristic, expected: tuple[str, Reason]) -> None:
    assert _at_home(heuristic, IDLE, BUSY, CACHED) == expected


def test_only_another_choice_of_p_can_be_overloaded() -> None:
    """The instance with the fewest tokens is never above their mean."""
    idle = [candidate(f"idle{n}") for n in range(4)]
    peers = (BUSY, *idle)
    assert _at_home(Heuristic(in_turn), BUSY, *(candidate("x", placed=9) for _ in range(4))) == (
        None,
        Reason.P_OVERLOADED,
    )
    assert _at_home(Heuristic(), *peers)[1] is Reason.P_IDLE_D_BUSY


def test_the_order_of_the_tests_is_the_founding_texts() -> None:
    as_busy = candidate("p", decode_tokens=10_000, decode_requests=1)
    assert _at_home(Heuristic(), as_busy) == (None, Reason.P_BUSIER_THAN_D)
    quiet = candidate("d", prefill_tokens=500)
    choice = Heuristic()(scene_of(quiet, IDLE, home="d"))
    assert (choice.prefill, choice.reason) == (None, Reason.D_IDLE)
    short = candidate("d", hit=PROMPT - 100, decode_tokens=9_000, decode_requests=1)
    assert Heuristic()(scene_of(short, IDLE, home="d")).reason is Reason.BELOW_THRESHOLD
    assert Heuristic()(scene_of(D, home="d")).reason is Reason.NO_PEER
    assert idlest([BUSY, IDLE], all_tokens) is IDLE


@pytest.mark.parametrize(
    ("home", "hit", "expected"),
    [
        (None, 0, ("e2", "e0", True)),
        ("e3", 0, ("e3", "e0", False)),
        ("e3", PROMPT - 100, ("e3", None, False)),
        ("e0", 0, ("e2", "e0", True)),
    ],
)
def test_a_fixed_division_decodes_elsewhere(
    home: str | None, hit: int, expected: tuple[str, str | None, bool]
) -> None:
    e0 = candidate("e0")
    e1, e2 = (candidate(name, decode_tokens=most) for name, most in (("e1", 9), ("e2", 5)))
    e3 = candidate("e3", hit=hit, decode_tokens=99)
    choice = split(scene_of(e0, e1, e2, e3, home=home))
    assert (choice.decode.instance.name, _name(choice.prefill), choice.placed) == expected


def test_every_rule_has_a_name_of_its_own_and_a_source() -> None:
    assert not READINGS.keys() & RIVALS.keys()
    assert RULES.keys() == READINGS.keys() | RIVALS.keys()
    assert all(rival.source for rival in READINGS.values())
