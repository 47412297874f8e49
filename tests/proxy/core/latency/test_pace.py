"""What is known of times at a moment: as the lines say then, and never changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.latency.model import Latency
from proxy.core.latency.pace import Numbers, Pace
from tests.support.scenes import latency_of

CHANGES = ("reserve", "end", "prefill", "step", "transfer", "adopt", "drop")


def change(m: Latency, what: str, name: str, tokens: int, seconds: float, now_s: float) -> None:
    times = m.of(name)
    if what == "reserve":
        m.reserve_prefill(times, tokens % 7, seconds, now_s)
    elif what == "end":
        m.end_prefill(times, tokens % 7, now_s)
    elif what == "prefill":
        seen = times.measured(tokens, tokens, seconds, 0.0, saw_way=True)
        assert seen is not None
        m.told(seen, tokens, 0)
    elif what == "step":
        m.observe_step(times, tokens, seconds)
    elif what == "transfer":
        m.observe_transfer("a", name, tokens, seconds)
    elif what == "adopt":
        m.adopt("b", m.legacy("a"))
    else:
        m.drop_pairs(name)


def is_now(m: Latency, name: str) -> bool:
    times = m.of(name)
    lines = times.prefill.p, times.prefill.q, times.step.p, times.step.q
    recent = times.recent, times.recent_s, times.recent_at_s
    now = [times.budget, *lines, times.busy_until_s, *recent, bool(times.pending)]
    return times.pace().numbers() == now


@given(
    st.lists(
        st.tuples(
            st.sampled_from(CHANGES),
            st.sampled_from("ab"),
            st.integers(1, 5000),
            st.floats(0.001, 5.0),
        ),
        max_size=40,
    )
)
def test_a_pace_is_what_is_known_now(changes: list[tuple[str, str, int, float]]) -> None:
    """It is made again only where something has changed; what is kept of a moment stays."""
    m = latency_of("ab")
    kept: list[tuple[Pace, Numbers]] = []
    for now_s, (what, name, tokens, seconds) in enumerate(changes):
        change(m, what, name, tokens, seconds, now_s)
        assert is_now(m, "a")
        assert is_now(m, "b")
        kept += [(pace, pace.numbers()) for pace in (m.of("a").pace(), m.of("b").pace())]
        pairs = {pair: (line.p, line.q) for pair, line in m._pairs.items()}
        assert m.fleet(1).transfers.pairs == pairs
    assert all(pace.numbers() == was == Pace.of(was).numbers() for pace, was in kept)
