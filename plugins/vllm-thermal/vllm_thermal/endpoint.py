"""What `GET` and `PUT /plugins/thermal` answer: who may ask, what may be asked.

Apart from any web framework: `plugin.py` has it on vLLM's API server.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from vllm_thermal.control import Wish, WishError

PATH = "/plugins/thermal"
METHODS = ("GET", "PUT")
TOKEN = "VLLM_THERMAL_TOKEN"
OPEN = "VLLM_THERMAL_OPEN"
LEAST_TOKEN_BYTES = 16
MOST_BODY_BYTES = 64 << 10
ENGINE_S = 10.0
"""The engine answers between two steps; one that takes longer is stuck."""
Call = Callable[..., Awaitable[list[dict[str, Any]]]]
"""Calls a method of every engine by its name; each answers with a dict."""


class AccessError(Exception):
    """The path is not protected as it must be; the text is one line."""


class Door:
    """Lets in requests with the token: of it only the digest is kept."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._digest = _digest(environment)

    def lets_in(self, authorization: str) -> bool:
        """Whether a request with this header may go on; takes as long for any wrong token."""
        if self._digest is None:
            return True
        scheme, _, token = authorization.partition(" ")
        given = sha256(token.strip().encode(errors="surrogateescape")).digest()
        return hmac.compare_digest(given, self._digest) and scheme.lower() == "bearer"


def _digest(environment: Mapping[str, str]) -> bytes | None:
    """Of the token in VLLM_THERMAL_TOKEN; None where VLLM_THERMAL_OPEN=1 says that there is none.

    Raises AccessError: vLLM's API key does not guard `/plugins`, so that nothing else would.
    """
    text = environment.get(TOKEN, "")
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise AccessError(f"{TOKEN} names a file that cannot be read: {error}") from error
        if not text:
            raise AccessError(f"{TOKEN} names a file that is empty")
    if len(text.encode()) >= LEAST_TOKEN_BYTES:
        return sha256(text.encode()).digest()
    if text:
        raise AccessError(f"{TOKEN} is shorter than {LEAST_TOKEN_BYTES} bytes")
    if environment.get(OPEN) != "1":
        raise AccessError(f"{TOKEN} is not set: set it, or {OPEN}=1 to let in everyone")
    return None


async def answered(call: Call, method: str, body: bytes) -> tuple[int, Any]:
    """Status and answer to a request that was let in: a list with one entry for each engine."""
    if method != "PUT":
        return await _ask(call, "thermal_get")
    if len(body) > MOST_BODY_BYTES:
        return error(413, f"the body is longer than {MOST_BODY_BYTES} bytes")
    try:
        fields = msgspec.json.decode(body)
        Wish().changed(fields)
    except (msgspec.DecodeError, UnicodeDecodeError) as why:
        return error(400, f"the body is not JSON: {why}")
    except WishError as why:
        return error(400, str(why))
    return await _ask(call, "thermal_set", fields)


def error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    """An error in the form of vLLM's own."""
    return status, {"error": {"message": message, "type": "thermal", "code": status}}


async def _ask(call: Call, method: str, *arguments: Any) -> tuple[int, Any]:
    try:
        async with asyncio.timeout(ENGINE_S):
            answers = await call(method, *arguments)
    except TimeoutError:
        return error(504, f"the engine has not answered in {ENGINE_S:g} s")
    except Exception as why:  # noqa: BLE001 - vLLM raises Exception itself for an engine's fault
        return error(503, f"the engine has not answered: {why}")
    refused = next((a for a in answers if "refused" in a), None)
    return (200, answers) if refused is None else error(refused["refused"], refused["why"])
