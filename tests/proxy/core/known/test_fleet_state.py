"""FleetState: what is dropped with a process leaves every part; what frees a load is told."""

import pytest

from proxy.core.known.fleet_state import FleetState
from proxy.core.known.tables import TEMPLATE_TOKENS
from proxy.core.thermal.readings import COOL, HeatLimits
from proxy.core.types import Instance, RequestFacts, RouterConfig, Thresholds


def two() -> FleetState:
    known = FleetState(RouterConfig(prefill_throughput=20_000))
    for name in ("a", "b"):
        known.add(Instance(name, f"http://{name}:1"))
    return known


def test_what_is_dropped_with_a_process_leaves_every_part() -> None:
    known = two()
    cache = known.fleet.states["a"].cache
    known.prefixes.adopt(cache, [[1, 2, 3]])
    known.published.open("a", 0)
    known.latency.observe_transfer("a", "b", 1000, 0.5)
    known.events.restarted("a", 1.0)
    assert known.fleet.states["a"].cache is not cache
    assert cache.is_lost
    assert not known.prefixes.total_blocks
    assert known.latency.transfer_tps("a") is None


def test_a_removed_instance_is_cool_when_it_comes_back() -> None:
    known = two()
    known.limit_heat("a", HeatLimits(cap=1))
    known.remove("a")
    assert known.heat.of("a") == COOL


def test_each_change_that_may_admit_a_request_is_told() -> None:
    known, heard = two(), list[str]()
    known.call_when_freed(lambda: heard.append("freed"))
    known.add(Instance("c", "http://c:1"))
    assert heard
    heard.clear()
    known.remove("b")
    assert heard
    heard.clear()
    for name in ("a", "a", "gone"):
        known.limit_heat(name, HeatLimits(cap=1))
    assert len(heard) == 1


def test_thresholds_that_an_operator_set_outlive_a_reload_of_others() -> None:
    known = two()
    own = Thresholds(active_prefill_tokens_threshold=7)
    known.gate.set("m", own)
    known.reconfigure(RouterConfig(prefill_throughput=20_000, tpot_slo_s=0.1))
    assert known.gate.thresholds("m", "a") == own


def test_a_found_bootstrap_server_replaces_the_instance() -> None:
    known, found = two(), Instance("a", "http://a:1", "http://a:8998")
    known.use_bootstrap(found)
    member = known.fleet.get("a")
    assert member is not None
    assert member.instance is found
    assert known.instance_changes == 1


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        (1000, 1000),
        (1900, 1900),
        (100_000_000, 2 * 1000 + TEMPLATE_TOKENS),
        (1, 500),
    ],
)
def test_what_an_engine_counts_is_believed_within_bounds(told: int, taken: int) -> None:
    """Its session's next turn may run elsewhere, and that instance is charged for it."""
    known = two()
    cache = known.fleet.states["a"].cache
    first = RequestFacts("m", "s", 1000, [1], 256.0)
    stay = known.conversations.assign(known.conversations.find(first, 1.0), first, cache, 1.0)
    assert stay is not None
    counts = told, None, 1
    stay.past = known.trust.told(first, None, cache, 0, counts, is_session=True)
    again = RequestFacts("m", "s", 1000, [1], 256.0)
    known.refine(again, 2.0)
    assert again.prompt_tokens == pytest.approx(taken, rel=0.01)
