"""Candidates and scenes for rules that place requests."""

from proxy.core.config import RouterConfig
from proxy.core.latency.model import Latency
from proxy.core.placement.scene import PlacementView
from proxy.core.types import Candidate, Instance, Load, RequestFacts

BLOCK = 512
CONFIG = RouterConfig(prefill_throughput=20_000)
PROMPT = 10_000


def candidate(name: str, hit: int = 0, placed: int = 0, **load: int) -> Candidate:
    instance = Instance(name, f"http://{name}", f"http://{name}:8998")
    return Candidate(instance, Load(**load), hit, PROMPT - hit, 0, placed)


def scene_of(*free: Candidate, home: str | None = None, tokens: int = PROMPT) -> PlacementView:
    facts = RequestFacts("m", "s", tokens, (), BLOCK)
    return PlacementView(
        CONFIG, facts, home, list(free), lambda: 0.0, 0.0, Latency(20_000, 0.5, 8192)
    )
