"""Router.admit: the one place where sessions, prefixes, load, gate and offload meet.

`admit` looks, decides and charges in one synchronous call, so that of two simultaneous HEAVY
requests the second sees the first. Afterwards the shell reports what happened (`prefill_done`,
`first_token`, `fall_back`, `retry`, `finish`), and the router keeps lease, sessions and prefixes in
step. Drivers: the aiohttp proxy, the virtual-time simulator, the tests.
"""

from __future__ import annotations

from collections.abc import Collection

from proxy.core.accounts.lease import Phase
from proxy.core.admission.gate import Busy
from proxy.core.admission.retry_after import RETRY_AFTER_MAX_S, retry_after_s
from proxy.core.fleet.members import Member
from proxy.core.known.fleet_state import FleetState
from proxy.core.kvcache.conversations import NOBODY, Found
from proxy.core.kvcache.reuse import is_far_above
from proxy.core.kvcache.sessions import Past, Stay
from proxy.core.kvcache.trust import Counts
from proxy.core.placement.alternatives import Shadowed
from proxy.core.placement.decision import (
    Candidates,
    Choice,
    Decide,
    PlacementView,
    place_of,
    route_class,
    split,
)
from proxy.core.placement.policies import POLICIES
from proxy.core.placement.wrappers import Shadow, failing_open
from proxy.core.routing import time_limits
from proxy.core.routing.hedging import Hedges, Parts
from proxy.core.routing.lifecycle import BlockUses, LatencyTracker
from proxy.core.routing.route import Route
from proxy.core.routing.session_kv import LiveSessionKv
from proxy.core.types import (
    NO_OFFLOADS,
    Fallback,
    Instance,
    Load,
    PastCheck,
    Place,
    Reason,
    Reject,
    RejectReason,
    RequestFacts,
    RouteClass,
    RouterConfig,
)

NO_INSTANCE_RETRY_S = 5.0
"""Advised wait when no instance is up: about two probe intervals and a restart's last seconds."""
ASLEEP_RETRY_S = 2.0
"""Least advised wait when all instances sleep or are paused: a pause for new weights is short."""
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
        self._heat, self._fleet, self._gate = known.heat, known.fleet, known.gate
        self._ledger, self._latency = known.ledger, known.latency
        self._sessions, self._conversations = known.sessions, known.conversations
        self._prefixes, self._reuse = known.prefixes, known.reuse
        self._published, self._trust = known.published, known.trust
        self._tracker = LatencyTracker(known.latency, known.slo_pressure)
        self._block_uses = BlockUses(known.reuse, known.fleet.states)
        parts = Parts(known.ledger, self._tracker, self._block_uses, known.fleet, known.gate)
        self.hedges = Hedges(parts, is_on=config.hedge)
        self._members: list[Member] = []
        self._instances: list[Instance] = []
        self._names: list[str] = []
        self._instance_changes = 0

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

    def admit(self, facts: RequestFacts, now_s: float) -> Route | Reject:
        """Choose D, the class and P, and charge them; or say why not and when to come back."""
        self._prefixes.now_s = now_s
        choice: Choice | None = None
        shadowed: Shadowed | None = None
        busy: list[tuple[Member, Busy]] = []
        found = self._conversations.find(facts, now_s)
        if facts.holder is not None:
            free = self._at_holder(facts, facts.holder, now_s, exclude=())
            if isinstance(free, Reject):
                return free
        else:
            members, busy = self._past_gate(facts, now_s, exclude=())
            if not members and not (self._may_split(facts) and _can_share(busy)):
                return self._rejection(facts, busy, now_s)
            free = self._candidates(facts, self._warm(found, members, now_s), now_s, found.past)
        view = self._view(facts, free, found, now_s)
        if busy and self._may_split(facts):
            self._add_one_role(view, busy, found.past)
        if len(free):
            choice = self._decide(view)
            shadowed = self._shadow.look(view, choice) if self._shadow else None
        elif self._config.offload_policy != "never":
            choice = split(view)
        if choice is None:
            return self._rejection(facts, busy, now_s)
        route = self._reserve(facts, choice, shadowed, found, now_s)
        route.home, route.place = view.home, place_of(view, choice.decode)
        return route

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
        free = self._free(facts, now_s, exclude | self._fleet.recently_failed(facts.asker))
        return self._free(facts, now_s, exclude) if isinstance(free, Reject) else free

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
        self._sessions.move(route.stay, self._fleet.states.of(d.instance.name).cache)
        route.decode, route.prefill, route.mistake = d.instance, None, choice.mistake
        route.hit_tokens, route.new_tokens = d.hit_tokens, d.new_tokens
        route.key_tokens, route.place = d.key_tokens, Place.RETRY
        return choice

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
        free = self._free(facts, now_s, exclude | failed, is_placed=is_placed)
        if isinstance(free, Reject):
            return self._free(facts, now_s, exclude, is_placed=is_placed)
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
        self._sessions.move(route.stay, self._fleet.states.of(on.name).cache)
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
        return bool(self._past_gate(facts, now_s, exclude)[0])

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
            self._sessions.ended(route.stay, kept if is_computed else None, now_s)
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

    def _free(
        self,
        facts: RequestFacts,
        now_s: float,
        exclude: Collection[str],
        *,
        is_placed: bool = True,
    ) -> Candidates | Reject:
        """The instances that may compute and decode the request, or why there is none.

        Not `is_placed`: it is only asked, so instances that start slowly use up no turn.
        """
        if facts.holder is not None:
            return self._at_holder(facts, facts.holder, now_s, exclude)
        free, busy = self._past_gate(facts, now_s, exclude)
        if not free:
            return self._rejection(facts, busy, now_s)
        found = self._conversations.find(facts, now_s)
        if is_placed:
            free = self._warm(found, free, now_s)
        return self._candidates(facts, free, now_s, found.past)

    def _past_gate(
        self, facts: RequestFacts, now_s: float, exclude: Collection[str]
    ) -> tuple[list[Member], list[tuple[Member, Busy]]]:
        """The members that may be chosen for a request: those past all checks, and the rest."""
        model, fleet = facts.model, self._fleet
        members = fleet.serving(model, exclude)
        if model in fleet.uneven:
            members = fleet.holding(members, model, facts.prompt_tokens, facts.beyond_tokens)
        busy: list[tuple[Member, Busy]] = []
        refused = facts.refused_until_s
        if refused is None and self._gate.is_open(model, now_s):
            return members, busy
        free: list[Member] = []
        asker = facts.asker
        # No instance at all is worse than a hot one: health comes before heat.
        is_last = all(self._heat.takes_none(member.instance.name) for member in members)
        for member in members:
            name = member.instance.name
            state = self.known.busy(name, model, now_s, is_last=is_last, client=asker)
            if refused is not None and (left_s := refused.get(name, now_s) - now_s) > 0:
                state = Busy((RejectReason.UPSTREAM_BUSY,), left_s)
            if state is None:
                free.append(member)
            else:
                busy.append((member, state))
        return free, busy

    def _rejection(
        self, facts: RequestFacts, busy: list[tuple[Member, Busy]], now_s: float
    ) -> Reject:
        model, asker = facts.model, facts.asker
        if not busy:
            rested_s = self._fleet.rested_s(model, now_s)
            if rested_s is not None:
                # What has lasted for so long is likely to last as long again.
                wait_s = max(ASLEEP_RETRY_S, rested_s)
                return Reject(RejectReason.ASLEEP, retry_after_s([wait_s]))
            return Reject(RejectReason.NO_INSTANCE, retry_after_s([NO_INSTANCE_RETRY_S]))
        soonest = min([state for _, state in busy], key=lambda b: b.free_in_s)
        intake_tps, wait_s = self._gate.intake_tps, soonest.free_in_s
        tps = sum([intake_tps(m.instance.name, state.check, now_s) for m, state in busy])
        past = tuple([_past(member, state) for member, state in busy])
        is_own = any(self._gate.is_own(m.instance.name, asker, now_s) for m, _ in busy)
        wait = retry_after_s([wait_s])
        return Reject(soonest.check, wait, wait_s, tps, past, model, is_own)

    def _may_split(self, facts: RequestFacts) -> bool:
        """Whether an instance that may take one role only could be of use to the request."""
        is_heavy = facts.prompt_tokens >= self._config.heavy_threshold
        return is_heavy and facts.offloadable and self._transfers.can_offload

    def _add_one_role(
        self, view: PlacementView, busy: list[tuple[Member, Busy]], past: Past | None
    ) -> None:
        """Add to a view the instances that a busy threshold leaves one role of an offload."""
        for_p = [member for member, state in busy if state.may_prefill]
        for_d = [member for member, state in busy if state.may_decode]
        if for_p:
            view.prefill_only = self._candidates(view.facts, for_p, view.now_s, past)
        if for_d:
            view.decode_only = self._candidates(view.facts, for_d, view.now_s, past)
        view.busy_peers = [member.instance for member, state in busy if not state.may_prefill]

    def _at_holder(
        self, facts: RequestFacts, name: str, now_s: float, exclude: Collection[str]
    ) -> Candidates | Reject:
        """The one instance that holds what the request is about, while it drains too."""
        member = self._fleet.get(name)
        is_usable = self._fleet.is_up(name) or self._fleet.is_used(name)
        if member is None or not is_usable or name in exclude:
            return Reject(RejectReason.HOLDER_DOWN, retry_after_s([NO_INSTANCE_RETRY_S]))
        busy = self.known.busy(name, facts.model, now_s, is_last=True, client=facts.asker)
        if busy is not None:
            wait_s = min(busy.free_in_s, float(RETRY_AFTER_MAX_S))
            past = (_past(member, busy),)
            return Reject(busy.check, retry_after_s([wait_s]), wait_s, 0.0, past, facts.model)
        return self._candidates(facts, [member], now_s)

    def _warm(self, found: Found, free: list[Member], now_s: float) -> list[Member]:
        if not self._fleet.is_weighed:
            return free
        return self._fleet.warm(free, found.home, now_s)

    def _candidates(
        self, facts: RequestFacts, members: list[Member], now_s: float, past: Past | None = None
    ) -> Candidates:
        known = self.known
        if members != self._members or known.instance_changes != self._instance_changes:
            # Nearly always the members of the last decision.
            instances = [member.instance for member in members]
            self._members, self._instances = members, instances
            self._instance_changes = known.instance_changes
            self._names = [instance.name for instance in instances]
        heat, names, states = self._heat, self._names, [member.state for member in members]
        caches = [state.cache for state in states]
        loads = [state.account.seen or state.account.load() for state in states]
        hits = _hit_tokens(facts, self._reuse.hits(facts), names)
        is_exact = [False] * len(names)
        if exact := self._published.hits(facts):
            for at, name in enumerate(names):
                if (held := exact.get(name)) is not None:
                    is_exact[at] = True
                    is_above = is_far_above(facts, held, hits[at])
                    goes_on = is_above and self._published.goes_on(facts, name)
                    hits[at] = self._reuse.expected(
                        caches[at], facts, held, hits[at], goes_on=goes_on
                    )
        believed, is_doubted = self._trust.believed(facts, past, caches, hits, is_exact)
        return Candidates(
            prompt_tokens=facts.prompt_tokens,
            instances=self._instances,
            names=names,
            loads=loads,
            hit_tokens=believed,
            key_tokens=hits,
            is_home_doubted=is_doubted,
            kv_full=self._prefixes.full_ratios(caches),
            kv_wait_s=self._gate.kv_waits_s(states, loads, believed, facts.prompt_tokens, now_s),
            kv_tokens=[state.assumed_kv_tokens for state in states],
            unreleased=self.known.unreleased_kv.on_each(states, now_s),
            sessions=[cache.sessions for cache in caches],
            last_placed=[member.last_placed for member in members],
            has_failed=[member.health.has_failed_for(facts.asker) for member in members],
            doubts=self._fleet.doubts(members, facts.asker, now_s),
            helps=None if heat.is_cool else [heat.of(name).helps for name in names],
            prefill_factors=(
                None if heat.is_cool else [heat.of(name).prefill_factor for name in names]
            ),
            times=[state.times or self._latency.of(state.name) for state in states],
        )

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
            self._up_loads,
            now_s,
            self._latency,
            self._transfers,
            self.known.slo_pressure.price,
            session_kv=LiveSessionKv(facts, sessions, self._prefixes, states, now_s, found),
        )

    def _up_loads(self) -> list[Load]:
        """Loads of all instances that are up."""
        return [member.state.account.load() for member in self._fleet.up()]

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


def _past(member: Member, state: Busy) -> PastCheck:
    return PastCheck(member.instance.name, state.checks, state.free_in_s)


def _can_share(busy: list[tuple[Member, Busy]]) -> bool:
    """Whether one of these instances may compute a prompt and another one decode it."""
    states = [state for _, state in busy]
    return any(s.may_prefill for s in states) and any(s.may_decode for s in states)


def _hit_tokens(facts: RequestFacts, blocks: dict[str, int], names: list[str]) -> list[int]:
    """Hit tokens per instance, of hit blocks; many hits are equal: none, or a system prompt."""
    hits, last, tokens = [], 0, 0
    for name in names:
        count = blocks.get(name, 0)
        if count != last:
            last, tokens = count, facts.hit_tokens(count)
        hits.append(tokens)
    return hits


def _turn(facts: RequestFacts, stay: Stay | None) -> int | None:
    """The number of the turn; None where a request under a session's name is none of its turns."""
    if stay is None:
        return 0 if facts.takes_turn else None
    return stay.turn if stay.key or facts.session_id is None else None


def _shadow_of(config: RouterConfig) -> Shadow | None:
    if config.shadow_policy is None:
        return None
    return Shadow(config.shadow_policy, POLICIES[config.shadow_policy])
