"""The token counts of an engine's answer, in each dialect's names."""

from __future__ import annotations

from typing import Any, Final

from proxy.protocol.endpoints import Dialect
from proxy.protocol.streams.sse import object_of

MOST_TOKENS: Final = 100_000_000
"""More than any answer has: a larger count is wrong."""
Told = tuple[int | None, int | None, int | None]
"""Tokens of the prompt, those of them that were cached, and of the output."""


def told_counts(answer: bytes | None, dialect: Dialect, first_data: bytes = b"") -> Told:
    """The counts that an engine tells; None for each that is missing or cannot be right.

    `answer`: a JSON object with the member `usage`; the Responses API's streams have it further in.
    `first_data`: data of the stream's first event, where Anthropic's API has a part of the counts.
    """
    prompt: Any
    cached: Any
    output: Any  # what an engine tells may be of any type
    told = object_of(answer) if answer else {}  # many clients do not ask for usage
    counts = _inner(told if "usage" in told else _inner(told, "response"), "usage")
    if dialect is Dialect.MESSAGES:
        prompt, cached = _of_message(counts)
        if not prompt and first_data:
            begun = _inner(_inner(object_of(first_data), "message"), "usage")
            prompt, cached = _of_message(begun)
        output = counts.get("output_tokens")
    elif dialect is Dialect.RESPONSES:
        details = _inner(counts, "input_tokens_details")
        prompt = _first(details.get("input_tokens_per_turn"), counts.get("input_tokens"))
        cached = _first(details.get("cached_tokens_per_turn"), details.get("cached_tokens"))
        output = counts.get("output_tokens")
    else:
        prompt, output = counts.get("prompt_tokens"), counts.get("completion_tokens")
        cached = _inner(counts, "prompt_tokens_details").get("cached_tokens")
    prompt_tokens = _count(prompt)
    most = MOST_TOKENS if prompt_tokens is None else prompt_tokens
    return prompt_tokens, _count(cached, most), _count(output)


def _inner(told: dict[str, Any], name: str) -> dict[str, Any]:
    found = told.get(name)
    return found if isinstance(found, dict) else {}


def _of_message(counts: dict[str, Any]) -> tuple[int | None, Any]:
    """Prompt tokens and cached prompt tokens: Anthropic counts three parts apart."""
    cached = counts.get("cache_read_input_tokens")
    parts = counts.get("input_tokens"), cached, counts.get("cache_creation_input_tokens")
    known = [_count(part) for part in parts if part is not None]
    if parts[0] is None or None in known:
        return None, None
    return sum([part for part in known if part is not None]), cached


def _first(turns: Any, total: Any) -> Any:
    """The count of the first turn, whose prompt is the request's, where a tool's turns followed."""
    return turns[0] if isinstance(turns, list) and len(turns) > 1 else total


def _count(value: Any, most: int = MOST_TOKENS) -> int | None:
    """A plausible count, else None: a wrong one would spoil sums and learned rates."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
    return value if is_count else None
