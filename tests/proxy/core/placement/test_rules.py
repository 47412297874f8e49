"""Golden tests of the rules: four properties, the reasons; all policies.

What they do to requests under load: tests/analysis/elastic/test_experiment.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.placement.candidates import Candidate
from proxy.core.placement.rules import OFFLOAD_RULES, OffloadQuestion, should_offload
from proxy.core.types import Instance, Load, Reason
from tests.support.scenes import PACE

HEAVY = 8192
PT = 20_000.0


def load(prefill: int = 0, decode: int = 0) -> Load:
    return Load(prefill_tokens=prefill, decode_tokens=decode, decode_requests=bool(decode))


def question(
    new: int, d: Load, p: Load | None, *, others: tuple[int, ...] = (), transfer_s: float = 0.5
) -> OffloadQuestion:
    loads = [d.ongoing_tokens, *((p.ongoing_tokens,) if p else ()), *others]
    peer = Candidate(Instance("p", "http://p"), p, 0, new, PACE) if p else None
    return OffloadQuestion(
        decode=Candidate(Instance("d", "http://d"), d, 0, new, PACE),
        prefill=peer,
        mean_ongoing_tokens=sum(loads) / len(loads),
        prompt_tokens=new,
        heavy_threshold=HEAVY,
        prefill_throughput=PT,
        kv_transfer_time_s=transfer_s,
        non_cached_tokens=512,
    )


IDLE, DECODING = load(), load(decode=30_000)


class TestSeedHeuristic:
    """Its conditions, in their order."""

    @pytest.mark.parametrize(
        ("name", "new", "d", "p", "others", "expected"),
        [
            ("P idle, D busy", 20_000, DECODING, IDLE, (), (True, Reason.P_IDLE_D_BUSY)),
            ("P busy", 20_000, DECODING, load(40_000), (), (False, Reason.P_BUSIER_THAN_D)),
            ("P as busy as D", 20_000, DECODING, DECODING, (), (False, Reason.P_BUSIER_THAN_D)),
            ("D idle", 20_000, IDLE, IDLE, (), (False, Reason.D_IDLE)),
            ("D only prefills", 20_000, load(9000), IDLE, (), (False, Reason.D_IDLE)),
            (
                "P less than D but over 1.5 x mean",
                20_000,
                load(0, 20_000),
                load(5_000),
                (0,) * 6,
                (False, Reason.P_OVERLOADED),
            ),
            ("WARM", 500, DECODING, IDLE, (), (False, Reason.BELOW_THRESHOLD)),
            ("MEDIUM", HEAVY - 1, DECODING, IDLE, (), (False, Reason.BELOW_THRESHOLD)),
            ("no peer", 20_000, DECODING, None, (), (False, Reason.NO_PEER)),
        ],
    )
    def test_properties(
        self,
        name: str,
        new: int,
        d: Load,
        p: Load | None,
        others: tuple[int, ...],
        expected: tuple[bool, Reason],
    ) -> None:
        decision = should_offload("seed-heuristic", question(new, d, p, others=others))
        assert (decision.offload, decision.reason) == expected, name


class TestSeedCost:
    """0.5 * new / PT against P's ongoing / PT + the transfer constant."""

    @pytest.mark.parametrize(
        ("new", "d", "p", "expected"),
        [
            # With an idle P and 0.5 s transfer the break-even is 20,000 new tokens, exclusive.
            (20_000, DECODING, IDLE, (False, Reason.MARGIN)),
            (20_002, DECODING, IDLE, (True, Reason.P_IDLE_D_BUSY)),
            # 10,000 ongoing on P move it to 40,000: n > PT + 2 * ongoing.
            (40_000, DECODING, load(10_000), (False, Reason.P_OVERLOADED)),
            (40_002, DECODING, load(10_000), (True, Reason.P_IDLE_D_BUSY)),
            (60_000, IDLE, IDLE, (False, Reason.D_IDLE)),
            (60_000, load(50_000), IDLE, (False, Reason.D_IDLE)),
            (8_000, DECODING, IDLE, (False, Reason.BELOW_THRESHOLD)),
        ],
    )
    def test_golden(self, new: int, d: Load, p: Load, expected: tuple[bool, Reason]) -> None:
        decision = should_offload("seed-cost", question(new, d, p))
        assert (decision.offload, decision.reason) == expected


def test_threshold_is_llm_ds_rule() -> None:
    remote = should_offload("threshold", question(9_000, IDLE, DECODING))
    assert (remote.offload, remote.reason) == (True, Reason.NON_CACHED_TOKENS)


def test_never_and_always() -> None:
    q = question(50_000, DECODING, IDLE)
    assert not should_offload("never", q).offload
    assert should_offload("always", q).offload
    assert not should_offload("always", question(100, DECODING, IDLE)).offload


loads = st.builds(load, st.integers(0, 200_000), st.integers(0, 400_000))


@pytest.mark.parametrize("policy", OFFLOAD_RULES)
@given(new=st.integers(1, 200_000), d=loads, p=st.one_of(st.none(), loads))
def test_contract_of_every_policy(policy: str, new: int, d: Load, p: Load | None) -> None:
    """Small requests stay, nobody is offloaded to nobody, and the same question gets one answer."""
    decision = should_offload(policy, question(new, d, p))
    if new < HEAVY or p is None:
        assert not decision.offload
    assert decision == should_offload(policy, question(new, d, p))


@pytest.mark.parametrize("policy", ["seed-heuristic", "seed-cost"])
@given(new=st.integers(HEAVY, 200_000), d=loads, p=loads, more=st.integers(0, 100_000))
def test_a_busier_p_is_never_more_welcome(
    policy: str, new: int, d: Load, p: Load, more: int
) -> None:
    if not should_offload(policy, question(new, d, p)).offload:
        busier = load(p.prefill_tokens + more, p.decode_tokens)
        assert not should_offload(policy, question(new, d, busier)).offload
