"""Offloadable requests, and vLLM's reading of flags and numbers in a body.

The prefill leg drops or replaces fields (`prefill_edits`), so P never judges those. A D refuses
such a request while it parses the body, before it reads `kv_transfer_params`. P then hears nothing,
and the prompt's KV stays pinned there for minutes. So each such field must have a value that every
vLLM takes (`TAKEN`, `LINKED`). With any other the request goes to one instance, which has the last
word on it.

`TAKEN` also has the fields with which the two legs could see different prompts, or with which one
request over the whole prompt is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from proxy.core.connectors.base import KV_PARAMS
from proxy.protocol.endpoints import OFFLOADABLE

COMPLETIONS: Final = "/v1/completions"
LIST_MAX: Final = 1024
"""Most ids in a list that are looked at; with more the request goes to one instance."""
LOGPROBS_MAX: Final = 20
"""Log probabilities per token that every vLLM gives (--max-logprobs)."""
STOPS_MAX: Final = 4
"""Stop strings that every vLLM takes (VLLM_MAX_STOP_STRINGS)."""
_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_WHOLE: Final = re.compile(r"\s*+([+-]?[0-9]++(?:_[0-9]++)*+)(?:\.0*+)?\s*+", re.ASCII)
_DIGITS_MAX: Final = 4300
"""Pydantic refuses longer numbers in strings, as Python does."""


def asks_for_stream(body: Mapping[str, Any]) -> bool:
    """Whether vLLM streams the answer: it also takes 1 and some words. Unfit values are refused."""
    given = body.get("stream")
    if isinstance(given, str):
        return given.lower() in _TRUE
    return isinstance(given, int | float) and given == 1


def whole_number(value: Any) -> int | None:
    """A whole number as vLLM reads it: also `7.0`, `true` and `"7"`. None for any other value."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if not isinstance(value, str) or len(value) > _DIGITS_MAX:
        return None
    match = _WHOLE.fullmatch(value)
    return int(match.group(1)) if match is not None else None


def is_offloadable(endpoint: str, body: Mapping[str, Any]) -> bool:
    """Whether two legs give the same answer as one request, and there is something to decode."""
    if endpoint not in OFFLOADABLE:
        return False
    for name, value in body.items():
        is_taken = TAKEN.get(name)
        if is_taken is not None and not is_taken(value):
            return False
    is_chat = endpoint != COMPLETIONS
    if not LINKED.isdisjoint(body) and not _fit_together(body, is_chat=is_chat):
        return False
    if is_chat and _has_media_elsewhere(body.get("messages")):
        return False
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or (bool(prompt) and type(prompt[0]) is int)


def _absent(value: Any) -> bool:
    return value is None


def _off(value: Any) -> bool:
    return value is False


def _boolean(value: Any) -> bool:
    return value is True or value is False


def _flag(value: Any) -> bool:
    return value is True or value is False or value is None


def _one(value: Any) -> bool:
    return value is None or (type(value) is int and value == 1)


def _many(value: Any) -> bool:
    """At 0 and 1 tokens there is nothing to decode; below, vLLM refuses."""
    return value is None or (type(value) is int and value > 1)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _logprobs(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value <= LOGPROBS_MAX)


def _ids(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, list) or len(value) > LIST_MAX:
        return False
    return all(type(item) is int for item in value)


def _stops(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    if value is None:
        return True
    if not isinstance(value, list) or len(value) > STOPS_MAX:
        return False
    return all(isinstance(item, str) and item for item in value)


TAKEN: dict[str, Callable[[Any], bool]] = {
    # Replaced in the prefill leg.
    "stream": _flag,
    "max_tokens": _many,
    "max_completion_tokens": _many,
    "ignore_eos": _boolean,
    "n": _one,
    KV_PARAMS: _absent,
    # Dropped in it.
    "best_of": _one,
    "use_beam_search": _off,
    "prompt_logprobs": _absent,
    "echo": _off,
    "stop": _stops,
    "stop_token_ids": _ids,
    "min_tokens": _count,
    "repetition_detection": _absent,
    "thinking_token_budget": _absent,
    "return_token_ids": _flag,
    "return_prompt_text": _flag,
    # The legs could see different prompts: -1 stands for a length that depends on max_tokens.
    "truncate_prompt_tokens": _absent,
    "prompt_embeds": _absent,
}
"""Values of these fields that two legs can serve."""
LINKED: Final = frozenset(
    {"min_tokens", "stream_options", "logprobs", "top_logprobs", "logprob_token_ids"}
)
"""Fields that the prefill leg drops too, and that vLLM takes only beside others."""


def _fit_together(body: Mapping[str, Any], *, is_chat: bool) -> bool:
    """Whether vLLM takes the fields of LINKED. In a chat `logprobs` is a flag, else a number."""
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict) or (options and body.get("stream") is not True):
            return False
        if not (
            _flag(options.get("include_usage")) and _flag(options.get("continuous_usage_stats"))
        ):
            return False
    longest = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    least = body.get("min_tokens") or 0
    if any(type(limit) is int and least > limit for limit in longest):
        return False
    logprobs, most = body.get("logprobs"), body.get("top_logprobs")
    if not (_flag(logprobs) if is_chat else _logprobs(logprobs)):
        return False
    is_asked = logprobs is True if is_chat else logprobs is not None
    if is_chat and most is not None and not (_logprobs(most) and (is_asked or most == 0)):
        return False
    ids = body.get("logprob_token_ids")
    return _ids(ids) and (is_asked or not ids)


_MEDIA: Final = ("image_url", "audio_url", "video_url")


def _has_media_elsewhere(messages: Any) -> bool:
    """Whether a message names media that each leg would look up by itself, and may find changed.

    Inlined media are the same for both. Of another size, they make P's prompt shorter than D's,
    and an engine that fetches KV of fewer blocks than it needs may stop.
    """
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and _is_elsewhere(part):
                    return True
    return False


def _is_elsewhere(part: dict[str, Any]) -> bool:
    if part.get("uuid") is not None:
        return True
    for name in _MEDIA:
        if name in part:
            given = part[name]
            url = given.get("url") if isinstance(given, dict) else given
            if not isinstance(url, str) or not url.startswith("data:"):
                return True
    return False
