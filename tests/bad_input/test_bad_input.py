"""The corpus and its variants against a real proxy: refused or served as expected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from tests.bad_input import drips
from tests.bad_input.cases import EXPECTATIONS, Case, cases, variants
from tests.bad_input.run import run

CASES = cases()
NAMES = [case.name for case in CASES]


@pytest.mark.long
def test_every_case_is_treated_as_expected_and_nothing_leaks(tmp_path: Path) -> None:
    """One run over everything: a connection each, many at once."""
    everything = CASES + [variant for case in CASES for variant in variants(case)]
    result = uvloop.run(run(everything, tmp_path))
    faults: dict[str, list[str]] = {}
    for outcome in result.outcomes:
        if outcome.fault:
            faults.setdefault(outcome.case.name, []).append(str(outcome))
    assert faults == {}
    assert {outcome.case.name for outcome in result.outcomes} == set(NAMES)
    assert result.leaked == [], "nothing of what is refused reaches an engine"
    assert result.log == [], "no traceback and no header is logged"


def test_the_corpus_is_as_large_as_said() -> None:
    assert len(set(NAMES)) == len(NAMES)
    counts = {e: sum(case.expect == e for case in CASES) for e in EXPECTATIONS}
    assert counts["refuse"] >= 100
    assert counts["serve"] >= 40


def all_variants() -> Iterator[Case]:
    return (variant for case in CASES for variant in variants(case))


def test_variants_are_the_same_every_time_and_keep_what_is_cut() -> None:
    written = {case.name: case.bytes for case in CASES}
    again = list(all_variants())
    assert again == list(all_variants())
    cut = [v for v in again if v.variant == "byte by byte" or v.variant.startswith("cut")]
    assert all(v.bytes == written[v.name] for v in cut)


def test_drips_are_given_up_and_others_served(tmp_path: Path) -> None:
    found = uvloop.run(drips.run(20, tmp_path, header_timeout=0.3, body_timeout=0.6))
    assert (len(found.head_s), len(found.body_s)) == (20, 20)
    assert max(found.head_s + found.body_s) < drips.TOO_LONG_S
    assert set(found.beside) == {200}
