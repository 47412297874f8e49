"""The tick loop: look, decide, keep the decision, then have it carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from planner.config.components import Component
from planner.config.options import PlannerOptions
from planner.core.budget import OFF, Limits, Share
from planner.core.builtin import Builtin
from planner.core.memory import recall, remembered
from planner.core.perf.regression import Inputs
from planner.core.pipeline import Outcome
from planner.core.types import Capabilities, Context, Traffic
from planner.plugin_api.external import Externals
from planner.scalers.base import Applied, Decision, Scaler, ScalerError
from planner.scalers.state_file import Kept, StateError, StateFile
from planner.sources.live import Live
from planner.sources.proxy import Proxies
from planner.sources.workers.forecasts import Forecasts, child_of
from planner.telemetry.metrics import Metrics
from planner.telemetry.recorder import Recorder
from planner.telemetry.report import report_html
from planner.telemetry.snapshot import (
    Snapshot,
    TickOutcome,
    decided_of,
    hold_of,
    reason_of,
    seen_of,
)
from replayer.arguments import replace_file

ASK_S = 4.0
"""A forecast of a child process is waited for so long."""
SAVE_S = 60.0
"""Time between two writes of what was learned; decisions are written at once."""
_log = logging.getLogger("planner")


@dataclass(frozen=True, slots=True)
class Clocks:
    """`now_s`: monotonic; `epoch_s`: seconds of the epoch."""

    now_s: Callable[[], float]
    epoch_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known before the first tick: points of a profile, intervals of traces."""

    priors: Sequence[tuple[Inputs, float]] = ()
    windows: Sequence[Traffic] = ()


@dataclass(slots=True)
class _Now:
    """What a tick has come to so far."""

    began_s: float
    context: Context | None = None
    outcome: Outcome | None = None
    applied: Applied = field(default_factory=Applied)
    failure: str = ""
    is_new: bool = False
    """Whether it has made a decision."""


def components_of(options: PlannerOptions) -> list[Component]:
    """The components that the options describe."""
    gpus, most = options.gpus_per_replica, options.max_gpu_budget
    replicas = most // gpus if most >= 0 else 10**6
    return [
        Component(
            match=options.match,
            gpus_per_replica=gpus,
            min_endpoint=options.min_endpoint,
            max_endpoint=replicas,
        )
    ]


def capabilities_of(options: PlannerOptions) -> Capabilities:
    """What one instance can hold; its KV cache is what the proxy knows."""
    return Capabilities(
        options.gpus_per_replica, options.max_num_batched_tokens, options.max_num_seqs
    )


class Planner:
    """One planner of one fleet; `scaler` is not called while it is advisory."""

    def __init__(
        self,
        options: PlannerOptions,
        live: Live,
        proxies: Proxies,
        scaler: Scaler,
        clocks: Clocks,
        learned: Learned | None = None,
    ) -> None:
        learned = learned or Learned()
        self._options, self._live, self._proxies = options, live, proxies
        self._scaler, self._clocks = scaler, clocks
        self._components = components_of(options)
        self.floors = {one.name: one.min_endpoint for one in self._components}
        """Fewest replicas by component; an operator may change them while it runs."""
        self._limits = Limits(
            {one.name: one.gpus_per_replica for one in self._components},
            self.floors,
            options.max_gpu_budget if options.max_gpu_budget >= 0 else OFF,
        )
        self.builtin = Builtin(options.rules, self._limits, learned.priors)
        self.externals = Externals(self.builtin.pipeline, clocks.now_s)
        """The plugins of other processes."""
        self._share: Share | None = None
        self._warm_up = learned.windows
        deadline_s = min(ASK_S, options.tick_max_duration_seconds / 6)  # three are asked for
        child = child_of(options.load_predictor, clocks.now_s, deadline_s)
        self._forecasts = None if child is None else Forecasts(options.rules, child)
        self.metrics = Metrics()
        self.metrics.is_advisory(advisory=options.advisory)
        self.recorder = Recorder()
        self.decision: Decision | None = None
        self._state: StateFile | None = None
        self._ticks, self._saved_s, self._reported_s = 0, 0.0, 0.0
        self._last_s: float | None = None
        self._is_done = False
        self._decided_s, self._held = 0.0, 0
        self._said, self._is_blind = "", False
        self._holds = set[str]()
        self._noted: dict[str, Any] = {}
        """The scaler's notes as they are in the state file."""

    def most_replicas(self, name: str) -> int:
        """The most replicas of a component that its GPUs allow."""
        most = next(one.max_endpoint for one in self._components if one.name == name)
        return most if self._share is None else min(most, self._share.budget.most(self._share.name))

    @property
    def takes_plugins(self) -> bool:
        """Whether plugins may register themselves."""
        return self._options.plugin_registration

    @property
    def tick_s(self) -> float:
        """The longest that a tick may take."""
        return self._options.tick_max_duration_seconds

    def join(self, share: Share) -> None:
        """Have its GPUs from a budget that it shares with others; before it begins."""
        self._share = share
        share.budget.join(share.name, self._options.gpus_per_replica, self.floors)

    def begin(self) -> None:
        """Hold the state file, and go on where the process before has ended. Raises StateError."""
        self._state = StateFile(self._options.state_file)
        kept, why_anew = self._state.load()
        now_s = self._clocks.now_s()
        try:
            if kept.learned:
                recall(self.builtin, kept.learned, now_s)
            else:
                self.builtin.predict.warm_up(self._warm_up)
            self._scaler.recall(kept.notes)
        except (ValueError, KeyError, TypeError) as error:
            why_anew = f"state_file {self._options.state_file}: of another form: {error}"
        if why_anew:
            _log.warning("%s; begun anew", why_anew)
        if self._forecasts is not None:
            learner = self._forecasts.predict
            learn = learner.recall if kept.learned else learner.warm_up
            learn(self.builtin.predict.windows)
            self._forecasts.start()
        self._noted = kept.notes
        self.decision = kept.decision
        if kept.decision is not None and kept.advisory and not self._options.advisory:
            # Nobody has carried it out, and it may be of another day: it is no target.
            self.decision = replace(kept.decision, targets={})
        for name, count in kept.floors.items():
            if name in self.floors:
                self.floors[name] = min(max(1, count), self.most_replicas(name))
        self._decided_s = self._saved_s = self._reported_s = now_s
        self.builtin.remember(self._share, self._targets())

    async def run(self, stop: asyncio.Event) -> None:
        """Tick until `stop`; a tick that is missed is not made up for."""
        interval_s = self.builtin.interval_s
        while not stop.is_set():
            began_s = self._clocks.now_s()
            await self.tick()
            self._report_when_due()
            rest_s = interval_s - (self._clocks.now_s() - began_s)
            try:
                async with asyncio.timeout(max(0.0, rest_s)):
                    await stop.wait()
            except TimeoutError:
                continue

    async def tick(self) -> Snapshot:
        """Look at the fleet, decide, and go a step towards the decision."""
        self._ticks += 1
        now = _Now(self._clocks.now_s())
        try:
            async with asyncio.timeout(self._options.tick_max_duration_seconds):
                how = await self._ticked(now)
        except TimeoutError:
            how = TickOutcome.TIMEOUT
        except ScalerError as error:
            how, now.failure = TickOutcome.FAILED, str(error)
            self.metrics.failed(self._scaler.name, error.failure)
        except StateError as error:
            how, now.failure = TickOutcome.FAILED, str(error)
        except ArithmeticError as error:
            # What sources tell is bounded, but a rule may still meet figures that it cannot take.
            how, now.failure = TickOutcome.FAILED, f"no decision: {error}"
        snapshot = self._snapshot(now, how)
        self._show(snapshot, now)
        return snapshot

    async def _ticked(self, now: _Now) -> TickOutcome:
        expected = {} if self._options.advisory else self._targets()
        if not (expected or self._options.advisory):
            # Proxies do not know those yet that were ordered, and know some that nobody ordered.
            expected = await self._scaler.observe()
        now.context = await self._live.look(self._ticks, now.began_s, expected)
        if now.context is None:
            now.failure = "; ".join(self._proxies.failures())
            return TickOutcome.NO_DATA
        if self._forecasts is not None:
            prediction = await self._forecasts.of(now.context)
            now.context = replace(now.context, prediction=prediction)
        now.outcome = await self.externals.decided(self.builtin.steps(now.context))
        if now.outcome.rejected_by:
            return TickOutcome.REJECTED
        if self._share is not None:
            there = self._there(now.context)
            now.outcome = self.builtin.shared(self._share, now.context, now.outcome, there)
            self.metrics.granted(now.outcome.targets)
        now.is_new = self._decide(now.context, now.outcome)
        if self._options.advisory:
            return TickOutcome.ADVISORY if now.is_new else TickOutcome.UNCHANGED
        return await self._carry_out(now)

    def _there(self, context: Context) -> int:
        """Replicas that hold GPUs: one that goes does until the scaler is done with it."""
        if self._options.advisory:
            return 0
        is_open = bool(self._targets()) and not self._is_done
        waited_s = self._clocks.now_s() - self._decided_s
        is_late = waited_s > self._options.scaling_max_wait_seconds
        before = self._held if is_open and not is_late else 0
        self._held = max(before, sum(o.ready + o.pending for o in context.replicas.values()))
        return self._held

    def _targets(self) -> Mapping[str, int]:
        return {} if self.decision is None else self.decision.targets

    def _decide(self, context: Context, outcome: Outcome) -> bool:
        """Whether the targets are others than before; they are kept before anybody acts on them."""
        targets = dict(outcome.targets)
        before = self._targets() or context.baseline
        if targets == dict(before):
            return False
        number = 0 if self.decision is None else self.decision.decision_id + 1
        reason = reason_of(decided_of(outcome, self.builtin))
        decision = Decision(number, targets, round(self._clocks.epoch_s(), 3), reason)
        self._keep(decision)
        self.decision, self._is_done, self._decided_s = decision, False, self._clocks.now_s()
        changes = ", ".join(f"{n} {before.get(n, 0)} -> {count}" for n, count in targets.items())
        mode = " (advisory)" if self._options.advisory else ""
        _log.info("decision %d%s: %s; %s", number, mode, changes, reason)
        return True

    async def _carry_out(self, now: _Now) -> TickOutcome:
        if self.decision is None or not self.decision.targets:
            return TickOutcome.UNCHANGED
        self._keep_notes()  # a tick that was cut short may have left some
        now.applied = await self._scaler.apply(self.decision, self._proxies)
        self._keep_notes()
        if now.applied.is_done:
            was_done, self._is_done = self._is_done, True
            return TickOutcome.UNCHANGED if was_done else TickOutcome.APPLY
        self._is_done = False
        waited_s = self._clocks.now_s() - self._decided_s
        if waited_s > self._options.scaling_max_wait_seconds:
            now.failure = f"not done after {waited_s:.0f} s: {now.applied.waits_for}"
        return TickOutcome.IN_PROGRESS

    def _keep_notes(self) -> None:
        """The scaler goes by its notes only once they are kept."""
        if self._noted != self._scaler.notes():
            self._keep(self.decision)

    def save(self) -> bool:
        """Keep what a successor needs; whether it could be kept. A failure is said."""
        try:
            self._keep(self.decision)
        except StateError as error:
            _log.warning("%s", error)
            return False
        return True

    def _keep(self, decision: Decision | None) -> None:
        """Keep it with all that was learned. Raises StateError."""
        self._saved_s = self._clocks.now_s()
        if self._state is not None:
            own = {n: count for n, count in self.floors.items() if count != self._own_floor(n)}
            notes = dict(self._scaler.notes())
            learned, advisory = remembered(self.builtin), self._options.advisory
            self._state.save(Kept(decision, learned, notes, own, advisory))
            self._noted = notes

    def _own_floor(self, name: str) -> int:
        return next(one.min_endpoint for one in self._components if one.name == name)

    def _snapshot(self, now: _Now, how: TickOutcome) -> Snapshot:
        end_s = self._clocks.now_s()
        targets = self._targets() if now.outcome is None else now.outcome.targets
        return Snapshot(
            self._ticks,
            round(self._clocks.epoch_s(), 3),
            how,
            round(end_s - now.began_s, 6),
            dict(targets),
            None if now.context is None else seen_of(now.context, self.builtin),
            None if now.outcome is None else decided_of(now.outcome, self.builtin),
            now.applied.waits_for,
            now.failure,
        )

    def _show(self, snapshot: Snapshot, now: _Now) -> None:
        """In metrics, in the audit log and, when it is another than before, on stderr."""
        self.recorder.add(snapshot)
        self.metrics.tick(snapshot, self._gpu_hours(now))
        self.metrics.ages(self._proxies.ages_s(self._clocks.now_s()))
        self.metrics.absent(self._live.absent)
        self._show_unread()
        self._show_hold(snapshot)
        self.metrics.start_ups(self._live.start_ups_s)
        self.metrics.plugins(self.externals.states())
        said = snapshot.failure or (
            "the tick took too long" if snapshot.outcome is TickOutcome.TIMEOUT else ""
        )
        has_failed = snapshot.outcome is TickOutcome.FAILED and said != self._said
        if now.is_new or has_failed or snapshot.outcome is TickOutcome.APPLY:
            self._audit(snapshot)
        if said != self._said:
            _log.warning("%s", said) if said else _log.info("ticks are well again")
            self._said = said
        if self._clocks.now_s() - self._saved_s > SAVE_S:
            self.save()

    def _show_hold(self, snapshot: Snapshot) -> None:
        """Say once what a decision waits for, and once that it waits no more."""
        if snapshot.decided is None:
            return
        hold = hold_of(snapshot.decided)
        if hold not in self._holds:
            self._holds.add(hold)
            said = f"nothing is decided yet: {hold}" if hold else "load and model are known"
            _log.info("%s", said)

    def _show_unread(self) -> None:
        """Without an engine's counters no model learns its steps: say so once, and when it ends."""
        unread = self._live.unread
        self.metrics.unread(len(unread))
        if bool(unread) == self._is_blind:
            return
        self._is_blind = bool(unread)
        if unread:
            first = next(iter(unread))
            _log.warning("%d engines are not read; %s: %s", len(unread), first, unread[first])
        else:
            _log.info("all engines are read again")

    def _gpu_hours(self, now: _Now) -> float:
        """GPU hours since the tick before."""
        last_s, self._last_s = self._last_s, now.began_s
        if now.context is None or last_s is None:
            return 0.0
        count = sum(one.ready + one.pending for one in now.context.replicas.values())
        return self._options.gpus_per_replica * count * (now.began_s - last_s) / 3600

    def _audit(self, snapshot: Snapshot) -> None:
        path = self._options.audit_log
        if path is None:
            return
        try:
            with path.open("ab") as file:
                file.write(orjson.dumps({"decision": self.decision, **_document(snapshot)}) + b"\n")
        except OSError as error:
            _log.warning("audit_log %s: %s", path, error.strerror)

    def _report_when_due(self) -> None:
        now_s = self._clocks.now_s()
        if now_s - self._reported_s >= self._options.report_interval_hours * 3600:
            self._reported_s = now_s
            self.report()

    def page(self) -> str:
        """The report of what was recorded."""
        return report_html(self.recorder)

    def report(self) -> None:
        """Write the report, where one is wanted."""
        path = self._options.report_file
        if path is None:
            return
        try:
            replace_file(path, self.page().encode())
        except OSError as error:
            _log.warning("report_file %s: %s", path, error.strerror)

    async def end(self) -> None:
        """Keep what was learned, write the last report, and let another planner begin."""
        self.report()
        if self._forecasts is not None:
            self._forecasts.close()
        if self._state is not None:
            self.save()
            self._state.close()
        await self.externals.aclose()
        await self._scaler.aclose()


def _document(snapshot: Snapshot) -> dict[str, object]:
    return {name: getattr(snapshot, name) for name in Snapshot.__dataclass_fields__}
