"""How fast an instance's KV becomes free."""

from __future__ import annotations

import pytest

from proxy.core.kvcache.engine_cache import ReleaseRate


class TestReleaseRate:
    @pytest.mark.parametrize(
        ("ended", "now_s", "expected"),
        [
            ([], 0.0, None),
            ([(0.0, 100)], 0.0, 100.0),
            ([(0.0, 100)], 10.0, 10.0),
            ([(0.0, 100)], 60.0, 100 / 60),
            ([(0.0, 100)], 60.1, None),
            ([(0.0, 100), (50.0, 40)], 61.0, 40 / 11),
            ([(0.0, 0)], 1.0, None),
        ],
    )
    def test_over_the_last_minute(
        self, ended: list[tuple[float, int]], now_s: float, expected: float | None
    ) -> None:
        rate = ReleaseRate()
        for then_s, tokens in ended:
            rate.add(tokens, then_s)
        assert rate.tokens_per_s(now_s) == expected

    def test_over_the_last_streams_when_they_are_many(self) -> None:
        rate = ReleaseRate()
        for i in range(5000):
            rate.add(10, i / 1000)
        assert len(rate._ended) == ReleaseRate.WINDOW_STREAMS
        assert rate.tokens_per_s(5.0) == pytest.approx(10 * 1000, rel=0.01)
