"""Edits of a stream that may migrate: of its first instance, and of the next ones.

The first instance's events pass unchanged, except the token ids that the proxy requested. Each list
is replaced by `null`, as an engine writes it without that request. That is done by byte search; an
event of plain content does not leave the fast path (`look`, `taken`). Another instance's events, of
a completion, are rewritten as a part of the first one's stream. They get the same id, no second
role, and usage as if one instance had served it all.

Signs of a lost instance are withheld from the client, with all that follows. They are an error of
the engine, and a finish reason `abort` (the engine stops) or `error`.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from proxy.core.types import Unmoved
from proxy.protocol.streams.parse_cost import is_cheap
from proxy.protocol.streams.sse import LONG_BYTES, Scanner, ends_of, long_end, place_of
from proxy.protocol.streams.trail import Trail, data_of, is_lost_error, member_list

_IDS: Final = b'"token_ids":['
_PROMPT_IDS: Final = b'"prompt_token_ids":['
_GOES_ON: Final = b'"finish_reason":null'
_FINISHED: Final = b'"finish_reason":"'
_ABORT: Final = b'"finish_reason":"abort"'
_FAILED: Final = b'"finish_reason":"error"'
_CHAT_TEXT, _ANY_CHAT_TEXT, _TEXT = b'"delta":{"content":"', b'"content":"', b'"text":"'
_REASONING: Final = (b'"reasoning":"', b'"reasoning_content":"')
_CALLS: Final = b'"tool_calls":[{'
_CHOICES: Final = b',"choices":['
_NULL: Final = b"null"
HELD_BYTES: Final = 1 << 16
"""Events that are held at most while a stop string may go on in them: 200 of an ordinary size."""
_ERROR_EVENT: Final = b'data: {"error"'
_QUOTE: Final = ord('"')
_LEAST_BYTES: Final = 64
"""A shorter event with a choice is no engine's, and thousands of them come in one read."""
_MOST_ERRORS: Final = 16
"""Most errors of one stream that are read; more than one is no engine's either."""
_LINE_ENDS: Final = re.compile(rb"\n+")
_NOTED: Final = [
    re.compile(
        rb'"(?:(?:prompt_)?token_ids":\[|finish_reason":"|%b":"|error"'
        rb'|tool_calls":\[\{|reasoning(?:_content)?":")' % text
    )
    for text in (b"text", b"content")
]
"""What an event of a completion, or of a chat, has that is more than passed on."""
_FIRST_NOTED: Final = [
    re.compile(rb"%b|%b" % (noted.pattern, re.escape(_CHOICES))) for noted in _NOTED
]
"""The same before the first choice."""
_LOST: Final = re.compile(rb'\n\ndata: \{"error"|"finish_reason":"(?:abort|error)"')
_LISTS: Final = [
    (key, re.compile(re.escape(key) + rb'[^]\n"]*\]'), key[:-1] + _NULL)
    for key in (_IDS, _PROMPT_IDS)
]
"""Lists of token ids, and what stands for them; a replacement with groups is a step for each."""
_REWRITTEN: Final = re.compile(rb'"(?:choices|error)"')
_MOST_PARSED: Final = 1 << 20
"""Most bytes of an event that are parsed, without the prompt's token ids."""


class FirstLeg:
    """The stream of the first instance. `lost`: why it counts as lost; `withheld`: what follows."""

    __slots__ = (
        "_any_key",
        "_errors",
        "_ids",
        "_is_chat",
        "_is_first",
        "_key",
        "_withholds",
        "is_shown",
        "lost",
        "trail",
        "withheld",
    )

    def __init__(self, trail: Trail) -> None:
        self.trail = trail
        self.lost = ""
        self.withheld = b""
        self._key = _CHAT_TEXT if trail.plan.is_chat else _TEXT
        self._is_chat = trail.plan.is_chat
        self._any_key = _ANY_CHAT_TEXT if trail.plan.is_chat else _TEXT
        self._is_first = self._withholds = True
        self._ids = b""
        self._errors = 0
        self.is_shown = trail.plan.shows_ids

    def look(self, wire: bytes) -> bytes:
        """A chunk of one event of plain content as its client gets it; empty for any other piece.

        The piece counts once it is `taken`.
        """
        text = wire.find(self._key)
        if text < 0:
            return b""
        text += len(self._key)
        if wire.find(_GOES_ON, text) < 0 or wire[text] == _QUOTE:
            return b""
        at = wire.find(_IDS, text)
        if at < 0 or self.trail.wants_text or self._is_first:
            return b""
        at += len(_IDS)
        end = wire.find(b"]", at)
        line = wire.find(b"\r\n")
        if end < 0 or line < 0 or line > 8:
            return b""
        self._ids = wire[at:end]
        if self.is_shown:
            return wire
        start = line + 2
        size = len(wire) - start - 2 - (end - at + 2) + 4
        return b"%x\r\n%b%b%b" % (size, wire[start : at - 1], _NULL, wire[end + 1 :])

    def taken(self) -> None:
        """The piece that was looked at goes to the client."""
        self.trail.add(self._ids, "", is_shown=True)

    @property
    def is_error_event(self) -> bool:
        """Whether it is lost by an error event, not by the finish reason of a choice."""
        return self.withheld.startswith(_ERROR_EVENT)

    def let_pass(self) -> bytes:
        """Stop withholding, since no instance continues; returns the withheld events."""
        withheld, self.withheld, self.lost = self.withheld, b"", ""
        self._withholds = False
        return withheld

    def edit(self, events: bytes) -> bytes:
        """The client's form of whole events; events after a loss are kept in `withheld`."""
        if self.lost:
            self.withheld += events
            return b""
        if ends_of(events).find(b"\r\n") >= 0:
            self.trail.stop(Unmoved.NO_IDS)  # its events end otherwise than vLLM's
        done: list[bytes] = []
        at, size, end = 0, len(events), long_end(events)
        while at < size:
            if at or not end:
                if self.trail.why is not None:
                    done.append(self._rest(events, at))
                    break
                noted = _FIRST_NOTED if self._is_first else _NOTED
                start = _next(noted[self._is_chat], events, at)
                done.append(events[at:start])
                if start == size:
                    break
                at, end = start, _event_end(events, start)
            event = events[at:end]
            if self._withholds and self._is_lost(event):
                self.withheld = events[at:]
                break
            done.append(self._event(event))
            at = end
        return b"".join(done)

    def _rest(self, events: bytes, at: int) -> bytes:
        """The client's form of what is from there on, of a stream that is not followed any more."""
        lost = self._lost_at(events, at) if self._withholds else -1
        rest = events[at:] if lost < 0 else events[at:lost]
        if lost >= 0:
            self.withheld = events[lost:]
        if rest.find(_REASONING[0]) >= 0 or rest.find(_REASONING[1]) >= 0:
            self.trail.reasons()
        if not self.is_shown:
            for key, form, null in _LISTS:
                if rest.find(key) >= 0:
                    rest = form.sub(null, rest)
        return rest

    def _lost_at(self, events: bytes, at: int) -> int:
        """Start of the first event from there that is a sign of loss; -1 without one."""
        size, start = len(events), _next(_NOTED[self._is_chat], events, at)
        while start < size and self._withholds:
            if not events.startswith(_ERROR_EVENT, start):
                found = _LOST.search(events, max(0, start - 2))
                if found is None:
                    break
                place = found.start() + 2 * found[0].startswith(b"\n")
                start = max(start, events.rfind(b"\n\n", start, place) + 2)
            end = _event_end(events, start)
            if self._is_lost(events[start:end]):
                return start
            start = end
        return -1

    def _is_lost(self, event: bytes) -> bool:
        is_error = event.startswith(_ERROR_EVENT) and (
            len(event) > LONG_BYTES or is_lost_error(data_of(event))
        )
        if event.startswith(_ERROR_EVENT) and not is_error:
            self._errors += 1
            if self._errors > _MOST_ERRORS:
                self._withholds = False
                self.trail.stop(Unmoved.NO_IDS)
        if place_of(_ABORT, event) >= 0:
            self.lost = "abort"
        elif is_error or place_of(_FAILED, event) >= 0:
            self.lost = "error"
        return bool(self.lost)

    def _event(self, event: bytes) -> bytes:
        if len(event) < _LEAST_BYTES:
            self.trail.stop(Unmoved.NO_IDS)
        if not event.startswith(b"data: {"):
            return event
        if self._is_first and (at := place_of(_CHOICES, event)) >= 0:
            self._is_first = False
            begin, end = member_list(event, _PROMPT_IDS)
            self.trail.begin(event[6:at], event[begin:end] if begin >= 0 else b"")
        if place_of(_CALLS, event) >= 0:
            self.trail.stop(Unmoved.TOOLS)
        elif place_of(_REASONING[0], event) >= 0 or place_of(_REASONING[1], event) >= 0:
            self.trail.reasons()
        self._track(event)
        if self.is_shown:
            return event
        return _without(_without(event, _IDS), _PROMPT_IDS)

    def _track(self, event: bytes) -> None:
        """Keep an event's tokens."""
        trail = self.trail
        begin, end = member_list(event, _IDS)
        text = place_of(self._any_key, event)
        has_text = text >= 0 and event[text + len(self._any_key)] != _QUOTE
        is_finished = place_of(_FINISHED, event) >= 0
        if begin >= 0:
            said = ""
            if trail.wants_text and trail.why is None:
                short = _without(event, _PROMPT_IDS) if len(event) > LONG_BYTES else event
                if len(short) > LONG_BYTES:
                    trail.stop(Unmoved.NO_IDS)  # its text would be missing
                else:
                    said = text_of(short)
            trail.add(event[begin:end], said, is_shown=has_text or is_finished)
        elif has_text:
            trail.stop(Unmoved.NO_IDS)
        trail.is_finished |= is_finished


def _next(noted: re.Pattern[bytes], events: bytes, at: int) -> int:
    """Start of the next event with a match; the end of all without one.

    A step per event would be tens of thousands in one read of blank lines or comments.
    """
    blank = _LINE_ENDS.match(events, at)
    if blank is not None:
        at = blank.end()
    found = noted.search(events, at)
    if found is None:
        return len(events)
    place = found.start()
    before = events.rfind(b"\n\n", at, place)
    return at if before < 0 else before + 2


def _event_end(events: bytes, at: int) -> int:
    end = events.find(b"\n\n", at)
    return len(events) if end < 0 else end + 2


def _without(event: bytes, key: bytes) -> bytes:
    """An event with null in place of the list that is the value of `key`."""
    begin, end = member_list(event, key)
    if begin < 0:
        return event
    behind = end + 1
    if len(event) > LONG_BYTES:  # each copy of a long one takes milliseconds
        view = memoryview(event)
        return b"".join([view[: begin - 1], _NULL, view[behind:]])
    return event[: begin - 1] + _NULL + event[behind:]


def _parsable(event: bytes) -> bytes:
    """An event as it may be parsed, a long one without its prompt; empty for one that may not."""
    if len(event) < _LEAST_BYTES and event.find(b'"choices"') >= 0:
        return b""
    if len(event) > LONG_BYTES:
        event = _without(event, _PROMPT_IDS)
    return event if len(event) <= _MOST_PARSED else b""


class EditingScanner(Scanner):
    """A scanner whose pieces of plain content lose the token ids that only the proxy wants."""

    __slots__ = ("_leg",)

    def __init__(self, leg: FirstLeg) -> None:
        super().__init__()
        self._leg = leg

    def takes(self, wire: bytes) -> bytes:
        """See `Scanner.takes`; the client gets less than what came."""
        seen = self._leg.look(wire)
        if not seen or not super().takes(wire):
            return b""
        self._leg.taken()
        return seen


class Joint:
    """Finds a stop string that begins in what a client has and ends in what another instance says.

    That instance knows its own text only. `stop`: the string that was found, empty before. While it
    `holds`, what has come may be the rest of one.
    """

    __slots__ = ("_begins", "_joint", "_seen", "holds", "stop")

    def __init__(self, stops: list[str], said: str) -> None:
        self._seen = said
        self._joint = len(said)
        # Of each stop its first place whose text may still become it. A place that text has refuted
        # stays refuted, so each is left once, however often the text repeats itself.
        self._begins = [(stop, max(0, self._joint - len(stop) + 1)) for stop in stops]
        self.stop = ""
        self.holds = True
        self._look()

    def take(self, text: str) -> None:
        """More of the instance's text has come."""
        if self.holds and text:
            self._seen += text
            self._look()

    def _look(self) -> None:
        """Find a stop that is whole, and for each other one its next place."""
        left: list[tuple[str, int]] = []
        for stop, start in self._begins:
            at = self._next(stop, start)
            if at + len(stop) <= len(self._seen) and at < self._joint:
                self.stop = stop
                break
            if at < self._joint:
                left.append((stop, at))
        self._begins = left
        self.holds = bool(left) and not self.stop

    def _next(self, stop: str, start: int) -> int:
        """The first place from `start` where the text is a stop, or its beginning up to the end."""
        seen, size = self._seen, len(stop)
        while start < self._joint and not stop.startswith(seen[start : start + size]):
            start += 1
        return start


class LaterLeg:
    """The stream of an instance that goes on: the events of a completion, rewritten.

    `offset_tokens`: of the output that the client had when it began. `first`: the members of the
    stream's first event that all its events share. `held`: events whose text may be the rest of a
    stop string that had begun before.
    """

    __slots__ = (
        "_first",
        "_held",
        "_held_bytes",
        "_joint",
        "_offset_tokens",
        "_wants_usage",
        "is_shown",
        "lost",
        "trail",
        "withheld",
    )

    def __init__(self, trail: Trail) -> None:
        self.trail = trail
        self.lost = ""
        self.withheld = b""
        self.is_shown = trail.plan.shows_ids
        self._offset_tokens = trail.tokens
        self._first: dict[str, Any] = first_members(trail.head)
        plan = trail.plan
        self._wants_usage = wants_usage(plan.fields)
        stops = stop_strings(plan.fields) if plan.stop_chars else []
        self._joint = Joint(stops, trail.said[-plan.stop_chars :] if stops else "")
        self._held: list[tuple[bytes, str, str]] = []
        self._held_bytes = 0

    @property
    def is_error_event(self) -> bool:
        """Whether it is lost by an error event, not by the finish reason of a choice."""
        return self.withheld.startswith(_ERROR_EVENT)

    def edit(self, events: bytes) -> bytes:
        """Whole events, edited as a part of the first instance's stream."""
        if self.lost:
            self.withheld += events
            return b""
        done: list[bytes] = []
        at, size, end = 0, len(events), long_end(events)
        while at < size:
            if at or not end:
                start = _next(_REWRITTEN, events, at)
                done.append(events[at:start])
                if start == size:
                    break
                at, end = start, _event_end(events, start)
            event = events[at:end]
            written = self._event(event) if event.startswith(b"data: {") else event
            if written is None:
                self.withheld = events[at:]
                break
            done.append(written)
            if self._joint.stop:
                break
            at = end
        return b"".join(done)

    def _event(self, event: bytes) -> bytes | None:
        """An event for the client, empty where it has nothing for it; None: the stream is lost."""
        event = _parsable(event)
        data = data_of(event)
        try:
            told: dict[str, Any] | None = orjson.loads(data) if data and is_cheap(data) else None
        except orjson.JSONDecodeError:
            return event
        if told is None:
            self.lost = "error"
            return None
        choices = told.get("choices")
        if not isinstance(choices, list):
            self.lost = "error" if is_lost_error(data) else ""
            return None if self.lost else event
        usage = told.get("usage")
        if isinstance(usage, dict):
            told["usage"] = self._usage(usage)
        told.update(self._first)
        if choices and not isinstance(choices[0], dict):
            self.lost = "error"
            return None
        if choices:
            choice = self._choice(choices[0], event)
            if choice is None:
                return None if self.lost else b""
            told["choices"] = [choice]
        written = self._as_event(told)
        return written + self._end(told) if written and self._joint.stop else written

    def _as_event(self, told: dict[str, Any]) -> bytes | None:
        """An event of this object; None for one that is nested deeper than can be written."""
        try:
            return b"data: %b\n\n" % orjson.dumps(told)
        except TypeError:
            self.lost = "error"
            return None

    def _end(self, told: dict[str, Any]) -> bytes:
        """The end of a stream at a stop string that its instance has not seen."""
        end = b"data: [DONE]\n\n"
        if not self._wants_usage:
            return end
        own = self.trail.tokens - self._offset_tokens
        usage = self._usage({"completion_tokens": own})
        last = told | {"choices": [], "usage": usage}
        return b"data: %b\n\n" % orjson.dumps(last) + end

    def _choice(self, choice: dict[str, Any], event: bytes) -> dict[str, Any] | None:
        """A choice for the client; None where it has nothing for it, or the stream is lost."""
        trail, reason, said = self.trail, choice.get("finish_reason"), choice.get("text")
        text = said if isinstance(said, str) else ""
        shown = self._shown(text)
        if reason in ("abort", "error"):
            self.lost = str(reason)
        elif not isinstance(reason, str | None):
            self.lost = "error"
        elif shown is None or (reason is not None and trail.overlap):
            self.lost = Unmoved.DIFFERS
            trail.stop(Unmoved.DIFFERS)
        if self.lost or shown is None:
            return None
        self._held.append((event, text, shown))
        self._held_bytes += len(event)
        self._joint.take(text)
        if self._joint.holds and reason is None and self._held_bytes <= HELD_BYTES:
            return None
        shown = self._free()
        if self._joint.stop:
            choice, reason = choice | {"stop_reason": self._joint.stop}, "stop"
            trail.is_finished = True
        return self._written(choice, shown, reason)

    def _written(
        self, choice: dict[str, Any], shown: str, reason: str | None
    ) -> dict[str, Any] | None:
        trail = self.trail
        if not shown and reason is None and not self.is_shown:
            return None
        listed = choice.get("token_ids") if self.is_shown else None
        if not trail.plan.is_chat:
            written = choice | {"text": shown, "prompt_token_ids": None, "token_ids": listed}
            return written | {"finish_reason": reason}
        as_chat: dict[str, Any] = {"index": 0, "delta": {"content": shown}, "logprobs": None}
        as_chat["finish_reason"] = reason
        if reason is not None:
            as_chat["stop_reason"] = choice.get("stop_reason")
        return as_chat | {"token_ids": listed}

    def _free(self) -> str:
        """The text of what was held, for the client; nothing where it has the rest of a stop."""
        held, self._held, self._held_bytes = self._held, [], 0
        for event, text, _ in held:
            is_finished = event.find(_FINISHED) >= 0
            self._track(event, text, is_finished=is_finished)
        return "" if self._joint.stop else "".join([shown for _, _, shown in held])

    def _track(self, event: bytes, text: str, *, is_finished: bool) -> None:
        """Keep an event's tokens."""
        begin, end = member_list(event, _IDS)
        if begin >= 0:
            self.trail.add(event[begin:end], text, is_shown=bool(text) or is_finished)
        elif text:
            self.trail.stop(Unmoved.NO_IDS)
        self.trail.is_finished |= is_finished

    def _shown(self, text: str) -> str | None:
        """The text without what the client has already; None where it is another text."""
        overlap = self.trail.overlap
        if not overlap:
            return text
        size = min(len(text), len(overlap))
        if text[:size] != overlap[:size]:
            return None
        self.trail.overlap = overlap[size:]
        return text[size:]

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Usage over all instances, with the prompt of the first."""
        prompt = self.trail.prompt_tokens
        own = usage.get("completion_tokens")
        output = self._offset_tokens + (own if isinstance(own, int) else 0)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            usage["prompt_tokens_details"] = details | {
                "cached_tokens": min(details["cached_tokens"], prompt)
            }
        return usage | {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
        }


def stop_strings(fields: bytes) -> list[str]:
    """The stop strings among a plan's sampling parameters."""
    stop = _parameters(fields).get("stop")
    given = stop if isinstance(stop, list) else [stop]
    return [text for text in given if isinstance(text, str) and text]


def wants_usage(fields: bytes) -> bool:
    """Whether a plan's parameters ask for usage at the stream's end."""
    options = _parameters(fields).get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _parameters(fields: bytes) -> dict[str, Any]:
    told: dict[str, Any] = orjson.loads(b"{%b}" % fields)
    return told


def first_members(head: bytes) -> dict[str, Any]:
    """The members `id`, `object`, `created` and `model` of a stream, of its first event."""
    if not is_cheap(head):
        return {}
    try:
        told: dict[str, Any] = orjson.loads(head + b"}")
    except orjson.JSONDecodeError:
        return {}
    wanted = ("id", "object", "created", "model")
    return {name: told[name] for name in wanted if isinstance(told.get(name), str | int)}


def text_of(event: bytes) -> str:
    """The text that an event has for its client; empty where it has none."""
    if not is_cheap(event):
        return ""
    try:
        choice = orjson.loads(data_of(event))["choices"][0]
        said = choice.get("text") if "text" in choice else choice["delta"].get("content")
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
        return ""
    return said if isinstance(said, str) else ""
