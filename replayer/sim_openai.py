"""Reading OpenAI requests the way vLLM does: body -> Ask, or an error in vLLM's words.

What the simulator does not model is accepted and ignored, as vLLM accepts unknown fields: sampling
parameters, stop strings, logprobs, echo, priorities, response formats, continuous_usage_stats.
"""

from array import array
from dataclasses import dataclass
from typing import Any

import orjson

from replayer.sim_tokens import (
    IM_END,
    IM_START,
    MAX_TOKEN_ID,
    Output,
    Prompt,
    TokenIds,
    make_prompt,
    tokenize,
)
from replayer.sim_types import RemoteKv

_COMPLETIONS_MAX_TOKENS = 16
_MOST_CHOICES = 128
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "Service Unavailable"}


class ApiError(Exception):
    """An answer other than 200, shaped `{"error": {message, type, param, code}}`."""

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind or _ERROR_TYPES.get(status, "InternalServerError")

    def body(self) -> bytes:
        """Return the JSON body."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return orjson.dumps({"error": error})


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server imposes on requests; lengths in tokens."""

    model: str
    block_size: int
    max_model_len: int
    natural_length: int
    eos_with_limit: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to be generated: `output_tokens` long, ended by itself when `stops`."""

    prompt: Prompt
    output: Output
    output_tokens: int
    stops: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request for completions or chat completions."""

    chat: bool
    model: str
    choices: tuple[Choice, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    send_as: str | None
    fetch: RemoteKv | None
    fetch_keys_missing: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all distinct prompts, counted once per choice's prompt object."""
        return sum({id(c.prompt): c.prompt.tokens for c in self.choices}.values())


def parse_body(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"JSON decode error: {error}", kind="Bad Request") from error
    if not isinstance(body, dict):
        raise ApiError(400, "Input should be a valid dictionary", kind="Bad Request")
    return body


def parse_ask(body: dict[str, Any], limits: Limits, *, chat: bool) -> Ask:
    """Check a body and tokenise its prompts."""
    check_model(body, limits.model)
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not stream:
        raise ApiError(
            400, "Stream options can only be defined when `stream=True`.", kind="Bad Request"
        )
    send_as, fetch, missing = _transfer(body)
    prompts = [_chat_ids(body)] if chat else _completion_ids(body)
    salt = body.get("cache_salt") or ""
    choices: list[Choice] = []
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
        send_as=send_as,
        fetch=fetch,
        fetch_keys_missing=missing,
    )


def check_model(body: dict[str, Any], served: str) -> None:
    """Refuse a model that is not served; none named means the only one."""
    model = body.get("model")
    if model not in (None, served):
        raise ApiError(
            404, f"The model `{model}` does not exist. Valid aliases: {served}.", "model"
        )


def prompt_of(body: dict[str, Any]) -> TokenIds:
    """Return the ids of a /tokenize body: `messages` like a chat, or one `prompt`."""
    return _chat_ids(body) if "messages" in body else _completion_ids(body)[0]


def transfer_of(body: dict[str, Any]) -> RemoteKv | None:
    """Return the KV source named by a body, however wrong the rest of it is."""
    try:
        return _transfer(body)[1]
    except ApiError:
        return None


def render_chat(body: dict[str, Any]) -> str:
    """Render messages and tools like a ChatML template, one word per role marker."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: Input should be a non-empty list", kind="Bad Request")
    parts = []
    if body.get("tools"):
        parts += [IM_START, "tools", _spaced_json(body["tools"]), IM_END]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, "messages: each needs a role", kind="Bad Request")
        parts += [IM_START, message["role"], _content(message), IM_END]
    if body.get("continue_final_message"):
        parts.pop()
    elif body.get("add_generation_prompt", True):
        parts += [IM_START, "assistant"]
    return " ".join(parts)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = " ".join(
            [str(p.get("text", "")) if isinstance(p, dict) else str(p) for p in content]
        )
    if message.get("tool_calls"):
        content = f"{content} {_spaced_json(message['tool_calls'])}"
    return str(content)


def _spaced_json(value: Any) -> str:
    """Return JSON with white space between its items, so that it counts as many words."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def _chat_ids(body: dict[str, Any]) -> TokenIds:
    return tokenize(render_chat(body))


def _completion_ids(body: dict[str, Any]) -> list[TokenIds]:
    """Return one id array per prompt: a text, texts, a list of ids, or lists of ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        found = [_one_prompt(item) for item in prompt]
    else:
        found = [_one_prompt(prompt)]
    if not all(found):
        raise ApiError(400, "The decoder prompt cannot be empty", "prompt")
    return found


def _one_prompt(prompt: Any) -> TokenIds:
    if isinstance(prompt, str):
        return tokenize(prompt)
    if not isinstance(prompt, list):
        raise ApiError(400, "prompt: Input should be text or token ids", kind="Bad Request")
    try:
        return array("I", prompt)
    except (TypeError, OverflowError) as error:
        message = f"Token ids must be integers from 0 to {MAX_TOKEN_ID}"
        raise ApiError(400, message, "prompt") from error


def _choice(body: dict[str, Any], prompt: Prompt, limits: Limits, *, chat: bool) -> Choice:
    """Fix the output's length: the client's limit, the context's end, or a natural end."""
    room = limits.max_model_len - prompt.tokens
    if room < 1:
        raise ApiError(
            400,
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your "
            f"request has {prompt.tokens} input tokens. Please reduce the length of the input.",
            "input_tokens",
        )
    default = None if chat else _COMPLETIONS_MAX_TOKENS
    limit = _integer(body, "max_tokens", default, least=1)
    if chat:
        limit = _integer(body, "max_completion_tokens", limit, least=1)
    min_tokens = _integer(body, "min_tokens", 0, least=0)
    if limit is not None and min_tokens > limit:
        raise ApiError(
            400,
            f"min_tokens must be less than or equal to max_tokens={limit}, got {min_tokens}.",
            "min_tokens",
        )
    output = Output(prompt)
    most = room if limit is None else min(limit, room)
    if _flag(body, "ignore_eos") or not (limit is None or limits.eos_with_limit):
        return Choice(prompt, output, most, stops=False)
    tokens, stops = output.natural_tokens(limits.natural_length, min_tokens, most)
    return Choice(prompt, output, tokens, stops)


def _transfer(body: dict[str, Any]) -> tuple[str | None, RemoteKv | None, bool]:
    """Read kv_transfer_params: (id to send under, KV to fetch, whether a fetch lacks keys)."""
    params = body.get("kv_transfer_params")
    if params is None:
        return None, None, False
    if not isinstance(params, dict):
        message = "kv_transfer_params: Input should be a valid dictionary"
        raise ApiError(400, message, kind="Bad Request")
    transfer_id = params.get("transfer_id")
    if params.get("do_remote_prefill"):
        engine_id, address = params.get("remote_engine_id"), params.get("remote_bootstrap_addr")
        if not (transfer_id and engine_id and address):
            return None, None, True
        return None, RemoteKv(str(engine_id), str(transfer_id), str(address)), False
    if params.get("do_remote_decode") and transfer_id:
        return str(transfer_id), None, False
    return None, None, False


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ApiError(400, f"{name}: Input should be a valid boolean", name, "Bad Request")


def _integer(body: dict[str, Any], name: str, default: Any, *, least: int) -> Any:
    """Return an integer field, or the default where the body has none (or null)."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError(400, f"{name}: Input should be a valid integer", name, "Bad Request")
    if value < least:
        raise ApiError(400, f"{name} must be at least {least}, got {value}.", name)
    return value
