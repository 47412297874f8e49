"""Prompts in flight against a naive model: every owner that leaves takes along what it brought."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.kvcache.inflight import Inflight
from tests.support.caches import Caches
from tests.support.examples import examples

paths = st.lists(st.integers(0, 2), max_size=8)
steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave"]),
        st.sampled_from("ab"),
        st.integers(0, 4),
        paths,
        st.integers(0, 8),
    ),
    max_size=40,
)


def chained(path: Sequence[int]) -> list[int]:
    return [hash(tuple(path[: i + 1])) for i in range(len(path))]


@settings(max_examples=examples(200))
@given(steps, paths, st.integers(0, 8))
def test_as_a_list_of_prompts_would_say(
    plan: list[tuple[str, str, int, list[int], int]], asked: list[int], hit: int
) -> None:
    inflight, at = Inflight(), Caches()
    naive: dict[tuple[str, int], list[int]] = {}
    for step, name, key, path, start in plan:
        if step == "enter":
            inflight.enter(at[name], key, chained(path), start)
            naive.pop((name, key), None)
            if start < len(path):
                naive[name, key] = chained(path)[start:]
        else:
            assert inflight.leave(at[name], key) == (naive.pop((name, key), None) is not None)
        for one in "ab":
            mine = [missing for (where, _), missing in naive.items() if where == one]
            assert at[one].computing_blocks == sum(map(len, mine))
            reach = inflight.reach(at[one], chained(asked), hit)
            assert reach == max(hit, _reach(mine, chained(asked), hit))
    for name, key in list(naive):
        inflight.leave(at[name], key)
    assert not inflight
    assert not any(at[name].computing for name in "ab")


def _reach(missing: list[list[int]], asked: list[int], hit: int) -> int:
    """Follow whoever begins at the first missing block, as long as somebody does."""
    while hit < len(asked):
        runs = [m for m in missing if m[0] == asked[hit]]
        if not runs:
            return hit
        best = 0
        for run in runs:
            pairs = zip(run, asked[hit:], strict=False)
            best = max(best, next((i for i, (x, y) in enumerate(pairs) if x != y), len(run)))
        hit = min(len(asked), hit + min(best, len(asked) - hit))
    return hit


def test_a_chain_of_siblings() -> None:
    """A second one counts the first's blocks and brings its own; a third counts both."""
    inflight, at = Inflight(), Caches()
    first, second = chained([0] * 4), chained([0] * 6)
    inflight.enter(at["x"], 1, first, 1)
    inflight.enter(at["x"], 2, second, inflight.reach(at["x"], second, 1))
    assert at["x"].computing_blocks == 5
    assert inflight.reach(at["x"], chained([0] * 9), 1) == 6
    assert inflight.reach(at["y"], second, 1) == 1
    inflight.leave(at["x"], 1)
    assert inflight.reach(at["x"], second, 1) == 1
    assert inflight.reach(at["x"], second, 4) == 6


def test_who_computes_in_a_lost_cache_is_not_named() -> None:
    inflight, at = Inflight(), Caches()
    lost, prompt = at["x"], chained([0] * 4)
    inflight.enter(lost, 1, prompt, 1)
    assert inflight.begun_at(prompt, 1) == [lost]
    lost.is_lost = True
    assert inflight.begun_at(prompt, 1) == []
    inflight.enter(at["x"], 2, prompt, 1)
    assert inflight.begun_at(prompt, 1) == [at["x"]]
    assert inflight.leave(lost, 1)
    assert inflight.leave(at["x"], 2)
    assert not inflight
