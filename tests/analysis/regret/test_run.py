"""One run with some of its decisions judged."""

from analysis.regret.run import sample


def test_a_sample_depends_on_the_seed_alone() -> None:
    assert sample(3, 5, 0) == frozenset(range(3))
    assert len(sample(100, 10, 1)) == 10
    assert sample(100, 10, 1) == sample(100, 10, 1) != sample(100, 10, 2)
