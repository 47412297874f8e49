"""A stream's events as its client gets them, of the first instance and of one that goes on."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.types import Unmoved
from proxy.protocol.framing import wrap
from proxy.protocol.streams.legs import HELD_BYTES, FirstLeg, Joint, LaterLeg, first_members
from proxy.protocol.streams.movable import Plan
from proxy.protocol.streams.trail import Resumption, Trail, TrailMemory
from tests.support.work import calls_of

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
DONE = b"data: [DONE]\n\n"


def trail(
    *,
    is_chat: bool = True,
    shows_ids: bool = False,
    stop_chars: int = 0,
    memory: TrailMemory | None = None,
) -> Trail:
    plan = Plan(b"", None, 0, stop_chars, is_chat=is_chat, shows_ids=shows_ids)
    return Trail(plan, memory or TrailMemory(), None)


def event(**members: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(HEAD | members)


def role(ids: list[int] | None) -> bytes:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return event(choices=[choice], prompt_token_ids=ids)


def said(text: str, ids: list[int] | None, reason: str | None = None, **delta: Any) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text} | delta, "logprobs": None}
    return event(choices=[choice | {"finish_reason": reason, "token_ids": ids}])


def text(text: str, ids: list[int], reason: str | None = None, **more: Any) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    choice |= {"stop_reason": None, "prompt_token_ids": None, "token_ids": ids}
    return event(id="cmpl-2", object="text_completion", choices=[choice], **more)


def usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    total = {"total_tokens": prompt + output, "prompt_tokens_details": details}
    return {"prompt_tokens": prompt, "completion_tokens": output} | total


def objects(events: bytes) -> list[Any]:
    return [orjson.loads(e[6:]) for e in events.split(b"\n\n") if e.startswith(b"data: {")]


def after_two() -> LaterLeg:
    """A later leg of a chat whose client has the prompt's role and two tokens."""
    it = trail()
    first = FirstLeg(it)
    first.edit(role([7, 8, 9]) + said("a", [1]) + said("b", [2]))
    at = it.resumption()
    assert isinstance(at, Resumption)
    it.resume(at)
    return LaterLeg(it)


def test_the_client_gets_what_an_engine_writes_for_those_who_do_not_ask() -> None:
    first = FirstLeg(trail())
    given = (
        role([7, 8]) + said('x "token_ids":[1]', [1, 2]) + said("", [3]) + said("y", [4], "stop")
    )
    asked_not = (
        role(None) + said('x "token_ids":[1]', None) + said("", None) + said("y", None, "stop")
    )
    assert first.edit(given + DONE) == asked_not + DONE
    assert (first.trail.prompt, first.trail.tokens) == (b"7,8", 4)
    assert first.trail.resumption() is Unmoved.FINISHED


def test_the_client_that_asks_gets_them() -> None:
    first = FirstLeg(trail(shows_ids=True))
    given = role([7]) + said("x", [1]) + said("", [2])
    assert first.edit(given) == given
    assert first.look(wrap(said("z", [3]))) == wrap(said("z", [3]))
    assert first.trail.tokens == 2


@given(st.text(), st.lists(st.integers(0, 2**31), min_size=1, max_size=5))
def test_the_fast_way_is_the_other_one(content: str, ids: list[int]) -> None:
    first, other = FirstLeg(trail()), FirstLeg(trail())
    for leg in (first, other):
        leg.edit(role([7]))
    given = said(content, ids)
    seen = first.look(wrap(given))
    assert bool(seen) == bool(content)
    if seen:
        first.taken()
        assert seen == wrap(other.edit(given))
        assert first.trail.tokens == other.trail.tokens == len(ids)


@pytest.mark.parametrize(
    "piece",
    [
        role([1]),
        said("x", None),
        said("x", [1], "stop"),
        said("", [1]),
        DONE,
        b": keepalive\n\n",
        event(choices=[], usage={"prompt_tokens": 1}),
        event(error={"code": 500}),
    ],
)
def test_pieces_that_are_looked_at_whole(piece: bytes) -> None:
    first = FirstLeg(trail())
    first.edit(role([7]))
    assert first.look(wrap(piece)) == b""
    assert first.look(piece) == b""


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (said("", [], "abort"), "abort"),
        (said("x", [5], "error"), "error"),
        (b'data: {"error":{"code":500}}\n\n', "error"),
    ],
)
def test_what_speaks_for_a_lost_instance_is_withheld(lost: bytes, why: str) -> None:
    first = FirstLeg(trail())
    got = first.edit(role([7]) + said("a", [1]) + lost + DONE)
    assert got == role(None) + said("a", None)
    assert (first.lost, first.withheld) == (why, lost + DONE)
    assert first.edit(b": more\n\n") == b""
    assert first.withheld.endswith(b": more\n\n")
    assert isinstance(first.trail.resumption(), Resumption)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (said("x", None), Unmoved.NO_IDS),
        (said("", [1], reasoning="hm"), Unmoved.REASONING),
        (said("", [1], tool_calls=[{"index": 0}]), Unmoved.TOOLS),
    ],
)
def test_streams_that_turn_out_not_to_be_movable(odd: bytes, why: Unmoved) -> None:
    first = FirstLeg(trail())
    first.edit(role([7]) + odd)
    assert first.trail.resumption() is why


def test_a_stream_without_the_prompts_ids() -> None:
    first = FirstLeg(trail())
    first.edit(role(None))
    assert first.trail.resumption() is Unmoved.NO_IDS


def test_a_chat_goes_on_as_a_chat() -> None:
    leg = after_two()
    told = usage(5, 2, 4)
    given = text("c", [3]) + text("d", [4], "length") + event(choices=[], usage=told) + DONE
    got = leg.edit(given)
    assert got.endswith(DONE)
    third, fourth, last = objects(got)
    assert {name: third[name] for name in HEAD} == HEAD
    assert third["choices"] == [
        {
            "index": 0,
            "delta": {"content": "c"},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": None,
        }
    ]
    assert fourth["choices"][0]["finish_reason"] == "length"
    assert last["usage"] == usage(3, 4, 3)
    assert leg.trail.tokens == 4
    assert leg.trail.is_finished


def test_usage_in_each_event() -> None:
    leg = after_two()
    (told,) = objects(leg.edit(text("c", [3], usage=usage(5, 1, 4))))
    assert told["usage"] == usage(3, 3, 3)


def test_a_completion_goes_on_as_one() -> None:
    it = trail(is_chat=False)
    FirstLeg(it).edit(text("a", [1]).replace(b'"prompt_token_ids":null', b'"prompt_token_ids":[7]'))
    at = it.resumption()
    assert isinstance(at, Resumption)
    it.resume(at)
    (told,) = objects(LaterLeg(it).edit(text("b", [2])))
    choice = told["choices"][0]
    assert (told["id"], choice["text"], choice["token_ids"]) == ("cmpl-2", "b", None)


def test_text_that_the_client_has_comes_once() -> None:
    leg = after_two()
    leg.trail.overlap = "xyz"
    got = leg.edit(text("xy", [3]) + text("z!", [4]))
    assert [o["choices"][0]["delta"]["content"] for o in objects(got)] == ["!"]


@pytest.mark.parametrize("other", [text("xq", [3]), text("x", [3], "stop")])
def test_another_text_than_the_client_has_is_not_passed_on(other: bytes) -> None:
    leg = after_two()
    leg.trail.overlap = "xyz"
    assert leg.edit(other) == b""
    assert leg.lost == Unmoved.DIFFERS
    assert leg.trail.resumption() is Unmoved.DIFFERS


@pytest.mark.parametrize("lost", [text("", [], "abort"), b'data: {"error":{"code":500}}\n\n'])
def test_one_that_goes_on_may_be_lost_too(lost: bytes) -> None:
    leg = after_two()
    got = leg.edit(text("c", [3]) + lost + DONE)
    assert len(objects(got)) == 1
    assert leg.lost
    at = leg.trail.resumption()
    assert isinstance(at, Resumption)
    assert (at.ids, at.tokens) == (b"1,2,3", 3)


def test_what_is_no_json_passes() -> None:
    assert after_two().edit(b"data: {nonsense\n\n: beat\n\n") == b"data: {nonsense\n\n: beat\n\n"


def test_a_chat_without_a_token_yet_stays() -> None:
    """Where any has reasoned: this one may, and only its own engine keeps that from the text."""
    memory = TrailMemory()
    it, other = trail(memory=memory), trail(memory=memory)
    leg = FirstLeg(it)
    leg.edit(role([1, 2]))
    assert isinstance(it.resumption(), Resumption)
    FirstLeg(other).edit(role([1]) + said("", [5], reasoning_content="hm"))
    assert it.resumption() is other.resumption() is Unmoved.REASONING
    leg.edit(said("a", [10]))
    assert isinstance(it.resumption(), Resumption)


def test_events_with_other_ends_are_not_followed() -> None:
    it = trail()
    leg = FirstLeg(it)
    both = (role([1, 2]) + said("a", [10]) + said("b", [11])).replace(b"\n\n", b"\r\n\r\n")
    leg.edit(both)
    assert it.resumption() is Unmoved.NO_IDS


def test_a_choice_that_is_none_is_an_engines_error() -> None:
    leg = after_two()
    assert leg.edit(b'data: {"choices":[1]}\n\n') == b""
    assert leg.lost == "error"


NEST = b'{"a":' * 300 + b"1" + b"}" * 300


@pytest.mark.parametrize(
    "odd",
    [
        b'data: {"x":%b,"choices":[{"index":0,"text":"c","finish_reason":null}]}\n\n' % NEST,
        b'data: {"choices":[{"index":0,"text":"c","stop_reason":%b,"finish_reason":"x"}]}\n\n'
        % NEST,
        b'data: {"usage":{"z":%b},"choices":[]}\n\n' % NEST,
        b'data: {"choices":[{"index":0,"text":"c","finish_reason":["x"]}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"c","finish_reason":{"a":1}}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"c","finish_reason":true}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"c","finish_reason":0}]}\n\n',
        b'data: {"choices":[%b1]}\n\n' % (b"{}," * 100_000),
    ],
)
def test_an_event_that_cannot_be_written_anew_counts_as_an_error(odd: bytes) -> None:
    """Of the instance that goes on: the stream may be moved once more."""
    leg = after_two()
    assert leg.edit(text("c", [3]) + odd + text("d", [4])).count(b"data: ") == 1
    assert leg.lost == "error"


def test_what_is_nested_in_the_first_event_is_in_no_later_one() -> None:
    head = b'{"id":%b,"object":"o","created":[1],"model":"m"' % NEST
    assert first_members(head) == {"object": "o", "model": "m"}


def at_joint(stops: list[str], before: str, **fields: Any) -> LaterLeg:
    """A leg that goes on with a stream whose client has `before`, all of it with its tokens."""
    inside = orjson.dumps({"stop": stops} | fields)[1:-1]
    plan = Plan(inside, None, 0, max(map(len, stops)) - 1, is_chat=True, shows_ids=False)
    it = Trail(plan, TrailMemory(), None)
    first = FirstLeg(it)
    first.edit(role([7, 8]))
    it.resume(Resumption(b"1", 1, "", before))
    return LaterLeg(it)


STOP = "\nUser:"
JOINTS = [
    ("Hello you\nU", ["ser:", " go away"], "", True),
    ("Hello you\nU", ["se", "r", ": go away"], "", True),
    ("Hello you\n", ["User: go"], "", True),
    ("Hello you\nU", ["se", "less"], "seless", False),
    ("Hello you\nU", ["s", "e"], "se", False),
    ("Hello you", ["\nUser: is the engine's own"], "\nUser: is the engine's own", False),
    ("", ["ser:"], "ser:", False),
]


@pytest.mark.parametrize(("before", "pieces", "shown", "is_stopped"), JOINTS)
def test_a_stop_string_across_the_joint(
    before: str, pieces: list[str], shown: str, *, is_stopped: bool
) -> None:
    leg = at_joint([STOP, "<end>"], before)
    events = [text(piece, [n]) for n, piece in enumerate(pieces)]
    got = leg.edit(b"".join(events) + text("", [], "length") + DONE)
    assert got.endswith(DONE)
    choices = [o["choices"][0] for o in objects(got.removesuffix(DONE))]
    assert "".join(choice["delta"]["content"] for choice in choices) == shown
    assert choices[-1]["finish_reason"] == ("stop" if is_stopped else "length")
    assert choices[-1]["stop_reason"] == (STOP if is_stopped else None)
    assert leg.trail.is_finished


def test_what_is_held_at_the_joint_is_not_the_clients_yet() -> None:
    """A loss meanwhile goes on behind what it has."""
    leg = at_joint([STOP], "you\nU")
    assert leg.edit(text("se", [2])) == b""
    assert leg.trail.tokens == 1
    (told,) = objects(leg.edit(text("lf", [3])))
    assert told["choices"][0]["delta"]["content"] == "self"
    assert leg.trail.tokens == 3


def test_what_is_held_at_the_joint_is_bounded() -> None:
    """Events without text say nothing of a stop string, and there may be any number."""
    leg = at_joint([STOP], "you\nU")
    empty = text("", [2], logprobs={"x": "y" * 10_000})
    got = b"".join(leg.edit(empty) for _ in range(3 * HELD_BYTES // len(empty)))
    assert leg._held_bytes <= HELD_BYTES
    assert leg.trail.tokens > 1
    assert got == b""


@pytest.mark.parametrize("before", ["a" * 255, "ab" * 127 + "a", "a" * 127 + "b" + "a" * 127])
@pytest.mark.parametrize("size", [1, 400])
def test_a_beginning_of_a_stop_string_is_left_once(before: str, size: int) -> None:
    """However often the text repeats itself: per stop a look for each place, and for each piece."""
    stops = [before + chr(0x4E00 + n) for n in range(32)]
    pieces = [(before + before)[:size]] * (300 // size + 1)
    calls = calls_of(partial(_taken, stops, before, pieces))
    assert calls <= len(stops) * (len(before) + 6 * len(pieces)) + 1000


def _taken(stops: list[str], before: str, pieces: list[str]) -> Joint:
    joint = Joint(stops, before)
    for piece in pieces:
        joint.take(piece)
    return joint


def test_pieces_without_text_are_not_looked_at() -> None:
    joint = Joint(["a" * 255 + "b"] * 32, "a" * 255)
    assert joint.holds
    assert calls_of(partial(joint.take, "")) <= 2


@given(
    st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=4),
    st.text("ab", max_size=12),
    st.lists(st.text("ab", max_size=5), max_size=8),
)
def test_a_joint_answers_as_if_each_beginning_was_tried(
    stops: list[str], before: str, pieces: list[str]
) -> None:
    """What it found, and whether more may follow, after each piece."""
    joint, seen, stop = Joint(stops, before), before, ""
    begun = [
        (one, start)
        for one in stops
        for start in range(len(before))
        if start + len(one) > len(before)
    ]
    for piece in ["", *pieces]:
        joint.take(piece)
        seen += piece
        whole = [one for one, start in begun if seen.startswith(one, start)]
        stop = stop or next(iter(whole), "")
        may_go_on = any(one.startswith(seen[start:]) for one, start in begun)
        assert (joint.stop, joint.holds) == (stop, may_go_on and not stop)


def test_usage_of_a_stream_that_ends_at_the_joint() -> None:
    leg = at_joint([STOP], "you\nU", stream_options={"include_usage": True})
    got = leg.edit(text("ser:", [2, 3])).removesuffix(DONE)
    last = objects(got)[-1]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert last["id"] == HEAD["id"]


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("ab", max_size=6),
    st.lists(st.text("ab", max_size=3), max_size=6),
)
def test_only_stop_strings_that_begin_before_the_joint_end_it(
    stops: list[str], before: str, pieces: list[str]
) -> None:
    leg = at_joint(stops, before)
    events = b"".join(text(piece, [n]) for n, piece in enumerate(pieces))
    got = leg.edit(events + text("", [], "length") + DONE).removesuffix(DONE)
    choices = [o["choices"][0] for o in objects(got)]
    shown = "".join(choice["delta"]["content"] for choice in choices)
    said, at = "".join(pieces), len(before)
    across = [
        start + len(stop) - at
        for stop in stops
        for start in range(at)
        if (before + said).startswith(stop, start) and start + len(stop) > at
    ]
    if across:
        assert choices[-1]["finish_reason"] == "stop"
        assert len(shown) < min(across)
    else:
        assert (shown, choices[-1]["finish_reason"]) == (said, "length")


FLOODS = [
    b"\n",
    b"\n\n",
    b":\n\n",
    b"data: {}\n\n",
    b'data: {"a":1}\n\n',
    b"event: a\n\n",
    b'data: {"usage":{}}\n\n',
    b'data: "[DONE]"\n\n',
    b'data: {"type":"x"}\n\n',
    b'data: {"text":"\n\n',
    b'data: {"content":""}\n\n',
    b'"content":"a\n\n',
    b'data: {"token_ids":[]}\n\n',
    b'data: {"reasoning":"a"}\n\n',
    b'data: {"tool_calls":[{}]}\n\n',
    b'data: {"finish_reason":""}\n\n',
    b'data: {,"choices":[]}\n\n',
]
READ_BYTES = 65536


@pytest.mark.parametrize("unit", FLOODS, ids=repr)
@pytest.mark.parametrize("is_later", [False, True])
def test_a_read_of_short_events_is_few_calls(unit: bytes, *, is_later: bool) -> None:
    """As many of them come in one read as an engine likes, and none has anything for a stream."""
    leg: FirstLeg | LaterLeg = after_two()
    if not is_later:
        leg = FirstLeg(trail())
        leg.edit(role([7]) + said("a", [1]))
    assert calls_of(partial(leg.edit, unit * (READ_BYTES // len(unit)))) <= 200


def test_errors_in_a_row_are_not_read_without_end() -> None:
    """Each is a client's, which no other instance would mend."""
    refused = b'data: {"error":{"code":400,"message":"%b"}}\n\n' % (b"x" * 60)
    leg = FirstLeg(trail())
    leg.edit(role([7]) + said("a", [1]))
    assert calls_of(partial(leg.edit, refused * 600)) <= 2000
    assert leg.edit(refused * 600) == refused * 600


noise = st.sampled_from([b"\n", b":\n\n", b"data: {}\n\n", b"event: a\n\n", b'data: {"a":"b"}\n\n'])
told = st.sampled_from(
    [
        said("a", [1]),
        said("", [2]),
        said("b", [3, 4], "stop"),
        said('"token_ids":[1]', [5]),
        said("", [1], "abort"),
        said("x", None),
        said("", [6], reasoning="hm"),
        said("", [7], tool_calls=[{"index": 0}]),
        b'data: {"token_ids":[8]}\n\n',
        b'data: {"error":{"code":500}}\n\n',
        b'data: {"error":{"code":400}}\n\n',
        DONE,
    ]
)


@given(st.lists(noise | told, max_size=14), st.sets(st.integers(1, 13)))
def test_events_in_any_pieces_are_edited_alike(events: list[bytes], cuts: set[int]) -> None:
    """What is passed over in bulk, alone or among others."""
    whole, cut = FirstLeg(trail()), FirstLeg(trail())
    got = whole.edit(role([7]) + b"".join(events))
    places = [0, *sorted(at for at in cuts if at < len(events)), len(events)]
    pieces = [b"".join(events[a:b]) for a, b in pairwise(places)]
    assert b"".join([cut.edit(piece) for piece in [role([7]), *pieces]]) == got
    assert (cut.lost, cut.withheld) == (whole.lost, whole.withheld)
    assert (cut.trail.why, cut.trail.tokens) == (whole.trail.why, whole.trail.tokens)


@given(st.lists(noise, max_size=8).map(b"".join), st.lists(noise, max_size=8).map(b"".join))
def test_a_later_leg_hands_on_what_it_has_nothing_to_do_with(before: bytes, behind: bytes) -> None:
    got = after_two().edit(before + text("c", [3]) + behind)
    assert got.startswith(before)
    assert got.endswith(behind)
    assert len(got) > len(before) + len(behind)
