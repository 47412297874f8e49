"""The table of API paths: which are relayed, and what a client is told of the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.endpoints import (
    BESIDE_V1,
    END_NAMES,
    ENDPOINTS,
    MODELS,
    OFFLOADABLE,
    OPERATORS_ONLY,
    OTHER,
    RELAYED,
    RESPONSES,
    Dialect,
    Salting,
    dialect_of,
    endpoint_of,
    is_for_operators,
    is_relayed,
    why_not_relayed,
)
from proxy.protocol.streams.sse import Scanner, names_the_end


def test_a_path_without_a_row_is_other() -> None:
    assert endpoint_of("/v1/images/generations") is OTHER
    assert (OTHER.label, OTHER.dialect, OTHER.teaches) == ("other", Dialect.OPENAI, False)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_rows(path: str) -> None:
    row = endpoint_of(path)
    assert row.path == path
    assert row.use
    assert row.label in (path, "other")
    assert (path in OFFLOADABLE) == row.offloadable
    assert not row.offloadable or (row.salting, row.methods) == (Salting.ALWAYS, ("POST",))
    assert (path in BESIDE_V1) == (not path.startswith("/v1/"))
    assert is_relayed(path, ())
    assert not is_for_operators(path)


WORDS = st.sampled_from(
    [
        *("v1", "admin", "Admin", "load_lora_adapter", "unload_lora_adapter", "batch", "sleep"),
        *("responses", "r", "chat", "completions", "images", "tokenize", "score", "embeddings"),
        *("", ".", "..", "a\\b"),
    ]
)
PATHS = st.lists(WORDS, min_size=1, max_size=5).map(lambda words: "/" + "/".join(words))


@given(PATHS, st.lists(PATHS | PATHS.map(lambda path: f"{path.rstrip('/')}/*"), max_size=3))
def test_only_what_is_listed_is_relayed(path: str, extra: list[str]) -> None:
    """For every path and any --extra-paths: nothing else, and nothing for engines' operators."""
    if not is_relayed(path, extra):
        assert why_not_relayed(path).startswith("path: ")
        return
    below = path.startswith(f"{RESPONSES}/") and not path.endswith("/")
    added = path in extra or any(e.endswith("/*") and path.startswith(e[:-1]) for e in extra)
    assert path in ENDPOINTS or below or added
    assert not any(path == own or path.startswith(own + "/") for own in OPERATORS_ONLY)
    assert not {".", ".."} & set(path.split("/"))
    assert "\\" not in path


@given(st.text(max_size=200))
def test_what_is_told_repeats_nothing_of_the_path(path: str) -> None:
    """Of one that is far from all that are known."""
    told = why_not_relayed("/%" + path)
    known = (*ENDPOINTS, MODELS)
    assert "%" not in told
    assert "\n" not in told
    assert told == why_not_relayed("/nothing") or any(name in told for name in known)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/chat/completions", "/v1 is missing, with which a client's base URL ends"),
        ("/models", "/v1/models"),
        ("/v1/v1/chat/completions", "/v1 is there twice, the base URL has it already"),
        ("/v1/v1/models", "/v1/models"),
        ("//v1/chat/completions", "without the slash too many: /v1/chat/completions"),
        ("/v1/chat/completions/", "without the slash at its end: /v1/chat/completions"),
        ("/v1", "/v1 ends a client's base URL"),
        ("/v1/", "/v1 ends a client's base URL"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/Chat/Completions", "did you mean /v1/chat/completions?"),
        ("/v1/realtime", "websockets are not relayed"),
        ("/api/chat", "not Ollama's"),
        ("/openai/deployments/m/chat/completions", "not Azure's"),
        ("/v1/admin", "changes one engine only"),
        ("/v1/load_lora_adapter", "changes one engine only"),
        ("/sleep", "--extra-paths adds to it"),
    ],
)
def test_a_path_that_is_not_relayed_gets_a_hint(path: str, told: str) -> None:
    assert not is_relayed(path, ())
    assert told in why_not_relayed(path)


def test_the_last_row_is_of_what_is_below_its_path() -> None:
    *rows, stored = RELAYED
    assert [row.path for row in rows] == list(ENDPOINTS)
    assert endpoint_of(f"{RESPONSES}/r/cancel") is stored


@pytest.mark.parametrize("name", END_NAMES)
def test_a_stream_ends_with_each_of_the_last_events(name: str) -> None:
    event = b'event: %b\ndata: {"a":1}\n\n' % name.encode()
    scanner = Scanner()
    scanner.feed(event)
    assert scanner.is_done
    assert names_the_end(event)
    assert not names_the_end(event.replace(b"\n", b"s\n", 1))


BELOW_MESSAGES = "/v1/messages /v1/messages/count_tokens /v1/messages/x/y /v1/messages/"
MISSPELT = "/messages /v1/v1/messages //v1/messages"


@pytest.mark.parametrize("path", [*BELOW_MESSAGES.split(), *MISSPELT.split()])
def test_errors_on_messages_and_below_are_anthropics(path: str) -> None:
    assert dialect_of(path) is Dialect.MESSAGES


@pytest.mark.parametrize(
    "path", ["", "/", "/v1/chat/messages", "/v1/threads/t/messages", "/v1/messagesx", "/v1/models"]
)
def test_errors_elsewhere_are_openais(path: str) -> None:
    assert dialect_of(path) is Dialect.OPENAI


@pytest.mark.parametrize("name", [*END_NAMES, "error"])
def test_an_end_is_one_without_a_blank_or_a_name(name: str) -> None:
    named = b'event:%b\ndata:{"a":1}\n\n' % name.encode()
    typed = b'data: {"type":"%b","a":1}\n\n' % name.encode()
    for event in (named, typed):
        scanner = Scanner()
        scanner.feed(event)
        assert scanner.is_done
        assert names_the_end(event)
