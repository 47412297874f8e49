"""The token counts of answers, in each dialect's names."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.endpoints import Dialect
from proxy.protocol.streams.token_counts import told_counts


def counts_of(dialect: Dialect, usage: Any, first: Any = None) -> tuple[int | None, ...]:
    """Tokens of prompt, cache and output, by a usage in this dialect."""
    begun = b"" if first is None else orjson.dumps({"message": {"usage": first}})
    return told_counts(orjson.dumps({"usage": usage}), dialect, begun)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"input_tokens": 9, "output_tokens": 2}, (9, None, 2)),
        ({"input_tokens": 9, "cache_read_input_tokens": 32}, (41, 32, None)),
        ({"input_tokens": 0, "cache_read_input_tokens": 32, "output_tokens": 0}, (32, 32, 0)),
        ({"input_tokens": 9, "cache_read_input_tokens": None}, (9, None, None)),
        ({"input_tokens": 9, "cache_creation_input_tokens": 4}, (13, None, None)),
        ({"input_tokens": 9, "cache_creation_input_tokens": -4}, (None, None, None)),
        ({"input_tokens": "9", "output_tokens": 2}, (None, None, 2)),
        ({"input_tokens": True}, (None, None, None)),
        ({"cache_read_input_tokens": 32, "output_tokens": 2}, (None, None, 2)),
        ({"prompt_tokens": 9, "completion_tokens": 2}, (None, None, None)),
        ([], (None, None, None)),
    ],
)
def test_anthropics_counts_are_parts_of_the_prompt(
    usage: Any, counts: tuple[int | None, ...]
) -> None:
    assert counts_of(Dialect.MESSAGES, usage) == counts
    begun = {"input_tokens": 5, "cache_read_input_tokens": 2}
    told = counts if counts[0] else (7, 2, counts[2])
    assert counts_of(Dialect.MESSAGES, usage, begun) == told


@given(st.integers(0, 10**8), st.integers(0, 10**8), st.integers(0, 10**8))
def test_all_dialects_say_the_same(prompt: int, cached: int, output: int) -> None:
    """Whatever the counts are, beyond what is plausible too."""
    told = {"prompt_tokens_details": {"cached_tokens": cached}}
    chat = counts_of(Dialect.CHAT, told | {"prompt_tokens": prompt, "completion_tokens": output})
    io = {"input_tokens": prompt, "output_tokens": output}
    details = {"input_tokens_details": {"cached_tokens": cached}}
    assert counts_of(Dialect.RESPONSES, io | details) == chat
    if cached <= prompt:
        parts = io | {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
        assert counts_of(Dialect.MESSAGES, parts) == chat
