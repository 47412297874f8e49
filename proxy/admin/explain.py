"""The command `cache-proxy explain REQUEST_ID`: why a request went where it went.

It asks a running proxy for the decision, or reads a request log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

import aiohttp
import orjson

from proxy.config.secrets import secret_text
from proxy.protocol.errors import DEFECTS
from proxy.telemetry.explain import Explained
from proxy.telemetry.log import printable

EXIT_PROXY, EXIT_INPUT, EXIT_INTERRUPTED = 1, 2, 130
TARGET = "http://127.0.0.1:8000"
TOKEN = "CACHE_PROXY_ADMIN_TOKEN"
"""The environment variable with the proxy's `--admin-token`, as the proxy itself reads it."""
ANSWER_S = 10.0
"""Longest wait for the proxy's answer."""
ANSWER_BYTES = 4 << 20
LINE_BYTES = 1 << 20
"""A longer line of a log is none of ours."""
_ID_CHARS = 256
Json = dict[str, Any]


class InputError(Exception):
    """What was asked for cannot be told; one line says why."""


class UnreachableError(Exception):
    """No proxy answers there."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print why a request went where it went. Exit 1: no proxy answers; 2: wrong input."""
    try:
        asked = _parser().parse_args(list(argv))
        sys.stdout.write(_explained(_record(asked, environ), asked))
        sys.stdout.flush()
    except (InputError, ValueError) as error:
        return _fails(str(error), EXIT_INPUT)
    except UnreachableError as error:
        return _fails(str(error), EXIT_PROXY)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _explained(record: Json, asked: argparse.Namespace) -> str:
    """What is printed of a record; raises ValueError, and InputError for one of another form."""
    try:
        explained = Explained(record)
        if not asked.json:
            return explained.text(asked.policy)
        rows = orjson.dumps(explained.as_json(asked.policy), option=orjson.OPT_INDENT_2)
    except ValueError:
        raise
    except (*DEFECTS, OSError) as error:  # OSError: a time past those that the system knows
        raise InputError(
            "its record has a field of another form, which none of ours has"
        ) from error
    return f"{rows.decode()}\n"


def _fails(why: str, status: int) -> int:
    sys.stderr.write(f"cache-proxy explain: {printable(why)}\n")
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see cache-proxy explain --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cache-proxy explain",
        description="Say why a request went where it went, and what else it could have cost.",
        epilog="Exit status: 0, or 1 where no proxy answers, or 2 where the input is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="as in X-Request-Id")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="also say what this --offload-policy would have chosen; may be repeated",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--log", metavar="FILE", type=Path, help="a request log to read")
    source.add_argument(
        "--target",
        metavar="URL",
        default=TARGET,
        help=f"a running proxy's admin paths (default: {TARGET})",
    )
    parser.add_argument(
        "--admin-token",
        metavar="TEXT",
        help=f"the proxy's --admin-token, or @FILE that holds it (default: {TOKEN})",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def _record(asked: argparse.Namespace, environ: Mapping[str, str]) -> Json:
    if not 0 < len(asked.request_id) <= _ID_CHARS:
        raise InputError(f"REQUEST_ID: 1 to {_ID_CHARS} characters")
    if asked.log is not None:
        return logged(asked.log, asked.request_id)
    token = asked.admin_token or environ.get(TOKEN) or None
    try:
        token = secret_text(token)
    except ValueError as error:
        raise InputError(f"--admin-token: {error}") from error
    return asyncio.run(told(asked.target, asked.request_id, token))


def logged(path: Path, request_id: str) -> Json:
    """The last record of a request in a log; raises InputError."""
    wanted = orjson.dumps(request_id)
    found, count = None, 0
    try:
        with path.open("rb") as file:
            for line in _lines(file.readline):
                count += 1
                if wanted in line and (row := _row(line)) is not None:
                    found = row if row.get("request_id") == request_id else found
    except OSError as error:
        raise InputError(f"--log {path}: {error.strerror}") from error
    if found is None:
        raise InputError(f"--log {path}: none of its {count} lines is of request {request_id}")
    return found


def _lines(readline: Any) -> Iterator[bytes]:
    return iter(lambda: readline(LINE_BYTES), b"")


def _row(line: bytes) -> Json | None:
    """A line as an object; None where it is none, as one that was cut."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


async def told(target: str, request_id: str, token: object) -> Json:
    """A running proxy's record of a request; raises InputError and UnreachableError."""
    parts = urlsplit(target)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise InputError("--target: http://HOST:PORT or https://HOST:PORT, without a user")
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    url = f"{base}/decisions/{quote(request_id, safe='')}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limit = aiohttp.ClientTimeout(total=ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=headers) as http,
            http.get(url, allow_redirects=False) as answer,
        ):
            body, status = await _bounded(answer), answer.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UnreachableError(_unreachable(error, base)) from error
    row = _row(body)
    if status != 200 or row is None:
        raise InputError(f"--target {target}: {_refusal(status, row)}")
    return row


def _unreachable(error: Exception, base: str) -> str:
    """Why nothing answers, in one line."""
    if not isinstance(error, aiohttp.ClientConnectorError):
        return f"--target {base}: {str(error) or f'no answer within {ANSWER_S:g} s'}"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"cannot connect to {base}: TLS: {error.os_error}"
    cause = error.os_error
    number = cause.errno or 0  # negative for names that do not resolve
    reason = os.strerror(number) if number > 0 else cause.strerror or str(cause)
    return f"cannot connect to {base}: {reason}"


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > ANSWER_BYTES:
            raise InputError(f"the answer is over {ANSWER_BYTES} bytes")
    return body


def _refusal(status: int, row: Json | None) -> str:
    """Why a proxy, or whatever answers there, has told nothing."""
    error = (row or {}).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        return f"status {status}: it is no cache-proxy, or its admin paths are at another port"
    hint = f" (--admin-token, or {TOKEN})" if status == 401 else ""
    return f"{message[:300]}{hint}"
