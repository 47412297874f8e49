"""FleetState: what is known of the fleet, in one owner of all parts that decisions read.

It decides nothing. `Router` reads it and writes to it in the course of requests; whoever watches
the fleet (probes, reports, operators) writes to it too; /instances, the gauges and the snapshot
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from proxy.core.accounts.instances import InstanceState
from proxy.core.accounts.ledger import Ledger, UnreleasedKv
from proxy.core.admission.gate import ANY_MODEL, Busy, Gate
from proxy.core.connectors import CONNECTORS, transfer_rules
from proxy.core.fleet.bytes_per_token import BytesPerToken
from proxy.core.fleet.events import InstanceEvents
from proxy.core.fleet.health import State
from proxy.core.fleet.members import Fleet
from proxy.core.fleet.output_tokens import OutputTokens
from proxy.core.kvcache.conversations import Conversations
from proxy.core.kvcache.prefix_index import PrefixIndex
from proxy.core.kvcache.published_index import PublishedIndex
from proxy.core.kvcache.reuse import Reuse
from proxy.core.kvcache.sessions import Sessions, StoredResponses
from proxy.core.kvcache.trust import Trust
from proxy.core.latency.model import Latency
from proxy.core.latency.slo_pressure import SloPressure
from proxy.core.thermal.fleet_limits import HeatByInstance
from proxy.core.thermal.readings import HeatLimits
from proxy.core.types import Instance, RequestFacts, RouterConfig


class FleetState:
    """All that is known of the fleet, and of what its instances hold. Single-threaded.

    What is dropped with an instance's process leaves every part at once.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.transfers = transfer_rules(CONNECTORS[config.kv_connector])
        self.heat = HeatByInstance()
        self.fleet = Fleet(config.slow_start_s, self.heat)
        states = self.fleet.states
        self.ledger = Ledger(states)
        self.latency = Latency(
            config.prefill_throughput,
            config.kv_transfer_time_s,
            config.max_num_batched_tokens,
            states,
        )
        self.bytes_per_token = BytesPerToken(states)
        self.output_tokens = OutputTokens(states)
        self.unreleased_kv = UnreleasedKv(config.kv_pin_timeout_s, states)
        self.slo_pressure = SloPressure(config.tpot_slo_s)
        self.sessions = Sessions(config.session_ttl_s, config.max_sessions)
        self.conversations = Conversations(self.sessions, config.max_sessions, config.session_ttl_s)
        self.responses = StoredResponses(config.session_ttl_s, config.max_sessions)
        self.prefixes = PrefixIndex(config.prefix_cache_bytes)
        self.reuse = Reuse(self.prefixes)
        self.published = PublishedIndex(config.prefix_cache_bytes)
        self.trust = Trust()
        self.gate = Gate(
            config.thresholds,
            config.max_num_batched_tokens,
            config.prefill_throughput,
            states,
            self.heat,
        )
        self.events = InstanceEvents(self.fleet, self.freed)
        self.instance_changes = 0
        """Number of members whose `Instance` was replaced."""
        self._on_freed: Callable[[], None] | None = None
        states.on_dropped = self._sweep

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by other limits and targets from now on; see `Router.reconfigure`."""
        if config.thresholds != self.config.thresholds:
            self.gate.set(ANY_MODEL, config.thresholds)
        self.config = config
        self.transfers = transfer_rules(CONNECTORS[config.kv_connector])
        self.slo_pressure.aim_at(config.tpot_slo_s)

    def add(self, instance: Instance, *, is_proven: bool = True) -> None:
        """Bring an instance in, with fresh counters; see `Fleet.add`."""
        self.fleet.add(instance, is_proven=is_proven)
        self.freed()

    def remove(self, name: str) -> None:
        """Take an instance out; its live leases go on against its detached account."""
        self.fleet.remove(name)
        self.heat.forget(name)
        self.gate.know_bases(self.fleet.bases())
        self.freed()

    def rests(self, name: str, rest: State | None, now_s: float) -> bool:
        """Obey what an engine says: ASLEEP or PAUSED, or neither; returns whether that is news.

        One that sleeps has emptied its cache.
        """
        if not self.events.rests(name, rest, now_s):
            return False
        if rest is State.ASLEEP:
            self.prefixes.empty(self.fleet.states.of(name).cache)
        return True

    def limit_heat(self, name: str, limits: HeatLimits) -> None:
        """Obey these limits on an instance from the next decision on; COOL ends all of them."""
        if self.fleet.get(name) is not None and self.heat.limit(name, limits):
            self.freed()

    def _sweep(self, dropped: InstanceState) -> None:
        """Clear the tables over all instances of one whose state was dropped.

        All else that was known of it left with the state.
        """
        self.prefixes.drop(dropped.cache)
        self.published.process_gone(dropped.name)
        self.sessions.lose(dropped.cache)
        self.latency.drop_pairs(dropped.name)

    def call_when_freed(self, on_freed: Callable[[], None] | None) -> None:
        """Call `on_freed` after any change that may admit a rejected request; None stops the calls.

        It is called in the middle of changes, so it must not ask the router anything itself.
        """
        self.ledger.on_freed = self.gate.on_change = self._on_freed = on_freed

    def freed(self) -> None:
        """Something has changed that may admit a rejected request."""
        if self._on_freed is not None:
            self._on_freed()

    def busy(
        self,
        name: str,
        model: str,
        now_s: float,
        *,
        is_last: bool = False,
        client: str | None = None,
    ) -> Busy | None:
        """The threshold that an instance is past, or None; KeyError for an unknown instance.

        `is_last`: there is no other that may be chosen. `client`: whose request it is; None: any.
        """
        load = self.ledger.load(name)
        return self.gate.busy(name, model, load, now_s, is_last=is_last, client=client)

    def busy_by_model(self, name: str, now_s: float) -> dict[str, Busy | None]:
        """`busy` for each row of thresholds that holds for a model which the instance serves.

        While its models are unknown, for every row.
        """
        return {model: self.busy(name, model, now_s) for model in self._rows_of(name)}

    def lacks_kv_size(self, name: str) -> bool:
        """Whether the KV threshold can't refuse anything: the engine has told no KV cache size."""
        if self.gate.kv_tokens(name) is not None:
            return False
        in_force = [self.gate.thresholds(model, name) for model in self._rows_of(name)]
        return any(limits.active_decode_blocks_threshold is not None for limits in in_force)

    def _rows_of(self, name: str) -> list[str]:
        member = self.fleet.get(name)
        models = member.models if member is not None else None
        return self.gate.rows_of(models, name) if models else list(self.gate.configured())

    def observe_models(
        self,
        name: str,
        models: Iterable[str],
        bases: Mapping[str, str],
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        """Take in the models that an instance serves: see `Fleet.observe_models`."""
        known = self.fleet.bases()
        self.fleet.observe_models(name, models, bases, lengths)
        if (now := self.fleet.bases()) != known:
            self.gate.know_bases(now)

    def lane(self, model: str) -> str:
        """Under which name requests for a model wait.

        Under its own, where an instance is known to serve it; else together with all others that
        the same busy thresholds hold for. Lanes have turns one after another, and a client that
        invents models must not have one for each.
        """
        return model if self.fleet.serves(model) else f"unserved {self.gate.rows_of([model])[0]}"

    def note_published_size(self, name: str) -> None:
        """Take a KV cache whose engine reports no size to be as large as its evictions show."""
        tokens, state = self.published.kv_tokens(name), self.fleet.states.of(name)
        if tokens is not None and state.cache.learned_tokens != tokens:
            state.cache.learned_tokens = tokens
            self.fleet.states.assume_sizes()

    def is_usage_doubted(self, name: str) -> bool:
        """Whether nothing is learned from an instance's usage: it disagrees with the others'."""
        return self.fleet.states.of(name).is_usage_doubted

    def refine(self, facts: RequestFacts, now_s: float) -> None:
        """Correct a prompt's estimated length by what its session's last one was counted as."""
        self.trust.refine(facts, self.conversations.find(facts, now_s).past)
        self.published.refine(facts)

    def least_new_tokens(self, facts: RequestFacts) -> int:
        """Estimated tokens of a prompt that no instance has cached."""
        most = max(self.reuse.hits(facts).values(), default=0)
        return facts.prompt_tokens - facts.hit_tokens(most)

    def use_bootstrap(self, instance: Instance) -> None:
        """A bootstrap server of an instance was found: it may prefill for others."""
        if (member := self.fleet.get(instance.name)) is not None:
            member.instance = instance
            self.instance_changes += 1

    def kv_peers(self) -> tuple[int, int]:
        """Number of prefill servers by the options, and of those with a known engine id."""
        rules = self.transfers
        if not rules.can_offload or self.config.offload_policy == "never":
            return 0, 0
        members = self.fleet.members()
        if not rules.needs_bootstrap:
            return len(members), len(members)
        given = [m for m in members if m.instance.bootstrap_url is not None]
        return len(given), sum(m.is_kv_known for m in given)
