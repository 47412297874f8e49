"""The key of a prompt changes where vLLM's own prompt does, as real engines have shown."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.protocol.endpoints import Dialect
from proxy.protocol.prompt.facts import prompt_facts
from proxy.protocol.prompt.rendered import Rendered
from proxy.protocol.prompt.rendering import Where
from tests.support.rendering_cases import (
    CASES,
    CHAT,
    COMPLETIONS,
    FOUND,
    MESSAGES,
    PATHS,
    REFUSED,
    RESPONSES,
    pair,
)

FIRST_TURN = {
    CHAT: "messages[].content[text].text",
    MESSAGES: "messages[].content[text].text",
    RESPONSES: "input[].content[input_text].text",
}
HASHED = {"model", "cache_salt"}
"""Members that are no text of the key, but in what its hashes begin with."""
MORE = {
    (MESSAGES, "tool_use before text"),
    (MESSAGES, "tool_result behind text"),
    (CHAT, "tool_calls[].function.arguments, no object"),
    (RESPONSES, "input[] of role assistant, second part"),
}
"""The key has more than vLLM renders, where no client changes it from turn to turn: the order of a
message's parts, arguments that are no object, and parts that gpt-oss renders."""
AS_WRITTEN = {(CHAT, "messages[] of role developer"), (RESPONSES, "input[] of role developer")}
"""In place, where a template knows the role; vLLM moves it to the front where it does not."""
SEEN = [(key, where) for key, where in FOUND.items() if where is not REFUSED and key not in MORE]


def key(dialect: str, body: dict[str, Any]) -> bytes:
    """The texts of the key."""
    return b"\x1f".join(bytes(text) for text in Rendered(Dialect(dialect), body, 1 << 16).texts)


def common(dialect: str, member: str) -> int:
    """Bytes that the keys of a pair have in common."""
    one, other = (key(dialect, body) for body in pair(dialect, CASES[dialect][member]))
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


@pytest.mark.parametrize(("case", "where"), SEEN, ids=str)
def test_the_key_changes_where_the_engines_prompt_does(case: tuple[str, str], where: Where) -> None:
    dialect, member = case
    one, other = pair(dialect, CASES[dialect][member])
    if member in HASHED:
        hashes = [prompt_facts(PATHS[dialect], body).hashes for body in (one, other)]  # type: ignore[union-attr]
        assert not set(hashes[0]) & set(hashes[1])
        return
    is_equal = key(dialect, one) == key(dialect, other)
    assert is_equal == (where is Where.NOT)
    if not is_equal and dialect != COMPLETIONS and case not in AS_WRITTEN:
        is_front = common(dialect, member) < common(dialect, FIRST_TURN[dialect])
        assert is_front == (where is Where.FRONT)
