"""The tokens of one stream that its client has, so that the stream can migrate after them.

Engines tell them in each event (`return_token_ids`). They are kept as the JSON that they came in:
nothing is parsed per event, and a continuation's prompt is joined from the same bytes. A token
whose text the engine still holds back, since its character is not complete, is not the client's
yet; it is generated again.

With stop strings an engine's text is behind its tokens by as many characters as could begin such a
string (`Plan.stop_chars`). So the stream has to go on from an earlier token, of whose text the
client has all, and the text that comes twice is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import orjson

from proxy.core.types import Unmoved
from proxy.protocol.streams.movable import MOST_LENGTH, MOST_STOP_CHARS, Plan
from proxy.protocol.streams.parse_cost import is_cheap
from proxy.protocol.streams.sse import place_of

STEP_BYTES: Final = 4096
"""Memory is taken in steps of this size, so that an event costs no look at what others take."""
TRAIL_BYTES: Final = 256 << 20
"""Most bytes of the token ids of all streams, some 40 million tokens; a stream for which there is
no room is not moved."""
TRAIL_PART: Final = 8
"""With a memory limit they have this part of it, if that is less."""
STREAM_BYTES: Final = 8 << 20
"""Most bytes of one stream: prompt and output of a million tokens."""
AT_ONCE_BYTES: Final = 1 << 20
"""Most bytes of the output's ids that come at once: of 150,000 tokens."""
SHARE: Final = 7
"""One tenant alone gets seven eighths of the memory, of two each gets seven fifteenths."""
EVENT_BYTES: Final = 160
"""Memory of an event whose text is kept, beside the text."""
_SPARE_EVENTS: Final = 64
"""Events without text that may stand among those of the text that is held back."""
_SAID_CHARS: Final = 4 * MOST_STOP_CHARS
_DIGITS: Final = b"0123456789,"


class TrailMemory:
    """Bytes that the trails of all streams take; and whether any stream has reasoned.

    Where clients have tenants each gets `SHARE` times what is left at most, so that one that fills
    it leaves room for the others.
    """

    __slots__ = ("_taken_by", "has_reasoned", "most_bytes", "taken_bytes")

    def __init__(self, most_bytes: int = TRAIL_BYTES) -> None:
        self.most_bytes = most_bytes
        self.taken_bytes = 0
        self._taken_by: dict[str, int] = {}
        self.has_reasoned = False

    def take(self, size: int, tenant: str = "") -> bool:
        """Take `size` bytes for a tenant's stream, if there is room."""
        left = self.most_bytes - self.taken_bytes - size
        own = self._taken_by.get(tenant, 0) + size
        if left < 0 or (tenant and own > SHARE * left):
            return False
        self.taken_bytes += size
        if tenant:
            self._taken_by[tenant] = own
        return True

    def give_back(self, size: int, tenant: str = "") -> None:
        """`size` bytes are free again."""
        self.taken_bytes -= size
        if tenant and size:
            own = self._taken_by.pop(tenant) - size
            if own:
                self._taken_by[tenant] = own


def trail_bytes(limit_bytes: int | None) -> int:
    """The room for all streams; `limit_bytes`: of the process, None: no limit."""
    return TRAIL_BYTES if limit_bytes is None else min(TRAIL_BYTES, limit_bytes // TRAIL_PART)


class Resumption:
    """The point where a stream continues: after these tokens, less the client's `overlap`.

    `said`: the last text before that, where stop strings may begin in it.
    """

    __slots__ = ("ids", "overlap", "said", "tokens")

    def __init__(self, ids: bytes, tokens: int, overlap: str, said: str = "") -> None:
        self.ids, self.tokens, self.overlap, self.said = ids, tokens, overlap, said


class _Passed:
    """An event that the client has, while its text may be behind its tokens.

    `at`, `tokens`: how many bytes and tokens the trail had with it.
    """

    __slots__ = ("at", "text", "tokens")

    def __init__(self, text: str, at: int, tokens: int) -> None:
        self.text, self.at, self.tokens = text, at, tokens


class Trail:
    """The tokens that a stream's client has. `why`: the reason that it cannot migrate, or None.

    `prompt`, `_ids`: token ids, separated by commas. `head`: the first event as far as its
    choices, with the stream's own id. `headers`: of its request. `most_tokens`: of prompt and
    output; None: no limit. `tenant`: whose stream it is.
    """

    __slots__ = (
        "_base",
        "_base_tokens",
        "_checked",
        "_granted",
        "_has_dropped",
        "_ids",
        "_knows_prompt",
        "_memory",
        "_most_tokens",
        "_pending",
        "_pending_tokens",
        "_size",
        "_stop_chars",
        "_tenant",
        "_window",
        "head",
        "headers",
        "is_finished",
        "most_output",
        "most_prompt",
        "overlap",
        "plan",
        "prompt",
        "prompt_tokens",
        "said",
        "tokens",
        "why",
    )

    def __init__(
        self, plan: Plan, memory: TrailMemory, most_tokens: int | None, tenant: str = ""
    ) -> None:
        self.plan = plan
        self._memory, self._tenant = memory, tenant
        self._most_tokens = most_tokens
        self.why: Unmoved | None = None
        self.head = self.headers = b""
        self.prompt = b""
        self._knows_prompt: bool | None = None
        """Whether the prompt is token ids; None: nobody has asked."""
        self.prompt_tokens = 0
        self.most_prompt = MOST_LENGTH
        """Most tokens that the prompt can have."""
        self.most_output: Callable[[], float] | None = None
        """Returns the most tokens that the output can have by now; None: any number."""
        self._ids = bytearray()
        self._checked = 0
        """Bytes of them that are known to be ids."""
        self.tokens = 0
        self._pending = bytearray()
        self._pending_tokens = 0
        self.is_finished = False
        self._stop_chars = plan.stop_chars
        self._window: deque[_Passed] = deque()
        self._has_dropped = False
        self._base = self._base_tokens = 0
        self.overlap = ""
        """Text that the client has and that the present instance will say again."""
        self.said = ""
        """The last text so far, where there are stop strings."""
        self._size = self._granted = 0

    def keep(self, headers: bytes) -> None:
        """Keep what its request had, besides its prompt: these headers and the plan's fields."""
        self.headers = headers
        self._check(len(headers) + len(self.plan.fields))

    def begin(self, head: bytes, prompt: bytes) -> None:
        """The stream's first event has come, with the prompt's token ids."""
        if self.why is not None:
            return
        self.head, self.prompt, self._knows_prompt = head, prompt, None
        self.prompt_tokens = prompt.count(b",") + 1 if prompt else 0
        if not 0 < self.prompt_tokens <= self.most_prompt:
            self.stop(Unmoved.NO_IDS)
        self._check(len(head) + len(prompt))

    def add(self, ids: bytes, text: str, *, is_shown: bool) -> None:
        """An event passes with these token ids; not `is_shown`: it has no text.

        `text` is wanted where stop strings may hold text back (`wants_text`).
        """
        if self.why is not None:
            return
        count = ids.count(b",") + 1 if ids else 0
        if self._stop_chars:
            self._append(ids, count)
            self.said = (self.said + text)[-_SAID_CHARS:]
            self._window.append(_Passed(text, len(self._ids), self.tokens))
            self._size += _text_bytes(text)
            if len(self._window) > self._stop_chars + _SPARE_EVENTS:
                self._size -= _text_bytes(self._window.popleft().text)
                self._has_dropped = True
        elif is_shown or self.plan.shows_ids:
            if self._pending_tokens:
                self._append(self._pending, self._pending_tokens)
                self._pending, self._pending_tokens = bytearray(), 0
            self._append(ids, count)
        elif count:
            if self._pending:
                self._pending += b","
            self._pending += ids
            self._pending_tokens += count
        self._check(len(ids) + 1)

    @property
    def wants_text(self) -> bool:
        """Whether each event's text has to be read."""
        return self._stop_chars > 0

    def _append(self, ids: bytes | bytearray, count: int) -> None:
        if count:
            if self._ids:
                self._ids += b","
            self._ids += ids
            self.tokens += count

    def _check(self, size: int) -> None:
        most = self._most_tokens
        if most is not None and self.prompt_tokens + self.tokens > most:
            self.stop(Unmoved.TOO_LONG)
            return
        self._size += size
        if self._size > self._granted and self.why is None:
            self._grow(size)

    def _grow(self, size: int) -> None:
        """Take a step of memory, and look at what has come since the last one: never at much."""
        wanted = max(STEP_BYTES, self._size - self._granted)
        if not self._is_plausible(size):
            self.stop(Unmoved.NO_IDS)
        elif self._size <= STREAM_BYTES and self._memory.take(wanted, self._tenant):
            self._granted += wanted
        else:
            self.stop(Unmoved.MEMORY)

    def _is_plausible(self, size: int) -> bool:
        """Whether the output's ids are no more than there can be, and ids; `size`: of the last."""
        told = self.tokens + self._pending_tokens
        if told and max(size, len(self._pending)) > AT_ONCE_BYTES:
            return False
        if self.most_output is not None and told > self.most_output():
            return False
        return not self.prompt or self._are_ids(len(self._ids))

    def reasons(self) -> None:
        """The stream has reasoning in it, which only its own engine keeps apart from the text."""
        self._memory.has_reasoned = True
        self.stop(Unmoved.REASONING)

    def stop(self, why: Unmoved) -> None:
        """Keep nothing of the stream: it cannot migrate any more."""
        if self.why is None:
            self.why = why
        self.head = self.prompt = self.headers = self.plan.fields = b""
        self._ids = bytearray()
        self._pending, self._window = bytearray(), deque()
        self.let_go()

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes, a little more than a continuation's body."""
        return self._size

    def let_go(self) -> None:
        """Give the memory back."""
        granted, self._granted, self._size = self._granted, 0, 0
        self._memory.give_back(granted, self._tenant)

    def resumption(self) -> Resumption | Unmoved:
        """The point where the stream can continue, or the reason that it cannot migrate."""
        point = self.point()
        if isinstance(point, Unmoved):
            return point
        end, tokens, overlap = point
        said = self.said[: max(0, len(self.said) - len(overlap))] if self._stop_chars else ""
        return Resumption(bytes(self._ids[:end]), tokens, overlap, said)

    def why_fixed(self) -> Unmoved | None:
        """The reason that it cannot migrate now; None if it can. It may be asked at any time."""
        point = self.point()
        return point if isinstance(point, Unmoved) else None

    def point(self) -> tuple[int, int, str] | Unmoved:
        """Bytes of ids and tokens before the point to continue from, and the text behind it."""
        if self.why is not None:
            return self.why
        if self.is_finished:
            return Unmoved.FINISHED
        found = self._shown() if self._stop_chars else (len(self._ids), self.tokens, self.overlap)
        if found is None or not self._are_ids(found[0]):
            return Unmoved.NO_IDS
        if not found[1] and self.plan.is_chat and self._memory.has_reasoned:
            return Unmoved.REASONING
        most = self.plan.most_tokens
        return found if most is None or found[1] < most else Unmoved.FINISHED

    def _are_ids(self, end: int) -> bool:
        """Whether prompt and output are ids; each byte is looked at once."""
        if self._knows_prompt is None:
            self._knows_prompt = _are_ids(self.prompt)
        if self._checked < end and _are_ids(bytes(self._ids[self._checked : end])):
            self._checked = end
        return self._knows_prompt and self._checked >= end

    def _shown(self) -> tuple[int, int, str] | None:
        """`point` of a stream whose text is behind its tokens; None where it is not known."""
        held = self._stop_chars
        again = self.overlap
        for index in range(len(self._window) - 1, -1, -1):
            passed = self._window[index]
            if len(again) >= held and (self._has_dropped or self._has_text(index)):
                return passed.at, passed.tokens, again[held:]
            again = passed.text + again
        return None if self._has_dropped else (self._base, self._base_tokens, again)

    def _has_text(self, index: int) -> bool:
        """Whether text had come with this event: before that, less is held back than may be."""
        return any(passed.text for passed in islice(self._window, index + 1))

    def resume(self, at: Resumption) -> None:
        """Another instance goes on from there."""
        self._ids, self._checked = bytearray(at.ids), len(at.ids)
        self.tokens = at.tokens
        self._pending, self._pending_tokens = bytearray(), 0
        self._size -= sum([_text_bytes(passed.text) for passed in self._window])
        self._window = deque()
        self._has_dropped = False
        self._base, self._base_tokens = len(at.ids), at.tokens
        self.overlap, self.said = at.overlap, at.said

    def request_body(self, at: Resumption) -> bytes:
        """The body of the completion that goes on from there."""
        plan = self.plan
        most = b"null" if plan.most_tokens is None else b"%d" % (plan.most_tokens - at.tokens)
        least = max(0, plan.least_tokens - at.tokens)
        return b'{%b%b"prompt":[%b%b%b],"max_tokens":%b,"min_tokens":%d%b' % (
            plan.fields,
            b"," if plan.fields else b"",
            self.prompt,
            b"," if at.ids else b"",
            at.ids,
            most,
            least,
            b',"stream":true,"return_token_ids":true}',
        )


def _text_bytes(text: str) -> int:
    """At most so much memory an event takes whose text is kept."""
    return EVENT_BYTES + len(text) * (1 if text.isascii() else 4)


def _are_ids(ids: bytes) -> bool:
    """Whether these bytes are whole numbers and commas, as they will be sent to an instance."""
    return bool(ids) and not ids.translate(None, _DIGITS)


def member_list(event: bytes, key: bytes) -> tuple[int, int]:
    """Start and end of the inside of the list after `key` (`"name":[`).

    (-1, -1) where there is none. In a text the quotes of such a key are escaped.
    """
    at = place_of(key, event)
    if at < 0:
        return -1, -1
    begin = at + len(key)
    end = event.find(b"]", begin)
    return (begin, end) if end >= 0 else (-1, -1)


def data_of(event: bytes) -> bytes:
    """The JSON of an event of one line; empty where it has none."""
    line = event.strip()
    return line[5:].strip() if line.startswith(b"data:") else b""


def is_lost_error(data: bytes) -> bool:
    """Whether the JSON of an event is an error of the engine that another one might not have."""
    if not data.startswith(b'{"error"'):
        return False
    if not is_cheap(data):
        return True
    try:
        error = orjson.loads(data).get("error")
    except (orjson.JSONDecodeError, AttributeError):
        return False
    code = error.get("code") if isinstance(error, dict) else None
    return type(code) is not int or not 400 <= code < 500
