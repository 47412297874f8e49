"""Eligible: the instances that may serve a request now, in columns for a decision.

Or why there are none, and when to come back.
"""

from __future__ import annotations

from collections.abc import Collection

from proxy.core.admission.gate import Busy
from proxy.core.admission.retry_after import RETRY_AFTER_MAX_S, retry_after_s
from proxy.core.fleet.members import Member
from proxy.core.known.tables import Tables
from proxy.core.kvcache.conversations import Found
from proxy.core.kvcache.reuse import is_far_above
from proxy.core.kvcache.sessions import Past
from proxy.core.placement.candidates import Candidates
from proxy.core.placement.decision import PlacementView
from proxy.core.types import Instance, PastCheck, Reject, RejectReason, RequestFacts

NO_INSTANCE_RETRY_S = 5.0
"""Advised wait when no instance is up: about two probe intervals and a restart's last seconds."""
ASLEEP_RETRY_S = 2.0
"""Least advised wait when all instances sleep or are paused: a pause for new weights is short."""
BusyMembers = list[tuple[Member, Busy]]


class Eligible:
    """Who may serve a request, by all that is known. It changes nothing but turns of a slow start.

    An instance takes part that is up, serves the model, holds the prompt, and is past no threshold.
    """

    def __init__(self, known: Tables) -> None:
        self._known = known
        self._heat, self._fleet, self._gate = known.heat, known.fleet, known.gate
        self._conversations, self._latency = known.conversations, known.latency
        self._prefixes, self._reuse = known.prefixes, known.reuse
        self._published, self._trust = known.published, known.trust
        self._targets = known.targets
        self._members: list[Member] = []
        self._instances: list[Instance] = []
        self._names: list[str] = []
        self._instance_changes = 0

    def first(
        self, facts: RequestFacts, found: Found, now_s: float
    ) -> tuple[Candidates, BusyMembers] | Reject:
        """The instances for a first placement, and those past a threshold.

        There may be none of the former, where one of the latter may compute the prompt and another
        one decode it.
        """
        if facts.holder is not None:
            held = self._at_holder(facts, facts.holder, now_s, exclude=())
            return held if isinstance(held, Reject) else (held, [])
        members, busy = self._past_gate(facts, now_s, exclude=())
        if self._targets.is_on and (late := self._late(members, facts.model, now_s)):
            return self.rejection(facts, busy + late, now_s)
        if not members and not (self._may_split(facts) and _can_share(busy)):
            return self.rejection(facts, busy, now_s)
        free = self._warm(found, members, now_s)
        return self._candidates(facts, free, now_s, found.past), busy

    def _late(self, members: list[Member], model: str, now_s: float) -> BusyMembers:
        """All members, if each would miss a target; none where one would not.

        Which one serves is for the policy to say: as long as there is one, decisions are the same.
        """
        targets, lane = self._targets, self._known.lane(model)
        late = self._all_late(members, now_s, None)
        if late:
            targets.lacks_room(lane, now_s)
        elif targets.lasts(lane, now_s):
            return self._all_late(members, now_s, self._latency.output_tokens)
        return late

    def _all_late(
        self, members: list[Member], now_s: float, output_tokens: float | None
    ) -> BusyMembers:
        late: BusyMembers = []
        for member in members:
            missed = self._targets.missed(member.state, now_s, output_tokens)
            if missed is None:
                return []
            late.append((member, Busy((missed[0],), missed[1])))
        return late

    def is_anyone_free(self, facts: RequestFacts, now_s: float, exclude: Collection[str]) -> bool:
        """Whether an instance other than these would take the request now."""
        return bool(self._past_gate(facts, now_s, exclude)[0])

    def free(
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
            return self.rejection(facts, busy, now_s)
        found = self._conversations.find(facts, now_s)
        if is_placed:
            free = self._warm(found, free, now_s)
        return self._candidates(facts, free, now_s, found.past)

    def _past_gate(
        self, facts: RequestFacts, now_s: float, exclude: Collection[str]
    ) -> tuple[list[Member], BusyMembers]:
        """The members that may be chosen for a request: those past all checks, and the rest."""
        model, fleet = facts.model, self._fleet
        members = fleet.serving(model, exclude)
        if model in fleet.uneven:
            members = fleet.holding(members, model, facts.prompt_tokens, facts.beyond_tokens)
        busy: BusyMembers = []
        refused = facts.refused_until_s
        if refused is None and self._gate.is_open(model, now_s):
            return members, busy
        free: list[Member] = []
        asker = facts.asker
        # No instance at all is worse than a hot one: health comes before heat.
        is_last = all(self._heat.takes_none(member.instance.name) for member in members)
        for member in members:
            name = member.instance.name
            state = self._known.busy(name, model, now_s, is_last=is_last, client=asker)
            if refused is not None and (left_s := refused.get(name, now_s) - now_s) > 0:
                state = Busy((RejectReason.UPSTREAM_BUSY,), left_s)
            if state is None:
                free.append(member)
            else:
                busy.append((member, state))
        return free, busy

    def rejection(self, facts: RequestFacts, busy: BusyMembers, now_s: float) -> Reject:
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
        is_heavy = facts.prompt_tokens >= self._known.config.heavy_threshold
        return is_heavy and facts.offloadable and self._known.transfers.can_offload

    def add_one_role(self, view: PlacementView, busy: BusyMembers, past: Past | None) -> None:
        """Add to a view the instances that a busy threshold leaves one role of an offload."""
        if not self._may_split(view.facts):
            return
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
        busy = self._known.busy(name, facts.model, now_s, is_last=True, client=facts.asker)
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
        known = self._known
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
            unreleased=self._known.unreleased_kv.on_each(states, now_s),
            sessions=[cache.sessions for cache in caches],
            last_placed=[member.last_placed for member in members],
            has_failed=[member.health.has_failed_for(facts.asker) for member in members],
            doubts=self._fleet.doubts(members, facts.asker, now_s),
            helps=None if heat.is_cool else [heat.of(name).helps for name in names],
            prefill_factors=(
                None if heat.is_cool else [heat.of(name).prefill_factor for name in names]
            ),
            paces=[(state.times or self._latency.of(state.name)).pace() for state in states],
        )


def _past(member: Member, state: Busy) -> PastCheck:
    return PastCheck(member.instance.name, state.checks, state.free_in_s)


def _can_share(busy: BusyMembers) -> bool:
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
