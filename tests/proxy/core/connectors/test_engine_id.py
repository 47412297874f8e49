"""What is known of an engine's id, whatever its server does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.connectors.engine_id import BREAK_AFTER, KEEP_S, OPEN_MAX_S, OPEN_MIN_S, EngineId


def test_the_last_word_holds_for_a_while() -> None:
    engine = EngineId()
    assert not engine.answered("a", 10.0)
    engine.failed(20.0)
    assert engine.known(10.0 + KEEP_S) == "a"
    assert engine.known(10.1 + KEEP_S) is None


def test_no_engine_holds_at_once_and_a_new_one_is_noticed() -> None:
    engine = EngineId()
    engine.answered("a", 0.0)
    assert not engine.answered(None, 1.0)
    assert engine.known(1.0) is None
    assert not engine.answered("a", 2.0)
    assert engine.answered("b", 3.0)
    engine.forget()
    assert engine.known(3.0) is None
    engine.renew()
    assert not engine.answered("c", 4.0), "who comes back is no news"


def test_a_server_that_fails_is_left_alone() -> None:
    engine = EngineId()
    for _ in range(BREAK_AFTER - 1):
        engine.failed(0.0)
        assert engine.may_ask(0.0)
    engine.failed(0.0)
    assert not engine.may_ask(OPEN_MIN_S - 0.1)
    assert engine.may_ask(OPEN_MIN_S)
    for _ in range(20):
        engine.failed(0.0)
    assert engine.may_ask(OPEN_MAX_S)
    engine.answered("a", 1.0)
    assert engine.may_ask(1.0)


steps = st.lists(
    st.tuples(st.sampled_from(["a", "b", None, "fail", "forget", "renew"]), st.floats(0, 40)),
    max_size=30,
)


@given(steps)
def test_an_id_that_is_used_was_heard_lately(course: list[tuple[str | None, float]]) -> None:
    engine, now_s, heard, heard_s = EngineId(), 0.0, None, 0.0
    for what, later_s in course:
        now_s += later_s
        if what == "fail":
            engine.failed(now_s)
        elif what == "forget":
            engine.forget()
            heard = None
        elif what == "renew":
            engine.renew()
            heard = None
        else:
            engine.answered(what, now_s)
            heard, heard_s = what, now_s
        assert engine.known(now_s) == (heard if now_s - heard_s <= KEEP_S else None)
        assert engine.may_ask(now_s + OPEN_MAX_S)
