"""Candidates and scenes for rules that place requests."""

from collections.abc import Iterable, Sequence

from proxy.core.accounts.instances import InstanceStates
from proxy.core.connectors import CONNECTORS, transfer_rules
from proxy.core.latency.model import Latency
from proxy.core.latency.pace import Pace
from proxy.core.placement.candidates import Candidate, Candidates
from proxy.core.placement.decision import PlacementView
from proxy.core.types import Instance, Load, RequestFacts, RouterConfig

BLOCK = 512
CONFIG = RouterConfig(prefill_throughput=20_000)
PROMPT = 10_000


def latency_of(names: Iterable[str], prefill_throughput: float = 20_000.0) -> Latency:
    """The model of time of a fleet that was not asked anything yet."""
    states = InstanceStates()
    for name in names:
        states.add(name)
    return Latency(prefill_throughput, 0.5, 8192, states)


def pace_of(prefill_throughput: float = 20_000.0) -> Pace:
    """The times of an instance that was not asked anything yet."""
    return latency_of(["any"], prefill_throughput).of("any").pace()


PACE = pace_of()


def candidate(name: str, hit: int = 0, placed: int = 0, **load: int) -> Candidate:
    instance = Instance(name, f"http://{name}", f"http://{name}:8998")
    return Candidate(instance, Load(**load), hit, PROMPT - hit, PACE, 0, placed)


def scene_of(*free: Candidate, home: str | None = None, tokens: int = PROMPT) -> PlacementView:
    facts = RequestFacts("m", "s", tokens, (), BLOCK)
    return view_of(free, facts, home, CONFIG, latency_of(c.instance.name for c in free))


def view_of(
    free: Sequence[Candidate],
    facts: RequestFacts,
    home: str | None,
    config: RouterConfig,
    latency: Latency,
) -> PlacementView:
    """A scene with what `latency` knows now."""
    for one in free:
        one.pace = latency.of(one.instance.name).pace()
    columns = Candidates.of(free, facts.prompt_tokens)
    fleet, transfers = latency.fleet(facts.prompt_tokens), CONNECTORS[config.kv_connector]
    return PlacementView(config, facts, home, columns, [], 0.0, fleet, transfer_rules(transfers))
