"""Names of sessions: which of several in a request it is, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.names.session_names import (
    CORRELATION,
    NO_NAMES,
    OF_REQUESTS,
    SESSION_HEADERS,
    SessionNames,
    bounded,
    session_in,
)

OLD_USER = "user_5f2c_account_{}_session_7c9e6679-7425-40de-944b-e07fc1f90ae7"
IN_USER = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
SOURCES = (
    *(("header", name) for name in SESSION_HEADERS),
    ("body", "session_id"),
    ("metadata", "session_id"),
    ("client_metadata", "session_id"),
    ("body", "prompt_cache_key"),
)


def names(
    headers: dict[str, str], body: dict[str, Any] | None = None, *order: str
) -> tuple[str | None, str | None]:
    return SessionNames(order or None).of(headers, session_in(body or {}))


def nested(levels: int) -> Any:
    value: Any = "deep"
    for _ in range(levels):
        value = [value]
    return value


class TestOrder:
    def test_the_order_is_the_contracts(self) -> None:
        assert SESSION_HEADERS == (
            "X-Session-ID",
            "X-Session-Affinity",
            "x-claude-code-session-id",
            "session-id",
            "session_id",
            "thread-id",
            "X-Dynamo-Session-ID",
        )

    @pytest.mark.parametrize("first", range(len(SOURCES)))
    def test_the_first_present_names_the_session(self, first: int) -> None:
        given: dict[str, dict[str, Any]] = {
            where: {} for where in ("header", "body", "metadata", "client_metadata")
        }
        for i, (where, name) in enumerate(SOURCES):
            given[where][name] = f"id-{i}" if i >= first else ""
        header = given["header"] | {"thread-id": ""} if first != 5 else given["header"]
        body = {**given["body"], "metadata": given["metadata"]}
        body["client_metadata"] = given["client_metadata"]
        assert names(header, body) == (f"id-{first}", None)

    @pytest.mark.parametrize(
        ("headers", "body"),
        [
            *(({name: "s"}, {}) for name in SESSION_HEADERS),
            ({}, {"session_id": "s"}),
            ({}, {"metadata": {"session_id": "s"}}),
            ({}, {"prompt_cache_key": "s"}),
            ({}, {"client_metadata": {"session_id": "s", "thread_id": "s"}}),
        ],
    )
    def test_an_own_name_wins_over_ids_of_the_request(
        self, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        ids = {CORRELATION: "c", "X-Request-ID": "r"}
        assert names(headers | ids, body | {"previous_response_id": "p"}) == ("s", None)

    def test_ids_that_may_be_the_requests_own_come_last(self) -> None:
        assert names({CORRELATION: "c"}, {"previous_response_id": "p"}) == (None, "c")
        assert names({}, {"previous_response_id": "p"}) == (None, "p")
        assert names({"X-Request-ID": "r"}) == NO_NAMES

    def test_an_operators_order_replaces_that_of_the_headers(self) -> None:
        headers = {"X-Session-ID": "a", "x-chat": "b", CORRELATION: "c"}
        assert names(headers, {}, "x-chat", "X-Session-ID") == ("b", None)
        assert names(headers, {}, "x-other") == NO_NAMES
        assert names(headers, {"session_id": "d"}, "x-other") == ("d", None)

    @pytest.mark.parametrize("header", sorted(OF_REQUESTS))
    def test_an_operator_may_name_an_id_of_requests_which_still_has_to_come_back(
        self, header: str
    ) -> None:
        headers = {header: "c", "X-Session-ID": "a"}
        assert names(headers, {"session_id": "d"}, header, "X-Session-ID") == (None, "c")
        assert names(headers, {}, "X-Session-ID", header) == ("a", None)


class TestAgents:
    """A sub-agent works under its parent's name, and has a place of its own."""

    def test_claude_codes(self) -> None:
        session = {"x-claude-code-session-id": "s"}
        assert names(session) == ("s", None)
        assert names(session | {"x-claude-code-agent-id": "a"}) == ("s:a", None)

    @pytest.mark.parametrize("spelt", ["session-id", "session_id"])
    def test_codexs_thread(self, spelt: str) -> None:
        assert names({spelt: "s", "thread-id": "s"}) == ("s", None)
        assert names({spelt: "s", "thread-id": "t"}) == ("s:t", None)
        assert names({"thread-id": "t"}) == ("t", None)

    def test_codexs_thread_where_a_gateway_took_its_headers(self) -> None:
        def told(thread: str) -> dict[str, Any]:
            body = {"client_metadata": {"session_id": "s", "thread_id": thread}}
            return body | {"prompt_cache_key": "s"}

        assert names({}, told("s")) == ("s", None)
        assert names({}, told("t")) == ("s:t", None)

    def test_opencodes_child_has_its_own_session(self) -> None:
        child = {"x-parent-session-id": "s", "x-session-affinity": "c", "X-Session-ID": "c"}
        assert names(child) == ("c", None)

    def test_an_agent_beside_a_name_by_the_body(self) -> None:
        user = {"metadata": {"user_id": OLD_USER.format("")}}
        assert names({"x-claude-code-agent-id": "a"}, user) == (f"{IN_USER}:a", None)

    def test_an_agent_without_a_session_is_none(self) -> None:
        assert names({"x-claude-code-agent-id": "a"}) == NO_NAMES


class TestUser:
    @pytest.mark.parametrize("account", ["", "0c5a2f7e-9c1b-4d7e-8f11-2f1f7a0f3c55"])
    @pytest.mark.parametrize("field", ["metadata", "user"])
    def test_the_older_form(self, account: str, field: str) -> None:
        user = OLD_USER.format(account)
        body = {"user": user} if field == "user" else {"metadata": {"user_id": user}}
        assert session_in(body)[0] == IN_USER

    @pytest.mark.parametrize(
        "user",
        [
            '{"device_id":"5f2c","account_uuid":"","session_id":"S"}',
            '{"session_id": "S", "device_id": "5f2c"}',
            '{ "parent_session_id":"P" , "session_id" : "S" }',
        ],
    )
    def test_the_newer_form(self, user: str) -> None:
        assert session_in({"metadata": {"user_id": user}})[0] == "S"

    @pytest.mark.parametrize(
        "user",
        [
            *("alice", "user_5f2c", "user_5f2c_account_x", "{", "{}", '{"session_id":7}'),
            *('{"session_id":""}', "session_x", OLD_USER.format("") + "x" * 2000, None, 7, {}),
        ],
    )
    def test_any_other_user_is_no_session(self, user: Any) -> None:
        assert session_in({"metadata": {"user_id": user}, "user": user}) == NO_NAMES

    @given(st.text(max_size=2000))
    def test_whatever_a_user_is_called_a_name_is_bounded(self, user: str) -> None:
        name, own_id = session_in({"user": user, "metadata": {"user_id": "{" + user}})
        assert own_id is None
        assert name is None or len(name) <= 128


class TestNames:
    @pytest.mark.parametrize(
        ("value", "name"),
        [
            *(("s", "s"), ("é\0\n", "é\0\n"), (7, "7"), (0, "0"), (10**30, str(10**30))),
            *(("", None), (None, None), (True, None), (1.5, None), ([], None), (["s"], None)),
            *(({"id": "s"}, None), (nested(1000), None)),
        ],
        ids=lambda value: repr(value)[:20] if not isinstance(value, list) else "list",
    )
    def test_strings_and_whole_numbers_are_names(self, value: Any, name: str | None) -> None:
        assert session_in({"session_id": value}) == (name, None)
        assert session_in({"metadata": {"session_id": value}}) == (name, None)
        assert session_in({"previous_response_id": value}) == (None, name)

    @pytest.mark.parametrize("metadata", [None, "s", 1, [{"session_id": "s"}]])
    def test_metadata_of_another_form_names_nobody(self, metadata: Any) -> None:
        assert session_in({"metadata": metadata, "client_metadata": metadata}) == NO_NAMES

    def test_a_value_that_is_no_name_leaves_the_word_to_the_next(self) -> None:
        assert session_in({"session_id": {}, "prompt_cache_key": "k"}) == ("k", None)

    @given(st.text(min_size=129) | st.just("\ud800" * 200))
    def test_long_names_are_kept_short_and_apart(self, name: str) -> None:
        kept = bounded(name)
        assert len(kept) == 32
        assert names({"X-Session-ID": name}) == (kept, None)
        assert kept != bounded(name + "x")

    @given(st.text(max_size=128))
    def test_others_stay_as_they_are(self, name: str) -> None:
        assert bounded(name) == name
