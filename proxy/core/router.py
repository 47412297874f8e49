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
from proxy.core.learn import Course
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

DECIDERS: dict[str, Decide] = {"cost": by_cost}
"""Policies that choose D and P together; any other is a rule of POLICIES behind a placement."""
KV_USABLE_RATIO = 0.95
KV_TURNOVER_S = 20.0
"""Until streams have ended on an instance: it is taken to free its whole cache in this time."""
NO_INSTANCE_RETRY_S = 5.0
"""Advised wait when no instance is up: about two probe intervals and a restart's last seconds."""


class Router:
    """All state of the decisions. Single-threaded; no method waits.

    `decide` makes the choice among the free instances; the default follows the options.
    """

    def __init__(self, config: RouterConfig, decide: Decide | None = None) -> None:
        self.config = config
        self._decide = decide or DECIDERS.get(config.offload_policy, by_rules)
        self.latency = Latency(
            config.prefill_throughput, config.kv_transfer_time_s, config.max_num_batched_tokens
        )
        self.ledger = Ledger()
        self._course = Course(self.latency)
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

    def probe_failed(self, name: str, error: str, *, is_dead: bool) -> bool:
        """A probe or a connection failed; true when this took the instance down.

        Where nobody listens any more (`is_dead`), the KV is lost: prefixes and homes are forgotten.
        One that is merely slow keeps them for its return.
        """
        member = self.fleet.get(name)
        went_down = member is not None and member.health.failed(error)
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

    def prefill_done(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """P has answered: its work is over, its copy stays pinned until D has pulled."""
        if route.prefill is None:
            return
        self._course.prefill_done(route, facts, now_s)
        p, d, tokens = route.prefill.name, route.decode.name, route.prompt_tokens
        self._remember(p, facts)
        charge = self.ledger.charge
        route.lease.replace((*charge(p, Phase.PINNED, tokens), *charge(d, Phase.INBOUND, tokens)))

    def first_token(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """D has answered: the prompt's KV is there, and the stream decodes."""
        name = route.decode.name
        self._course.first_token(route, facts, now_s)
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
        self._course.release(route, now_s)
        route.prefill = None
        self._charge_colocated(route, now_s)

    def finish(self, route: Route, now_s: float, output_tokens: int | None = None) -> None:
        """The request is over, however it ended: take back what is charged.

        `output_tokens`: of a whole answer, as the engine counted them.
        """
        name = route.decode.name
        if route.lease.is_open and self.fleet.is_up(name):
            kv_tokens = self.ledger.load(name).decode_tokens
            self._course.finished(route, kv_tokens, output_tokens, now_s)
        for charge in route.lease.charges:
            if charge.phase is Phase.DECODE:
                self.gate.released(route.decode.name, charge.tokens, now_s)
        self._course.release(route, now_s)
        route.lease.close()

    def _free(
        self, facts: RequestFacts, now_s: float, exclude: Collection[str]
    ) -> list[Candidate] | Reject:
        busy: list[Busy] = []
        free: list[Member] = []
        serving = self.fleet.serving(facts.model, exclude)
        if serving and self.gate.is_open(facts.model, now_s):
            return self._candidates(facts, serving, now_s)
        for member in serving:
            state = self.busy(member.instance.name, facts.model, now_s)
            if state is None:
                free.append(member)
            else:
                busy.append(state)
        if free:
            return self._candidates(facts, free, now_s)
        if busy:
            soonest = min(busy, key=lambda b: b.free_in_s)
            return Reject(soonest.check, retry_after_s([soonest.free_in_s]))
        return Reject(RejectReason.NO_INSTANCE, retry_after_s([NO_INSTANCE_RETRY_S]))

    def _candidates(
        self, facts: RequestFacts, members: list[Member], now_s: float
    ) -> list[Candidate]:
        hits = self.prefixes.hits(facts.block_hashes)
        tokens_of = {0: 0}
        load, kv_tokens, sessions = self.ledger.load, self.gate.kv_tokens, self.sessions.count
        candidates = []
        for member in members:
            name = member.instance.name
            blocks = hits.get(name, 0)
            hit = tokens_of.get(blocks)
            if hit is None:
                hit = tokens_of[blocks] = facts.hit_tokens(blocks)
            new = facts.prompt_tokens - hit
            knows_kv = kv_tokens(name) is not None
            candidates.append(
                Candidate(
                    member.instance,
                    load(name),
                    hit,
                    new,
                    sessions(name),
                    member.last_placed,
                    self._kv_full(name) if knows_kv else 0.0,
                    self._kv_wait_s(name, new, now_s) if knows_kv else 0.0,
                )
            )
        return candidates

    def _scene(self, facts: RequestFacts, free: list[Candidate], now_s: float) -> Scene:
        home = self.sessions.home(facts.session_id, now_s)
        mean = self._mean_ongoing(free)
        return Scene(self.config, facts, home, free, mean, now_s, self.latency)

    def _mean_ongoing(self, free: list[Candidate]) -> float:
        """Over all instances that are up, which mostly are the free ones."""
        if len(free) == len(self.fleet):
            loads = [c.load.ongoing_tokens for c in free]
        else:
            load = self.ledger.load
            loads = [load(m.instance.name).ongoing_tokens for m in self.fleet.up()]
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
            predicted_transfer_s=self._transfer_s(p, d) if p else None,
            candidates=tuple(free) if choice.size is Size.HEAVY else (),
        )
        if p is None:
            self._charge_colocated(route, now_s)
        else:
            self._course.reserve(route, p.instance, p.hit_tokens, p.load, now_s)
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
        return ready_s + self._transfer_s(c, d)

    def _transfer_s(self, p: Candidate, d: Candidate) -> float:
        return self.latency.transfer_s(p.instance.name, d.instance.name, d.new_tokens)

    def _kv_wait_s(self, name: str, new_tokens: int, now_s: float) -> float:
        """An engine begins a prompt only when its new KV fits beside what is running."""
        capacity = self.gate.kv_tokens(name)
        if not capacity:
            return 0.0
        load = self.ledger.load(name)
        held = load.ongoing_tokens + load.pinned_tokens
        excess = held + new_tokens - KV_USABLE_RATIO * capacity
        if excess <= 0:
            return 0.0
        rate = self.gate.release_tps(name, now_s) or capacity / KV_TURNOVER_S
        return excess / rate

    def _kv_full(self, name: str) -> float:
        """How full an instance's cache is, reusable blocks included; 0 while size is unknown."""
        capacity = self.prefixes.capacity(name)
        return min(1.0, self.prefixes.blocks(name) / capacity) if capacity else 0.0

    def _charge_colocated(self, route: Route, now_s: float) -> None:
        name, tokens = route.decode.name, route.new_tokens
        if self.fleet.get(name) is not None:
            load = self.ledger.load(name)
            self._course.reserve(route, route.decode, route.hit_tokens, load, now_s)
        route.lease.replace(self.ledger.charge(name, Phase.PREFILL, tokens))


def _route_class(size: Size, *, offloaded: bool) -> RouteClass:
    if size is Size.HEAVY:
        return RouteClass.HEAVY_P2P if offloaded else RouteClass.HEAVY_COLO
    return RouteClass.WARM if size is Size.WARM else RouteClass.MEDIUM
