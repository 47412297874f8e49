"""Tables: all parts of what is known of the fleet, and the questions that need several of them."""

from __future__ import annotations

from typing import Final

from proxy.core.accounts.ledger import Ledger, UnreleasedKv
from proxy.core.admission.gate import Busy, Gate
from proxy.core.admission.targets import Targets
from proxy.core.connectors import CONNECTORS, transfer_rules
from proxy.core.fleet.bytes_per_token import BytesPerToken
from proxy.core.fleet.members import Fleet
from proxy.core.fleet.output_tokens import OutputTokens
from proxy.core.kvcache.conversations import Conversations
from proxy.core.kvcache.prefix_index import PrefixIndex
from proxy.core.kvcache.published_index import PublishedIndex
from proxy.core.kvcache.reuse import Reuse
from proxy.core.kvcache.sessions import Sessions, StoredResponses
from proxy.core.kvcache.trust import LEAST_SCALE, MOST_SCALE, Trust
from proxy.core.latency.model import Latency
from proxy.core.latency.slo_pressure import SloPressure
from proxy.core.thermal.fleet_limits import HeatByInstance
from proxy.core.types import RequestFacts, RouterConfig

TEMPLATE_TOKENS: Final = 2048
"""Tokens that an engine may add to a prompt, of which the proxy sees nothing."""


class Tables:
    """What is known, in one owner of all parts; `FleetState` is it with what changes it."""

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
        self.targets = Targets(config)
        self.instance_changes = 0
        """Number of members whose `Instance` was replaced."""

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

    def lane(self, model: str) -> str:
        """Under which name requests for a model wait.

        Under its own, where an instance is known to serve it; else together with all others that
        the same busy thresholds hold for. Lanes have turns one after another, and a client that
        invents models must not have one for each.
        """
        return model if self.fleet.serves(model) else f"unserved {self.gate.rows_of([model])[0]}"

    def is_usage_doubted(self, name: str) -> bool:
        """Whether nothing is learned from an instance's usage: it disagrees with the others'."""
        return self.fleet.states.of(name).is_usage_doubted

    def refine(self, facts: RequestFacts, now_s: float) -> None:
        """Correct a prompt's estimated length by what its session's last one was counted as.

        That is one engine's word, and wherever the prompt goes now it is charged for it. So it is
        believed within what a template may add, and a text be denser than most.
        """
        self.trust.refine(facts, self.conversations.find(facts, now_s).past)
        self.published.refine(facts)
        least, most = LEAST_SCALE * facts.estimate, MOST_SCALE * facts.estimate + TEMPLATE_TOKENS
        facts.prompt_tokens = int(min(most, max(1.0, least, facts.prompt_tokens)))

    def least_new_tokens(self, facts: RequestFacts) -> int:
        """Estimated tokens of a prompt that no instance has cached."""
        most = max(self.reuse.hits(facts).values(), default=0)
        return facts.prompt_tokens - facts.hit_tokens(most)

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
