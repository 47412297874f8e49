"""RequestFacts of a parsed body: session, prompt blocks, token estimate.

The prompt is the bytes of its texts, in the order in which a chat template renders them (tools
before messages). Blocks of `BLOCK_BYTES` are hashed in a chain, so one hash stands for the whole
prefix up to its block. There is no tokenizer: bytes per token are learned from the engines' own
`usage.prompt_tokens` (`core/fleet/bytes_per_token.py`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from proxy.core.types import BYTES_PER_TOKEN_PRIOR, UNIT_TOKENS, RequestFacts
from proxy.protocol.endpoints import Salting, endpoint_of
from proxy.protocol.offloadable import COMPLETIONS, is_offloadable, whole_number

BLOCK_BYTES = 1024
PART_RATIO = 0.4
"""Part of a block by which two prompts go on to be alike after their last common one: half of it,
less what an engine does not count, half a block of its own (8 to 32 tokens)."""
SESSION_HEADERS = (
    "X-Session-ID",
    "X-Session-Affinity",
    "X-Correlation-ID",
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "X-Dynamo-Session-ID",
)
PROMPT_KEYS = (
    "tools",
    "system",
    "instructions",
    "messages",
    "prompt",
    "input",
    "query",
    "documents",
)
_TURNS = ("messages", "input")
"""Of these the list of messages that a conversation has."""
MOST_ANSWER_CHARS = 16_384
"""Of a longer answer in a conversation the text is not kept."""
FIRST_ENDS, LAST_ENDS = 2, 8
"""Ends of messages that are looked at: those that conversations share, and the last turns."""
_SEPARATOR = b"\x1f"
_READ_KEYS = {"/v1/chat/completions": ("tools", "messages", "documents"), COMPLETIONS: ("prompt",)}
"""The prompt fields that vLLM reads, where it ignores the others of PROMPT_KEYS."""
_INLINED = re.compile(r"data:[^,\s]{0,128};base64,")
_SESSION_ID_MAX = 128
_MODEL_CHARS = 256
MOST_VALUES, MOST_VALUES_SMALL = 1 << 18, 1 << 13
"""Most values of a prompt; a list of token ids is one value. Each takes 0.3 us to look at, so few
of them can be looked at on the event loop."""
_PROMPTS_MAX = 1024
"""Most prompts of one request that vLLM takes (VLLM_MAX_COMPLETION_PROMPTS)."""
_KEPT_MAX = 1 << 40
IDS, ID_BYTES = "I", 4
"""Array type of token ids: 4 bytes each, like a token of text by the prior."""
_UNIT_BYTES = UNIT_TOKENS * ID_BYTES


def session_identity(headers: Mapping[str, str], in_body: str | None) -> str | None:
    """The session's name: a header's, else the body's (`session_in`), else None.

    Long names are hashed, so that the session table's memory is bounded by its count.
    """
    for header in SESSION_HEADERS:
        if given := headers.get(header):
            return bounded(given)
    return in_body


def session_in(body: Mapping[str, Any]) -> str | None:
    """The session's name by the first body field that gives one; None without any."""
    metadata = body.get("metadata")
    named = (
        body.get("session_id"),
        metadata.get("session_id") if isinstance(metadata, dict) else None,
        body.get("prompt_cache_key"),
        body.get("previous_response_id"),
    )
    return next((bounded(name) for value in named if (name := _name(value))), None)


def _name(value: Any) -> str:
    """A string, or a whole number as its digits; empty for any other value."""
    return str(value) if type(value) in (str, int) else ""


def bounded(session_id: str) -> str:
    """A session's key: its name, or a digest of one that is long or not text."""
    if len(session_id) <= _SESSION_ID_MAX and (session_id.isascii() or _is_text(session_id)):
        return session_id
    return xxh3_128_hexdigest(session_id.encode("utf-8", "surrogatepass"))


def of_tenant(session_id: str | None, tenant: str | None) -> str | None:
    """The key of a tenant's session. Tenant names have no slash, so keys cannot collide."""
    return session_id if session_id is None or tenant is None else f"{tenant}/{session_id}"


def _is_text(name: str) -> bool:
    """Whether the name can be encoded: a header's bytes that are not UTF-8 cannot."""
    return not any(0xD800 <= ord(char) <= 0xDFFF for char in name)


def prompt_bytes(
    body: Mapping[str, Any], keys: tuple[str, ...] = PROMPT_KEYS, most_values: int = MOST_VALUES
) -> bytes | None:
    """All prompt texts of these fields as UTF-8, in their order; token ids as 4 bytes each.

    None: they have more than `most_values` values.
    """
    found = _texts(body, keys, most_values)
    return None if found is None else _SEPARATOR.join(found[0])


Texts = list[bytes | memoryview]


def _texts(
    body: Mapping[str, Any], keys: tuple[str, ...], most_values: int
) -> tuple[Texts, list[int]] | None:
    """The prompt texts of these fields, and how many of them the first and last messages end with.

    None: they have more than `most_values` values.
    """
    texts: Texts = []
    ends: list[int] = []
    left = most_values
    for key in keys:
        value: Any = body.get(key)
        if key in _TURNS and _are_messages(value) and len(value) < left:
            left -= 1
            for part in _parted(value):
                if left >= 0:
                    left = _collect(part, texts, left + 1)  # the part itself is no value
                    ends.append(len(texts))
        elif key in body:
            ends = []  # what follows the messages here may come before them in the template
            left = _collect(value, texts, left)
        if left < 0:
            return None
    return texts, ends


def _parted(messages: list[Any]) -> list[list[Any]]:
    """The messages, each by itself but those between the first and the last, which are together."""
    if len(messages) <= FIRST_ENDS + LAST_ENDS:
        return [[message] for message in messages]
    last = len(messages) - LAST_ENDS + 1
    first = [[message] for message in messages[:FIRST_ENDS]]
    return [*first, messages[FIRST_ENDS:last], *[[message] for message in messages[last:]]]


def _are_messages(value: Any) -> bool:
    """Whether a field has messages, and not one text or token ids."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _collect(value: Any, texts: Texts, left: int) -> int:
    """Collect the texts of a nested value, without recursion, since the client chooses the depth.

    Returns how many of `left` values are left; below 0 there are more.
    """
    stack = [value]
    while stack:
        left -= 1
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(_inner(item))
        elif isinstance(item, list):
            ids = _token_ids(item)
            if ids is None:
                stack.extend(reversed(item))
            else:
                texts.append(ids)
        elif item is not None:
            texts.append(_text(item))
        if len(stack) > left:
            return -1
    return left


def _text(item: Any) -> bytes:
    """A text, or a number's digits; an inlined image or sound is replaced by its digest."""
    if not isinstance(item, str):
        return repr(item).encode()
    raw = item.encode("utf-8", "surrogatepass")
    if item[:5] == "data:" and _INLINED.match(item):
        return xxh3_128_hexdigest(raw).encode()
    return raw


def _inner(item: dict[str, Any]) -> Iterable[Any]:
    """Keys and values, last first. A text part gives its text only, as if it were not in parts."""
    if item.get("type") == "text" and isinstance(item.get("text"), str):
        return (item["text"],)
    parts: list[Any] = []
    for pair in item.items():
        parts += pair
    parts.reverse()
    return parts


def _token_ids(item: list[Any]) -> memoryview | None:
    """The ids of a tokenised prompt; None for any other list."""
    if not item or not isinstance(item[0], int):
        return None
    try:
        return memoryview(array(IDS, item)).cast("B")
    except (TypeError, OverflowError):  # not only ids; the engine will refuse the prompt
        return None


def _count_ids(prompt: Any) -> int:
    """Number of token ids of a prompt, or of a list of such prompts; 0 if it is neither.

    The engine checks each id, and takes 7.0 and "7" for one, but a list of strings for texts.
    """
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int | float):
        return len(prompt)
    first = prompt[:_PROMPTS_MAX]
    if isinstance(prompt[0], str):
        return 0 if all(isinstance(item, str) for item in first) else len(prompt)
    return sum(len(ids) for ids in first if isinstance(ids, list))


def _kept(most: Any) -> int:
    """Tokens that the engine keeps of a prompt by `truncate_prompt_tokens`; -1: it depends."""
    number = whole_number(most)
    return -1 if number is None else max(-1, min(number, _KEPT_MAX))


def block_hashes(prompt: bytes, root: bytes = b"") -> list[int]:
    """Chained xxh3-64 over whole blocks of the prompt; a partial last block has no hash."""
    return chained(prompt, xxh3_64_intdigest(root), BLOCK_BYTES)


def message_ends(
    prompt: bytes, texts: Texts, ends: list[int], hashes: list[int], root: bytes
) -> list[int]:
    """Hashes of the prompt up to the ends of its first and last messages, in their order.

    `ends`: texts up to each; `hashes`: of the prompt's blocks, which begin with `root`.
    """
    found, size, done = [], 0, 0
    for end in ends:
        size += sum(map(len, texts[done:end])) + end - done
        done = end
        # Without the separator that follows: the last message has none.
        stop = max(0, size - 1)
        blocks = stop // BLOCK_BYTES
        before = hashes[blocks - 1] if blocks else xxh3_64_intdigest(root)
        found.append(xxh3_64_intdigest(prompt[blocks * BLOCK_BYTES : stop], before))
    return found


NO_ANSWER = ("", 0)


def last_answer(body: Mapping[str, Any], ends: int) -> tuple[str, int]:
    """The text of the last answer in a chat, and where the message before it ends.

    That is a place among the `ends` of messages; no answer where it has more than a text.
    """
    given = body.get("messages")
    if not isinstance(given, list):
        return NO_ANSWER
    for back in range(2, min(len(given), LAST_ENDS)):
        item = given[-back]
        if isinstance(item, dict) and item.get("role") == "assistant":
            text = item.get("content")
            if not isinstance(text, str) or item.get("tool_calls"):
                return NO_ANSWER
            at = ends - back - 1
            is_kept = len(text) <= MOST_ANSWER_CHARS and at >= 0
            return (text, at) if is_kept else NO_ANSWER
    return NO_ANSWER


def unit_hashes(ids: bytes, before: int) -> list[int]:
    """Chained xxh3-64 over whole units of token ids; `before`: that of the unit before, or root."""
    return chained(ids, before, _UNIT_BYTES)


def unit_root(salt: str) -> int:
    """What the units of a prompt with this `cache_salt` begin with."""
    return xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"))


def chained(data: bytes, chain: int, size: int) -> list[int]:
    """xxh3-64 over whole pieces of `size` bytes, each with the one before it as its seed."""
    starts = range(0, len(data) - size + 1, size)
    return [chain := xxh3_64_intdigest(data[at : at + size], chain) for at in starts]


class PromptFacts:
    """What a body's prompt is, as far as it does not depend on what was learned.

    `model`: the model's name. `bytes`: of the prompt's texts, token ids as 4 each. `ids`: number of
    token ids, 0 for a text. `hashes`: of its blocks, chained; none where the engine keeps a part of
    the prompt only, which may be its tail: `kept` tokens, -1 where that depends on the engine.
    `units`: of its token ids, chained as `unit_hashes` does; empty for a text or several prompts.
    `ends`: of its messages, see `message_ends`. `answer`: the text of the last answer among them,
    and the place in `ends` of the message before it.
    `offloadable`: see `is_offloadable`.
    """

    __slots__ = (
        "answer",
        "bytes",
        "ends",
        "hashes",
        "ids",
        "kept",
        "model",
        "offloadable",
        "units",
    )

    def __init__(  # noqa: PLR0913 - a value has as many fields as it has
        self,
        model: str,
        bytes: int,  # noqa: A002 - the field's name
        ids: int,
        hashes: list[int],
        kept: int | None = None,
        units: Sequence[int] = (),
        ends: Sequence[int] = (),
        answer: tuple[str, int] = NO_ANSWER,
        *,
        offloadable: bool,
    ) -> None:
        self.model = model
        self.bytes = bytes
        self.ids = ids
        self.hashes = hashes
        self.kept = kept
        self.units = units
        self.ends = ends
        self.answer = answer
        self.offloadable = offloadable

    @property
    def learnable_bytes(self) -> int:
        """Bytes of the text whose tokens the engine counts; 0 where it counts others."""
        return 0 if self.ids or self.kept is not None else self.bytes


def prompt_facts(
    endpoint: str, body: Mapping[str, Any], most_values: int = MOST_VALUES
) -> PromptFacts | None:
    """The prompt of a parsed body; None: it has more than `most_values` values.

    On a path where no prompt is computed none of it is kept.
    """
    found = _texts(body, _READ_KEYS.get(endpoint, PROMPT_KEYS), most_values)
    if found is None:
        return None
    texts, ends = found
    prompt = _SEPARATOR.join(texts)
    model = _name(body.get("model"))[:_MODEL_CHARS]
    is_computed = endpoint_of(endpoint).salting is not Salting.NO_KV
    most = body.get("truncate_prompt_tokens") if is_computed else 0
    salt = _name(body.get("cache_salt"))
    root = f"{model}\0{salt}".encode("utf-8", "surrogatepass")
    ids = _count_ids(body.get("prompt")) if endpoint == COMPLETIONS else 0
    has_units = most is None and ids * ID_BYTES == len(prompt)
    hashes = block_hashes(prompt, root) if most is None else []
    return PromptFacts(
        model,
        len(prompt),
        ids,
        hashes,
        None if most is None else _kept(most),
        unit_hashes(prompt, unit_root(salt)) if has_units else (),
        message_ends(prompt, texts, ends, hashes, root) if most is None else (),
        last_answer(body, len(ends)) if most is None and ends else NO_ANSWER,
        offloadable=is_offloadable(endpoint, body),
    )


def _prior(_model: str) -> float:
    return BYTES_PER_TOKEN_PRIOR


class TokenEstimator:
    """Makes the facts of requests; `bytes_per_token` gives the ratio learned for a model."""

    def __init__(self, bytes_per_token: Callable[[str], float] = _prior) -> None:
        self._bytes_per_token = bytes_per_token

    def facts(
        self,
        prompt: PromptFacts,
        headers: Mapping[str, str],
        session: str | None = None,
        tenant: str | None = None,
    ) -> RequestFacts:
        """The facts of a request. `session`: its session's name by its body.

        Sessions of two tenants are different ones, even with the same name.
        """
        ids, size = prompt.ids, prompt.bytes
        ratio = self._bytes_per_token(prompt.model)
        tokens = ids or max(1, round(size / ratio))
        if prompt.kept is not None and prompt.kept >= 0:
            tokens = max(1, min(tokens, prompt.kept))
        block_tokens = BLOCK_BYTES * (ids / max(1, size) if ids else 1 / ratio)
        return RequestFacts(
            model=prompt.model,
            session_id=of_tenant(session_identity(headers, session), tenant),
            tenant=tenant or "",
            prompt_tokens=tokens,
            block_hashes=prompt.hashes,
            block_tokens=block_tokens,
            offloadable=prompt.offloadable,
            units=prompt.units,
            ends=prompt.ends,
            part_tokens=PART_RATIO * block_tokens,
        )


def most_output_tokens(body: Mapping[str, Any]) -> int | None:
    """The most output tokens that the client allows; None if it gives no limit."""
    given = (body.get("max_completion_tokens"), body.get("max_tokens"))
    return next((most for value in given if (most := whole_number(value)) is not None), None)
