"""A memo remembers a limited number of results."""

from __future__ import annotations

from proxy.protocol.memo import Memo


def test_results_are_kept_until_it_is_full() -> None:
    memo: Memo[str, int] = Memo(2)
    assert [memo.keep("a", 1), memo.keep("b", 2)] == [1, 2]
    assert memo.known == {"a": 1, "b": 2}
    known = memo.known
    memo.keep("c", 3)
    assert known == {"c": 3}, "the same dict, for those who hold it"
