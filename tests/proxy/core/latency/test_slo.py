"""What counts as goodput."""

from __future__ import annotations

import pytest

from proxy.core.latency.slo import Slo


@pytest.mark.parametrize(
    ("ttft_s", "new_tokens", "kept"),
    [(2.0, 0, True), (2.01, 0, False), (2.9, 10_000, True), (3.1, 10_000, False)],
)
def test_a_long_prompt_may_take_longer(ttft_s: float, new_tokens: int, *, kept: bool) -> None:
    assert Slo().keeps_ttft(ttft_s, new_tokens) is kept


def test_an_answer_of_one_token_has_no_pace() -> None:
    slo = Slo(tpot_s=0.03)
    assert slo.keeps_tpot(None)
    assert slo.keeps_tpot(0.03)
    assert not slo.keeps_tpot(0.031)
