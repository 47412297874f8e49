"""Streams that may migrate when their instance fails, by the fields of their request.

A stream goes on as a completion whose prompt is that of the request with the tokens behind it that
the client has. State that an engine keeps beside tokens (a grammar, random numbers, counts of
generated tokens) is lost, so a request that uses it does not migrate. `UNLESS` names the field, the
reason, and its harmless values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from proxy.core.types import Unmoved
from proxy.protocol.endpoints import OFFLOADABLE
from proxy.protocol.offloadable import COMPLETIONS, asks_for_stream, whole_number

FIELDS_BYTES: Final = 1 << 16
"""Most bytes of sampling parameters that are kept while a stream runs."""
MOST_LENGTH: Final = 1 << 31
MOST_STOPS: Final = 32
MOST_STOP_CHARS: Final = 256
"""With more or longer stop strings a stream does not move: each is looked for at each character
before a cut, and so many of its last events are kept."""
COMPLETIONS_TOKENS: Final = 16
"""vLLM's `max_tokens` of a completion that gives none; a chat's is the rest of the context."""


class Plan:
    """The data for a request's continuation, kept while its stream runs.

    `fields`: its sampling parameters as the inside of a JSON object. `most_tokens`: of the output,
    None: up to the context's end. `stop_chars`: how many characters an engine holds back in
    case a stop string has begun. `shows_ids`: the client asked for token ids itself.
    """

    __slots__ = ("fields", "is_chat", "least_tokens", "most_tokens", "shows_ids", "stop_chars")

    def __init__(
        self,
        fields: bytes,
        most_tokens: int | None,
        least_tokens: int,
        stop_chars: int,
        *,
        is_chat: bool,
        shows_ids: bool,
    ) -> None:
        self.fields = fields
        self.most_tokens, self.least_tokens = most_tokens, least_tokens
        self.stop_chars = stop_chars
        self.is_chat, self.shows_ids = is_chat, shows_ids

    def packed(self) -> list[Any]:
        """The plan as JSON values, for another process."""
        flags = [self.is_chat, self.shows_ids]
        lengths = [self.most_tokens, self.least_tokens, self.stop_chars]
        return [self.fields.decode(), *lengths, *flags]


def unpacked_plan(told: list[Any]) -> Plan:
    """The reverse of `Plan.packed`."""
    fields, most, least, stop_chars, is_chat, shows_ids = told
    return Plan(fields.encode(), most, least, stop_chars, is_chat=is_chat, shows_ids=shows_ids)


def _absent(value: Any) -> bool:
    return value is None


def _off(value: Any) -> bool:
    return value is None or value is False


def _zero(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and value == 0)


def _one(value: Any) -> bool:
    return value is None or (type(value) is int and value == 1)


def _empty(value: Any) -> bool:
    return not value


def _on(value: Any) -> bool:
    return value is None or value is True


def _plain_text(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


def _text_only(value: Any) -> bool:
    return value is None or value == ["text"]


UNLESS: Final[dict[str, tuple[Unmoved, Callable[[Any], bool]]]] = {
    "response_format": (Unmoved.STRUCTURED, _plain_text),
    "structured_outputs": (Unmoved.STRUCTURED, _absent),
    "guided_json": (Unmoved.STRUCTURED, _absent),
    "guided_regex": (Unmoved.STRUCTURED, _absent),
    "guided_choice": (Unmoved.STRUCTURED, _absent),
    "guided_grammar": (Unmoved.STRUCTURED, _absent),
    "structural_tag": (Unmoved.STRUCTURED, _absent),
    "functions": (Unmoved.TOOLS, _empty),
    "function_call": (Unmoved.TOOLS, _absent),
    "reasoning_effort": (Unmoved.REASONING, _absent),
    "thinking_token_budget": (Unmoved.REASONING, _absent),
    "include_reasoning": (Unmoved.REASONING, _on),
    "n": (Unmoved.CHOICES, _one),
    "best_of": (Unmoved.CHOICES, _one),
    "use_beam_search": (Unmoved.BEAM, _off),
    "logprobs": (Unmoved.LOGPROBS, _off),
    "top_logprobs": (Unmoved.LOGPROBS, _zero),
    "prompt_logprobs": (Unmoved.LOGPROBS, _absent),
    "logprob_token_ids": (Unmoved.LOGPROBS, _empty),
    "echo": (Unmoved.ECHO, _off),
    "prompt_embeds": (Unmoved.EMBEDS, _absent),
    "modalities": (Unmoved.MEDIA, _text_only),
    "audio": (Unmoved.MEDIA, _absent),
    "mm_processor_kwargs": (Unmoved.MEDIA, _absent),
    "store": (Unmoved.STORED, _off),
    "presence_penalty": (Unmoved.PENALTIES, _zero),
    "frequency_penalty": (Unmoved.PENALTIES, _zero),
    "bad_words": (Unmoved.PENALTIES, _empty),
    "repetition_detection": (Unmoved.PENALTIES, _absent),
    "vllm_xargs": (Unmoved.PLUGINS, _empty),
    "logits_processors": (Unmoved.PLUGINS, _empty),
    "suffix": (Unmoved.UNKNOWN_FIELD, _empty),
    "truncate_prompt_tokens": (Unmoved.UNKNOWN_FIELD, _absent),
}
"""Fields that keep a stream from being moved: why, and which values do no harm."""
KEPT: Final = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("stop", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "priority", "cache_salt", "session_id", "user"),
        "stream_options",
    }
)
"""Fields that the continuation has as well."""
REPLACED: Final = frozenset(
    {
        *("messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "min_tokens"),
        *("seed", "tools", "tool_choice", "parallel_tool_calls", "return_token_ids"),
        *("return_prompt_text", "metadata", "chat_template", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "documents"),
        *("prompt_cache_key", "safety_identifier", "service_tier", "request_id"),
        *("return_tokens_as_token_ids", "length_penalty", "conversation_id"),
        *("previous_response_id", "conversation"),
    }
)
"""Fields without meaning once the prompt is made of token ids, or that are set again."""


def plan_of(endpoint: str, body: Mapping[str, Any], steering: list[str]) -> Plan | Unmoved | None:
    """The migration plan of this request's stream, or the reason for none; None without a stream.

    `steering`: fields that are taken out before an instance gets the body.
    """
    if endpoint not in OFFLOADABLE or not asks_for_stream(body):
        return None
    is_chat = endpoint != COMPLETIONS
    why = _why_not(body, frozenset(steering), is_chat=is_chat)
    if why is not None:
        return why
    most, least = _lengths(body, is_chat=is_chat)
    fields = _kept(body)
    if fields is None or least is None or (most is not None and most < 1):
        return Unmoved.UNKNOWN_FIELD
    stop_chars, shows_ids = _stop_chars(body), bool(body.get("return_token_ids"))
    stops = body.get("stop")
    too_many = isinstance(stops, list) and len(stops) > MOST_STOPS
    if len(fields) > FIELDS_BYTES or stop_chars > MOST_STOP_CHARS or too_many:
        return Unmoved.MEMORY
    if stop_chars and (shows_ids or not _off(body.get("include_stop_str_in_output"))):
        return Unmoved.STOP_INCLUDED
    return Plan(fields, most, least, stop_chars, is_chat=is_chat, shows_ids=shows_ids)


def _kept(body: Mapping[str, Any]) -> bytes | None:
    """The parameters of KEPT, as the inside of an object; None with half of a surrogate pair."""
    try:
        return orjson.dumps({name: body[name] for name in KEPT if name in body})[1:-1]
    except TypeError:
        return None


def _why_not(body: Mapping[str, Any], steering: frozenset[str], *, is_chat: bool) -> Unmoved | None:
    for name, value in body.items():
        unless = UNLESS.get(name)
        if unless is not None:
            if not unless[1](value):
                return unless[0]
        elif name not in KEPT and name not in REPLACED and name not in steering:
            return Unmoved.UNKNOWN_FIELD
    return _why_not_together(body) or _why_not_prompt(body, is_chat=is_chat)


def _why_not_together(body: Mapping[str, Any]) -> Unmoved | None:
    """Fields that do harm beside others only."""
    if body.get("return_token_ids") not in (None, False, True):
        return Unmoved.UNKNOWN_FIELD
    if body.get("tools") and body.get("tool_choice") != "none":
        return Unmoved.TOOLS
    if body.get("seed") is not None and not _is_greedy(body):
        return Unmoved.SEED
    return None


def _why_not_prompt(body: Mapping[str, Any], *, is_chat: bool) -> Unmoved | None:
    if is_chat:
        return Unmoved.MEDIA if _has_media(body.get("messages")) else None
    prompt = body.get("prompt")
    is_one = isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is int
    )
    return None if is_one else Unmoved.CHOICES


def _is_greedy(body: Mapping[str, Any]) -> bool:
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and temperature == 0


def _has_media(messages: Any) -> bool:
    """Whether a message has parts that are not text: their tokens are placeholders."""
    if not isinstance(messages, list):
        return True
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in content:
                is_text = isinstance(part, dict) and part.get("type") in ("text", "refusal")
                if not (is_text or isinstance(part, str)):
                    return True
    return False


def _lengths(body: Mapping[str, Any], *, is_chat: bool) -> tuple[int | None, int | None]:
    """Most and least tokens of the output; (0, None) where they are not whole numbers."""
    given = body.get("max_completion_tokens") if is_chat else None
    if given is None:
        given = body.get("max_tokens", None if is_chat else COMPLETIONS_TOKENS)
    most = None if given is None else whole_number(given)
    least = whole_number(body.get("min_tokens") or 0)
    if given is not None and most is None:
        return 0, None
    if max(most or 0, least or 0) >= MOST_LENGTH:
        return 0, None  # of no use, and more than JSON of another process may hold
    return most, least


def _stop_chars(body: Mapping[str, Any]) -> int:
    """Characters that the engine holds back: one less than the longest stop string has."""
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return max([len(text) - 1 for text in stops if isinstance(text, str) and text], default=0)
