"""OpenAI requests parsed as by vLLM: body to Ask, or vLLM's error.

Fields that the simulator does not model are accepted and ignored: sampling parameters, stop
strings, logprobs, echo, priorities, response formats, continuous_usage_stats.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from replayer.engine.tokens import (
    MAX_TOKEN_ID,
    Output,
    Prompt,
    Spoken,
    TokenIds,
    make_prompt,
    tokenize,
)
from replayer.simulator.openai.agent import Step
from replayer.simulator.openai.errors import ApiError, EarlyError, invalid, wrong
from replayer.simulator.openai.kv_params import Handing, handing_of
from replayer.simulator.openai.rendering import render_chat

_COMPLETIONS_MAX_TOKENS = 16
_MOST_CHOICES = 128
_NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""Strings that vLLM reads as booleans."""
_NAMED = frozenset({"max_tokens", "max_completion_tokens"})
"""Fields whose value is repeated in the error."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The server's settings for requests; lengths in tokens."""

    model: str
    block_size: int
    max_model_len: int
    natural_length: int
    eos_with_limit: bool
    connector: str = "mooncake"


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """One answer to generate, of `output_tokens`; `stops`: it ends there by itself."""

    prompt: Prompt
    output: Output
    output_tokens: int
    stops: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request for completions or chat completions; `step`: what a script says to it."""

    chat: bool
    model: str
    choices: tuple[AnswerChoice, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    handing: Handing
    step: Step | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt shared by several choices counts once."""
        return sum({id(c.prompt): c.prompt.tokens for c in self.choices}.values())


def parse_body(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        where, text = f"body.{error.pos}", "Expecting value"
        raise invalid("json_invalid", where, "JSON decode error", {}, text) from error
    if not isinstance(body, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", text, body)
    return body


def parse_ask(body: dict[str, Any], limits: RequestLimits, *, chat: bool) -> Ask:
    """Check a body and tokenise its prompts."""
    check_model(body, limits.model)
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not stream:
        message = "Stream options can only be defined when `stream=True`."
        raise EarlyError(400, f"{message} (parameter=stream_options)", "stream_options")
    handing = handing_of(body, limits.connector)
    prompts = [_chat_ids(body)] if chat else _completion_ids(body)
    salt = body.get("cache_salt") or ""
    choices: list[AnswerChoice] = []
    copies = _integer(body, "n", 1, least=1)
    if copies * len(prompts) > _MOST_CHOICES:
        raise ApiError(400, f"n times prompts must be at most {_MOST_CHOICES}.", "n")
    for ids in prompts:
        choice = _choice(body, make_prompt(ids, limits.block_size, str(salt)), limits, chat=chat)
        choices.extend([choice] * copies)
    return Ask(
        chat=chat,
        model=limits.model,
        choices=tuple(choices),
        stream=stream,
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        return_token_ids=_flag(body, "return_token_ids"),
        handing=handing,
    )


def scripted(ask: Ask, step: Step) -> Ask:
    """The request, answered by a script."""
    prompt = ask.choices[0].prompt
    said = Spoken(prompt, step.rendered())
    return replace(ask, choices=(AnswerChoice(prompt, said, said.tokens, stops=True),), step=step)


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Refuse a model that is not served; a body without a model means the only one."""
    model = body.get("model")
    if model not in (None, served):
        raise ApiError(
            404, f"The model `{model}` does not exist. Valid aliases: {served}.", "model"
        )


def prompt_of(body: dict[str, Any]) -> TokenIds:
    """Return the ids of a /tokenize body: `messages` like a chat, or one `prompt`."""
    return _chat_ids(body) if "messages" in body else _completion_ids(body)[0]


def embedded_ids(body: Mapping[str, Any]) -> list[TokenIds]:
    """Return the ids of each prompt of an /v1/embeddings body: its `input`, or one chat."""
    if "messages" in body:
        return [_chat_ids({"add_generation_prompt": False} | dict(body))]
    if body.get("input") is None:
        raise invalid("missing", "body.input", "Field required", dict(body))
    return _completion_ids({"prompt": body["input"]})


def too_long(prompt: Prompt, limits: RequestLimits) -> ApiError:
    """Make the error for a prompt that the model's context has no room for."""
    return wrong(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, your "
        f"prompt contains {prompt.tokens} input tokens, which exceeds this limit even without "
        "any output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        prompt.tokens,
    )


def _chat_ids(body: dict[str, Any]) -> TokenIds:
    return tokenize(render_chat(body))


def _completion_ids(body: dict[str, Any]) -> list[TokenIds]:
    """Return one id array per prompt: a text, texts, a list of ids, or lists of ids."""
    prompt = body.get("prompt")
    if prompt is None:
        raise wrong(_NO_PROMPT, "prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        found = [_one_prompt(item) for item in prompt]
    else:
        found = [_one_prompt(prompt)]
    if not all(found):
        raise wrong(_NO_PROMPT, "prompt")
    return found


def _one_prompt(prompt: Any) -> TokenIds:
    if isinstance(prompt, str):
        return tokenize(prompt)
    if not isinstance(prompt, list):
        raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)
    try:
        return array("I", prompt)
    except (TypeError, OverflowError) as error:
        message = f"Token ids must be integers from 0 to {MAX_TOKEN_ID}"
        raise ApiError(400, message, "prompt") from error


def _choice(
    body: dict[str, Any], prompt: Prompt, limits: RequestLimits, *, chat: bool
) -> AnswerChoice:
    """Fix the output's length: the client's limit, the context's end, or a natural end."""
    room = limits.max_model_len - prompt.tokens
    if room < 1:
        raise too_long(prompt, limits)
    # A null says as much as is possible; only a completion without the field is short.
    default = None if chat or "max_tokens" in body else _COMPLETIONS_MAX_TOKENS
    limit = _integer(body, "max_tokens", default, least=1)
    if chat:
        limit = _integer(body, "max_completion_tokens", limit, least=1)
    if limit is not None and limit > limits.max_model_len:
        newer = chat and body.get("max_completion_tokens") is not None
        name = "max_completion_tokens" if newer else "max_tokens"
        raise wrong(
            f"{name}={limit} cannot be greater than max_model_len={limits.max_model_len}. "
            "Please request fewer output tokens.",
            name,
            limit,
        )
    min_tokens = _integer(body, "min_tokens", 0, least=0)
    if limit is not None and min_tokens > limit:
        raise ApiError(
            400, f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}."
        )
    output = Output(prompt)
    most = room if limit is None else min(limit, room)
    if _flag(body, "ignore_eos") or not (limit is None or limits.eos_with_limit):
        return AnswerChoice(prompt, output, most, stops=False)
    tokens, stops = output.natural_tokens(limits.natural_length, min_tokens, most)
    return AnswerChoice(prompt, output, tokens, stops)


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    if isinstance(value, str):
        text = "Input should be a valid boolean, unable to interpret input"
        raise invalid("bool_parsing", f"body.{name}", text, value)
    raise invalid("bool_type", f"body.{name}", "Input should be a valid boolean", value)


def _integer(body: dict[str, Any], name: str, default: Any, *, least: int) -> Any:
    """Return an integer field, or the default where the body has none (or null)."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, str):
        text = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", text, value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid("int_type", f"body.{name}", "Input should be a valid integer", value)
    if value < least:
        text = f"{name} must be at least {least}, got {value}."
        raise wrong(text, name, value) if name in _NAMED else ApiError(400, text)
    return value
