"""FleetState: what is known of the fleet, in one owner of all parts that decisions read.

It decides nothing. `Router` reads it and writes to it in the course of requests; whoever watches
the fleet (probes, reports, operators) writes to it too; /instances, the gauges and the snapshot
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from proxy.core.accounts.instances import InstanceState
from proxy.core.admission.gate import ANY_MODEL
from proxy.core.connectors import CONNECTORS, transfer_rules
from proxy.core.fleet.events import InstanceEvents
from proxy.core.fleet.health import State
from proxy.core.known.tables import Tables
from proxy.core.kvcache.sessions import nobody
from proxy.core.thermal.readings import HeatLimits
from proxy.core.types import Instance, RouterConfig


class FleetState(Tables):
    """All that is known of the fleet, and of what its instances hold. Single-threaded.

    What is dropped with an instance's process leaves every part at once.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self.events = InstanceEvents(self.fleet, self.freed)
        self._on_freed: Callable[[], None] | None = None
        self.fleet.states.on_dropped = self._sweep

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by other limits and targets from now on; see `Router.reconfigure`."""
        if config.thresholds != self.config.thresholds:
            self.gate.set(ANY_MODEL, config.thresholds)
        self.config = config
        self.transfers = transfer_rules(CONNECTORS[config.kv_connector])
        self.slo_pressure.aim_at(config.tpot_slo_s)
        self.targets.aim_at(config)

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

    def note_published_size(self, name: str) -> None:
        """Take a KV cache whose engine reports no size to be as large as its evictions show."""
        tokens, state = self.published.kv_tokens(name), self.fleet.states.of(name)
        if tokens is not None and state.cache.learned_tokens != tokens:
            state.cache.learned_tokens = tokens
            self.fleet.states.assume_sizes()

    def use_bootstrap(self, instance: Instance) -> None:
        """A bootstrap server of an instance was found: it may prefill for others."""
        if (member := self.fleet.get(instance.name)) is not None:
            member.instance = instance
            self.instance_changes += 1

    def snapshot(self, rows_at_once: int) -> Iterator[dict[str, Any]]:
        """What a successor would have to learn anew, as values of JSON; `adopt` reads them.

        First the ratios of bytes to tokens, then a value per instance, then sessions and stored
        responses, so many of them in a value. What was unused longest comes first.
        """
        yield {"bytes_per_token": self.bytes_per_token.all()}
        for member in self.fleet.members():
            name, state = member.instance.name, member.state
            line: dict[str, Any] = {"instance": name, "url": member.instance.url}
            line |= {"start_s": state.start_s, "runs": state.cache.runs.rows()}
            yield line | {"times": self.latency.legacy(name)}
        for key, rows in (("sessions", self.sessions.rows()), ("responses", self.responses.rows())):
            while some := list(islice(rows, rows_at_once)):
                yield {key: some}

    def adopt(
        self, lines: Sequence[dict[str, Any]], tenant_of: Callable[[str], str] = nobody
    ) -> set[str]:
        """Take over a predecessor's snapshot; gives the instances that are known here as there.

        `tenant_of`: whose session or response has this key. Raises ValueError, TypeError,
        LookupError or AttributeError where it is none.
        """
        for model, ratio in lines[0]["bytes_per_token"].items():
            if isinstance(ratio, int | float):
                self.bytes_per_token.adopt(str(model), ratio)
        sessions = [row for line in lines[1:] for row in line.get("sessions", ())]
        # What was cached is taken to be used as lately as the last session: it keeps no times.
        self.prefixes.now_s = max([row[3] for row in sessions], default=0.0)
        kept = {line["instance"] for line in lines[1:] if self._adopt_instance(line)}
        self.sessions.adopt(
            [
                (s, self.fleet.states[at].cache, *use, None if form is None else tuple(form))
                for s, at, *use, form in sessions
                if at in kept
            ],
            tenant_of,
        )
        for line in reversed(lines[1:]):  # the first line has those that were unused longest
            held = [row for row in line.get("responses", ()) if row[1] in kept]
            found = [(k, self.fleet.states[at].cache, s) for k, at, s in held]
            self.responses.adopt(found, tenant_of)
        return kept

    def _adopt_instance(self, line: dict[str, Any]) -> bool:
        """Read the line of an instance; False if it is not known here at the same address.

        Whether the engine is still the same process is found out later by its start time
        (`InstanceEvents.observe_start`).
        """
        member = self.fleet.get(line.get("instance", ""))
        if member is None or member.instance.url != line["url"]:
            return False
        member.state.start_s = line["start_s"]
        self.prefixes.adopt(member.state.cache, line["runs"])
        if times := line.get("times"):
            self.latency.adopt(member.instance.name, times)
        return True
