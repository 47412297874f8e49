"""What the proxy makes of requests of real clients, beside what an engine makes of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest

from proxy.core.kvcache.engine_cache import EngineCache
from proxy.core.kvcache.prefix_index import PrefixIndex
from proxy.protocol.examined import Examined, Task, examine
from proxy.protocol.prompt.facts import BLOCK_BYTES, MOST_VALUES, TokenEstimator
from tests.clients.agents import ALL
from tests.support.clients import CLIENTS, Recorded, recorded
from tests.test_docs import ROOT, marked

SLACK_BYTES = 1126
"""1.1 KiB: the key's last block is mostly a part of one, which nothing stands for."""
SHAPE_RATIO = 0.007
"""By which the share of a prompt that is cached differs from that of the original's."""
NAMING = {"claude-code", "claude-code-cch", "codex", "opencode", "opencode-marks"}
"""Clients that name their sessions."""


@dataclass(frozen=True, slots=True)
class Made:
    """What the proxy makes of a request: the size of its prompt, blocks by key, session's name."""

    size: int
    hashes: list[int]
    session: str | None


def made_of(request: Recorded) -> Made:
    """The request as `request/client_request.py` reads it."""
    found = examine(Task(request.path, request.body, is_object=True, salt=None), MOST_VALUES)
    assert isinstance(found, Examined)
    facts = TokenEstimator().facts(found.prompt, request.headers, found.session)
    return Made(found.prompt.bytes, list(facts.block_hashes), facts.session_id)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_key_finds_what_the_engine_finds(client: str) -> None:
    index, cache = PrefixIndex(1 << 30), EngineCache("a")
    wrong = []
    for number, request in enumerate(recorded(client)):
        if not request.rendered_chars:
            continue
        made = made_of(request)
        hit = index.held(cache, made.hashes) * BLOCK_BYTES
        index.insert(cache, made.hashes)
        new, cached = request.rendered_chars - request.cached_chars, request.cached_chars
        most = cached + SHAPE_RATIO * request.rendered_chars + BLOCK_BYTES
        if made.size - hit > new + SLACK_BYTES or hit > most:
            wrong.append((number, request.step, made.size - hit, new, hit, cached))
    assert not wrong, "new by the key and for the engine, cached by the key and for the engine"


@pytest.mark.parametrize("client", CLIENTS)
def test_the_size_is_what_is_rendered(client: str) -> None:
    sizes = [(r.step, made_of(r).size, r.rendered_chars) for r in recorded(client)]
    wrong = [row for row in sizes if row[2] and not 0.9 * row[2] <= row[1] <= 1.1 * row[2]]
    assert not wrong, "size by the proxy, and as it is rendered"


@pytest.mark.parametrize("client", CLIENTS)
def test_each_agent_of_a_session_has_one_name(client: str) -> None:
    names: dict[tuple[str, int], set[str | None]] = defaultdict(set)
    for request in recorded(client):
        if request.rendered_chars:
            names[request.session, request.agent].add(made_of(request).session)
    assert all(len(found) == 1 for found in names.values()), names
    by_session: dict[str, set[str | None]] = defaultdict(set)
    for (session, _), found in names.items():
        by_session[session] |= found
    if client.rpartition("-")[0] in NAMING:
        given = [name for found in by_session.values() for name in found]
        assert None not in given
        assert len(given) == len(set(given)), "two sessions with one name"


def test_the_page_has_every_agent_and_every_recording() -> None:
    rows = [
        line.split("|")[1:4]
        for line in marked("docs/concepts/clients.md", "agents").splitlines()[2:]
    ]
    told = [(name.strip(), version.strip()) for name, version, _ in rows]
    assert told == [(agent.name, agent.version) for agent in ALL]
    page = (ROOT / "docs/concepts/clients.md").read_text("utf-8")
    for client in CLIENTS:
        assert client.rpartition("-")[2] in page, client
