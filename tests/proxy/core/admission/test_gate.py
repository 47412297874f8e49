"""The busy gate: its checks as a table, its limits per model, and the advised wait."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.accounts.instances import InstanceStates
from proxy.core.admission.gate import ANY_MODEL, STALE_S, Gate
from proxy.core.admission.retry_after import (
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_MIN_S,
    UNKNOWN_DRAIN_S,
    retry_after_s,
)
from proxy.core.types import OFF, THRESHOLD_FIELDS, Load, RejectReason, Thresholds

BATCHED, TPS = 8192, 20_000.0


BLOCKS, TOKENS, FRAC = (
    RejectReason.DECODE_BLOCKS,
    RejectReason.PREFILL_TOKENS,
    RejectReason.PREFILL_FRAC,
)


def gate(blocks: float | None = None, tokens: int | None = None, frac: float | None = None) -> Gate:
    return gate_of(Thresholds(blocks, tokens, frac))


def gate_of(thresholds: Thresholds) -> Gate:
    states = InstanceStates()
    for name in ("a", "i", "j", "other"):
        states.add(name)
    return Gate(thresholds, BATCHED, TPS, states)


def check(g: Gate, load: Load, now_s: float = 0.0, model: str = "m") -> RejectReason | None:
    busy = g.busy("i", model, load, now_s)
    return busy.check if busy else None


class TestPrefillChecks:
    @pytest.mark.parametrize(
        ("tokens", "frac", "prefill_tokens", "expected"),
        [
            (None, None, 10**9, None),
            (10_000, None, 0, None),
            (10_000, None, 10_000, None),
            (10_000, None, 10_001, TOKENS),
            (10_000, None, 12_000, TOKENS),
            (0, None, 0, None),
            (0, None, 1, TOKENS),
            (None, 1.0, 8192, None),
            (None, 1.0, 8193, FRAC),
            (None, 0.3, 2457, None),
            (None, 0.3, 2458, FRAC),
            (None, 2.5, 20_480, None),
            (None, 2.5, 20_481, FRAC),
            (None, 0.0, 1, FRAC),
            (None, 1e308, 10**12, None),
            (20_000, 1.0, 9000, FRAC),
            (9000, 2.0, 9001, TOKENS),
            (9000, 1.0, 10_000, TOKENS),
        ],
    )
    def test_strictly_above_a_limit_is_busy(
        self, tokens: int | None, frac: float | None, prefill_tokens: int, expected: str | None
    ) -> None:
        g = gate(None, tokens, frac)
        assert check(g, Load(prefill_tokens=prefill_tokens)) == expected


class TestBlocksCheck:
    @pytest.mark.parametrize(
        ("limit", "total", "own", "reported", "expected"),
        [
            (0.85, 1000, 850, None, None),
            (0.85, 1000, 851, None, BLOCKS),
            (0.85, 1000, 870, 0.1, BLOCKS),
            (0.85, 1000, 0, 0.85, None),
            (0.85, 1000, 0, 0.87, BLOCKS),
            (0.85, 1000, 870, 0.87, BLOCKS),
            (0.29, 1000, 290, None, None),
            (0.0, 1000, 0, 0.0, None),
            (0.0, 1000, 1, 0.0, BLOCKS),
            (1.0, 1000, 1001, None, BLOCKS),
            (1.0, 1000, 1000, 1.0, None),
            (0.85, None, 10**9, 1.0, None),
            (0.85, 0, 10**9, 1.0, None),
            (None, 1000, 10**9, 1.0, None),
        ],
    )
    def test_either_signal_makes_busy_and_both_must_clear(
        self,
        limit: float | None,
        total: int | None,
        own: int,
        reported: float | None,
        expected: str | None,
    ) -> None:
        g = gate(limit)
        g.observe_engine("i", EngineKv(total, reported), 0.0)
        assert check(g, Load(decode_tokens=own)) == expected

    def test_an_engine_that_never_reported_is_free(self) -> None:
        assert check(gate(0.5), Load(decode_tokens=10**9)) is None

    def test_kv_on_its_way_here_counts(self) -> None:
        g = gate(0.5)
        g.observe_engine("i", EngineKv(1000), 0.0)
        assert check(g, Load(decode_tokens=300, inbound_tokens=300)) == BLOCKS

    @pytest.mark.parametrize(
        ("age_s", "own", "expected"),
        [
            (STALE_S, 0, BLOCKS),
            (STALE_S + 0.1, 0, None),
            (STALE_S + 0.1, 900, BLOCKS),
        ],
    )
    def test_a_stale_report_is_ignored_but_the_size_it_told_stays(
        self, age_s: float, own: int, expected: str | None
    ) -> None:
        g = gate(0.5)
        g.observe_engine("i", EngineKv(1000, 0.9), 0.0)
        assert check(g, Load(decode_tokens=own), age_s) == expected

    def test_instances_are_judged_apart(self) -> None:
        g = gate(0.5)
        g.observe_engine("other", EngineKv(1000, 0.9), 0.0)
        assert check(g, Load()) is None


class TestRanks:
    @pytest.mark.parametrize(
        ("used_by_rank", "own", "prefill_tokens", "expected"),
        [
            ((0.9, 0.1), 0, 0, None),
            ((0.9, 0.85), 0, 0, None),
            ((0.9, 0.86), 0, 0, BLOCKS),
            ((0.9, None), 0, 0, None),
            ((0.9, 0.1), 851, 0, BLOCKS),
            ((0.1, 0.1), 0, 2000, None),
            ((0.1, 0.1), 0, 2001, TOKENS),
            ((0.1, 0.1, 0.1), 0, 3000, None),
            ((0.9,), 0, 0, BLOCKS),
            ((0.1,), 0, 1001, TOKENS),
            ((), 0, 1001, TOKENS),
        ],
    )
    def test_busy_only_while_all_ranks_are(
        self,
        used_by_rank: tuple[float | None, ...],
        own: int,
        prefill_tokens: int,
        expected: str | None,
    ) -> None:
        g = gate(0.85, 1000)
        fullest = max((used for used in used_by_rank if used is not None), default=None)
        g.observe_engine("i", EngineKv(1000, fullest, used_by_rank), 0.0)
        assert check(g, Load(prefill_tokens=prefill_tokens, decode_tokens=own)) == expected


class TestMark:
    @pytest.mark.parametrize(
        ("now_s", "expected"), [(0.0, 5.0), (4.5, 0.5), (5.0, None), (9.0, None)]
    )
    def test_it_ends_by_itself(self, now_s: float, expected: float | None) -> None:
        g = gate()
        g.mark_busy("i", 5.0)
        busy = g.busy("i", "m", Load(), now_s)
        assert (busy and busy.free_in_s) == expected
        assert busy is None or busy.check is RejectReason.UPSTREAM_BUSY

    def test_a_restart_ends_it_and_the_report(self) -> None:
        g = gate(0.5)
        g.observe_engine("i", EngineKv(1000, 0.9), 0.0)
        g.mark_busy("i", 5.0)
        g._states.add("i")
        assert check(g, Load(decode_tokens=900)) is None


class TestThresholds:
    def test_merged_overwrites_the_given_fields_only(self) -> None:
        blocks, tokens, frac = THRESHOLD_FIELDS
        base = Thresholds(0.5, 100, 2.0)
        assert base.merged({}) == base
        assert base.merged({tokens: 7}) == Thresholds(0.5, 7, 2.0)
        assert base.merged({blocks: None, frac: 0.0}) == Thresholds(None, 100, 0.0)
        assert base == Thresholds(0.5, 100, 2.0)

    def test_a_field_that_does_not_exist_is_an_error(self) -> None:
        with pytest.raises(TypeError):
            Thresholds().merged({"active_prefil_tokens_threshold": 1})

    def test_what_a_model_does_not_set_follows_all(self) -> None:
        g = gate(tokens=100)
        g.set("m", Thresholds(0.9))
        assert g.thresholds("m") == Thresholds(0.9, 100)
        g.set(ANY_MODEL, Thresholds(0.5, 200, 2.0))
        assert g.thresholds("m") == Thresholds(0.9, 200, 2.0)
        assert check(g, Load(prefill_tokens=201)) == TOKENS
        g.set(ANY_MODEL, Thresholds(0.5))
        assert g.thresholds("m") == Thresholds(0.9)
        assert g.own("m") == Thresholds(0.9)
        assert check(g, Load(prefill_tokens=10**9)) is None

    def test_an_adapter_follows_its_base(self) -> None:
        g = gate(0.5, tokens=100)
        g.set("m", Thresholds(0.9))
        g.know_bases({"i": {"Lora": "M"}, "j": {"lora": "m"}})
        assert g.thresholds("lora") == Thresholds(0.9, 100)
        g.set("lora", Thresholds(None, None, 2.0))
        assert g.thresholds("LORA") == Thresholds(0.9, 100, 2.0)
        assert g.rows_of(["lora"]) == ["lora"]
        g.unset("lora")
        assert g.rows_of(["lora", "m"]) == ["m"]
        g.know_bases({})
        assert g.thresholds("lora") == Thresholds(0.5, 100)
        assert g.rows_of(["lora", "m"]) == [ANY_MODEL, "m"]

    def test_a_base_counts_on_the_instance_that_tells_it(self) -> None:
        """Neither puts one engine's card a model under limits elsewhere, nor out of them."""
        g = gate()
        g.set("base", Thresholds(None, 5))
        g.know_bases({"j": {"m": "base", ANY_MODEL: "base"}})
        load = Load(prefill_tokens=100)
        assert g.busy("i", "m", load, 0.0) is None
        assert (at_j := g.busy("j", "m", load, 0.0)) is not None
        assert at_j.check is TOKENS
        assert not g.is_open("m", 0.0), "so each is asked"
        assert g.is_open("n", 0.0)
        assert (g.rows_of(["m"], "i"), g.rows_of(["m"], "j")) == ([ANY_MODEL], ["base"])
        assert (g.busy("j", "n", load, 0.0), g.busy("j", ANY_MODEL, load, 0.0)) == (None, None)
        g.know_bases({"i": {"m": "base"}, "j": {"m": "other"}})
        assert g.busy("i", "m", load, 0.0) is not None
        assert g.busy("j", "m", load, 0.0) is None
        assert g.thresholds("m") == OFF, "they do not agree"
        g.set("m", Thresholds(0.9))
        assert g.thresholds("m", "i") == Thresholds(0.9, 5)
        assert g.thresholds("m", "j") == g.as_if("m", Thresholds(0.9), "j") == Thresholds(0.9)

    @pytest.mark.parametrize("name", ["Sim-8B", "sim-8b", "SIM-8B"])
    def test_names_are_compared_without_case(self, name: str) -> None:
        g = gate()
        g.set("Sim-8B", Thresholds(0.9))
        assert g.thresholds(name) == Thresholds(0.9)
        g.unset(name)
        assert g.configured() == {ANY_MODEL: Thresholds()}

    def test_they_hold_at_once_and_until_unset(self) -> None:
        g, load = gate(), Load(prefill_tokens=101)
        seen = [check(g, load)]
        g.set("m", Thresholds(None, 100))
        seen.append(check(g, load))
        g.unset("m")
        seen.append(check(g, load))
        assert seen == [None, TOKENS, None]

    def test_unset_falls_back_to_all_and_unset_of_all_to_none(self) -> None:
        g = gate(tokens=100)
        g.set("m", Thresholds(0.9))
        g.unset("m")
        g.unset("never set")
        assert g.configured() == {ANY_MODEL: Thresholds(None, 100)}
        g.unset(ANY_MODEL)
        assert g.configured() == {ANY_MODEL: Thresholds()}
        assert check(g, Load(prefill_tokens=10**9)) is None

    def test_what_is_configured_is_a_copy(self) -> None:
        g = gate()
        g.configured()["m"] = Thresholds(0.0)
        assert g.thresholds("m") == Thresholds()

    def test_limits_can_be_tried_without_setting_them(self) -> None:
        g, load = gate(), Load(prefill_tokens=101)
        assert g.busy("i", "m", load, 0.0, Thresholds(None, 100)) is not None
        assert g.busy("i", "m", load, 0.0) is None


class TestWait:
    def wait_s(self, g: Gate, load: Load, now_s: float = 0.0) -> float:
        busy = g.busy("i", "m", load, now_s)
        return busy.free_in_s if busy else 0.0

    def test_prefill_drains_at_the_given_speed(self) -> None:
        assert self.wait_s(gate(tokens=10_000), Load(prefill_tokens=50_000)) == 2.0
        assert self.wait_s(gate(frac=1.0), Load(prefill_tokens=BATCHED + 20_000)) == 1.0

    def test_kv_drains_as_streams_have_ended(self) -> None:
        g = gate(0.5)
        g.observe_engine("i", EngineKv(10_000), 0.0)
        assert self.wait_s(g, Load(decode_tokens=6000)) == UNKNOWN_DRAIN_S
        for now_s in (1.0, 3.0, 5.0):
            g.released("i", 1000, now_s)
        assert self.wait_s(g, Load(decode_tokens=6000), 11.0) == pytest.approx(1000 / 300)

    def test_several_checks_wait_for_the_last(self) -> None:
        g = gate(0.5, 10_000)
        g.observe_engine("i", EngineKv(10_000), 0.0)
        load = Load(prefill_tokens=10_020, decode_tokens=6000)
        busy = g.busy("i", "m", load, 0.0)
        assert busy is not None
        assert (busy.check, busy.free_in_s) == (TOKENS, UNKNOWN_DRAIN_S)
        g.mark_busy("i", 30.0)
        assert self.wait_s(g, load) == 30.0

    @given(*[st.integers(0, 100_000)] * 4, st.integers(0, 10_000))
    def test_more_load_never_waits_less(
        self, prefill: int, decode: int, more_prefill: int, more_decode: int, released: int
    ) -> None:
        g = gate(0.5, 10_000, 2.0)
        g.observe_engine("i", EngineKv(50_000), 0.0)
        g.released("i", released, 0.0)
        less = self.wait_s(g, Load(prefill_tokens=prefill, decode_tokens=decode))
        load = Load(prefill_tokens=prefill + more_prefill, decode_tokens=decode + more_decode)
        assert less <= self.wait_s(g, load)

    @pytest.mark.parametrize(
        ("waits_s", "expected"),
        [
            ([], 10),
            ([0.0], 1),
            ([0.2], 1),
            ([1.0], 1),
            ([1.2], 2),
            ([29.1], 30),
            ([1e9], 30),
            ([math.inf], 30),
            ([30.0, 3.5, 9.0], 4),
        ],
    )
    def test_retry_after_is_whole_seconds_within_bounds(
        self, waits_s: list[float], expected: int
    ) -> None:
        assert retry_after_s(waits_s) == expected

    @given(st.lists(st.floats(0, 1e12), min_size=1), st.floats(0, 1e12))
    def test_retry_after_is_monotone(self, waits_s: list[float], more_s: float) -> None:
        advised = retry_after_s(waits_s)
        assert RETRY_AFTER_MIN_S <= advised <= RETRY_AFTER_MAX_S
        assert advised <= retry_after_s([wait_s + more_s for wait_s in waits_s])


@dataclass
class Reference:
    """The rules as they read, from scratch for each question."""

    limits: dict[str, Thresholds] = field(default_factory=lambda: {ANY_MODEL: Thresholds()})
    bases: dict[str, dict[str, str]] = field(default_factory=dict)
    reports: dict[str, tuple[EngineKv, float]] = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)

    def is_busy(self, name: str, model: str, load: Load, now_s: float) -> bool:
        named = (model.lower(), self.bases.get(name, {}).get(model.lower()), ANY_MODEL)
        rows = [self.limits[name] for name in named if name in self.limits]
        blocks, tokens, frac = (
            next((v for row in rows if (v := getattr(row, field)) is not None), None)
            for field in THRESHOLD_FIELDS
        )
        kv, seen_s = self.reports.get(name, (EngineKv(), 0.0))
        own, prefill = load.decode_tokens + load.inbound_tokens, load.prefill_tokens
        over = [self.marks.get(name, 0.0) > now_s]
        ranks = kv.used_by_rank or (kv.used_ratio,)
        # The even split is the one with which all ranks are over the soonest.
        over.append(tokens is not None and all(prefill / len(ranks) > tokens for _ in ranks))
        over.append(frac is not None and prefill / len(ranks) > frac * BATCHED)
        if blocks is not None and kv.total_tokens:
            over.append(own / kv.total_tokens > blocks)
            is_fresh = now_s - seen_s <= STALE_S
            over.append(is_fresh and all(used is not None and used > blocks for used in ranks))
        return any(over)


def ratios(*more: float | None) -> st.SearchStrategy[float | None]:
    return st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.85, 1.0, *more])


limits = st.builds(
    Thresholds, ratios(), st.none() | st.sampled_from([0, 1000, 8192]), ratios(2.0, 0.3)
)


kvs = st.builds(
    EngineKv,
    st.none() | st.sampled_from([0, 1000, 4000]),
    ratios(),
    st.lists(ratios(), max_size=3).map(tuple),
)


amounts = st.sampled_from([0, 1, 250, 251, 500, 850, 851, 1000, 1001, 2457, 2458, 8192, 8193])


loads = st.builds(Load, prefill_tokens=amounts, inbound_tokens=amounts, decode_tokens=amounts)


instances = st.sampled_from(["i", "j"])


models = st.sampled_from(["m", "M", "n", "lora", ANY_MODEL])


steps = st.one_of(
    st.tuples(st.just("set"), models, limits),
    st.tuples(st.just("unset"), models, st.none()),
    st.tuples(st.just("base"), instances, st.sampled_from(["m", "n", "N", "unknown"])),
    st.tuples(st.just("report"), instances, kvs),
    st.tuples(st.just("mark"), instances, st.floats(0, 20)),
    st.tuples(st.just("forget"), instances, st.none()),
    st.tuples(st.just("wait"), instances, st.floats(0, 8)),
)


@given(st.lists(st.tuples(steps, instances, models, loads), max_size=40))
def test_any_history_agrees_with_the_rules_as_they_read(history: list[Any]) -> None:
    g, ref, now_s = gate(), Reference(), 0.0
    told: dict[str, dict[str, str]] = {}
    for (kind, name, value), instance, model, load in history:
        if kind == "set":
            g.set(name, value)
            ref.limits[name.lower()] = value
        elif kind == "base":
            told = told | {name: {"lora": value}}
            g.know_bases(told)
            ref.bases[name] = {"lora": value.lower()}
        elif kind == "unset":
            g.unset(name)
            ref.limits.pop(name.lower(), None)
            ref.limits.setdefault(ANY_MODEL, Thresholds())
        elif kind == "report":
            g.observe_engine(name, value, now_s)
            ref.reports[name] = value, now_s
        elif kind == "mark":
            g.mark_busy(name, now_s + value)
            ref.marks[name] = max(now_s + value, ref.marks.get(name, 0.0))
        elif kind == "forget":
            g._states.add(name)
            ref.reports.pop(name, None)
            ref.marks.pop(name, None)
        else:
            now_s += value
        busy = g.busy(instance, model, load, now_s)
        assert (busy is not None) == ref.is_busy(instance, model, load, now_s)
        assert busy is None or busy.free_in_s > 0


def test_open_is_when_nobody_can_be_busy() -> None:
    gate = gate_of(Thresholds())
    assert gate.is_open("m", 0.0)
    gate.mark_busy("a", 5.0)
    assert not gate.is_open("m", 4.9)
    assert gate.busy("a", "m", Load(), 4.9) is not None
    assert gate.is_open("m", 5.0)
    assert gate.busy("a", "m", Load(), 5.0) is None
    gate.set("m", Thresholds(active_prefill_tokens_threshold=1))
    assert not gate.is_open("m", 5.0)
    assert gate.is_open("other", 5.0)


def test_a_prompt_needs_room_for_what_it_finds_in_the_cache_too() -> None:
    """Whole prompts are asked about: a prefix that nobody used is in use with the prompt."""
    g = gate()
    g.observe_engine("i", EngineKv(100_000), 0.0)
    loads = [Load(decode_tokens=60_000, decode_requests=2)]
    assert g.kv_waits_s(list(g._states)[1:2], loads, [0], 20_000, 0.0) == [0.0]
    (wait_s,) = g.kv_waits_s(list(g._states)[1:2], loads, [0], 80_000, 0.0)
    assert wait_s == g.kv_wait_s("i", loads[0], 80_000, 0, 0.0) > 0


def test_of_what_streams_share_one_copy_needs_room() -> None:
    """Two streams of 40,000 tokens that begin with the same 30,000 hold 50,000."""
    g = gate()
    g.observe_engine("i", EngineKv(100_000), 0.0)
    states = list(g._states)[1:2]
    two = Load(decode_tokens=80_000, decode_requests=2, shared_tokens=60_000, shared_requests=2)
    assert two.held_tokens == 50_000
    assert g.kv_waits_s(states, [two], [0], 45_000, 0.0) == [0.0]
    assert g.kv_waits_s(states, [two], [0], 70_000, 0.0)[0] > 0
    assert g.kv_waits_s(states, [two], [30_000], 70_000, 0.0) == [0.0], "it shares them too"


@given(
    st.integers(1, 200_000),
    st.integers(0, 200_000),
    st.integers(0, 200_000),
    st.integers(0, 100_000),
    st.integers(1, 50),
)
def test_no_prompt_waits_for_more_than_all_that_is_held(
    kv_tokens: int, prompt_tokens: int, hit_tokens: int, held_tokens: int, freed_tokens: int
) -> None:
    """Ending streams free a token a second or more here: so many tokens take no more seconds."""
    g = gate()
    g.observe_engine("i", EngineKv(kv_tokens), 0.0)
    g.released("i", freed_tokens, 0.0)
    load = Load(decode_tokens=held_tokens, decode_requests=1 if held_tokens else 0)
    assert 0.0 <= g.kv_wait_s("i", load, prompt_tokens, hit_tokens, 1.0) <= held_tokens


def test_an_answer_opens_an_instance_that_one_client_has_closed() -> None:
    g = gate()
    woken: list[int] = []
    g.on_change = lambda: woken.append(1)
    g.refused("i", "mallory", 30.0, 0.0)
    assert g.is_open("m", 0.0), "it may be the request's own fault"
    g.judged("i", "mallory", 30.0, 1.0)
    assert not g.is_open("m", 1.0)
    g.served("i", "alice", 0.5)
    assert g.is_open("m", 1.5)
    assert woken
    g.judged("i", "mallory", 1.0, 2.0)
    assert g.is_open("m", 2.0), "its time is over"


def test_each_try_of_a_closed_instance_is_a_change() -> None:
    g = gate()
    for client, now_s in (("mallory", 0.0), ("alice", 0.0), ("mallory", 1.0)):
        g.refused("i", client, 30.0, now_s)
    assert [g.next_change_s(now_s) for now_s in (0.0, 1.0, 3.0)] == [1.0, 3.0, 31.0]
    assert g.busy("i", "m", Load(), 0.5, client="carol") is not None
    assert g.busy("i", "m", Load(), 1.0, client="carol") is None
    assert g.busy("i", "m", Load(), 1.0, client="mallory") is not None
    assert g.busy("i", "m", Load(), 1.0) is not None
