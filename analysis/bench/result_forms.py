"""The forms of a run's summary and rows, checked where a result folder is read back.

Of another version, or edited, a file may have other types under the same names. What reports take
for granted of it is told here once. Members without a name here stay as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from analysis.bench.phases import PHASES
from analysis.measures import INFINITE, METRICS, SPREAD, is_number

SHOWN_CHARS = 40


class FormError(ValueError):
    """A value has another form; the text is a part of one line for the user."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A value without members: what it must be, in words, and whether it is."""

    words: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Each:
    """A list or an object whose members are all of one form."""

    of: type[list[Any]] | type[dict[str, Any]]
    form: "Form"


Form: TypeAlias = Kind | Each | Mapping[str, "Form"]
"""Members of an object by name. One whose name ends with `?` may be missing."""


def check(value: Any, form: Form, at: str = "") -> None:
    """Check a value and all that is in it; raises FormError. `at`: its place."""
    if isinstance(form, Kind):
        if not form.fits(value):
            raise _error(at, form.words, value)
    elif isinstance(form, Each):
        _check_type(value, form.of, at)
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in members:
            check(one, form.form, f"{at}.{name}")
    else:
        _check_type(value, dict, at)
        for key, inner in form.items():
            name = key.rstrip("?")
            if name in value:
                check(value[name], inner, f"{at}.{name}")
            elif name == key:
                raise FormError(f"{at}.{name}: is missing".lstrip("."))


def check_row(row: Any) -> None:
    """Check a request's row; raises FormError."""
    check(row, ROW)
    for name, form in ROW_WITH.items():
        if row.get(name) is not None:
            check(row, form)


def _check_type(value: Any, of: type, at: str) -> None:
    if not isinstance(value, of):
        raise _error(at, "a list" if of is list else "an object", value)


def _error(at: str, words: str, value: Any) -> FormError:
    place, shown = at.lstrip(".") or "it", "null" if value is None else repr(value)
    if len(shown) > SHOWN_CHARS:
        shown = shown[:SHOWN_CHARS] + "..."
    return FormError(f"{place}: must be {words}, not {shown}")


def _is_amount(value: Any) -> bool:
    return value is None or value == INFINITE or is_number(value)


TEXT = Kind("a text", lambda value: isinstance(value, str))
NAME = Kind("a text or null", lambda value: value is None or isinstance(value, str))
NUMBER = Kind("a number", is_number)
POSITIVE = Kind("a number > 0", lambda value: is_number(value) and value > 0)
NOT_NEGATIVE = Kind("a number >= 0", lambda value: is_number(value) and value >= 0)
RATIO = Kind("a number or null", lambda value: value is None or is_number(value))
AMOUNT = Kind(f'a number, "{INFINITE}" or null', _is_amount)
ANY = Kind("anything", lambda _: True)
TEXTS, NAMED_TEXTS = Each(list, TEXT), Each(dict, TEXT)
NUMBERS, COUNTERS = Each(dict, NUMBER), Each(dict, Each(dict, NUMBER))
SPREADS = {f"{name}?": RATIO for name in SPREAD}

FACTS: dict[str, Form] = {
    **dict.fromkeys(("model?", "mode?", "stopped?", "proxy_log_problem?"), NAME),
    **dict.fromkeys(("concurrency?", "planned?", "client_cpu_s?", "proxy_log_missing?"), RATIO),
    **dict.fromkeys(("rows_skipped?", "log_lines_skipped?"), RATIO),
    **dict.fromkeys(("time_scale?", "speedup?"), POSITIVE),
    "seed?": ANY,
    "notes?": TEXTS,
    "settings?": Each(dict, ANY),
    "slo_s?": NUMBERS,
    "engine_counters?": {
        "source?": NAME,
        "before?": COUNTERS,
        "after?": COUNTERS,
        "unread?": NAMED_TEXTS,
        "layouts?": NAMED_TEXTS,
    },
}
"""Of a run that was cut there is no more than this."""
_ROUTE_CLASS: Form = {
    "requests": NUMBER,
    **dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"), SPREADS),
}
_PHASES: Form = {
    "requests": NOT_NEGATIVE,
    "time_s": dict.fromkeys(PHASES, dict.fromkeys(("mean", "p90", "max"), NOT_NEGATIVE)),
    "predicted": Each(
        dict,
        {
            "count": NUMBER,
            "predicted_s": {"mean": RATIO},
            "realised_s": {"mean": RATIO},
            "ratio": {"p50": RATIO, "p90": RATIO},
        },
    ),
}
_SLOW: Form = {
    **dict.fromkeys(("request_id", "outcome", "route_class"), NAME),
    **dict.fromkeys(("prefill_instance", "decode_instance"), NAME),
    "wait_s": NUMBER,
    "phases_s": NUMBERS,
}
_REFUSALS = ("answers", "requests", "retries", "ok_after_retry", "given_up")
RESULTS: dict[str, Form] = {
    **{f"{name}?": SPREADS for name in METRICS},
    "ttft_s_failures_as_inf?": {f"{name}?": AMOUNT for name in SPREAD},
    **dict.fromkeys(("duration_s", "input_tokens", "output_tokens"), NUMBER),
    "requests": {
        **dict.fromkeys(("sent", "ok", "skipped"), NOT_NEGATIVE),
        "by_outcome": NUMBERS,
    },
    "refusals?": {**dict.fromkeys(_REFUSALS, NUMBER), "waited_s": {"mean": RATIO}},
    "errors?": Each(list, {"outcome": TEXT, "status": RATIO, "message": TEXT, "count": NUMBER}),
    "errors_not_listed?": NUMBER,
    "throughput": dict.fromkeys(("requests_per_s", "output_tokens_per_s"), RATIO),
    "tokens_per_event?": RATIO,
    "goodput": {"slo": NUMBERS, "kept?": Each(dict, RATIO), "ratio_of_sent": RATIO},
    "by_route_class?": Each(dict, _ROUTE_CLASS),
    "phases?": Each(dict, _PHASES),
    "slowest?": Each(list, _SLOW),
    "offload_policies?": TEXTS,
    "offload_decision_reasons?": NUMBERS,
    "cache": {
        **dict.fromkeys(("ideal_hit_ratio", "predicted_hit_ratio", "engine_hit_ratio"), RATIO),
        **dict.fromkeys(("local_hit_ratio?", "external_hit_ratio?"), RATIO),
    },
    "engine_cache?": {
        **dict.fromkeys(("looked_up_tokens?", "engines_counted?", "combined_hit_ratio?"), RATIO),
        **dict.fromkeys(("local_hit_ratio?", "external_hit_ratio?"), RATIO),
        "source?": NAME,
        "engines?": Each(dict, ANY),
        "unread?": NAMED_TEXTS,
        "layouts?": NAMED_TEXTS,
    },
    "known_text_ratio?": RATIO,
    "client": {"duration_s": NUMBER},
    "degraded?": TEXTS,
}
_NAMES = ("request_id", "sent_as", "session_id", "route_class", "policy", "error")
_PLACES = ("prefill_instance", "decode_instance", "offload_decision_reason", "output_digest")
ROW: Form = {
    "outcome": TEXT,
    **{f"{name}?": NAME for name in (*_NAMES, *_PLACES)},
    **dict.fromkeys(("status?", "refusals?", "chunks?"), RATIO),
    "time_scale?": POSITIVE,
}
ROW_WITH: dict[str, Form] = {
    "sent_s": {"end_s": NUMBER},
    "first_token_s": {"end_s": NUMBER},
    "refusals": {"attempts": NUMBER, "retry_waits_s": Each(list, NUMBER)},
    "phases_s": {"phases_s": Each(dict, NOT_NEGATIVE)},
    **{name: {name: Each(list, NUMBER)} for name in ("itl_s", "retry_waits_s")},
}
"""What a row must have where it has this field."""
