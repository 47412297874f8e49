"""The conservation law, under any order of events; and that breaking it would be noticed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase as Phase_
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from proxy.core import is_compiled
from proxy.core.accounts.instances import InstanceStates
from proxy.core.accounts.lease import Charge, Lease, Phase
from proxy.core.accounts.ledger import Ledger
from tests.support.examples import examples

NAMES = ("a", "b", "c")
tokens = st.integers(0, 100_000)
names = st.sampled_from(NAMES)


class Requests(RuleBasedStateMachine):
    """Any mix of success, failure, retry, fallback, cancel, removal and return."""

    ledger_type: type[Ledger] = Ledger
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.states = InstanceStates()
        self.ledger = self.ledger_type(self.states)
        self.accounts = [self.states.add(name).account for name in NAMES]
        self.open: list[Lease] = []

    def charge(self, *charges: tuple[str, Phase, int]) -> list[Charge]:
        return [c for charge in charges for c in self.ledger.charge(*charge)]

    @initialize()
    def start(self) -> None:
        assert not self.ledger.live

    @rule(target=leases, d=names, new=tokens, hit=tokens)
    def colocate(self, d: str, new: int, hit: int) -> Lease:
        lease = self.ledger.open(self.ledger.computing(d, new, hit))
        self.open.append(lease)
        return lease

    @rule(target=leases, p=names, d=names, new=tokens, hit=tokens)
    def offload(self, p: str, d: str, new: int, hit: int) -> Lease:
        inbound = self.charge((d, Phase.INBOUND, new + hit))
        lease = self.ledger.open((*self.ledger.computing(p, new, hit), *inbound))
        self.open.append(lease)
        return lease

    @rule(lease=leases, p=names, d=names, prompt=tokens)
    def prefill_done(self, lease: Lease, p: str, d: str, prompt: int) -> None:
        lease.replace(self.charge((p, Phase.PINNED, prompt), (d, Phase.INBOUND, prompt)))

    @rule(lease=leases, d=names, prompt=tokens)
    def first_token(self, lease: Lease, d: str, prompt: int) -> None:
        lease.replace(self.charge((d, Phase.DECODE, prompt)))

    @rule(lease=leases, d=names, prompt=tokens, shared=tokens)
    def first_token_of_a_shared_prompt(
        self, lease: Lease, d: str, prompt: int, shared: int
    ) -> None:
        lease.replace(
            self.charge((d, Phase.DECODE, prompt), (d, Phase.SHARED, min(prompt, shared)))
        )

    @rule(lease=leases, n=st.integers(1, 64))
    def output(self, lease: Lease, n: int) -> None:
        lease.grow(n)

    @rule(lease=leases, d=names, new=tokens, hit=tokens)
    def fall_back_or_retry(self, lease: Lease, d: str, new: int, hit: int) -> None:
        lease.replace(self.ledger.computing(d, new, hit))

    @rule(lease=consumes(leases))
    def end(self, lease: Lease) -> None:
        lease.close()

    @rule(lease=leases)
    def end_and_come_again(self, lease: Lease) -> None:
        """A cancel's `finally` and a late callback may both close, and change phase after it."""
        lease.close()
        lease.close()
        lease.grow(5)

    @rule(name=names)
    def instance_leaves(self, name: str) -> None:
        self.states.remove(name)

    @rule(name=names)
    def instance_returns(self, name: str) -> None:
        self.accounts.append(self.states.add(name).account)

    @invariant()
    def never_negative(self) -> None:
        for account in self.accounts:
            assert min(*account.tokens, *account.requests) >= 0

    @invariant()
    def counters_are_the_sum_of_live_leases(self) -> None:
        assert self.ledger.drift() == 0
        for account in self.accounts:
            for phase in Phase:
                mine = [
                    c
                    for lease in self.open
                    for c in lease.charges
                    if c.account is account and c.phase is phase
                ]
                assert account.tokens[phase] == sum(c.tokens for c in mine)
                assert account.requests[phase] == len(mine)

    def teardown(self) -> None:
        for lease in self.open:
            lease.close()
        assert self.ledger.live == 0
        for account in self.accounts:
            assert not any(account.tokens)
            assert not any(account.requests)


TestConservation = Requests.TestCase
TestConservation.settings = settings(max_examples=examples(60), stateful_step_count=40)


class _ReleasesAgain(Lease):
    """Mutant: `close` takes back what was charged each time it is called."""

    def close(self) -> None:
        charges = self.charges
        super().close()
        for charge in charges or self._last:
            if not charges:
                charge.account.tokens[charge.phase] -= charge.tokens
        self._last = charges or self._last

    _last: tuple[Charge, ...] = ()


class _Clamps(Lease):
    """Mutant: takes decode tokens back whatever the phase is, clamped at zero."""

    def replace(self, charges: Any) -> None:
        for old in self.charges:
            counters = old.account.tokens
            counters[Phase.DECODE] = max(0, counters[Phase.DECODE] - old.tokens)
        super().replace(charges)


@pytest.mark.skipif(is_compiled(), reason="what is compiled takes no mutants")
@pytest.mark.parametrize("mutant", [_ReleasesAgain, _Clamps])
def test_a_broken_lease_is_caught(mutant: type[Lease]) -> None:
    class Broken(Ledger):
        def open(self, charges: Any) -> Lease:
            lease = mutant(self, tuple(charges))
            self._leases.add(lease)
            return lease

    class Machine(Requests):
        ledger_type = Broken

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=200,
                stateful_step_count=30,
                report_multiple_bugs=False,
                phases=[Phase_.generate],
            ),
        )


def test_a_stale_lease_releases_into_the_void() -> None:
    states = InstanceStates()
    ledger = Ledger(states)
    states.add("a")
    lease = ledger.open(ledger.charge("a", Phase.DECODE, 100))
    states.remove("a")
    states.add("a")
    assert ledger.load("a").ongoing_tokens == 0
    lease.close()
    assert ledger.load("a").ongoing_tokens == 0
    assert ledger.drift() == 0


def test_drift_counts_what_leases_do_not_explain() -> None:
    states = InstanceStates()
    ledger, account = Ledger(states), states.add("a").account
    account.tokens[Phase.PREFILL] += 7
    assert ledger.drift() == 7
