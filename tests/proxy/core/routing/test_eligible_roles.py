"""Busy thresholds by role: P of an offload passes those of prefill, D that of KV blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.accounts.lease import Phase
from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.policies import POLICIES
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import (
    Instance,
    Reason,
    Reject,
    RejectReason,
    RequestFacts,
    RouterConfig,
    Thresholds,
)

KV_TOKENS = 100_000
LIMITS = Thresholds(0.5, 5000)
PREFILLS, DECODES, BOTH = (6000, 0), (0, 60_000), (6000, 60_000)
"""Loads (prefill tokens, decode tokens) past a threshold of prefill, of KV blocks, of both."""
FREE = (100, 20_000)
HEAVY = 20_000


def facts(tokens: int = HEAVY, *, offloadable: bool = True) -> RequestFacts:
    return RequestFacts("m", "s", tokens, [], 1.0, offloadable=offloadable)


def router(*loads: tuple[int, int], home: int | None = None, **options: Any) -> Router:
    """Instances i0, i1, ... with these loads; the session lives on that at `home`."""
    options = {"offload_policy": "always"} | options
    made = Router(FleetState(RouterConfig(prefill_throughput=20_000, thresholds=LIMITS, **options)))
    for at, (prefill, decode) in enumerate(loads):
        name = f"i{at}"
        made.known.add(Instance(name, f"http://{name}", f"http://{name}:8998"))
        made.known.gate.observe_engine(name, EngineKv(KV_TOKENS, 0.0), 0.0)
        charge = made.known.ledger.charge
        made.known.ledger.open(charge(name, Phase.PREFILL, prefill) if prefill else ())
        made.known.ledger.open(charge(name, Phase.DECODE, decode) if decode else ())
    if home is not None:
        made.known.sessions.assign("s", made.known.fleet.states[f"i{home}"].cache, 0.0)
    return made


def placed(r: Router, f: RequestFacts) -> tuple[str, str | None, Reason] | RejectReason:
    """D, P and the reason of an admitted request, or why it was refused."""
    answer = r.admit(f, 0.0)
    if isinstance(answer, Reject):
        return answer.reason
    return answer.decode.name, answer.prefill.name if answer.prefill else None, answer.reason


@pytest.mark.parametrize(
    ("loads", "home", "f", "expected"),
    [
        ((PREFILLS, FREE), 0, facts(), ("i0", "i1", Reason.POLICY_ALWAYS)),
        ((FREE, DECODES), 0, facts(), ("i0", "i1", Reason.POLICY_ALWAYS)),
        ((FREE, PREFILLS), 0, facts(), ("i0", None, Reason.PEER_PAST_THRESHOLD)),
        ((FREE, BOTH), 0, facts(), ("i0", None, Reason.PEER_PAST_THRESHOLD)),
        ((FREE,), 0, facts(), ("i0", None, Reason.NO_PEER)),
        ((DECODES, FREE), 0, facts(), ("i1", "i0", Reason.POLICY_ALWAYS)),
        ((PREFILLS, FREE), 0, facts(1000), ("i1", None, Reason.BELOW_THRESHOLD)),
        ((PREFILLS, FREE), 0, facts(offloadable=False), ("i1", None, Reason.NOT_OFFLOADABLE)),
        ((PREFILLS, DECODES), 0, facts(), ("i0", "i1", Reason.SPLIT_ROLES)),
        ((DECODES, PREFILLS, PREFILLS), 2, facts(), ("i2", "i0", Reason.SPLIT_ROLES)),
        ((PREFILLS, DECODES), 0, facts(1000), RejectReason.PREFILL_TOKENS),
        ((PREFILLS, DECODES), 0, facts(offloadable=False), RejectReason.PREFILL_TOKENS),
        ((PREFILLS, BOTH), 0, facts(), RejectReason.PREFILL_TOKENS),
        ((DECODES, DECODES), 0, facts(), RejectReason.DECODE_BLOCKS),
    ],
)
def test_each_role_has_its_thresholds(
    loads: tuple[tuple[int, int], ...], home: int, f: RequestFacts, expected: Any
) -> None:
    assert placed(router(*loads, home=home), f) == expected


@pytest.mark.parametrize("policy", ["cost", "seed-heuristic", "seed-cost", "threshold"])
def test_a_peer_past_a_threshold_is_logged_as_that(policy: str) -> None:
    """It looked like a missing configuration: `no_peer`."""
    for peers, reason in ((BOTH,), Reason.PEER_PAST_THRESHOLD), ((), Reason.NO_PEER):
        r = router(FREE, *peers, home=0, offload_policy=policy)
        assert placed(r, facts()) == ("i0", None, reason)


@pytest.mark.parametrize("policy", ["always", "cost"])
def test_roles_are_split_although_a_bootstrap_server_was_found_meanwhile(policy: str) -> None:
    """What the router keeps of the last decision has gone with it, whole."""
    r = router(FREE, FREE, offload_policy=policy)
    r.finish(placed_route(r), 0.0)
    for name, (prefill, decode) in (("i0", PREFILLS), ("i1", DECODES)):
        r.known.ledger.open(r.known.ledger.charge(name, Phase.PREFILL, prefill) if prefill else ())
        r.known.ledger.open(r.known.ledger.charge(name, Phase.DECODE, decode) if decode else ())
    r.known.use_bootstrap(Instance("i0", "http://i0", "http://i0:8999"))
    assert placed(r, facts()) == ("i0", "i1", Reason.SPLIT_ROLES)


def placed_route(r: Router) -> Route:
    route = r.admit(facts(100), 0.0)
    assert isinstance(route, Route)
    return route


def test_nothing_is_split_against_the_policy_or_without_a_connector() -> None:
    for options in ({"offload_policy": "never"}, {"kv_connector": "none"}):
        r = router(PREFILLS, DECODES, home=0, **options)
        assert placed(r, facts()) is RejectReason.PREFILL_TOKENS


def test_an_engine_that_says_that_it_is_busy_takes_no_role() -> None:
    r = router(FREE, FREE, home=0)
    r.known.gate.mark_busy("i1", 5.0)
    assert placed(r, facts()) == ("i0", None, Reason.PEER_PAST_THRESHOLD)


def test_models_follow_a_reload_in_what_is_not_set_for_them() -> None:
    r = router(FREE)
    r.known.gate.set("m", Thresholds(0.9))
    r.reconfigure(replace(r.known.config, thresholds=Thresholds(0.7, 9000)))
    assert r.known.gate.thresholds("m") == Thresholds(0.9, 9000)


def test_limits_of_a_base_are_forgotten_with_the_last_instance_that_names_it() -> None:
    r = router(FREE, FREE)
    for name in ("i0", "i1"):
        r.known.observe_models(name, ["base", "tuned"], {"tuned": "base"})
    r.known.gate.set("base", Thresholds(0.9))
    r.known.remove("i0")
    assert r.known.gate.thresholds("tuned") == Thresholds(0.9, 5000)
    r.known.observe_models("i1", ["base", "tuned"], {})
    assert r.known.gate.thresholds("tuned") == LIMITS


amounts = st.tuples(st.sampled_from([0, 5000, 5001]), st.sampled_from([0, 50_000, 50_001]))


@given(
    st.lists(amounts, min_size=1, max_size=4),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([1000, 20_000]),
    st.booleans(),
    st.integers(0, 3),
)
def test_whatever_is_placed_has_passed_the_checks_of_its_role(
    loads: list[tuple[int, int]], policy: str, tokens: int, offloadable: bool, home: int
) -> None:
    r = router(*loads, home=home % len(loads), offload_policy=policy)
    before = {f"i{at}": load for at, load in enumerate(loads)}

    def may_prefill(name: str) -> bool:
        return before[name][0] <= 5000

    def may_decode(name: str) -> bool:
        return before[name][1] <= 50_000

    answer = r.admit(facts(tokens, offloadable=offloadable), 0.0)
    some_do_both = any(may_prefill(name) and may_decode(name) for name in before)
    if isinstance(answer, Reject):
        assert not some_do_both
        return
    assert isinstance(answer, Route)
    assert answer.mistake is None
    assert may_decode(answer.decode.name)
    assert may_prefill(answer.prefill.name if answer.prefill else answer.decode.name)
    r.finish(answer, 0.0)
    assert r.known.ledger.drift() == 0
