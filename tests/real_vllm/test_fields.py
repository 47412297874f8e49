"""The proxy reads a request as vLLM's own classes do, and its prefill leg is the same prompt."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from proxy.core.connectors import CONNECTORS, Transfer
from proxy.core.types import Instance, RequestFacts
from proxy.protocol.body import complaint, steering_keys
from proxy.protocol.examined import Examined, Task, examine
from proxy.protocol.names.session_names import bounded
from proxy.protocol.offloadable import asks_for_stream
from proxy.protocol.prompt.facts import MOST_VALUES
from proxy.state.queue import priority_of
from tests.real_vllm.engines.fleet import Site
from tests.real_vllm.rig import CHAT, COMPLETIONS
from tests.support.examined import facts_of, splice
from tests.support.request_fields import documented

READER = Path(__file__).parent / "engines" / "read_bodies.py"
BODIES = 50_000
FLAGS = ["true", "false", "null", "1", "0", "1.0", '"true"', '"no"', '"T"', '""', "2", "[]"]
NUMBERS = [
    *("null", "0", "1", "2", "16", "5000", "-1", "-2", "1.0", "2.0", "1.5", "true", "false"),
    *('"1"', '"16"', '" 2 "', '"1.0"', '"1_6"', '"+2"', '"x"', '""', "1e2", "1" + "0" * 25),
    *("NaN", "Infinity", "[]", "{}", "[1]", "9223372036854775808"),
]
TEXTS = ['"a"', '""', "null", "7", "true", '["a"]', "{}", '"\\u00e9"', '"\\ud800"', '"a b"']
LISTS = ["null", "[]", "[1]", '["a"]', '["1"]', "[1.0]", "[true]", '"a"', "7", "[1,2]", "[[1]]"]
STOPS = ["null", '"a"', "[]", '["a"]', '["a","b","c","d","e"]', "7", "[1]", "[null]", '{"a":1}']
OPTIONS = [
    *("null", "{}", '{"include_usage":true}', '{"include_usage":"yes"}', "true", "[]"),
    *('{"include_usage":[]}', '{"continuous_usage_stats":null}', '{"other":1}'),
]
PROMPTS = [
    *('"one two"', '""', "null", "[1,2,3]", "[[1,2],[3]]", "[[1,2]]", '["a"]', '["a","b"]', "[]"),
    *('[1,"2"]', "[1.0,2]", "[true,2]", '["1",2]', "[-1]", "[1.5]", "7", "[[]]", "[1,2.0]", "{}"),
]
MESSAGES = [
    '[{"role":"user","content":"hi"}]',
    '[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"t"}]}]',
    '[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://h/a.png"}}]}]',
    *("[]", "null", '"hi"', '[{"role":7}]', '[{"content":"x"}]'),
]
FIELDS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("stream", "echo", "use_beam_search", "ignore_eos"), FLAGS),
    **dict.fromkeys(("return_token_ids", "return_prompt_text", "include_reasoning"), FLAGS),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message"), FLAGS),
    **dict.fromkeys(("n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens"), NUMBERS),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_logprobs", "top_logprobs"), NUMBERS),
    **dict.fromkeys(("thinking_token_budget", "priority", "stream_interval", "seed"), NUMBERS),
    "logprobs": [*FLAGS, *NUMBERS],
    **dict.fromkeys(("session_id", "model", "cache_salt", "user", "request_id"), TEXTS),
    **dict.fromkeys(("stop_token_ids", "logprob_token_ids", "allowed_token_ids"), LISTS),
    **dict.fromkeys(("bad_words", "prompt_embeds"), LISTS),
    "stop": STOPS,
    "stream_options": OPTIONS,
    "prompt": PROMPTS,
    "messages": MESSAGES,
    "tools": ["null", "[]", '[{"type":"function","function":{"name":"f"}}]', "7", "{}"],
    "tool_choice": ['"auto"', '"none"', '"required"', "null", '"x"'],
    "response_format": ["null", '{"type":"text"}', '{"type":"json_object"}', '{"type":"x"}', "7"],
    "repetition_detection": ["null", "{}", '{"max_pattern_size":2,"min_count":2}', "7"],
    "documents": ["null", "[]", '[{"text":"d"}]', "7"],
    "reasoning_effort": ['"low"', '"none"', "null", '"x"'],
    "chat_template_kwargs": ["null", "{}", '{"a":1}', "7"],
    "kv_transfer_params": ["null", "{}", '{"do_remote_decode":true}', "7"],
    "vllm_xargs": ["null", "{}", '{"a":1}', '{"a":[]}', "7"],
    "echo ": ["true"],
    "unknown": ["null", "7", "{}"],
}
"""Values of each field as JSON: valid, nearly valid, and what is coerced."""
_LIKELY = ("stream", "max_tokens", "stream_options", "stop", "logprobs", "logprob_token_ids")
_TRANSFER = Transfer("x", Instance("p", "http://p:1", "http://p:2"), "e", "r-p")


def read(site: Site, asked: Sequence[tuple[str, bytes]]) -> list[dict[str, Any] | None]:
    """What vLLM's classes make of these bodies, in order."""
    lines = b"".join(b"%b\t%b\n" % (path.encode(), raw) for path, raw in asked)
    answer = subprocess.run(
        [site.venv / "bin" / "python", READER], input=lines, stdout=subprocess.PIPE, check=True
    )
    return [orjson.loads(line) for line in answer.stdout.splitlines()]


def test_every_field_of_vllm_is_in_the_documented_table(site: Site) -> None:
    """A field that a new version brings is shown here, to be judged."""
    python = site.venv / "bin" / "python"
    answer = subprocess.run([python, READER, "--fields"], stdout=subprocess.PIPE, check=True)
    fields = orjson.loads(answer.stdout)
    nested = {f"stream_options.{name}" for name in fields.pop("stream_options")}
    known = set(documented())
    assert {name for names in fields.values() for name in names} - known == set()
    assert nested - known == set()


def body(rng: random.Random, path: str) -> bytes:
    """A body as bytes, from what clients send to what nobody should."""
    members = [("model", '"m"')]
    members += [("messages", MESSAGES[0])] if path == CHAT else [("prompt", '"one two"')]
    members += [("max_tokens", "64")] if rng.random() < 0.5 else []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))):
        name = rng.choice(_LIKELY) if rng.random() < 0.4 else rng.choice(sorted(FIELDS))
        member = (name, rng.choice(FIELDS[name]))
        kept = [m for m in members if m[0] != name] if rng.random() < 0.8 else members
        at = rng.randrange(len(kept) + 1)
        members = [*kept[:at], member, *kept[at:]]
    space = rng.choice(("", "", "", " ", "\t "))
    return ("{" + f",{space}".join(_member(rng, *m) for m in members) + "}").encode()


def _member(rng: random.Random, name: str, value: str) -> str:
    if rng.random() < 0.05:
        at = rng.randrange(len(name))
        name = f"{name[:at]}\\u{ord(name[at]):04x}{name[at + 1 :]}"
    return f'"{name}":{value}'


def view(path: str, raw: bytes) -> tuple[dict[str, Any], RequestFacts] | None:
    """The body and its facts as the proxy sees them; None where it refuses the body."""
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if complaint(parsed, raw) is not None:
        return None
    return parsed, facts_of(path, parsed)


def forwarded(raw: bytes, parsed: dict[str, Any]) -> bytes:
    """The body that an instance gets."""
    return splice(raw, {}, steering) if (steering := steering_keys(parsed)) else raw


def prefill_body(raw: bytes) -> bytes:
    found = examine(Task(CHAT, raw, is_object=True, salt=None), MOST_VALUES)
    assert isinstance(found, Examined)
    edits = CONNECTORS["implicit"].prepare(_TRANSFER, found.fields)
    return splice(raw, {key: orjson.dumps(v) for key, v in edits.put.items()}, edits.drop)


def test_no_disagreement_with_vllm_changes_a_decision(
    site: Site, figure: Callable[[str], None]
) -> None:
    rng = random.Random(17)
    paths = [rng.choice((CHAT, COMPLETIONS)) for _ in range(BODIES)]
    cases = [(path, raw, view(path, raw)) for path, raw in ((p, body(rng, p)) for p in paths)]
    seen = [(path, raw, *found) for path, raw, found in cases if found is not None]
    whole = read(site, [(path, forwarded(raw, parsed)) for path, raw, parsed, _ in seen])
    legs = read(site, [(path, prefill_body(raw)) for path, raw, parsed, _ in seen])
    wrong: dict[str, bytes] = {}
    for (path, raw, parsed, facts), d, p in zip(seen, whole, legs, strict=True):
        for fault in [*_misread(path, parsed, facts, d), *_unequal(facts, d, p)]:
            wrong.setdefault(fault, raw)
    assert wrong == {}
    taken, offloaded = sum(d is not None for d in whole), sum(f.offloadable for *_, f in seen)
    figure(f"fields: {len(seen)} bodies read by both, {taken} taken, {offloaded} offloadable")
    assert min(taken, offloaded) > BODIES / 10


def _misread(
    path: str, parsed: dict[str, Any], facts: RequestFacts, d: dict[str, Any] | None
) -> list[str]:
    """Decisions that the proxy takes on another reading than vLLM's."""
    if d is None:
        return []
    session = d["session_id"]
    agrees = {
        "model": facts.model == (d["model"] or ""),
        "stream": asks_for_stream(parsed) is d["stream"],
        "session": not session or facts.session_id == bounded(session),
        "tokens": d["ids"] is None or d["truncates"] or facts.prompt_tokens == max(1, d["ids"]),
        "priority": int(priority_of({}, parsed)) == 1 + (d["priority"] > 0) - (d["priority"] < 0),
    }
    if facts.offloadable:
        most = d["max_tokens"]
        agrees["n"] = d["n"] == 1 and d["prompts"] == 1
        agrees["something to decode"] = most is None or most > 1
        agrees["one request is needed"] = not (d["needs_whole"] or d["truncates"])
    return [f"{path} {name}" for name, is_equal in agrees.items() if not is_equal]


def _unequal(facts: RequestFacts, d: dict[str, Any] | None, p: dict[str, Any] | None) -> list[str]:
    """What tells the two legs of an offload apart that must not."""
    if not facts.offloadable or (d is None and p is None):
        return []
    if d is None or p is None:
        return ["only P takes it" if d is None else "only D takes it"]
    agrees = {
        "prompt of the legs": d["prompt"] in (p["prompt"], None),
        "one token, no stream": (p["stream"], p["n"], p["max_tokens"]) == (False, 1, 1),
        "a short answer that ends by its length": not (p["returns"] or p["ends"]),
    }
    return [name for name, is_equal in agrees.items() if not is_equal]
