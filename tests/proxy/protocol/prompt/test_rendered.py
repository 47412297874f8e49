"""A body is read as the engine renders it: by the rows of the table, and nothing else."""

from __future__ import annotations

import copy
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.endpoints import Dialect, endpoint_of
from proxy.protocol.prompt.facts import prompt_facts
from proxy.protocol.prompt.rendered import MOST_MEDIA, Rendered, _is_base64
from proxy.protocol.prompt.rendering import BILLING, ROWS, How, Row, Where

PATHS = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.MESSAGES: "/v1/messages",
    Dialect.RESPONSES: "/v1/responses",
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.OPENAI: "/v1/embeddings",
}
LONG = "x" * 3000
VALUES: dict[How, tuple[Any, Any]] = {
    How.TEXT: ("one", "other"),
    How.JSON: ({"a": 1}, {"a": 2}),
    How.OFF: ("enabled", "disabled"),
    How.TOOLS: ([{"name": "f"}], [{"name": "g"}]),
    How.CONTENT: ("one", [{"type": "text", "text": "other"}]),
    How.CALLS: ([{"function": {"name": "f"}}], [{"function": {"name": "g"}}]),
    How.ARGUMENTS: ('{"a": 1}', '{"a": 2}'),
    How.TURNS: ([{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]),
    How.ANY: (["one"], ["other"]),
    How.IMAGE: ({"url": "data:image/png;base64,AAAA"}, {"url": "data:image/png;base64,BBBB"}),
    How.AUDIO: ({"data": "AAAA"}, {"data": "BBBB"}),
    How.VIDEO: ({"url": "http://a/1"}, {"url": "http://a/2"}),
    How.FILE: ({"file_data": "AAAA"}, {"file_data": "BBBB"}),
}
"""Two values of a member that differ."""


def read(dialect: Dialect, body: Any) -> Rendered:
    return Rendered(dialect, body, 1 << 16)


def texts(dialect: Dialect, body: Any) -> list[bytes]:
    return [bytes(text) for text in read(dialect, body).texts]


def base(dialect: Dialect) -> dict[str, Any]:
    """A conversation of a few turns."""
    turns = [{"role": role, "content": LONG} for role in ("user", "assistant", "user")]
    name = {"responses": "input", "completions": "prompt", "openai": "input"}.get(
        dialect.value, "messages"
    )
    return {"model": "m", name: LONG if dialect is Dialect.COMPLETIONS else turns}


def put(body: dict[str, Any], member: str, value: Any) -> dict[str, Any]:
    """A copy of a body with a value at the path of a row, in its second turn."""
    body = copy.deepcopy(body)
    at: Any = body
    *within, name = member.split(".")
    for step in within:
        key, bracket, kind = step.partition("[")
        kind = kind.rstrip("]")
        if not bracket:
            at = at.setdefault(key, {})
            continue
        item: dict[str, Any] = {"type": kind} if kind else {}
        if key in ("messages", "input"):
            item |= {"role": "user", "content": []} if not kind else {}
            body[key][1] = item
        else:
            at[key] = [item]
        at = item
    at[name] = value
    return body


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.dialect.value} {row.member}")
def test_each_row_is_kept(row: Row) -> None:
    """In front a change leaves no text in common, in place those before it, else all."""
    values = VALUES[row.how] if row.where is not Where.NOT else ("one", "other")
    one, other = (texts(row.dialect, put(base(row.dialect), row.member, value)) for value in values)
    if row.where is Where.NOT:
        assert one == other
        return
    assert one != other
    common = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    is_turns = row.how in (How.TURNS, How.ANY) or row.dialect is Dialect.OPENAI
    if row.where is Where.IN_PLACE and not is_turns:
        assert LONG.encode() in one[:common]
    elif not is_turns:
        assert LONG.encode() not in one[:common]


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES])
def test_a_member_that_nobody_knows_is_not_rendered(dialect: Dialect) -> None:
    body, changed = base(dialect), base(dialect)
    changed["something_new"] = LONG
    turns = changed["input" if dialect is Dialect.RESPONSES else "messages"]
    turns[0]["something_new"] = LONG
    turns[1]["content"] = [{"type": "text", "text": LONG, "something_new": LONG}]
    assert texts(dialect, body) == texts(dialect, changed)


@given(st.permutations(["type", "function"]), st.permutations(["name", "description", "strict"]))
def test_the_order_of_members_is_not_rendered(outer: list[str], inner: list[str]) -> None:
    function = {"name": "f", "description": "d", "strict": True}
    tool = {"type": "function", "function": {name: function[name] for name in inner}}
    body = {"tools": [{name: tool[name] for name in outer}]}
    plain = {"tools": [{"type": "function", "function": function}]}
    assert texts(Dialect.CHAT, body) == texts(Dialect.CHAT, plain)


def test_the_order_within_a_schema_is_rendered() -> None:
    def tool(*names: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {name: {} for name in names}}
        return {"tools": [{"name": "f", "input_schema": schema}]}

    assert texts(Dialect.MESSAGES, tool("a", "b")) != texts(Dialect.MESSAGES, tool("b", "a"))


def test_one_tool_is_the_same_in_each_dialect() -> None:
    schema = {"type": "object"}
    chat = {"tools": [{"function": {"name": "n", "description": "d", "parameters": schema}}]}
    messages = {"tools": [{"name": "n", "description": "d", "input_schema": schema}]}
    flat = {"type": "function", "name": "n", "description": "d", "parameters": schema}
    responses = {"tools": [flat]}
    found = [
        texts(Dialect.CHAT, chat),
        texts(Dialect.MESSAGES, messages),
        texts(Dialect.RESPONSES, responses),
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("one", "other"),
    [('{"a":1,"b":[2]}', '{ "a": 1,\n "b": [2] }'), ('{"a":1}', {"a": 1}), ("{", "{")],
)
def test_white_space_of_arguments_is_not_rendered(one: Any, other: Any) -> None:
    forms: list[dict[str, Any]] = []
    for arguments in (one, other):
        call = {"id": str(len(forms)), "function": {"name": "f", "arguments": arguments}}
        forms.append({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert texts(Dialect.CHAT, forms[0]) == texts(Dialect.CHAT, forms[1])


class TestBilling:
    """Claude Code's line with a hash per request, wherever an engine drops it."""

    LINE = f"{BILLING}: cc_version=2.1; cch={{}};"

    @pytest.mark.parametrize(
        ("path", "form"),
        [
            ("/v1/messages", {"system": [{"type": "text", "text": "LINE"}]}),
            ("/v1/messages", {"system": "LINE\nrest"}),
            ("/v1/messages", {"messages": [{"role": "system", "content": "LINE"}]}),
            (
                "/v1/messages",
                {"messages": [{"role": "system", "content": [{"type": "text", "text": "LINE"}]}]},
            ),
            ("/v1/chat/completions", {"messages": [{"role": "system", "content": "LINE\nrest"}]}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "system", "content": [{"type": "text", "text": "LINE"}]}]},
            ),
            ("/v1/responses", {"instructions": "LINE\nrest", "input": "hi"}),
        ],
        ids=repr,
    )
    def test_it_is_not_rendered(self, path: str, form: dict[str, Any]) -> None:
        assert self.read(path, form, "a1") == self.read(path, form, "b2")

    @pytest.mark.parametrize("role", ["user", "assistant", "developer"])
    def test_elsewhere_it_is_text(self, role: str) -> None:
        form = {"messages": [{"role": role, "content": "LINE"}]}
        path = "/v1/chat/completions"
        assert self.read(path, form, "a1") != self.read(path, form, "b2")

    def test_a_blank_before_it_makes_it_text(self) -> None:
        form = {"system": [{"type": "text", "text": " LINE"}]}
        assert self.read("/v1/messages", form, "a1") != self.read("/v1/messages", form, "b2")

    def read(self, path: str, form: dict[str, Any], mark: str) -> list[bytes]:
        raw = orjson.dumps(form).decode().replace("LINE", self.LINE.format(mark))
        return texts(endpoint_of(path).dialect, orjson.loads(raw))


class TestMedia:
    """What becomes no text counts as what the engine makes of it, whatever its bytes."""

    BIG = "A" * 600_000
    LINES = "\r\n".join(["A" * 76] * 8_000)

    @pytest.mark.parametrize(
        ("dialect", "part", "kind"),
        [
            (Dialect.MESSAGES, {"type": "image", "source": {"data": BIG}}, "image"),
            (Dialect.MESSAGES, {"type": "document", "source": {"data": BIG}}, "file"),
            (
                Dialect.MESSAGES,
                {
                    "type": "tool_result",
                    "content": [{"type": "image", "source": {"type": "base64", "data": BIG}}],
                },
                "image",
            ),
            (Dialect.CHAT, {"type": "image_url", "image_url": {"url": BIG}}, "image"),
            (Dialect.CHAT, {"type": "image_url", "image_url": BIG}, "image"),
            (Dialect.CHAT, {"type": "input_audio", "input_audio": {"data": BIG}}, "audio"),
            (Dialect.CHAT, {"type": "video_url", "video_url": {"url": BIG}}, "video"),
            (Dialect.CHAT, {"type": "file", "file": {"file_data": BIG}}, "file"),
            (Dialect.CHAT, {"type": "of_tomorrow", "payload": {"data": BIG}}, "file"),
            (Dialect.RESPONSES, {"type": "input_image", "image_url": BIG}, "image"),
            (Dialect.RESPONSES, {"type": "input_audio", "input_audio": {"data": BIG}}, "audio"),
            (Dialect.RESPONSES, {"type": "input_file", "file_data": BIG}, "file"),
            (Dialect.OPENAI, {"image": f"data:image/png;base64,{BIG}"}, "image"),
            # Without a type, as vLLM reads it too.
            (Dialect.CHAT, {"image_url": f"data:image/png;base64,{BIG}"}, "image"),
            (Dialect.CHAT, {"input_audio": {"data": BIG}}, "audio"),
            # In lines, as in mails.
            (Dialect.CHAT, {"type": "of_tomorrow", "payload": LINES}, "file"),
            # Parts of other dialects.
            (Dialect.CHAT, {"type": "image", "source": {"data": BIG}}, "image"),
            (Dialect.RESPONSES, {"type": "video_url", "video_url": {"url": BIG}}, "video"),
            (Dialect.OPENAI, {"type": "input_audio", "input_audio": {"data": BIG}}, "audio"),
            # Where the table has the type, but not the member.
            (Dialect.RESPONSES, {"type": "input_audio", "data": BIG}, "file"),
            (Dialect.CHAT, {"type": "image_embeds", "image_embeds": {"of_model": BIG}}, "file"),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_its_bytes_are_no_text(self, dialect: Dialect, part: Any, kind: str) -> None:
        turns = [{"role": "user", "content": [part]}]
        found = read(
            dialect,
            {"input" if dialect in (Dialect.RESPONSES, Dialect.OPENAI) else "messages": turns},
        )
        assert [found_kind for found_kind, *_ in found.media] == [kind]
        assert sum(map(len, found.texts)) < 300

    def test_another_picture_is_another_prompt(self) -> None:
        def prompt(data: str) -> list[bytes]:
            part = {"type": "image", "source": {"type": "base64", "data": data}}
            return texts(Dialect.MESSAGES, {"messages": [{"role": "user", "content": [part]}]})

        assert prompt("AAAA") != prompt("AAAB")

    @pytest.mark.parametrize(
        ("dialect", "part", "name"),
        [
            (Dialect.CHAT, {}, "image_url"),
            (Dialect.RESPONSES, {"type": "input_file"}, "file_url"),
            (Dialect.RESPONSES, {"type": "input_image"}, "file_id"),
            (Dialect.CHAT, {"type": "image_embeds"}, "image_embeds"),
        ],
        ids=str,
    )
    def test_another_address_is_another_prompt(
        self, dialect: Dialect, part: dict[str, str], name: str
    ) -> None:
        turns = "input" if dialect is Dialect.RESPONSES else "messages"

        def prompt(value: Any) -> list[bytes]:
            return texts(dialect, {turns: [{"role": "user", "content": [part | {name: value}]}]})

        assert prompt("http://a/1") != prompt("http://a/2")
        assert prompt({"grid": "1"}) != prompt({"grid": "2"})

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "document", "source": {"type": "text", "data": BIG}},
            {"type": "of_tomorrow", "content": [{"type": "text", "text": BIG}]},
        ],
        ids=lambda part: str(part["type"]),
    )
    def test_what_says_that_it_is_text_is_text(self, part: dict[str, Any]) -> None:
        found = read(Dialect.MESSAGES, {"messages": [{"role": "user", "content": [part]}]})
        assert (len(found.texts[-1]), found.media) == (len(self.BIG), [])

    def test_depth_is_no_danger(self) -> None:
        part: Any = "x"
        for _ in range(2000):
            part = {"type": "image_url", "image_url": [part]}
        for dialect in (Dialect.CHAT, Dialect.OPENAI):
            assert read(dialect, {"messages": [{"role": "user", "content": [part]}]}).is_whole

    def test_the_name_that_a_client_gave_it_stands_for_it(self) -> None:
        def prompt(data: str | None) -> list[bytes]:
            part = {"type": "image_url", "image_url": data and {"url": data}, "uuid": "same"}
            return texts(Dialect.CHAT, {"messages": [{"role": "user", "content": [part]}]})

        assert prompt("data:image/png;base64,AAAA") == prompt("data:image/png;base64,AAAB")
        # Given before, it is not given again.
        assert prompt("data:image/png;base64,AAAA") == prompt(None)

    @pytest.mark.parametrize(
        "item",
        [
            {"type": "reasoning", "encrypted_content": BIG},
            {"type": "compaction", "encrypted_content": BIG},
            {"type": "redacted_thinking", "data": BIG},
        ],
        ids=lambda item: str(item["type"]),
    )
    def test_what_is_encrypted_counts_nothing(self, item: dict[str, Any]) -> None:
        assert (
            sum(map(len, read(Dialect.RESPONSES, {"input": [{"role": "user"}, item]}).texts)) < 99
        )
        body = {"messages": [{"role": "assistant", "content": [item]}]}
        assert sum(map(len, read(Dialect.MESSAGES, body).texts)) < 99

    def test_text_that_looks_like_data_is_text(self) -> None:
        body = {"messages": [{"role": "user", "content": self.BIG}]}
        found = read(Dialect.CHAT, body)
        assert (len(found.texts[-1]), found.media) == (len(self.BIG), [])

    def test_facts_say_where_media_are(self) -> None:
        part = {"type": "image", "source": {"data": self.BIG}}
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, part]}]}
        found = prompt_facts("/v1/messages", body)
        assert found is not None
        assert [kind for kind, *_ in found.media] == ["image"]
        assert found.bytes - 40 < found.media[0][1] < found.bytes


@pytest.mark.parametrize("count", [1, 5, 10, 11, 40])
def test_the_first_and_the_last_turns_have_ends(count: int) -> None:
    turns = [{"role": "user", "content": str(i)} for i in range(count)]
    found = read(Dialect.CHAT, {"messages": turns})
    assert len(found.ends) == min(count, 10)
    assert found.ends[-1] == len(found.texts)


def test_a_body_of_many_values_is_given_up() -> None:
    turns = [{"role": "user", "content": "x"}] * 100
    assert not Rendered(Dialect.CHAT, {"messages": turns}, 50).is_whole
    assert Rendered(Dialect.CHAT, {"messages": turns}, 200).is_whole


@pytest.mark.parametrize("inner", ["[" * 900 + "]" * 900, ",".join("1" * 1800), '{"a":' * 900])
@pytest.mark.parametrize("calls", [1, 50])
def test_what_arguments_have_in_them_is_counted(inner: str, calls: int) -> None:
    """Escapes hide it from who counts the body's bytes."""
    call = {"function": {"name": "f", "arguments": f'{{"a":[{inner}'}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call] * calls}]
    least, most = 100 * calls, 300 * calls
    assert not Rendered(Dialect.CHAT, {"messages": turns}, least).is_whole
    assert Rendered(Dialect.CHAT, {"messages": turns}, most).is_whole


@pytest.mark.parametrize("half", ["\ud83d", "a\udc00b"])
def test_half_a_surrogate_pair_is_read(half: str) -> None:
    call = {"function": {"name": half, "arguments": {"a": half}}}
    tool = {"function": {"name": half, "parameters": {half: half}}}
    turns = [{"role": half, "content": half, "tool_calls": [call]}]
    assert read(Dialect.CHAT, {"messages": turns, "tools": [tool]}).is_whole


@pytest.mark.parametrize("name", ["n" * 100_000, {"n": "n" * 100_000}, ["n" * 100_000], None])
def test_a_namespaces_name_is_not_repeated_at_any_length(name: Any) -> None:
    """Each of its tools has it in front of its own."""
    tools = [{"name": f"tool {at}"} for at in range(3000)]
    body = {"tools": [{"type": "namespace", "name": name, "tools": tools}], "input": "hi"}
    found = read(Dialect.RESPONSES, body)
    assert sum(map(len, found.texts)) < 1 << 20
    assert b"tool 2999" in b"".join(map(bytes, found.texts))


def test_tools_of_a_namespace_are_counted() -> None:
    tools = [{"name": "f"}] * 1000
    body = {"tools": [{"type": "namespace", "name": "n", "tools": tools}], "input": "hi"}
    assert Rendered(Dialect.RESPONSES, body, 1100).is_whole
    assert not Rendered(Dialect.RESPONSES, body, 900).is_whole


def test_the_first_media_are_told_apart() -> None:
    parts = [{"type": "image_url", "image_url": {"url": f"http://a/{n}"}} for n in range(1500)]
    many = read(Dialect.CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert len(many.media) == MOST_MEDIA
    assert len(set(map(bytes, many.texts))) > 1500, "the prompt is another one with each"


BASE64 = re.compile(r"(?:[A-Za-z0-9+/_-]{32,}\r?\n)*[A-Za-z0-9+/_-]*={0,2}\s*")
PIECES = ["A" * 31, "A" * 32, "b" * 33, "+/_-", "\n", "\r\n", "\r", "=", " ", "!", "é", "\u2028"]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_base64_is_what_its_pattern_matches(text: str) -> None:
    assert _is_base64(text) == (BASE64.fullmatch(text) is not None)
