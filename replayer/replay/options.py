"""The command line of `replay`: its options, and one-line errors for bad values.

Values are checked only here; all other modules rely on them.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from replayer.arguments import (
    OneLineParser,
    count,
    names,
    not_negative,
    positive,
    positive_count,
)
from replayer.replay.retries import NEVER, Retries
from replayer.trace.loaders import LOADERS

SLO_METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class SessionSample:
    """Number of sessions to take: a count, or a ratio up to 1."""

    count: int | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options of one replay."""

    trace: Path
    format: str | None
    target: str
    engines: tuple[str, ...]
    model: str | None
    api_key: str | None
    endpoint: str
    chat: str
    prompt: str
    mode: str
    concurrency: int
    ramp_s: float
    speedup: float
    time_scale: float
    think_cap_s: float | None
    window_s: tuple[float, float] | None
    sample: SessionSample | None
    limit: int | None
    max_input_tokens: int | None
    max_output_tokens: int | None
    seed: int | None
    out: Path
    proxy_log: Path | None
    slo_s: dict[str, float]
    request_timeout_s: float
    retry_503: Retries
    max_failures: int
    save_text: bool
    progress: bool
    report: bool


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to an option's help, unless it is empty, zero or a flag's."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.default or isinstance(action.default, bool | Retries):
            return action.help
        return super()._get_help_string(action)


def window(text: str) -> tuple[float, float]:
    """Read `a:b` in seconds of the trace's own clock; either may be left out."""
    start, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"must be START:END in seconds, not {text!r}")
    start_s = not_negative(start) if start else 0.0
    end_s = not_negative(end) if end else float("inf")
    if end_s <= start_s:
        raise argparse.ArgumentTypeError(f"END must be greater than START, not {text!r}")
    return start_s, end_s


def sample(text: str) -> SessionSample:
    """Read a number of sessions, or a ratio such as 0.1."""
    if text.isdecimal():
        return SessionSample(count=positive_count(text))
    ratio = positive(text)
    if ratio > 1:
        raise argparse.ArgumentTypeError(f"must be an integer or a ratio up to 1.0, not {text!r}")
    return SessionSample(ratio=ratio)


def slo(text: str) -> dict[str, float]:
    """Read `ttft:2,tpot:0.05`: the limits in seconds that a good request must keep."""
    limits = {}
    for part in text.split(","):
        name, _colon, limit = part.partition(":")
        if name not in SLO_METRICS:
            raise argparse.ArgumentTypeError(
                f"must be like ttft:2,tpot:0.05 with names {', '.join(SLO_METRICS)}, not {text!r}"
            )
        limits[name] = positive(limit)
    return limits


def url(text: str) -> str:
    """Read the base address of the proxy or of one instance."""
    text = text if "://" in text else f"http://{text}"
    if not text.startswith(("http://", "https://")) or not text.partition("://")[2]:
        raise argparse.ArgumentTypeError(f"must be http(s)://HOST:PORT, not {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def urls(text: str) -> tuple[str, ...]:
    """Read base addresses joined by commas."""
    return tuple(url(one) for one in names(text))


def retries(text: str) -> Retries:
    """Read how often to send again what got a 503: a number, or the word backoff."""
    if text == "backoff":
        return Retries.backoff()
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of retries or backoff, not {text!r}")
    return Retries(count(text))


def readable_log(text: str) -> Path:
    """Read the path of a log that exists, or that may be created during the run."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, not a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.exists() and not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be read: permission denied")
    return path


def build_parser() -> argparse.ArgumentParser:
    """Declare every option with its unit and default."""
    parser = OneLineParser(
        prog="replay",
        description="Replay a trace against a proxy or one engine and report TTFT, TPOT "
        "and E2E. Exit status: 0 all requests ok (see --max-failures); 1 "
        "failures, nothing sent, or results not written; 2 bad input or "
        "unreachable target; 130 interrupted (measured results are written).",
        epilog="About a trace's file, without sending: replay validate TRACE, "
        "replay analyze-trace TRACE, replay export TRACE (a file of such a name: ./validate). "
        "About a request log: replay what-if LOG.",
        formatter_class=Formatter,
    )
    parser.add_argument("trace", type=Path, help="trace file, one request per line, plain or gzip")
    _add_target(parser)
    _add_pace(parser)
    _add_selection(parser)
    _add_report(parser)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    add = group.add_argument
    add("--target", type=url, default="http://127.0.0.1:8000", help="base address")
    add("--engines", type=urls, default=(), metavar="URL,URL",
        help="addresses of the engines, to read their prefix cache counters before "
        "and after the run (default: the target's, or its instances')")  # fmt: skip
    add("--model", help="model name (default: the first of GET /v1/models)")
    add("--api-key", help="bearer token")
    add("--endpoint", choices=("chat", "completions"), default="chat", help="API to use")
    add("--chat-form", dest="chat", choices=("turns", "flat"), default="turns",
        help="messages cut where earlier turns ended, or one user message")  # fmt: skip
    add("--prompt-form", dest="prompt", choices=("words", "ids"), default="words",
        help="completions only: text or token ids")  # fmt: skip
    add("--request-timeout", dest="request_timeout_s", type=not_negative, default=600.0,
        help="seconds for one attempt; 0: none")  # fmt: skip
    add("--retry-503", type=retries, default=NEVER, metavar="N|backoff",
        help="N: retry a 503 up to N times, each after the answer's Retry-After "
        "(default: never). backoff: five tries, min(60, 2**attempt + U(0,1)) "
        "of the target's seconds apart (attempt from 0). Latency counts from "
        "the first try.")  # fmt: skip


def _add_pace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pace")
    add = group.add_argument
    add("--mode", choices=("open", "sessions"), default="open",
        help="open: by timestamp, dependent turns not before their dependencies end. sessions: a "
        "fixed number of slots, each runs whole sessions one after another.")  # fmt: skip
    add("--concurrency", type=positive_count, default=4, help="slots of mode sessions")
    add("--ramp", dest="ramp_s", type=not_negative, default=0.0, metavar="SECONDS",
        help="mode sessions: spread the start of the slots over this time, in "
        "seconds of the trace")  # fmt: skip
    add("--speedup", type=positive, default=1.0, help="divides timestamps and delays")
    add("--time-scale", type=positive, default=1.0, metavar="S",
        help="clock of the target: S times real time, as engine-sim --speed S. "
        "Latencies, durations and rates are reported in the target's seconds; "
        "requests.jsonl keeps them as measured.")  # fmt: skip
    add("--think-cap", dest="think_cap_s", type=not_negative,
        help="longest delay between turns, in seconds of the trace. In mode open, "
        "turns with a delay then ignore their timestamp.")  # fmt: skip


def _add_selection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("selection")
    add = group.add_argument
    add("--format", choices=tuple(LOADERS), help="row format (default: detected in the first row)")
    add("--window", dest="window_s", type=window, metavar="A:B",
        help="only requests with timestamps from A up to B, in seconds of the trace")  # fmt: skip
    add("--sample-sessions", dest="sample", type=sample, metavar="N|RATIO",
        help="only N whole sessions, or this part of them, chosen by --seed")  # fmt: skip
    add("--limit", type=positive_count, help="only the first LIMIT requests")
    add("--max-input", dest="max_input_tokens", type=positive_count, metavar="TOKENS",
        help="end a session before its first longer prompt")  # fmt: skip
    add("--max-output", dest="max_output_tokens", type=positive_count, metavar="TOKENS",
        help="cut longer answers")  # fmt: skip
    add("--seed", type=count, metavar="N",
        help="fix the sample and the prompts' words, so that a run can be repeated "
        "on fresh engines; literal text is sent unchanged. Default: sample 0, "
        "and new words in every run, which no engine has cached.")  # fmt: skip


def _add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    add = group.add_argument
    add("--out", type=Path, default=Path("replay-out"),
        help="folder for summary.json, requests.jsonl and report.html")  # fmt: skip
    add("--proxy-log", type=readable_log, help="the proxy's --request-log, joined by request id")
    add("--goodput", dest="slo_s", type=slo, default={}, metavar="SLO",
        help="limits of a good request in the target's seconds, such as "
        "ttft:2,tpot:0.05")  # fmt: skip
    add("--max-failures", type=count, default=0,
        help="most requests not ok (rejected, failed, skipped) for exit status 0 "
        "(default: 0). With more, and none ok among the first answers, the run "
        "stops.")  # fmt: skip
    add("--save-text", action="store_true",
        help="keep the answers' text in requests.jsonl, not only its hash")  # fmt: skip
    add("--no-progress", dest="progress", action="store_false", help="no live display")
    add("--no-html", dest="report", action="store_false", help="no report.html")


def parse_options(arguments: Sequence[str] | None = None) -> ReplayOptions:
    """Read the command line; a wrong one ends the process with status 2."""
    parser = build_parser()
    options = ReplayOptions(**vars(parser.parse_args(arguments)))
    if options.prompt == "ids" and options.endpoint != "completions":
        parser.error("argument --prompt-form: ids needs --endpoint completions")
    if options.ramp_s and options.mode != "sessions":
        parser.error("argument --ramp: needs --mode sessions")
    return replace(options, retry_503=replace(options.retry_503, time_scale=options.time_scale))
