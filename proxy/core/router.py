"""Router.admit: the one place where sessions, prefixes, load, gate and offload meet.

`admit` looks, decides and charges in one synchronous call, so that of two simultaneous HEAVY
requests the second sees the first. Afterwards the shell reports what happened (`prefill_done`,
`first_token`, `fall_back`, `retry`, `finish`), and the router keeps lease, sessions and prefixes in
step. Drivers: the aiohttp proxy, the virtual-time simulator, the tests.
"""

from __future__ import annotations

from collections.abc import Collection

from proxy.core.classify import Size
from proxy.core.cost import by_cost
from proxy.core.decide import Choice, Decide, RouterConfig, Scene, by_rules
from proxy.core.fleet import Fleet, Member
from proxy.core.gate import Busy, Gate, retry_after_s
from proxy.core.latency import Latency
from proxy.core.ledger import Ledger, Phase
from proxy.core.prefix import PrefixIndex
from proxy.core.sessions import Sessions
from proxy.core.types import (
    Candidate,
    Fallback,
    Instance,
    Reason,
    Reject,
    RejectReason,
    RequestFacts,
    Route,
    RouteClass,
)

__all__ = ["Router", "RouterConfig"]

NO_INSTANCE_RETRY_S = 5.0
"""Advised wait when no instance is up: about two probe intervals and a restart's last seconds."""


class Router:
    """All state of the decisions. Single-threaded; no method waits.

    `decide` makes the choice among the free instances; the default follows the options.
    """

    def __init__(self, config: RouterConfig, decide: Decide | None = None) -> None:
        self.config = config
        self._decide = decide or (by_cost if config.offload_policy == "cost" else by_rules)
        self.latency = Latency(
            config.prefill_throughput, config.kv_transfer_time_s, config.max_num_batched_tokens
        )
        self.ledger = Ledger()
        self.sessions = Sessions(config.session_ttl_s, config.max_sessions)
        self.prefixes = PrefixIndex(config.prefix_cache_bytes)
        self.gate = Gate(
            config.thresholds, config.max_num_batched_tokens, config.prefill_throughput
        )
        self.fleet = Fleet()

    def add(self, instance: Instance) -> None:
        """Bring an instance in, with fresh counters."""
        self.fleet.add(instance)
        self.ledger.add(instance.name)

    def remove(self, name: str) -> None:
        """Take an instance out; its live leases go on against its detached account."""
        self.fleet.remove(name)
        self.ledger.remove(name)
        self._forget(name)

    def probe_failed(self, name: str, *, is_dead: bool) -> bool:
        """A probe or a connection failed; true when this took the instance down.

        Where nobody listens any more (`is_dead`), the KV is lost: prefixes and homes are forgotten.
        One that is merely slow keeps them for its return.
        """
        member = self.fleet.get(name)
        went_down = member is not None and member.health.failed()
        if went_down and is_dead:
            self._forget(name)
        return went_down

    def probe_succeeded(self, name: str) -> bool:
        """A probe was answered; true when this brought the instance back."""
        member = self.fleet.get(name)
        if member is None or not member.health.probed():
            return False
        member.incarnation += 1
        return True

    def answered(self, name: str) -> None:
        """Traffic got an answer from the instance."""
        if (member := self.fleet.get(name)) is not None:
            member.health.answered()

    def _forget(self, name: str) -> None:
        self.prefixes.forget(name)
        self.gate.forget(name)
        self.sessions.forget(name)
        self.latency.forget(name)

    def busy(self, name: str, model: str, now_s: float) -> Busy | None:
        """Which threshold an instance is past, if any; KeyError when unknown."""
        return self.gate.busy(name, model, self.ledger.load(name), now_s)

    def admit(self, facts: RequestFacts, now_s: float) -> Route | Reject:
        """Choose D, the class and P, and charge them; or say why not and when to come back."""
        free = self._free(facts, now_s, exclude=())
        if isinstance(free, Reject):
            return free
        choice = self._decide(self._scene(facts, free, now_s))
        turn = self.sessions.assign(facts.session_id, choice.decode.instance.name, now_s)
        return self._route(facts, choice, turn, now_s, free)

    def retry(self, route: Route, facts: RequestFacts, now_s: float) -> Route | Reject:
        """Place the request again after its D failed, on an instance not tried yet, colocated."""
        route.tried.add(route.decode.name)
        free = self._free(facts, now_s, exclude=route.tried)
        if isinstance(free, Reject):
            return free
        d = self._decide(self._scene(facts, free, now_s)).decode
        self.sessions.move(facts.session_id, d.instance.name, route.turn, now_s)
        route.decode, route.prefill = d.instance, None
        route.hit_tokens, route.new_tokens = d.hit_tokens, d.new_tokens
        self._charge_colocated(route, now_s)
        return route

    def prefill_done(self, route: Route, facts: RequestFacts) -> None:
        """P has answered: its work is over, its copy stays pinned until D has pulled."""
        if route.prefill is None:
            return
        p, d, tokens = route.prefill.name, route.decode.name, route.prompt_tokens
        self._remember(p, facts)
        charge = self.ledger.charge
        route.lease.replace((*charge(p, Phase.PINNED, tokens), *charge(d, Phase.INBOUND, tokens)))

    def first_token(self, route: Route, facts: RequestFacts) -> None:
        """D has answered: the prompt's KV is there, and the stream decodes."""
        name = route.decode.name
        self._remember(name, facts)
        route.lease.replace(self.ledger.charge(name, Phase.DECODE, route.prompt_tokens))

    def _remember(self, name: str, facts: RequestFacts) -> None:
        if self.fleet.is_up(name):
            kv_tokens = self.gate.kv_tokens(name)
            if kv_tokens and facts.block_tokens > 0:
                self.prefixes.limit(name, int(kv_tokens / facts.block_tokens))
            self.prefixes.insert(name, facts.block_hashes)

    def fall_back(self, route: Route, why: Fallback, now_s: float) -> None:
        """The offload failed before the client's first byte: compute on D instead."""
        route.fallback = why
        late = why in (Fallback.TRANSFER_TIMEOUT, Fallback.P_GONE, Fallback.D_FAILED)
        route.reason = Reason.TRANSFER_FAILED if late else Reason.PREFILL_FAILED
        route.route_class = RouteClass.HEAVY_COLO
        self._release(route, now_s)
        route.prefill = None
        self._charge_colocated(route, now_s)

    def finish(self, route: Route, now_s: float) -> None:
        """The request is over, however it ended: take back what is charged."""
        for charge in route.lease.charges:
            if charge.phase is Phase.DECODE:
                self.gate.released(route.decode.name, charge.tokens, now_s)
        self._release(route, now_s)
        route.lease.close()

    def on_prefill_done(
        self,
        route: Route,
        facts: RequestFacts,
        prefill_s: float,
        cached_tokens: int | None,
        now_s: float,
    ) -> None:
        """Learn from a prefill leg: `prefill_s` from its sending to P's answer."""
        if route.prefill is not None:
            self._learn_prefill(route, facts, prefill_s, cached_tokens, now_s)

    def on_first_token(
        self,
        route: Route,
        facts: RequestFacts,
        ttft_s: float,
        cached_tokens: int | None,
        now_s: float,
    ) -> None:
        """Learn from a first token, `ttft_s` after the decision."""
        if route.prefill is None and route.fallback is None:
            self._learn_prefill(route, facts, ttft_s, cached_tokens, now_s)
        self._release(route, now_s)

    def on_transfer(self, route: Route, seconds: float) -> None:
        """Learn from a hand-over: from the decode leg's sending to its first token."""
        if route.prefill is not None:
            names = route.prefill.name, route.decode.name
            self.latency.observe_transfer(*names, route.new_tokens, seconds)

    def on_finish(
        self, route: Route, facts: RequestFacts, output_tokens: int, decode_s: float, now_s: float
    ) -> None:
        """Learn from a whole answer: `decode_s` for the tokens after the first."""
        del facts, now_s
        if output_tokens > 1 and self.fleet.is_up(route.decode.name):
            kv_tokens = self.ledger.load(route.decode.name).decode_tokens
            self.latency.observe_step(route.decode.name, kv_tokens, decode_s / (output_tokens - 1))

    def _learn_prefill(
        self,
        route: Route,
        facts: RequestFacts,
        seconds: float,
        cached_tokens: int | None,
        now_s: float,
    ) -> None:
        """Only a prefill that met no queue says how long computing takes."""
        computing = route.prefill or route.decode
        alone = self.latency.end(computing.name, id(route.lease), now_s) and route.ran_alone
        planned = route.new_tokens if route.prefill is None else route.new_tokens_prefill
        new = planned if cached_tokens is None else facts.prompt_tokens - cached_tokens
        if alone and new and new > 0:
            context = facts.prompt_tokens - new
            self.latency.observe_prefill(computing.name, new, context, seconds)

    def _release(self, route: Route, now_s: float) -> None:
        for instance in (route.prefill, route.decode):
            if instance is not None:
                self.latency.end(instance.name, id(route.lease), now_s)

    def _reserve(self, route: Route, computing: Instance, hit_tokens: int, now_s: float) -> None:
        """Occupy the computing instance for as long as this prefill is predicted to take."""
        name, new = computing.name, max(1, route.prompt_tokens - hit_tokens)
        load = self.ledger.load(name)
        route.work_s = self.latency.prefill_s(
            name, new, hit_tokens, load.decode_requests, load.decode_tokens
        )
        route.ran_alone = self.latency.wait_s(name, now_s) <= 0.0
        self.latency.begin(name, id(route.lease), route.work_s, now_s)

    def _free(
        self, facts: RequestFacts, now_s: float, exclude: Collection[str]
    ) -> list[Candidate] | Reject:
        busy: list[Busy] = []
        free: list[Member] = []
        for member in self.fleet.serving(facts.model, exclude):
            state = self.busy(member.instance.name, facts.model, now_s)
            if state is None:
                free.append(member)
            else:
                busy.append(state)
        if free:
            return self._candidates(facts, free)
        if busy:
            soonest = min(busy, key=lambda b: b.free_in_s)
            return Reject(soonest.check, retry_after_s([soonest.free_in_s]))
        return Reject(RejectReason.NO_INSTANCE, retry_after_s([NO_INSTANCE_RETRY_S]))

    def _candidates(self, facts: RequestFacts, members: list[Member]) -> list[Candidate]:
        hits = self.prefixes.hits(facts.block_hashes)
        candidates = []
        for member in members:
            name = member.instance.name
            hit = facts.hit_tokens(hits.get(name, 0))
            candidates.append(
                Candidate(
                    member.instance,
                    self.ledger.load(name),
                    hit,
                    facts.prompt_tokens - hit,
                    self.sessions.count(name),
                    member.last_placed,
                    self._kv_full(name),
                )
            )
        return candidates

    def _scene(self, facts: RequestFacts, free: list[Candidate], now_s: float) -> Scene:
        home = self.sessions.home(facts.session_id, now_s)
        mean = self._mean_ongoing()
        return Scene(self.config, facts, home, free, mean, now_s, self.latency)

    def _mean_ongoing(self) -> float:
        loads = [self.ledger.load(m.instance.name).ongoing_tokens for m in self.fleet.up()]
        return sum(loads) / len(loads) if loads else 0.0

    def _route(
        self,
        facts: RequestFacts,
        choice: Choice,
        turn: int,
        now_s: float,
        free: list[Candidate],
    ) -> Route:
        d, p = choice.decode, choice.prefill
        if choice.placed:
            self.fleet.placed(d.instance.name)
        predicted_s = choice.predicted_ttft_s
        if predicted_s is None:
            predicted_s = self._predicted_ttft_s(p or d, d if p else None, now_s)
        route = Route(
            decode=d.instance,
            prefill=p.instance if p else None,
            route_class=_route_class(choice.size, offloaded=p is not None),
            reason=choice.reason,
            policy=self.config.offload_policy,
            prompt_tokens=facts.prompt_tokens,
            hit_tokens=d.hit_tokens,
            new_tokens=d.new_tokens,
            new_tokens_prefill=p.new_tokens if p else None,
            lease=self.ledger.open(()),
            turn=turn,
            predicted_ttft_s=predicted_s,
            candidates=tuple(free) if choice.size is Size.HEAVY else (),
        )
        if p is None:
            self._charge_colocated(route, now_s)
        else:
            self._reserve(route, p.instance, p.hit_tokens, now_s)
            charge = self.ledger.charge
            prefill = charge(p.instance.name, Phase.PREFILL, p.new_tokens)
            inbound = charge(d.instance.name, Phase.INBOUND, facts.prompt_tokens)
            route.lease.replace((*prefill, *inbound))
        return route

    def _predicted_ttft_s(self, c: Candidate, d: Candidate | None, now_s: float) -> float:
        """Queue and computation on `c`, and the transfer to D where that is another."""
        name, load = c.instance.name, c.load
        ready_s = self.latency.wait_s(name, now_s) + self.latency.prefill_s(
            name, c.new_tokens, c.hit_tokens, load.decode_requests, load.decode_tokens
        )
        if d is None:
            return ready_s
        return ready_s + self.latency.transfer_s(name, d.instance.name, d.new_tokens)

    def _kv_full(self, name: str) -> float:
        """How full an instance's cache is, reusable blocks included; 0 while size is unknown."""
        capacity = self.prefixes.capacity(name)
        return min(1.0, self.prefixes.blocks(name) / capacity) if capacity else 0.0

    def _charge_colocated(self, route: Route, now_s: float) -> None:
        name, tokens = route.decode.name, route.new_tokens
        if self.fleet.get(name) is not None:
            self._reserve(route, route.decode, route.hit_tokens, now_s)
        route.lease.replace(self.ledger.charge(name, Phase.PREFILL, tokens))


def _route_class(size: Size, *, offloaded: bool) -> RouteClass:
    if size is Size.HEAVY:
        return RouteClass.HEAVY_P2P if offloaded else RouteClass.HEAVY_COLO
    return RouteClass.WARM if size is Size.WARM else RouteClass.MEDIUM
