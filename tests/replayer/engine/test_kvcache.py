"""The block pool: conservation under any use, LRU order, tail-first release."""

from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.engine.kvcache import BlockPool, Holding


def _cache(pool: BlockPool, hashes: list[int]) -> Holding:
    holding = Holding()
    assert pool.allocate(holding, len(hashes))
    assert pool.publish(holding, hashes) == len(hashes)
    return holding


def test_a_released_prefix_is_found_again_up_to_the_limit():
    pool = BlockPool(10)
    pool.release(_cache(pool, [1, 2, 3]))
    assert pool.match([1, 2, 3, 4], limit=9) == 3
    assert pool.match([1, 2, 3], limit=2) == 2
    assert pool.match([2, 3], limit=9) == 2
    assert pool.match([9, 1], limit=9) == 0
    assert (pool.free_blocks, pool.usage_ratio) == (10, 0.0)


def test_leaves_are_evicted_before_roots():
    pool = BlockPool(4)
    pool.release(_cache(pool, [1, 2, 3, 4]))
    other = Holding()
    assert pool.allocate(other, 2)
    assert pool.match([1, 2, 3, 4], limit=9) == 2
    assert pool.evicted_blocks == 2


def test_the_least_recently_released_goes_first():
    pool = BlockPool(2)
    pool.release(_cache(pool, [1]))
    pool.release(_cache(pool, [2]))
    again = Holding()
    pool.hold(again, [1])
    pool.release(again)
    assert pool.allocate(Holding(), 1)
    assert pool.match([1], limit=1) == 1
    assert pool.match([2], limit=1) == 0


def test_held_blocks_are_never_evicted():
    pool = BlockPool(3)
    held = _cache(pool, [1, 2])
    assert not pool.allocate(Holding(), 2)
    assert pool.match([1, 2], limit=2) == 2
    assert pool.room_beside([1, 2]) == 1
    pool.release(held)
    assert pool.room_beside([1, 2]) == 1
    assert pool.room_beside([]) == 3


def test_a_twin_stays_private():
    pool = BlockPool(4)
    _cache(pool, [7])
    twin = Holding()
    assert pool.allocate(twin, 1)
    assert pool.publish(twin, [7]) == 0
    pool.release(twin)
    pool.check()
    assert pool.free_blocks == 3


_actions = st.lists(
    st.tuples(st.sampled_from(["begin", "publish", "end"]), st.integers(0, 5), st.integers(0, 12)),
    max_size=80,
)


@settings(deadline=None)
@given(total=st.integers(1, 20), actions=_actions)
def test_blocks_are_conserved_under_any_use(total: int, actions: list[tuple[str, int, int]]):
    pool = BlockPool(total)
    holdings = [Holding() for _ in range(6)]
    for action, who, number in actions:
        holding = holdings[who]
        if action == "begin":
            chain = list(range(100 * (number % 3), 100 * (number % 3) + number))
            if not holding.blocks:
                pool.hold(holding, chain[: pool.match(chain, number)])
            free = pool.free_blocks
            assert pool.allocate(holding, number) == (number <= free)
        elif action == "publish" and holding.anonymous:
            pool.publish(holding, [100 * (number % 3) + len(holding.cached)])
        elif action == "end":
            pool.release(holding)
        pool.check()
        assert 0 <= pool.free_blocks <= total
    for holding in holdings:
        pool.release(holding)
    pool.check()
    assert pool.free_blocks == total
