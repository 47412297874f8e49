"""Breaks of one client's answers, of several clients', and the trials between."""

from __future__ import annotations

from proxy.core.fleet.broken import ALONE_S, REST_S, TRIED, Broken


def breaks(it: Broken, client: str, now_s: float, *, is_late: bool = False) -> None:
    it.broke(client, now_s, is_cut=True, is_late=is_late)


def test_a_single_one_waits_a_moment_for_its_trial() -> None:
    it = Broken()
    assert not it.is_trial_due(0.0)
    breaks(it, "a", 1.0)
    assert not it.is_trial_due(1.0)
    assert it.is_trial_due(1.0 + ALONE_S)
    for _ in range(TRIED - 1):
        breaks(it, "a", 1.1)
    assert it.is_trial_due(1.1)
    assert not it.is_several


def test_a_newer_answer_ends_the_row() -> None:
    it = Broken()
    breaks(it, "a", 1.0, is_late=True)
    it.served(0.5)
    assert (it.row, it.cuts, it.late) == (1, 1, 1)
    it.served(1.0)
    assert (it.row, it.cuts, it.late, it.is_open) == (0, 0, 0, False)
    breaks(it, "b", 2.0)
    assert not it.is_several, "with an answer in between"


def test_one_client_makes_no_more_trials_than_one_in_a_while() -> None:
    it, trials = Broken(), 0
    for at in range(100):
        now_s = at * REST_S / 20
        breaks(it, "mallory", now_s)
        if it.is_trial_due(now_s):
            it.passed(now_s)
            trials += 1
    assert trials <= 100 / 20 + 1
    breaks(it, "alice", 100 * REST_S / 20)
    assert it.is_trial_due(100 * REST_S / 20)
    assert it.is_several
