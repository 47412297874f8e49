"""Router.admit: the one place where sessions, prefixes, load, gate and offload meet.

`admit` looks, decides and charges in one synchronous call, so that of two simultaneous HEAVY
requests the second sees the first. Afterwards the shell reports what happened (`prefill_done`,
`first_token`, `fall_back`, `retry`, `finish`), and the router keeps lease, sessions and prefixes in
step. Drivers: the aiohttp proxy, the virtual-time simulator, the tests.
"""

from __future__ import annotations

from collections.abc import Collection

from proxy.core.accounts.lease import Phase
from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.conversations import NOBODY, Found
from proxy.core.kvcache.sessions import Stay
from proxy.core.kvcache.trust import Counts
from proxy.core.placement.alternatives import Shadowed
from proxy.core.placement.candidates import Candidates
from proxy.core.placement.decision import (
    Choice,
    Decide,
    PlacementView,
    place_of,
    route_class,
    split,
)
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.stored import Made
from proxy.core.placement.wrappers import Shadow, failing_open
from proxy.core.routing import time_limits
from proxy.core.routing.eligible import Eligible
from proxy.core.routing.hedging import Hedges, Parts
from proxy.core.routing.lifecycle import BlockUses, LatencyTracker
from proxy.core.routing.route import Route
from proxy.core.routing.session_kv import LiveSessionKv
from proxy.core.sharing.journal import Journal
from proxy.core.types import (
    NO_OFFLOADS,
    Fallback,
    Instance,
    Load,
    Place,
    Reason,
    Reject,
    RequestFacts,
    RouteClass,
    RouterConfig,
)

RELEASERS = 2
"""Instances that are asked to free KV, the second where the first cannot be reached."""


class Router:
    """Decides by what is known, and keeps it in step with each route. No method waits.

    `decide` makes the choice among the free instances; the default follows the options.
    """

    def __init__(self, known: FleetState, decide: Decide | None = None) -> None:
        self.known = known
        config = known.config
        self._decide = decide or failing_open(POLICIES[config.offload_policy])
        self._shadow = _shadow_of(config)
        self._config, self._transfers = config, known.transfers
        self._fleet, self._gate = known.fleet, known.gate
        self._ledger, self._latency = known.ledger, known.latency
        self._sessions, self._conversations = known.sessions, known.conversations
        self._prefixes = known.prefixes
        self._published, self._trust = known.published, known.trust
        self._tracker = LatencyTracker(known.latency, known.slo_pressure)
        self._block_uses = BlockUses(known.reuse, known.fleet.states)
        parts = Parts(known.ledger, self._tracker, self._block_uses, known.fleet, known.gate)
        self.hedges = Hedges(parts, is_on=config.hedge)
        self._eligible = Eligible(known)
        self._journal: Journal | None = None
        self._made = Made()

    def reconfigure(self, config: RouterConfig) -> None:
        """Decide by other limits, targets and policies from now on.

        What state was made with stays as it was: rates, capacities, lifetimes. Thresholds that an
        operator set meanwhile stay unless the new configuration has other ones.
        """
        self.known.reconfigure(config)
        self._config, self._transfers = config, self.known.transfers
        self._decide = failing_open(POLICIES[config.offload_policy])
        self._shadow = _shadow_of(config)
        self.hedges.switch(is_on=config.hedge)
        self.known.freed()

    def share(self, journal: Journal | None) -> None:
        """Note for other replicas what becomes of prompts and sessions; None: tell nobody."""
        self._journal = self._block_uses.journal = journal

    def admit(self, facts: RequestFacts, now_s: float) -> Route | Reject:
        """Choose D, the class and P, and charge them; or say why not and when to come back."""
        self._prefixes.now_s = now_s
        choice: Choice | None = None
        shadowed: Shadowed | None = None
        found = self._conversations.find(facts, now_s)
        who = self._eligible.first(facts, found, now_s)
        if isinstance(who, Reject):
            return who
        free, busy = who
        view = self._view(facts, free, found, now_s)
        if busy:
            self._eligible.add_one_role(view, busy, found.past)
        if len(free):
            choice = self._decide(view)
            shadowed = self._shadow.look(view, choice) if self._shadow else None
        elif self._config.offload_policy != "never":
            choice = split(view)
        if choice is None:
            return self._eligible.rejection(facts, busy, now_s)
        route = self._reserve(facts, choice, shadowed, found, now_s)
        route.home, route.place = view.home, place_of(view, choice.decode)
        route.reachable_hit_tokens = max([route.hit_tokens, *free.hit_tokens])
        if route.options is not None:
            self._made.add(route.options, view)
        return route

    def view_of(self, options: object) -> PlacementView | None:
        """What a decision with these alternatives was made of, if it is one of the last."""
        return self._made.of(options)

    def give_back(self, route: Route, now_s: float) -> None:
        """End all that the route holds: hedge, reservation, use of blocks, charges; each once.

        The next attempt may charge anew, until `finish`.
        """
        self.hedges.end_hedge(route, now_s)
        self._tracker.release_reservation(route, now_s)
        self._block_uses.end_use(route)
        route.lease.replace(())

    def elsewhere(
        self, route: Route, facts: RequestFacts, now_s: float, *, avoids_doubted: bool = False
    ) -> Candidates | Reject:
        """Instances on which a request whose D failed may run again: those not tried yet.

        Never where the breaker is open; only where nothing failed lately, if there is such a place.
        `avoids_doubted`: not where a trial has to decide, either.
        """
        route.tried.add(route.decode.name)
        exclude = route.tried | self._fleet.open()
        if avoids_doubted:
            exclude |= self._fleet.failing(facts.asker)
        free = self._eligible.free(facts, now_s, exclude | self._fleet.recently_failed(facts.asker))
        return self._eligible.free(facts, now_s, exclude) if isinstance(free, Reject) else free

    def retry(
        self,
        route: Route,
        facts: RequestFacts,
        now_s: float,
        free: Candidates | None = None,
    ) -> Route | Reject:
        """Place the request again, on one of `free`, or `elsewhere`."""
        self.give_back(route, now_s)
        found = free if free is not None else self.elsewhere(route, facts, now_s)
        if isinstance(found, Reject):
            return found
        choice = self._place_again(route, facts, found, now_s)
        route.route_class = route_class(choice.size, offloaded=False)
        if route.fallback is None:
            route.reason = choice.reason
        route.predicted_ttft_s, route.predicted_transfer_s = choice.predicted_ttft_s, None
        route.predicted_ttft_bound_s = self._latency.ttft_bound_s(choice.predicted_ttft_s)
        route.options = choice.alternatives()
        self._charge_colocated(route, facts, now_s)
        return route

    def _place_again(
        self, route: Route, facts: RequestFacts, free: Candidates, now_s: float
    ) -> Choice:
        found = Found(route.stay.key or None, route.stay) if route.stay is not None else NOBODY
        choice = self._together(facts, free, found, now_s)
        d = choice.decode
        self._move_stay(route, d.instance.name)
        route.decode, route.prefill, route.mistake = d.instance, None, choice.mistake
        route.hit_tokens, route.new_tokens = d.hit_tokens, d.new_tokens
        route.reachable_hit_tokens = max(free.hit_tokens)
        route.key_tokens, route.place = d.key_tokens, Place.RETRY
        return choice

    def _move_stay(self, route: Route, name: str) -> None:
        """The request's turn goes on at another instance."""
        self._sessions.move(route.stay, self._fleet.states.of(name).cache)
        if self._journal is not None:
            self._journal.moved(route.lease, name)

    def _together(
        self, facts: RequestFacts, free: Candidates, found: Found, now_s: float
    ) -> Choice:
        """The best instance to compute and answer a prompt: the D of a pair may be a bad one."""
        view = self._view(facts, free, found, now_s)
        view.transfers = NO_OFFLOADS
        return self._decide(view)

    def beside(
        self, facts: RequestFacts, lost: Collection[str], now_s: float, *, is_placed: bool = True
    ) -> Candidates | Reject:
        """Instances that may go on with a stream, none of `lost` and none with an open breaker.

        Only those where nothing failed lately, if there are any. See `_free` for `is_placed`.
        """
        exclude = {*lost} | self._fleet.open()
        failed = self._fleet.recently_failed(facts.asker)
        free = self._eligible.free(facts, now_s, exclude | failed, is_placed=is_placed)
        if isinstance(free, Reject):
            return self._eligible.free(facts, now_s, exclude, is_placed=is_placed)
        return free

    def would_go(self, facts: RequestFacts, left: str, now_s: float) -> Instance | Reject:
        """The instance that a stream would migrate to now; nothing is charged."""
        free = self.beside(facts, (left,), now_s, is_placed=False)
        if isinstance(free, Reject):
            return free
        found = self._conversations.find(facts, now_s)
        return self._together(facts, free, found, now_s).decode.instance

    def move(
        self, route: Route, facts: RequestFacts, free: Candidates, output_tokens: int, now_s: float
    ) -> None:
        """Place a stream that has begun on one of `free`, behind `output_tokens` of its output.

        They are a part of the prompt there, which no instance has cached.
        """
        route.tried.add(route.decode.name)
        self.give_back(route, now_s)
        self._place_again(route, facts, free, now_s)
        route.prompt_tokens = facts.prompt_tokens + output_tokens
        route.new_tokens += output_tokens
        self._charge_colocated(route, facts, now_s)

    def move_on(self, route: Route, facts: RequestFacts, output_tokens: int, now_s: float) -> None:
        """A stream goes on where it was moved to, behind more of its output than it was then."""
        self.give_back(route, now_s)
        more = facts.prompt_tokens + output_tokens - route.prompt_tokens
        route.prompt_tokens += more
        route.new_tokens += more
        self._charge_colocated(route, facts, now_s)

    def runs_on(self, route: Route, on: Instance) -> None:
        """A stream that was moved is decoded where it was until the next instance has it."""
        decodes = self._ledger.charge(on.name, Phase.DECODE, route.prompt_tokens)
        route.lease.replace((*route.lease.charges, *decodes))

    def stay(
        self, route: Route, facts: RequestFacts, on: Instance, output_tokens: int, now_s: float
    ) -> None:
        """A stream that was to be moved goes on where it is, `on`: charge it there again."""
        self.give_back(route, now_s)
        route.prompt_tokens = facts.prompt_tokens + output_tokens
        self._move_stay(route, on.name)
        route.decode = on
        self._block_uses.begin_use(route, on.name, facts)
        route.lease.replace(self._ledger.charge(on.name, Phase.DECODE, route.prompt_tokens))

    def repeat(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        """Charge the same instance again, after `give_back`."""
        self._charge_colocated(route, facts, now_s)

    def has_other(self, route: Route, facts: RequestFacts, now_s: float) -> bool:
        """Whether another instance would take this request now."""
        if facts.holder is not None:
            return False
        exclude = {*route.tried, route.decode.name} | self._fleet.open()
        return self._eligible.is_anyone_free(facts, now_s, exclude)

    def prefill_done(
        self, route: Route, facts: RequestFacts, now_s: float, cached_ratio: float | None = None
    ) -> None:
        """P has answered: its work is over, its copy stays pinned until D has pulled.

        `cached_ratio`: the part of the prompt that P found in its cache, where it tells.
        """
        if route.prefill is None:
            return
        self.hedges.drop(route, now_s)
        self._tracker.prefill_done(route, facts, now_s)
        self._tracker.told(route, cached_ratio)
        p, d, tokens = route.prefill.name, route.decode.name, route.prompt_tokens
        self._block_uses.computed(route, facts, cached_ratio)
        charge = self._ledger.charge
        route.lease.replace((*charge(p, Phase.PINNED, tokens), *charge(d, Phase.INBOUND, tokens)))

    def first_token(
        self, route: Route, facts: RequestFacts, now_s: float, *, seen: bool = True
    ) -> None:
        """D has answered: the prompt's KV is there, and the stream decodes.

        Not `seen`: the answer came in one piece, so its time teaches nothing of prefills.
        """
        name = route.decode.name
        self.hedges.end_hedge(route, now_s)
        self._tracker.first_token(route, facts, now_s, seen=seen)
        if route.prefill is not None:
            self._block_uses.received(route, facts)
        else:
            self._block_uses.computed(route, facts)
        charge, stay = self._ledger.charge, route.stay
        charges = charge(name, Phase.DECODE, route.prompt_tokens)
        if stay is not None and stay.key and 0 < stay.shared_tokens <= route.prompt_tokens:
            charges = (*charges, *charge(name, Phase.SHARED, stay.shared_tokens))
        route.lease.replace(charges)

    def came_whole(self, route: Route, now_s: float) -> None:
        """D's answer was there at once, to its end: instead of `first_token`, without a stream.

        For a request that is not offloaded; `completed` and `finish` follow now.
        """
        route.first_token_s = now_s
        if route.times is not None:
            route.times.computed_tokens += route.computes_tokens
        self._gate.released(route.decode.name, route.prompt_tokens, now_s)

    def completed(
        self,
        route: Route,
        facts: RequestFacts,
        cached_ratio: float | None = None,
        counts: Counts | None = None,
    ) -> None:
        """The answer came to its end: D gives its blocks back, the most recently used ones now.

        `cached_ratio`: the part of the prompt that D found in its cache, where it tells and has
        read the prompt there once: see `Reuse.reported`. `counts`: its tokens as D counted them.
        """
        if counts is not None:
            self._told(route, facts, counts)
        self._tracker.told(route, cached_ratio)
        decoded = sum([c.tokens for c in route.lease.charges if c.phase is Phase.DECODE])
        answer_tokens = max(0, decoded - route.prompt_tokens)
        self._block_uses.completed(route, facts, cached_ratio, answer_tokens)

    def _told(self, route: Route, facts: RequestFacts, counts: Counts) -> None:
        """Hold what was predicted against what D counted.

        What a peer has handed over counts as cached there, and says nothing of the prediction.
        """
        if route.prefill is not None:
            counts = counts[0], None, counts[2]
        stay, cache = route.stay, self._fleet.states.of(route.decode.name).cache
        is_session = stay is not None and not stay.is_dropped
        past = stay.past if stay is not None else None
        past = self._trust.told(facts, past, cache, route.key_tokens, counts, is_session=is_session)
        if stay is not None:
            stay.past = past

    def fall_back(self, route: Route, facts: RequestFacts, why: Fallback, now_s: float) -> None:
        """The offload failed before the client's first byte: compute on D instead.

        Where a hedge does so already, it goes on.
        """
        route.fallback = why
        late = why in (Fallback.TRANSFER_TIMEOUT, Fallback.P_GONE, Fallback.D_FAILED)
        route.reason = Reason.TRANSFER_FAILED if late else Reason.PREFILL_FAILED
        route.route_class = RouteClass.HEAVY_COLO
        self._tracker.release_reservation(route, now_s)
        route.prefill = None
        if not self.hedges.adopt(route):
            self._charge_colocated(route, facts, now_s)

    def finish(self, route: Route, now_s: float, output_tokens: int | None = None) -> None:
        """The request is over, however it ended: take back what is charged.

        `output_tokens`: of a whole answer, as the engine counted them.
        """
        name, has_decoded = route.decode.name, False
        account = self._fleet.states.of(name).account
        for charge in route.lease.charges:
            # Nothing is learned of another process than the one that it ran on.
            if charge.phase is Phase.DECODE and charge.account is account:
                has_decoded = True
                self._gate.released(name, charge.tokens, now_s)
        if has_decoded and self._fleet.is_up(name):
            kv_tokens = self._ledger.load(name).decode_tokens
            self._tracker.finished(route, kv_tokens, output_tokens, now_s)
        if route.stay is not None:
            kept = route.prompt_tokens + (output_tokens or 0)
            is_computed = route.first_token_s is not None
            tokens = kept if is_computed else None
            self._sessions.ended(route.stay, tokens, now_s)
            if self._journal is not None:
                self._journal.over(route.lease, tokens)
            route.stay = None
        self.give_back(route, now_s)
        self._tracker.told(route)
        route.lease.close()

    @property
    def pins_kv(self) -> bool:
        """Whether P keeps a prompt's KV until D has fetched it."""
        return self._transfers.pins

    def releasers(self, p: Instance, d: Instance) -> list[str]:
        """Names of the instances to ask to free KV that P holds for D, the likeliest first.

        Those of P's kind first, as KV moves among them; D last: mostly it cannot be reached.
        """
        known = self._fleet.get(p.name)
        models = known.models if known is not None else None
        up = [m for m in self._fleet.up() if m.instance.name != p.name]
        up.sort(key=lambda m: (m.models != models, m.instance.name == d.name))
        return [m.instance.name for m in up[:RELEASERS]]

    def silence_limit_s(self, route: Route, now_s: float, cap_s: float) -> float:
        """Longest silence of a started answer, at most `cap_s`."""
        name = route.decode.name
        if self._fleet.get(name) is None:
            return cap_s
        load = self._ledger.load(name)
        return time_limits.idle_limit_s(self._latency, route, load, now_s, cap_s)

    def _view(
        self, facts: RequestFacts, free: Candidates, found: Found, now_s: float
    ) -> PlacementView:
        self._sessions.renew_curve(now_s)
        sessions, states = self._sessions, self._fleet.states
        return PlacementView(
            self._config,
            facts,
            found.home,
            free,
            self._other_loads(free),
            now_s,
            self._latency.fleet(facts.prompt_tokens),
            self._transfers,
            self.known.slo_pressure.price,
            session_kv=LiveSessionKv(facts, sessions, self._prefixes, states, now_s, found),
        )

    def _other_loads(self, free: Candidates) -> list[Load]:
        """Loads of the instances that are up and not free; mostly there are none."""
        up = self._fleet.up()
        if len(up) == len(free):
            return []
        return [m.state.account.load() for m in up if m.instance.name not in free.names]

    def _reserve(
        self,
        facts: RequestFacts,
        choice: Choice,
        shadowed: Shadowed | None,
        found: Found,
        now_s: float,
    ) -> Route:
        d, p = choice.decode, choice.prefill
        home = self._fleet.states.of(d.instance.name).cache
        stay = self._conversations.assign(found, facts, home, now_s, d.hit_tokens)
        if choice.placed:
            self._fleet.placed(d.instance.name)
        predicted_s = choice.predicted_ttft_s
        route = Route(
            decode=d.instance,
            prefill=p.instance if p else None,
            route_class=route_class(choice.size, offloaded=p is not None),
            reason=choice.reason,
            policy=self._config.offload_policy,
            prompt_tokens=facts.prompt_tokens,
            hit_tokens=d.hit_tokens,
            new_tokens=d.new_tokens,
            new_tokens_prefill=p.new_tokens if p else None,
            lease=self._ledger.open(()),
            turn=_turn(facts, stay),
            predicted_ttft_s=predicted_s,
            predicted_ttft_bound_s=self._latency.ttft_bound_s(predicted_s),
            predicted_transfer_s=choice.predicted_transfer_s,
            options=choice.alternatives(),
        )
        route.shadow, route.mistake, route.stay = shadowed, choice.mistake, stay
        if self._journal is not None and stay is not None:
            self._journal.placed(route.lease, stay, facts.tenant)
        route.key_tokens = d.key_tokens
        route.claim = self._published.claim(facts, d.instance.name)
        if p is None:
            self._charge_colocated(route, facts, now_s)
        else:
            self._block_uses.begin_use(route, p.instance.name, facts)
            self._tracker.reserve(route, p.instance, p.hit_tokens, p.load, now_s, p.kv_wait_s)
            ledger = self._ledger
            prefill = ledger.computing(p.instance.name, p.new_tokens, p.hit_tokens)
            inbound = ledger.charge(d.instance.name, Phase.INBOUND, facts.prompt_tokens)
            route.lease.replace((*prefill, *inbound))
        return route

    def _charge_colocated(self, route: Route, facts: RequestFacts, now_s: float) -> None:
        name, hit = route.decode.name, route.hit_tokens
        self._block_uses.begin_use(route, name, facts)
        route.lease.replace(())  # the charges of an earlier attempt do not count beside this one
        if self._fleet.get(name) is not None:
            load = self._ledger.load(name)
            kv_wait_s = self._gate.kv_wait_s(name, load, route.prompt_tokens, hit, now_s)
            self._tracker.reserve(route, route.decode, hit, load, now_s, kv_wait_s)
        route.lease.replace(self._ledger.computing(name, route.new_tokens, hit))


def _turn(facts: RequestFacts, stay: Stay | None) -> int | None:
    """The number of the turn; None where a request under a session's name is none of its turns."""
    if stay is None:
        return 0 if facts.takes_turn else None
    return stay.turn if stay.key or facts.session_id is None else None


def _shadow_of(config: RouterConfig) -> Shadow | None:
    if config.shadow_policy is None:
        return None
    return Shadow(config.shadow_policy, POLICIES[config.shadow_policy])
