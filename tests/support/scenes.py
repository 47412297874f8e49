"""Candidates and scenes for rules that place requests."""

from collections.abc import Iterable

from proxy.core.accounts.instances import InstanceStates
from proxy.core.connectors import CONNECTORS, transfer_rules
from proxy.core.latency.model import Latency
from proxy.core.placement.decision import Candidates, PlacementView
from proxy.core.types import Candidate, Instance, Load, RequestFacts, RouterConfig

BLOCK = 512
CONFIG = RouterConfig(prefill_throughput=20_000)
PROMPT = 10_000


def candidate(name: str, hit: int = 0, placed: int = 0, **load: int) -> Candidate:
    instance = Instance(name, f"http://{name}", f"http://{name}:8998")
    return Candidate(instance, Load(**load), hit, PROMPT - hit, 0, placed)


def latency_of(names: Iterable[str], prefill_throughput: float = 20_000.0) -> Latency:
    """The model of time of a fleet that was not asked anything yet."""
    states = InstanceStates()
    for name in names:
        states.add(name)
    return Latency(prefill_throughput, 0.5, 8192, states)


def scene_of(*free: Candidate, home: str | None = None, tokens: int = PROMPT) -> PlacementView:
    facts = RequestFacts("m", "s", tokens, (), BLOCK)
    columns, transfers = Candidates.of(free, tokens), transfer_rules(CONNECTORS["mooncake"])
    latency = latency_of([one.instance.name for one in free])
    return PlacementView(CONFIG, facts, home, columns, list, 0.0, latency, transfers)
