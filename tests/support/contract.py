"""vLLM's HTTP as it was recorded from a real engine: statuses, headers, fields, errors, metrics.

`vllm_contract.json` is what `make test-vllm` found; there it is compared with the engine of that
day, here with the simulator. Values that differ from run to run are kept as their types.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

RECORDED = Path(__file__).parent / "vllm_contract.json"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
TALK: list[dict[str, Any]] = [{"role": "user", "content": "hello there"}]
TRANSPORT = {"date", "server", "content-length", "connection", "transfer-encoding", "keep-alive"}
"""Headers of the server's own making, none of vLLM's."""


@dataclass(frozen=True)
class Case:
    """One request. `model` is filled in: a real engine and a simulated one have other names."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    raw: bytes | None = None


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "MODEL", "prompt": "hello there", "max_tokens": 3, "temperature": 0} | more


def chat(**more: Any) -> dict[str, Any]:
    base = {"model": "MODEL", "messages": TALK, "max_tokens": 3, "temperature": 0}
    return base | {"ignore_eos": True} | more


def message(**more: Any) -> dict[str, Any]:
    return {"model": "MODEL", "messages": TALK, "max_tokens": 3, "temperature": 0} | more


def response(**more: Any) -> dict[str, Any]:
    base = {"model": "MODEL", "input": "hello there", "max_output_tokens": 3, "temperature": 0}
    return base | more


LONG = {"stream": True, "max_tokens": 24}
"""Of so many tokens some come before the last piece."""
STREAM = LONG | {"stream_options": {"include_usage": True}}
CASES = (
    Case("completion", COMPLETIONS, completion()),
    Case("completion with ids", COMPLETIONS, completion(return_token_ids=True)),
    Case("completion of two prompts", COMPLETIONS, completion(prompt=["a b", "c d"])),
    Case("completion streamed", COMPLETIONS, completion(**LONG)),
    Case("completion streamed, usage", COMPLETIONS, completion(**STREAM)),
    Case("completion streamed, ids", COMPLETIONS, completion(**STREAM, return_token_ids=True)),
    Case("chat", CHAT, chat()),
    Case("chat with ids", CHAT, chat(return_token_ids=True)),
    Case("chat streamed", CHAT, chat(**LONG)),
    Case("chat streamed, usage", CHAT, chat(**STREAM)),
    Case("chat streamed, ids", CHAT, chat(**STREAM, return_token_ids=True)),
    Case("unknown model", CHAT, chat(model="nobody")),
    Case("unknown model, streamed", COMPLETIONS, completion(model="nobody", stream=True)),
    Case("no tokens wanted", COMPLETIONS, completion(max_tokens=0)),
    Case("no tokens wanted in chat", CHAT, chat(max_tokens=0)),
    Case("no prompt", COMPLETIONS, {"model": "MODEL", "max_tokens": 3}),
    Case("empty prompt", COMPLETIONS, completion(prompt="")),
    Case("no messages", CHAT, {"model": "MODEL"}),
    Case("empty messages", CHAT, chat(messages=[])),
    Case("too long", COMPLETIONS, completion(prompt=[5] * 40_000)),
    Case("more asked than fits", COMPLETIONS, completion(max_tokens=2_000_000, stream=False)),
    Case("options without stream", CHAT, chat(stream_options={"include_usage": True})),
    Case("least over most", COMPLETIONS, completion(min_tokens=9)),
    Case("stream is no boolean", COMPLETIONS, completion(stream="perhaps")),
    Case("n is no number", COMPLETIONS, completion(n="two")),
    Case("n is zero", CHAT, chat(n=0)),
    Case("KV parameters are no object", COMPLETIONS, completion(kv_transfer_params=["x"])),
    Case("no JSON", CHAT, raw=b'{"model":'),
    Case("a list", CHAT, raw=b"[1]"),
    Case("message", MESSAGES, message()),
    Case("message streamed", MESSAGES, message(**LONG)),
    Case("message of an unknown model", MESSAGES, message(model="nobody")),
    Case("message without a limit", MESSAGES, {"model": "MODEL", "messages": TALK}),
    Case("no tokens wanted in a message", MESSAGES, message(max_tokens=0)),
    Case("more asked than fits a message", MESSAGES, message(max_tokens=2_000_000)),
    Case("tokens of a message", COUNT, {"model": "MODEL", "messages": TALK}),
    Case("response", RESPONSES, response()),
    Case("response streamed", RESPONSES, response(stream=True, max_output_tokens=24)),
    Case("response of an unknown model", RESPONSES, response(model="nobody")),
    Case("response to nothing", RESPONSES, {"model": "MODEL"}),
    Case("tokenize", "/tokenize", {"model": "MODEL", "prompt": "hello there"}),
    Case("tokenize a chat", "/tokenize", {"model": "MODEL", "messages": TALK}),
    Case("detokenize", "/detokenize", {"model": "MODEL", "tokens": [5, 6]}),
    Case("models", "/v1/models", method="GET"),
    Case("version", "/version", method="GET"),
    Case("health", "/health", method="GET"),
    Case("ping", "/ping", method="GET"),
    Case("unknown path", "/nothing", method="GET"),
    Case("wrong method", CHAT, method="GET"),
)


async def record(http: aiohttp.ClientSession, url: str, model: str) -> dict[str, Any]:
    """Everything this engine does, in the form of the recording."""
    found = {case.name: await _answer(http, url, model, case) for case in CASES}
    async with http.get(f"{url}/metrics") as response:
        found["metrics"] = _metrics(await response.text())
    return found


async def _answer(http: aiohttp.ClientSession, url: str, model: str, case: Case) -> dict[str, Any]:
    body = case.raw if case.raw is not None else _body(case, model)
    headers = {"Content-Type": "application/json", "X-Request-Id": "r-1"}
    async with http.request(case.method, url + case.path, data=body, headers=headers) as response:
        names = {name.lower() for name in response.headers} - TRANSPORT
        told: dict[str, Any] = {
            "status": response.status,
            "headers": sorted(names),
            "content_type": response.headers.get("Content-Type"),
        }
        raw = await response.read()
    if told["content_type"] and told["content_type"].startswith("text/event-stream"):
        return told | {"events": _events(raw, model)}
    return told | {"body": _shape(orjson.loads(raw), model) if raw else None}


def _body(case: Case, model: str) -> bytes | None:
    if case.body is None:
        return None
    body = case.body | ({"model": model} if case.body["model"] == "MODEL" else {})
    return orjson.dumps(body)


def _events(raw: bytes, model: str) -> list[Any]:
    """The forms of a stream's events, in their order.

    How many carry text is a matter of timing: they count as one, whose fields are those of all.
    """
    forms: dict[str, Any] = {}
    order: list[str] = []
    for event in filter(None, raw.split(b"\n\n")):
        text = event.rpartition(b"data: ")[2]
        parsed = None if text == b"[DONE]" else orjson.loads(text)
        kind = _kind(parsed)
        forms[kind] = _merged(forms.get(kind), _shape(parsed, model))
        if not order or order[-1] != kind:
            order.append(kind)
    return [{kind: forms[kind]} for kind in order]


def _kind(event: Any) -> str:
    if event is None:
        return "done"
    if "type" in event:
        return str(event["type"])
    if not event["choices"]:
        return "usage"
    choice = event["choices"][0]
    if choice["finish_reason"] is not None:
        return "end"
    return "role" if "role" in choice.get("delta", ()) else "text"


def _merged(one: Any, other: Any) -> Any:
    """Of two forms of the same object, with the types where only one of them has null."""
    if one is None or one == "NoneType":
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _merged(one.get(key), other.get(key)) for key in one | other}
    if isinstance(one, list) and isinstance(other, list) and one and other:
        return [_merged(one[0], other[0])]
    return one if other in (None, "NoneType") else other


def _shape(value: Any, model: str) -> Any:
    """Types instead of values; what an error says is kept, without the model's name."""
    if isinstance(value, dict):
        if "error" in value:
            return orjson.loads(orjson.dumps(value).replace(model.encode(), b"MODEL"))
        return {
            key: f"={inner}" if key == "type" else _shape(inner, model)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_shape(inner, model) for inner in value[:1]]
    if value in ("length", "stop", "assistant", "list", "model"):
        return f"={value}"
    return type(value).__name__


def _metrics(text: str) -> dict[str, list[str]]:
    """Series by name, with their labels."""
    families = text_string_to_metric_families(text)
    samples = (s for f in families for s in f.samples if s.name.startswith("vllm:"))
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return {name: sorted(labels) for name, labels in sorted(found.items())}


def differences(real: Any, ours: Any, where: str = "") -> Iterator[str]:
    """What the simulator says otherwise. A field that is null on one side may be any type."""
    if "NoneType" in (real, ours):
        return
    if isinstance(real, dict) and isinstance(ours, dict):
        for key in sorted(real.keys() | ours.keys()):
            if key not in real or key not in ours:
                yield f"{where}/{key}: only in {'real' if key in real else 'simulated'} answers"
            else:
                yield from differences(real[key], ours[key], f"{where}/{key}")
    elif isinstance(real, list) and isinstance(ours, list) and len(real) == len(ours):
        for index, (a, b) in enumerate(zip(real, ours, strict=True)):
            yield from differences(a, b, f"{where}/{index}")
    elif real != ours:
        yield f"{where}: really {real!r}, simulated {ours!r}"


def load() -> dict[str, Any]:
    """The recording."""
    found: dict[str, Any] = orjson.loads(RECORDED.read_bytes())
    return found


def save(recorded: dict[str, Any]) -> None:
    """Replace the recording."""
    RECORDED.write_bytes(orjson.dumps(recorded, option=orjson.OPT_INDENT_2) + b"\n")
