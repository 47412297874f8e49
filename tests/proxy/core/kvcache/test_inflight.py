"""Prompts in flight against a naive model: every owner that leaves takes along what it brought."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.kvcache.inflight import Inflight

paths = st.lists(st.integers(0, 2), max_size=8)
steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "forget"]),
        st.sampled_from("ab"),
        st.integers(0, 4),
        paths,
        st.integers(0, 8),
    ),
    max_size=40,
)


def chained(path: Sequence[int]) -> list[int]:
    return [hash(tuple(path[: i + 1])) for i in range(len(path))]


@settings(max_examples=200)
@given(steps, paths, st.integers(0, 8))
def test_as_a_list_of_prompts_would_say(
    plan: list[tuple[str, str, int, list[int], int]], asked: list[int], hit: int
) -> None:
    inflight = Inflight()
    naive: dict[tuple[str, int], list[int]] = {}
    for step, name, key, path, start in plan:
        if step == "enter":
            inflight.enter(name, key, chained(path), start)
            naive.pop((name, key), None)
            if start < len(path):
                naive[name, key] = chained(path)[start:]
        elif step == "leave":
            assert inflight.leave(name, key) == (naive.pop((name, key), None) is not None)
        else:
            inflight.forget(name)
            naive = {k: v for k, v in naive.items() if k[0] != name}
        for one in "ab":
            mine = [missing for (where, _), missing in naive.items() if where == one]
            assert inflight.blocks(one) == sum(map(len, mine))
            reach = inflight.reach(one, chained(asked), hit)
            assert reach == max(hit, _reach(mine, chained(asked), hit))
    for name, key in list(naive):
        inflight.leave(name, key)
    assert not inflight.instances()
    assert not inflight._prompts
    assert not inflight._blocks


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
    inflight = Inflight()
    first, second = chained([0] * 4), chained([0] * 6)
    inflight.enter("x", 1, first, 1)
    inflight.enter("x", 2, second, inflight.reach("x", second, 1))
    assert inflight.blocks("x") == 5
    assert inflight.reach("x", chained([0] * 9), 1) == 6
    assert inflight.reach("y", second, 1) == 1
    inflight.leave("x", 1)
    assert inflight.reach("x", second, 1) == 1
    assert inflight.reach("x", second, 4) == 6
