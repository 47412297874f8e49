"""Whether another tenant can tell by the time to the first token what a tenant has sent.

The real keys, salts, facts and router, and models of engines, on one virtual clock. Of two prompts
as long as each other the victim has sent one; the attacker sends one of them, sees how long its
first token takes, and guesses. Others' requests run beside, so no two are equally fast. Each trial
is run both ways, and all else is the same in both. With a salt per tenant the guess is as good as a
coin's: not one time differs. Without it, it is nearly always right.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import orjson
import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.config.in_force import BodyLimits, router_config
from proxy.config.options import Settings
from proxy.core.known.fleet_state import FleetState
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, RequestFacts
from proxy.protocol.prompt.facts import TokenEstimator
from proxy.request.client_request import read
from proxy.request.large_bodies import LargeBodies
from proxy.state.access import Access
from proxy.state.detached import DetachedTasks
from replayer.engine.engine import Engine
from replayer.engine.types import EngineOptions, Finished, FirstToken, Job, SimRequest
from replayer.simulator.openai.requests import RequestLimits, parse_ask
from tests.support.harness import chat, words

pytestmark = pytest.mark.figures

TRIALS = 80
PAUSE_S = 4.0
"""From one trial to the next; the victim's request is over long before the attacker's."""
WORDS = 500
OTHERS_PER_S = 3.0
PATH = "/v1/chat/completions"
LIMITS = RequestLimits("sim-8b", 16, 131_072, 64, eos_with_limit=False)
KEYS = "victim:key-1,attacker:key-2,other:key-3"


BODY = BodyLimits(1 << 20, 60.0)


def loaded(headers: CIMultiDictProxy[str], raw: bytes) -> web.Request:
    """A client's request that has come whole."""
    protocol = BaseProtocol(asyncio.get_running_loop())
    content = StreamReader(protocol, 1 << 20, loop=protocol._loop)
    content.feed_data(raw)
    content.feed_eof()
    return make_mocked_request("POST", PATH, headers, payload=content)


@dataclass(eq=False)
class Sent:
    """One request; `hit`: of an attacker's, whether the victim has sent this very prompt."""

    at_s: float
    key: str
    text: str
    hit: bool | None = None
    ttft_s: float = 0.0
    facts: RequestFacts | None = None
    route: Route | None = None


def sent(parity: int) -> Iterator[Sent]:
    """All requests of a run, in which every other trial is a hit."""
    dice = Random(16)
    for trial in range(TRIALS):
        start_s = PAUSE_S * trial
        hit = trial % 2 == parity
        secret, another = words(WORDS, f"s{trial}-"), words(WORDS, f"r{trial}-")
        yield Sent(start_s, "key-1", secret if hit else another)
        yield Sent(start_s + dice.uniform(1.5, 3.5), "key-2", secret, hit)
    at_s = 0.0
    while (at_s := at_s + dice.expovariate(OTHERS_PER_S)) < PAUSE_S * TRIALS:
        yield Sent(at_s, "key-3", words(dice.choice((20, 100, 300)), f"o{at_s}-"))


class Run:
    """A fleet behind the proxy's own decisions."""

    def __init__(self, settings: Settings) -> None:
        self.access, self.estimator = Access(settings), TokenEstimator()
        self.large = LargeBodies(DetachedTasks())
        self.router = Router(FleetState(router_config(settings)))
        self.engines = {spec.name: Engine(EngineOptions()) for spec in settings.instances}
        self.legs: dict[SimRequest, Sent] = {}
        for name in self.engines:
            self.router.known.add(Instance(name, f"http://{name}"))

    async def run(self, requests: list[Sent]) -> None:
        heap = [(one.at_s, n, one) for n, one in enumerate(requests)]
        heapq.heapify(heap)
        while heap or self.legs:
            due_s = {name: engine.next_event_s() for name, engine in self.engines.items()}
            now_s = min(*due_s.values(), *(at_s for at_s, _, _ in heap[:1]))
            while heap and heap[0][0] <= now_s:
                await self.arrive(heapq.heappop(heap)[2], now_s)
            for name, engine in self.engines.items():
                if due_s[name] <= now_s:
                    self.advance(engine, now_s)

    async def arrive(self, one: Sent, now_s: float) -> None:
        headers = CIMultiDictProxy(CIMultiDict({"Authorization": f"Bearer {one.key}"}))
        grant = self.access.grant(headers)
        request = loaded(headers, orjson.dumps(chat(one.text, max_tokens=4)))
        out = await read(request, "r", BODY, grant, self.large)
        assert out.raw is not None
        parsed = orjson.loads(out.raw)  # as the engine reads it
        prompt_found, session = out.found.prompt, out.found.session
        one.facts = self.estimator.facts(prompt_found, headers, session, grant.tenant)
        route = self.router.admit(one.facts, now_s)
        assert isinstance(route, Route)
        one.route = route
        prompt = parse_ask(parsed, LIMITS, chat=True).choices[0].prompt
        job = Job(str(one.at_s), prompt.tokens, prompt.block_hashes, 4)
        self.legs[self.engines[route.decode.name].submit(job, now_s)] = one

    def advance(self, engine: Engine, now_s: float) -> None:
        for event in engine.advance(now_s):
            if not isinstance(event, FirstToken | Finished):
                continue
            leg, one = event.request, self.legs[event.request]
            assert one.route is not None
            assert one.facts is not None
            if isinstance(event, FirstToken):
                one.ttft_s = now_s - one.at_s
                self.router.first_token(one.route, one.facts, now_s)
            else:
                del self.legs[leg]
                found = leg.local_hit_tokens / leg.job.prompt_tokens
                self.router.completed(one.route, one.facts, found)
                self.router.finish(one.route, now_s, 4)


def auc(faster: list[float], slower: list[float]) -> float:
    """How often one of the first is below one of the second; a tie is half."""
    won = sum((a < b) + 0.5 * (a == b) for a in faster for b in slower)
    return won / (len(faster) * len(slower))


@pytest.mark.parametrize("is_salted", [True, False], ids=["salted", "shared"])
async def test_what_the_first_token_tells(*, is_salted: bool) -> None:
    secret = {"cache_salt_secret": "0123456789abcdef"} if is_salted else {}
    settings = Settings(instances="a=a:1,b=b:1", api_key=KEYS, kv_connector="none", **secret)
    times_s: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for parity in (0, 1):
        requests = list(sent(parity))
        run = Run(settings)
        await run.run(requests)
        assert run.router.known.ledger.live == 0
        for one in requests:
            if one.hit is not None:
                times_s[one.hit][one.text] = one.ttft_s
    hits, misses = list(times_s[True].values()), list(times_s[False].values())
    found = auc(hits, misses)
    sys.stdout.write(
        f"R16 {'salted' if is_salted else 'shared'}: AUC {found:.3f}; TTFT p50 "
        f"{1e3 * sorted(hits)[len(hits) // 2]:.1f} ms where it was sent, "
        f"{1e3 * sorted(misses)[len(misses) // 2]:.1f} ms where not\n"
    )
    if is_salted:
        assert found <= 0.55
        assert times_s[True] == times_s[False], "what was sent changes nothing"
    else:
        assert found > 0.95
