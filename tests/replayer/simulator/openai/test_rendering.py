"""What of a request a model reads, and what of it stands in front of the rest."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from replayer.engine.tokens import make_prompt, tokenize
from replayer.simulator.messages import as_chat
from replayer.simulator.openai.rendering import functions_of, render_chat
from replayer.simulator.openai.responses import ResponseStore
from tests.support.clients import CLIENTS, Recorded, recorded

CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "read", "arguments": '{"path":"a"}'},
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "read", "parameters": {"type": "object"}},
}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "what is in a?"}]},
    {"role": "assistant", "content": "I read", "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "x = 1", "tool_call_id": "c1"},
]
BASE: dict[str, Any] = {"messages": TURNS, "tools": [TOOL]}


def changed(turn: int, **members: Any) -> dict[str, Any]:
    messages = [dict(message) for message in TURNS]
    messages[turn] |= members
    return BASE | {"messages": messages}


@pytest.mark.parametrize(
    "body",
    [
        changed(0, cache_control={"type": "ephemeral"}),
        changed(1, content="what is in a?"),
        changed(1, content=[{"type": "text", "text": "what is in a?", "cache_control": {}}]),
        changed(2, tool_calls=[CALL | {"id": "c2", "index": 0}]),
        changed(2, reasoning=None, reasoning_content="hm"),
        changed(2, tool_calls=[CALL["function"] | {"arguments": {"path": "a"}}]),
        changed(3, tool_call_id="c2"),
        BASE | {"tools": [TOOL | {"cache_control": {}}, {"type": "web_search"}]},
        BASE | {"tools": [{"type": "function"} | TOOL["function"] | {"strict": True}]},
        BASE | {"user": "a", "metadata": {"a": "b"}, "temperature": 0.5},
    ],
)
def test_what_the_model_does_not_read(body: dict[str, Any]) -> None:
    assert render_chat(body) == render_chat(BASE)


@pytest.mark.parametrize(
    "body",
    [
        BASE | {"reasoning_effort": "high"},
        BASE | {"chat_template": "{{ messages }}"},
        BASE | {"chat_template_kwargs": {"enable_thinking": False}},
        BASE | {"tools": [TOOL, TOOL]},
        BASE | {"tools": []},
    ],
)
def test_what_stands_in_front(body: dict[str, Any]) -> None:
    both = render_chat(body), render_chat(BASE)
    same = next(i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b)
    assert same < both[1].index("be brief")


@pytest.mark.parametrize(
    ("turn", "members"),
    [
        (1, {"content": "what is in b?"}),
        (2, {"reasoning": "well"}),
        (2, {"tool_calls": [CALL | {"function": {"name": "read", "arguments": "not JSON"}}]}),
        (3, {"content": "x = 2"}),
    ],
)
def test_what_stands_in_its_place(turn: int, members: dict[str, Any]) -> None:
    other = render_chat(changed(turn, **members))
    upto = render_chat(BASE | {"messages": TURNS[:turn], "add_generation_prompt": False})
    assert other != render_chat(BASE)
    assert other.startswith(upto)


def test_tools_of_a_name_space_have_its_name() -> None:
    space = {"type": "namespace", "name": "files", "tools": [TOOL]}
    (found,) = functions_of([space])
    assert (found["namespace"], found["name"]) == ("files", "read")
    assert '"files.read"' in render_chat(BASE | {"tools": [space]})


def chat_of(request: Recorded) -> dict[str, Any]:
    """The chat that a recorded request means."""
    body: dict[str, Any] = orjson.loads(request.body)
    if request.path.startswith("/v1/messages"):
        return as_chat(body)
    return body if "messages" in body else ResponseStore().as_chat(body)


def shares(client: str) -> Iterator[tuple[float, float]]:
    """Of each prompt: the share that is cached here, and on the engine of the recording."""
    known: set[int] = set()
    for request in recorded(client):
        if not request.rendered_chars:
            continue
        prompt = make_prompt(tokenize(render_chat(chat_of(request))), 16)
        hits = [block in known for block in prompt.block_hashes]
        known.update(prompt.block_hashes)
        hit = 16 * (hits.index(False) if False in hits else len(hits))
        yield hit / prompt.tokens, request.cached_chars / request.rendered_chars


@pytest.mark.long
@pytest.mark.parametrize("client", [name for name in CLIENTS if not name.startswith("ai-sdk")])
def test_of_real_clients_prompts_as_much_is_cached_as_in_the_recordings(client: str) -> None:
    """All but the AI SDK's, whose references to items are refused. Tokens are not characters."""
    off = [abs(here - there) for here, there in shares(client)]
    assert statistics.median(off) < 0.01
    assert max(off) < 0.06
