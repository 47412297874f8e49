"""A client's body, parsed once: the parts that the proxy needs, without the parsed object.

`examine` parses, refuses, edits and reads a body. A small body is parsed on the event loop. A
larger one is parsed in its own process (`request/large_bodies.py`): that may take half a second and
some 300 MB. Of the parsed object only `Examined` stays.
"""

from __future__ import annotations

import json  # noqa: TID251 - engines parse with it, see _as_engines_parse
import math
from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.core.types import Unmoved
from proxy.protocol.body import (
    PLUGINS,
    TOO_DEEP,
    Members,
    Span,
    Unfit,
    complaint,
    harmless_arguments,
    overfull,
    steering_keys,
)
from proxy.protocol.names.session_names import NO_NAMES, InBody, session_in
from proxy.protocol.names.stored_responses import NAMED
from proxy.protocol.prompt.facts import (
    MOST_VALUES,
    PromptFacts,
    encodable,
    kept_units,
    prompt_facts,
)
from proxy.protocol.streams.movable import Plan, plan_of, unpacked_plan

SALT: Final = "cache_salt"
_ONLY_SALT: Final = frozenset({SALT})
LENGTHS: Final = 4
"""Between the processes: bytes of a length in front of task, body and result, big-endian."""
READ = frozenset(
    {
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n",
        "priority",
        "store",
        "previous_response_id",
        NAMED,
        "session_id",
    }
)
"""Top-level fields that are looked at after the examination."""
_KEPT_CHARS: Final = 300
"""Kept of a text in one of them."""
_SLOW_BYTES: Final = 1 << 15
"""A longer body is parsed again in the other process only: full of numbers it takes 2 ms."""
_INT_DIGITS: Final = 19
"""Digits that fit into 64 bits, 18 with a sign."""
_NAME_CHARS: Final = 40
_PLUGINS_BYTES: Final = 1 << 16
"""Most bytes of plug-ins' arguments that are rewritten."""


class Task:
    """One body to examine.

    `endpoint`: the path it was sent to. `is_object`: whether anything but a JSON object is refused.
    `salt`: the tenant's `cache_salt`, which replaces the body's own; None: it has none. `plans`:
    whether its stream may migrate, and how, is wanted too.
    """

    __slots__ = ("endpoint", "is_object", "plans", "raw", "salt")

    def __init__(
        self,
        endpoint: str,
        raw: bytes,
        *,
        is_object: bool,
        salt: str | None,
        plans: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.raw = raw
        self.is_object = is_object
        self.salt = salt
        self.plans = plans


class Examined:
    """The part of a body that is kept.

    `fields`: of its top-level fields those of `READ`, but arrays and objects; texts are cut.
    `session`: the names that it gives its session. `put` and `drop`: top-level fields that have to
    be set, as JSON, and removed before an instance gets it. `is_new`: nothing is removed, and the
    only one that is set is not there yet, so that nothing has to be looked for. `spans`: where its
    members are, if that is known. `plan`: the migration plan of its stream, or the reason for none;
    None if not asked for.
    """

    __slots__ = ("drop", "fields", "is_new", "plan", "prompt", "put", "session", "spans")

    def __init__(
        self,
        fields: Mapping[str, Any],
        session: InBody,
        prompt: PromptFacts,
        put: Mapping[str, bytes],
        drop: list[str],
        spans: list[Span] | None = None,
    ) -> None:
        self.fields = fields
        self.session = session
        self.prompt = prompt
        self.put = put
        self.drop = drop
        self.spans = spans
        self.is_new = False
        self.plan: Plan | Unmoved | None = None


NO_OBJECT = Examined({}, NO_NAMES, PromptFacts("", 0, 0, [], offloadable=False), {}, [])
"""Result for a body that is not a JSON object: an upload, or none."""


def examine(task: Task, most_values: int) -> Examined | Unfit | None:
    """Parse a body and keep what is needed; `Unfit`: why it is refused.

    None: too much for the caller, as its prompt has more than `most_values` values, or as it is
    parsed slowly.
    """
    raw = task.raw
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if most_values < MOST_VALUES and len(raw) > _SLOW_BYTES:
            return None
        parsed = _as_engines_parse(raw, str(error))
    if type(parsed) is dict:
        return _examined(task, parsed, most_values)
    if isinstance(parsed, Unfit):
        return parsed
    if task.is_object or (task.salt is not None and type(parsed) is list):
        return Unfit("body: must be a JSON object")
    return NO_OBJECT


def _examined(task: Task, parsed: dict[str, Any], most_values: int) -> Examined | Unfit | None:
    if (unfit := complaint(parsed, task.raw, is_salted=task.salt is not None)) is not None:
        return unfit
    is_free = bool(parsed) and SALT not in parsed
    put = _put(parsed, task.salt)
    if len(put.get(PLUGINS, b"")) > _PLUGINS_BYTES:
        return Unfit(f"{PLUGINS}: over {_PLUGINS_BYTES} bytes", PLUGINS)
    prompt = prompt_facts(task.endpoint, parsed, most_values)
    if prompt is None:
        return None
    steering = steering_keys(parsed)
    found = Examined(_plain(parsed), session_in(parsed), prompt, put, steering)
    found.is_new = is_free and not steering and put.keys() == _ONLY_SALT
    if task.plans:
        found.plan = plan_of(task.endpoint, parsed, steering)
    return found


def _as_engines_parse(raw: bytes, why: str) -> Any:
    """Parse what orjson refuses and Python's json takes, with which engines parse.

    Examples: half of a surrogate pair, from an agent that cuts a text within an emoji; a byte order
    mark; NaN, infinities, numbers beyond a float. Else `Unfit` with orjson's words, `why`.
    """
    try:
        text = raw.decode("utf-8-sig", "surrogatepass")
        parsed = json.loads(text, parse_int=_whole)
    except RecursionError:
        return TOO_DEEP
    except ValueError:
        return Unfit(f"body: not valid JSON ({why})")
    unfit = _not_finite(parsed) if type(parsed) is dict else None
    return parsed if unfit is None else unfit


def _whole(digits: str) -> int | float:
    """A whole number; beyond 64 bits a float, as orjson has it."""
    return int(digits) if len(digits) <= _INT_DIGITS else float(digits)


def _not_finite(parsed: dict[str, Any]) -> Unfit | None:
    """Why a parameter is refused with which an engine would compute nonsense, or fail for all."""
    for key, value in parsed.items():
        if type(value) is float and not math.isfinite(value):
            # Any other name could be a text of the client's, which no log shows.
            name = key if key.isascii() and key.isidentifier() and len(key) <= _NAME_CHARS else None
            return Unfit(f"{name or 'body: each parameter'}: must be a finite number", name)
    return None


def _put(parsed: dict[str, Any], salt: str | None) -> dict[str, bytes]:
    """Fields to set, as JSON: the tenant's salt, which is set here too, and cleaned arguments."""
    put: dict[str, bytes] = {}
    if salt is not None:
        parsed[SALT] = salt
        put[SALT] = orjson.dumps(salt)
    plugins = harmless_arguments(parsed)
    if plugins is not None:
        put[PLUGINS] = json.dumps(plugins).encode()  # also halves of surrogate pairs
    return put


def _plain(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `READ` that hold no array or object; of `NAMED` it is told that it is there.

    What has to be removed is removed whatever it holds: before it there may be a text by that name.
    """
    fields: dict[str, Any] = {}
    for key in READ.intersection(parsed):
        value = parsed[key]
        kind = type(value)
        if kind is not dict and kind is not list:
            fields[key] = encodable(value[:_KEPT_CHARS]) if kind is str else value
        elif key == NAMED:
            fields[key] = ""
    return fields


def examine_large(task: Task) -> Examined | Unfit:
    """`examine` for a body of any size, with the places of its members; takes up to 0.5 s."""
    if (unfit := overfull(task.raw)) is not None:
        return unfit
    found = examine(task, MOST_VALUES)
    if found is None:
        return Unfit(f"body: over {MOST_VALUES} values in its prompt")
    if type(found) is Examined and found is not NO_OBJECT:
        try:
            found.spans = Members(task.raw).spans
        except ValueError as error:
            return Unfit(str(error))
    return found


def packed_task(task: Task) -> bytes:
    """A task without its body, for another process."""
    return orjson.dumps([task.endpoint, task.is_object, task.salt, task.plans])


def unpacked_task(packed: bytes, raw: bytes) -> Task:
    """The reverse of `packed_task`."""
    endpoint, is_object, salt, plans = orjson.loads(packed)
    return Task(endpoint, raw, is_object=is_object, salt=salt, plans=plans)


def packed(found: Examined | Unfit) -> bytes:
    """A result for another process."""
    if isinstance(found, Unfit):
        return orjson.dumps({"unfit": [found.message, found.param]})
    prompt = found.prompt
    return orjson.dumps(
        {
            "fields": found.fields,
            "session": found.session,
            "prompt": [
                *(prompt.model, prompt.bytes, prompt.ids, prompt.hashes),
                *(prompt.kept, list(prompt.units), prompt.ends, prompt.answer),
                *(prompt.dialect, prompt.media, prompt.tails),
            ],
            "offloadable": prompt.offloadable,
            "put": {key: value.decode() for key, value in found.put.items()},
            "drop": found.drop,
            "spans": found.spans,
            "plan": found.plan.packed() if isinstance(found.plan, Plan) else found.plan,
        }
    )


def unpacked(result: bytes) -> Examined | Unfit:
    """The reverse of `packed`."""
    told = orjson.loads(result)
    if "unfit" in told:
        message, param = told["unfit"]
        return Unfit(message, param)
    spans = told["spans"]
    if spans is None:
        return NO_OBJECT
    *prompt, units, ends, answer, dialect, media, tails = told["prompt"]
    name, own_id = told["session"]
    plan = told["plan"]
    found = Examined(
        told["fields"],
        (name, own_id),
        PromptFacts(
            *[*prompt, kept_units(units), ends, tuple(answer), dialect],
            *[[(kind, at, number) for kind, at, number in media], tails],
            offloadable=told["offloadable"],
        ),
        {key: value.encode() for key, value in told["put"].items()},
        told["drop"],
        [(key, start, end) for key, start, end in spans],
    )
    if plan is not None:
        found.plan = unpacked_plan(plan) if isinstance(plan, list) else Unmoved(plan)
    return found
