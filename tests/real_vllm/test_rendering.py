"""What real engines render: two requests that differ in one member.

How much of the second is cached says it. All of it: the member becomes no token. None of the turns:
it stands in front of them. Else it stands in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.protocol.prompt.rendering import MEDIA, ROWS, Where
from tests.real_vllm.engines.adapter import made_adapter
from tests.real_vllm.engines.fleet import BLOCK_TOKENS, MODEL, Engine, Site, running
from tests.support.rendering_cases import (
    ADAPTER,
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

TEMPLATE = Path(__file__).parent / "engines" / "rendering.jinja"
SYSTEM_FIRST = (
    "{%- for m in messages[1:] if m.role == 'system' -%}"
    "{{ raise_exception('System message must be at the beginning.') }}"
    "{%- endfor -%}"
)
"""What templates begin with that take system text in front only."""
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
THINKING = orjson.dumps({"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"})
FIRST_TURN = {
    CHAT: "messages[].content[text].text",
    MESSAGES: "messages[].content[text].text",
    RESPONSES: "input[].content[input_text].text",
}
"""The members that the turns begin with: what is cached of these requests is all in front."""


ELSEWHERE = {
    (MESSAGES, "messages[] of role system"): Where.FRONT,
    (MESSAGES, "tool_choice"): Where.FRONT,
    (MESSAGES, "tools"): Where.FRONT,
    (MESSAGES, "messages[].content[tool_result].content"): Where.IN_PLACE,
    (MESSAGES, "messages[] of role system, billing block"): Where.NOT,
    (MESSAGES, "system[] billing block"): Where.NOT,
}
"""What holds at an engine whose template takes system text in front only, and that is started with
`--exclude-tools-when-tool-choice-none`."""
UNSEEN = {
    (CHAT, "add_special_tokens"): "the tokenizer adds none",
    (CHAT, "mm_processor_kwargs"): "refused without --trust-request-mm-kwargs",
    (CHAT, "media_io_kwargs"): "refused without --trust-request-mm-kwargs",
    (CHAT, "messages[].tools"): "the template has no developer role",
    (CHAT, "messages[].content[image_url].detail"): "the model reads texts only",
    (RESPONSES, "input[].content[input_image].detail"): "the model reads texts only",
    (RESPONSES, "input[].content[refusal].refusal"): "vLLM fails with 500",
}
"""Rows of the table that this engine cannot show, beside those of images, sound and files."""


class Reader:
    """Asks an engine for what it finds cached."""

    def __init__(self, http: aiohttp.ClientSession, engine: Engine) -> None:
        self._http, self._engine = http, engine
        self._in_front: dict[str, int] = {COMPLETIONS: BLOCK_TOKENS}

    async def where(self, dialect: str, member: str) -> Where | None:
        """Where this engine renders it."""
        if dialect not in self._in_front:
            _, (_, front) = await self._asked(dialect, FIRST_TURN[dialect], "front")
            self._in_front[dialect] = front
        one, other = await self._asked(dialect, member, member)
        if one is None or other is None:
            return REFUSED
        size, cached = other
        if cached < self._in_front[dialect]:
            return Where.FRONT
        whole = (size - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return Where.NOT if (one[0], cached) == (size, whole) else Where.IN_PLACE

    async def _asked(self, dialect: str, member: str, salt: str) -> list[Any]:
        """Tokens of both prompts and how many were cached; a salt keeps other pairs out."""
        salted = {"cache_salt": f"{dialect} {salt}".translate(_PLAIN)}
        both = pair(dialect, CASES[dialect][member])
        return [await self._ask(dialect, salted | body) for body in both]

    async def _ask(self, dialect: str, body: dict[str, Any]) -> tuple[int, int] | None:
        body = {"model": MODEL, "temperature": 0} | body
        async with self._http.post(self._engine.url + PATHS[dialect], json=body) as answer:
            raw = await answer.read()
            if answer.status == 400:
                return None
            assert answer.status == 200, raw
        used = orjson.loads(raw)["usage"]
        if dialect == MESSAGES:
            cached = used["cache_read_input_tokens"]
            return cached + used["cache_creation_input_tokens"] + used["input_tokens"], cached
        if dialect == RESPONSES:
            return used["input_tokens"], used["input_tokens_details"]["cached_tokens"]
        return used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"]


_PLAIN = str.maketrans("", "", "@/\\")


@pytest.fixture(scope="module")
def engines(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("rendering")
    adapter = made_adapter(folder / ADAPTER, 1)
    first = folder / "system_first.jinja"
    first.write_text(SYSTEM_FIRST + TEMPLATE.read_text())
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}")
    asked = (
        *("--chat-template", str(TEMPLATE), "--trust-request-chat-template"),
        *("--reasoning-parser", "qwen3", "--reasoning-config", THINKING.decode()),
    )
    moved = ("--chat-template", str(first), "--exclude-tools-when-tool-choice-none")
    made = [
        Engine(site, "renders", "none", (*FLAGS, *lora, *asked)),
        Engine(site, "renders-system-first", "none", (*FLAGS, *moved)),
    ]
    with running(made):
        yield made


def test_each_row_of_the_table_is_seen_on_an_engine() -> None:
    rows = {(row.dialect.value, row.member) for row in ROWS if row.how.value not in MEDIA}
    there = {key for key in rows if key[0] in CASES}
    assert there - FOUND.keys() == UNSEEN.keys()


@pytest.mark.parametrize("dialect", PATHS)
async def test_an_engine_renders_what_the_table_says(engines: list[Engine], dialect: str) -> None:
    told = {key: where for key, where in FOUND.items() if key[0] == dialect}
    assert await seen(engines[0], told) == told


async def test_a_template_and_a_flag_change_where(engines: list[Engine]) -> None:
    assert await seen(engines[1], ELSEWHERE) == ELSEWHERE


async def seen(
    engine: Engine, members: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Where | None]:
    """Where this engine renders them."""
    async with aiohttp.ClientSession() as http:
        reader = Reader(http, engine)
        return {(dialect, name): await reader.where(dialect, name) for dialect, name in members}
