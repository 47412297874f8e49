"""RequestFacts of a parsed body: session, prompt blocks, token estimate.

The prompt is the bytes of its texts, in the order in which a chat template renders them (tools
before messages). Blocks of `BLOCK_BYTES` are hashed in a chain, so one hash stands for the whole
prefix up to its block. There is no tokenizer: bytes per token are learned from the engines' own
`usage.prompt_tokens` (`core/fleet/bytes_per_token.py`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from proxy.core.connectors.base import KV_PARAMS
from proxy.core.types import BYTES_PER_TOKEN_PRIOR, RequestFacts
from proxy.protocol.endpoints import OFFLOADABLE

BLOCK_BYTES = 1024
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
_UNUSUAL = frozenset({"use_beam_search", "echo", "prompt_logprobs", "prompt_embeds", KV_PARAMS})
_INLINED = re.compile(r"data:[^,\s]{0,128};base64,")
_SESSION_ID_MAX = 128
_ITEMS_MAX = 1 << 20
"""Most values of a prompt that are hashed; a list of token ids is one value."""
_IDS = "I"
"""Array type of token ids: 4 bytes each, like a token of text by the prior."""


def session_identity(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The session's name: the first header or body field present; None if the client gives none.

    Long names are hashed, so that the session table's memory is bounded by its count.
    """
    metadata = body.get("metadata")
    in_metadata = metadata.get("session_id") if isinstance(metadata, dict) else None
    for header in SESSION_HEADERS:
        if given := headers.get(header):
            return bounded(given)
    named = (
        body.get("session_id"),
        in_metadata,
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


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """All prompt texts as UTF-8, in rendering order; token ids as 4 bytes each."""
    texts: list[bytes | memoryview] = []
    for key in PROMPT_KEYS:
        if key in body:
            _collect(body[key], texts)
    return b"\x1f".join(texts)


def _collect(value: Any, texts: list[bytes | memoryview]) -> None:
    """Collect the texts of a nested value, without recursion, since the client chooses the depth.

    An inlined image or sound is replaced by its digest.
    """
    stack, left = [value], _ITEMS_MAX
    while stack and left:
        left -= 1
        item = stack.pop()
        if isinstance(item, str):
            is_inlined = item[:5] == "data:" and _INLINED.match(item)
            raw = item.encode("utf-8", "surrogatepass")
            texts.append(xxh3_128_hexdigest(raw).encode() if is_inlined else raw)
        elif isinstance(item, dict):
            stack.extend(_inner(item))
        elif isinstance(item, list):
            if (ids := _token_ids(item)) is not None:
                texts.append(ids)
            else:
                stack.extend(reversed(item if len(item) <= left else item[:left]))
        elif item is not None:
            texts.append(repr(item).encode())


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
        return memoryview(array(_IDS, item))
    except (TypeError, OverflowError):  # not only ids; the engine will refuse the prompt
        return None


def _count_ids(prompt: Any) -> int:
    """Number of token ids of a prompt, 0 if it is no such list; the engine checks each id."""
    return len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is int else 0


def block_hashes(prompt: bytes, root: bytes = b"") -> list[int]:
    """Chained xxh3-64 over whole blocks of the prompt; a partial last block has no hash."""
    if len(prompt) < BLOCK_BYTES:
        return []
    chain = xxh3_64_intdigest(root)
    starts = range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES)
    return [chain := xxh3_64_intdigest(prompt[at : at + BLOCK_BYTES], chain) for at in starts]


def is_offloadable(endpoint: str, body: Mapping[str, Any]) -> bool:
    """Whether two legs give the same answer as one request, and there is something to decode."""
    if endpoint not in OFFLOADABLE:
        return False
    get = body.get
    if get("n") not in (None, 1) or get("best_of") not in (None, 1):
        return False
    if get("max_tokens") in (0, 1) or get("max_completion_tokens") in (0, 1):
        return False
    if not _UNUSUAL.isdisjoint(body) and _is_unusual(body):
        return False
    prompt = get("prompt")
    return not isinstance(prompt, list) or bool(_count_ids(prompt))


def _is_unusual(body: Mapping[str, Any]) -> bool:
    """Whether the body asks for a result that only one request over the whole prompt can give."""
    return any(body.get(key) for key in ("use_beam_search", "echo")) or any(
        body.get(key) is not None for key in ("prompt_logprobs", "prompt_embeds", KV_PARAMS)
    )


def _prior(_model: str) -> float:
    return BYTES_PER_TOKEN_PRIOR


class TokenEstimator:
    """Makes the facts of requests; `bytes_per_token` gives the ratio learned for a model."""

    def __init__(self, bytes_per_token: Callable[[str], float] = _prior) -> None:
        self._bytes_per_token = bytes_per_token

    def facts(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any],
        tenant: str | None = None,
    ) -> tuple[RequestFacts, int]:
        """The facts of a request, and the bytes of its prompt's text, to learn from (0: nothing).

        Sessions of two tenants are different ones, even with the same name.
        """
        model = _name(body.get("model"))
        prompt = prompt_bytes(body)
        ids, ratio = _count_ids(body.get("prompt")), self._bytes_per_token(model)
        tokens = ids or max(1, round(len(prompt) / ratio))
        root = f"{model}\0{_name(body.get('cache_salt'))}".encode("utf-8", "surrogatepass")
        facts = RequestFacts(
            model=model,
            session_id=of_tenant(session_identity(headers, body), tenant),
            tenant=tenant or "",
            prompt_tokens=tokens,
            block_hashes=block_hashes(prompt, root),
            block_tokens=BLOCK_BYTES * (ids / max(1, len(prompt)) if ids else 1 / ratio),
            offloadable=is_offloadable(endpoint, body),
        )
        is_whole = not ids and body.get("truncate_prompt_tokens") is None
        return facts, len(prompt) if is_whole else 0


def most_output_tokens(body: Mapping[str, Any]) -> int | None:
    """The most output tokens that the client allows; None if it gives no limit."""
    given = (body.get("max_completion_tokens"), body.get("max_tokens"))
    return next((most for most in given if type(most) is int), None)
