"""Hostile requests of every class, and engines that take their bait, each in a process of its own.

    python -m bench.faults.hostile attack URL RATE
    python -m bench.faults.hostile engine

An attack sends RATE requests per second while the last line on its stdin is `on`, none after
`off`, and prints at the end of its stdin what became of each class, as JSON. An engine prints its
URL, serves until its stdin ends, and is as hostile as an engine can be (`Lies`) while the last line
on its stdin is `on`. Processes of their own: what a large body costs its sender or
its engine must not be taken for what it costs the proxy's other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
import uvloop
from aiohttp import web

from replayer.simulator import api, host
from tests.bad_input.cases import Case, cases
from tests.chaos.client import connect, exchange, request
from tests.support.harness import apart, chat, spend, words

POISON = "poison-500"
"""A prompt with this word makes an engine answer 500, each time."""
MOST_AT_ONCE = 64
SILENT_S = 20.0
NEST_BYTES = 12_000_000
MANY_IDS = 160_000
HALF_BYTES, HELD_S = 4 << 20, 5.0
HEAVY_LINES, DEEP = 260, 300
PROMPT_WORDS = 50
"""Of every request that an engine serves, hostile or not: a longer one's prefill would hold up the
others on its engine, which no proxy can prevent and nobody need be hostile for."""
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MODEL = "sim-8b"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BaitedApi(api.Api):
    """vLLM's HTTP with what clients can provoke: redirections, 500s, 404s, echoes of theirs."""

    def app(self) -> web.Application:
        """The simulator's application, behind `_bait` and `LIES`."""
        made = super().app()
        made.middlewares.extend([LIES.told, _bait])
        return made


class Lies:
    """What an engine says to cost others more than itself: documents that take long, empty answers.

    Metrics of a megabyte in lines as long as are read, a model's card too deep to be written anew,
    and every eighth answer has nothing in it.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._posts = 0
        labels = ",".join(f'a{i}=""' for i in range(480))
        self._metrics = b"vllm:num_requests_running{%b} 0\n" % labels.encode() * HEAVY_LINES
        deep = b'{"a":' * DEEP + b"1" + b"}" * DEEP
        self._models = b'{"object":"list","data":[{"id":"%b","x":%b}]}' % (MODEL.encode(), deep)

    @web.middleware
    async def told(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer, or have it answered."""
        if not self.is_on:
            return await handler(request)
        if request.path == "/v1/models":
            return web.Response(body=self._models, content_type="application/json")
        if request.path == "/metrics":
            answer = await handler(request)
            assert isinstance(answer, web.Response)
            assert isinstance(answer.body, bytes)
            return web.Response(body=answer.body + self._metrics, content_type="text/plain")
        if request.method == "POST":
            self._posts += 1
            if self._posts % 8 == 0:
                return _answer({})
        return await handler(request)


LIES = Lies()


@web.middleware
async def _bait(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.method != "POST":
        return await handler(request)
    if request.path.endswith("/"):
        raise web.HTTPTemporaryRedirect(request.path.rstrip("/"))
    raw = await request.read()
    if POISON.encode() in raw:
        return _error(500, "Internal server error")
    if request.path == RESPONSES:
        body = orjson.loads(raw)
        if previous := body.get("previous_response_id"):
            return _error(404, f"Response with id '{previous}' not found.")
        usage = {"input_tokens": 9, "output_tokens": 1, "total_tokens": 10}
        return _answer({"object": "response", "tools": body.get("tools", []), "usage": usage})
    return await handler(request)


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "NotFoundError", "param": "model", "code": status}
    return _answer({"error": error}, status)


def _answer(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


async def serve_engine() -> None:
    """One engine, until stdin ends."""
    host.Api = BaitedApi  # type: ignore[attr-defined]
    async with host.SimFleet(1, speed=2.0) as fleet:
        _say(fleet.engines[0].url)
        while line := await asyncio.to_thread(sys.stdin.readline):
            LIES.is_on = line.strip() == "on"


@dataclass
class Attack:
    """The proxy that is attacked, the dice of the attack, and the model that its engines serve."""

    url: str
    dice: random.Random
    model: str = MODEL

    async def one(self, name: str) -> str:
        """Send a request of a class; what became of it."""
        try:
            return await CLASSES[name](self)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            return type(error).__name__

    def encoded(self, body: object) -> bytes:
        """A body as bytes, for the model that is served."""
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return raw if self.model == MODEL else raw.replace(MODEL.encode(), self.model.encode())

    async def post(
        self, body: object, path: str = CHAT, headers: dict[str, str] | None = None
    ) -> str:
        """Send a body; the status of the answer."""
        raw = self.encoded(body)
        got = await exchange(self.url, request(raw, headers or {}, path))
        return str(got.status) if got.is_clean else "cut"

    async def send(self, data: bytes) -> str:
        """Send bytes as they are; the status of the first answer."""
        return str((await exchange(self.url, data)).status)


@cache
def _nested() -> bytes:
    one = b"[" * 100 + b"]" * 100
    many = b",".join([one] * (NEST_BYTES // len(one)))
    return b'{"model":"sim-8b","messages":[{"role":"user","content":"x"}],"x":[%s]}' % many


@cache
def _gzipped() -> bytes:
    return gzip.compress(b" " * (1 << 28))


@cache
def _tricks() -> list[Case]:
    """Requests whose framing is ambiguous; none that waits for a deadline."""
    return [case for case in cases() if case.name.startswith(("length and coding", "chunks"))]


async def nested(on: Attack) -> str:
    return await on.post(_nested())


async def deep(on: Attack) -> str:
    return await on.post(b'{"model":"sim-8b","x":%s%s}' % (b"[" * 100_000, b"]" * 100_000))


async def slash(on: Attack) -> str:
    path = on.dice.choice((COMPLETIONS, CHAT)) + "/"
    return await on.post({"model": MODEL, "prompt": "x", "max_tokens": 1}, path)


async def poison(on: Attack) -> str:
    return await on.post(chat(f"{POISON} {on.dice.random()}"))


async def worded_404(on: Attack) -> str:
    said = f"The model `{MODEL}` does not exist."
    body = {"model": MODEL, "input": "x", "previous_response_id": said}
    return await on.post(body, RESPONSES)


async def truncated(on: Attack) -> str:
    text = words(PROMPT_WORDS)
    body = {"model": MODEL, "prompt": text, "max_tokens": 64, "truncate_prompt_tokens": -1}
    return await on.post(body, COMPLETIONS)


async def planted_usage(on: Attack) -> str:
    planted = {"prompt_tokens": 1, "input_tokens": 1, "completion_tokens": 10**8}
    tool = {"type": "function", "name": "f", "parameters": {"usage": planted}, "usage": planted}
    return await on.post({"model": MODEL, "input": words(500), "tools": [tool]}, RESPONSES)


async def token_ids(on: Attack) -> str:
    ids = [on.dice.randrange(1000)] * MANY_IDS
    body = {"model": MODEL, "prompt": ids, "max_tokens": 2, "return_token_ids": True}
    return await on.post(body | {"logprob_token_ids": ids[:1000]}, COMPLETIONS)


async def odd_query(on: Attack) -> str:
    n = on.dice.choice(("9" * 5000, "-1", "%00", "\u0663"))
    return await on.send(request(None, {}, f"/decisions?n={n}", "GET"))


async def silence(on: Attack) -> str:
    connection = await connect(on.url)
    await spend(SILENT_S)
    connection.close("RST")
    return "left"


async def turned_text(on: Attack) -> str:
    odd = "\u202eabc\u2066\u200f\x1b[31m"
    head = {"X-Session-ID": odd, "X-Request-Id": odd}
    return await on.post(chat("x", user=odd, stream=False) | {"model": f"m{odd}"}, headers=head)


async def steering(on: Attack) -> str:
    params = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 1}
    head = {
        "X-data-parallel-rank": "3",
        "X-Request-Priority": "high",
        "X-Prefiller-Url": "http://x",
    }
    return await on.post(chat("x", kv_transfer_params=params, cache_salt="a"), headers=head)


async def cut_request(on: Attack) -> str:
    connection = await connect(on.url)
    connection.send(request(on.encoded(chat(words(PROMPT_WORDS), max_tokens=96)), {}))
    await spend(on.dice.random() * 0.1)
    connection.close("RST")
    return "left"


async def wrong_length(on: Attack) -> str:
    raw = on.encoded(chat("x"))
    head = {"Content-Length": str(len(raw) + on.dice.choice((-10, 10, 10**12)))}
    connection = await connect(on.url)
    connection.send(request(raw, head))
    await spend(0.05)
    connection.close()
    return "left"


async def smuggled(on: Attack) -> str:
    case = on.dice.choice(_tricks())
    connection = await connect(on.url)
    connection.send(case.bytes)
    await spend(0.2)
    connection.close()
    return "left"


async def gzipped(on: Attack) -> str:
    return await on.post(_gzipped(), headers={"Content-Encoding": "gzip"})


async def dripped(on: Attack) -> str:
    raw = request(on.encoded(chat("x")), {})
    connection = await connect(on.url)
    await apart(connection.writer, [raw[i : i + 1] for i in range(40)], 0.1)
    connection.close("RST")
    return "left"


async def many_names(on: Attack) -> str:
    head = {"X-Session-ID": f"{on.dice.random()}" * 10}
    return await on.post(chat("x") | {"model": f"model-{on.dice.random()}"}, headers=head)


async def odd_numbers(on: Attack) -> str:
    value = on.dice.choice((b"1e308", b"-1", b"NaN", b"1" * 400, b'"7"', b"true", b"[]"))
    field = on.dice.choice((b"max_tokens", b"n", b"priority", b"temperature", b"stream"))
    messages = b'"messages":[{"role":"user","content":"x"}]'
    return await on.post(b'{"model":"sim-8b",%s,"%s":%s}' % (messages, field, value))


async def nobodys_response(on: Attack) -> str:
    method = on.dice.choice(("GET", "DELETE"))
    return await on.send(request(None, {}, f"{RESPONSES}/resp_{on.dice.random()}", method))


async def unfinished(on: Attack) -> str:
    """A body of which the half comes, and then nothing for a while."""
    connection = await connect(on.url)
    head = request(b"", {"Content-Length": str(2 * HALF_BYTES)})
    connection.send(head + b" " * HALF_BYTES)
    await spend(HELD_S)
    connection.close("RST")
    return "left"


async def refused_session(on: Attack) -> str:
    """A session of its own, of a request that each engine refuses."""
    head = {"X-Session-ID": f"refused-{on.dice.random()}"}
    return await on.post(chat("x", max_tokens=-1), headers=head)


async def stored(on: Attack) -> str:
    body = {"model": MODEL, "input": "x", "request_id": f"resp_{on.dice.random()}"}
    raw = orjson.dumps(body | {"store": True})
    return await on.post(raw[:-1] + b',"request_id":["a"]}', RESPONSES)


async def tiny_chunks(on: Attack) -> str:
    """Requests behind each other, whose bodies come in thousands of chunks."""
    raw = on.encoded(chat(words(PROMPT_WORDS)))
    head = b"POST %b HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n" % CHAT.encode()
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in raw) + b"0\r\n\r\n"
    return await on.send((head + b"Transfer-Encoding: chunked\r\n\r\n" + body) * 4)


async def repeated_stops(on: Attack) -> str:
    """Stop strings that many places of a text may begin."""
    stops = ["a" * 255 + chr(ord("b") + i) for i in range(16)]
    return await on.post(chat("a" * 1000, stop=stops, max_tokens=64))


CLASSES: dict[str, Callable[[Attack], Awaitable[str]]] = {
    "nested body, 12 MB": nested,
    "deep JSON": deep,
    "trailing slash": slash,
    "poison prompt": poison,
    "404 worded by the client": worded_404,
    "truncate_prompt_tokens -1": truncated,
    "planted usage": planted_usage,
    "160,000 token ids": token_ids,
    "odd /decisions query": odd_query,
    "silent connection": silence,
    "turned text in names": turned_text,
    "steering fields": steering,
    "cut request": cut_request,
    "wrong Content-Length": wrong_length,
    "smuggling pair": smuggled,
    "gzip bomb": gzipped,
    "dripping request": dripped,
    "invented models, sessions": many_names,
    "odd numbers": odd_numbers,
    "nobody's response": nobodys_response,
    "unfinished body": unfinished,
    "session of a refused request": refused_session,
    "stored response, named twice": stored,
    "tiny chunks": tiny_chunks,
    "stops of one letter": repeated_stops,
}


class Attacker:
    """Sends requests of all classes in turn, in a new order each round."""

    def __init__(self, url: str, rate: float, seed: int) -> None:
        self._attack = Attack(url, random.Random(seed))
        self._rate = rate
        self.is_on = asyncio.Event()
        self.ends: dict[str, Counter[str]] = defaultdict(Counter)
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self) -> None:
        """Attack while it is on; ends by being cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                names = list(CLASSES)
                self._attack.dice.shuffle(names)
                for name in names:
                    await self.is_on.wait()
                    group.create_task(self._one(name))
                    await spend(self._attack.dice.expovariate(self._rate))

    async def _one(self, name: str) -> None:
        async with self._places:
            end = await self._attack.one(name)
        self.ends[name][end] += 1


async def attack(url: str, rate: float) -> None:
    """Attack as stdin says; prints what became of it."""
    _nested(), _gzipped(), _tricks()
    attacker = Attacker(url, rate, seed=14)
    running = asyncio.create_task(attacker.run())
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "on":
            attacker.is_on.set()
        else:
            attacker.is_on.clear()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    _say(orjson.dumps({name: dict(attacker.ends[name]) for name in CLASSES}).decode())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(args: list[str]) -> Any:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    if args[:1] == ["attack"]:
        return uvloop.run(attack(args[1], float(args[2])))
    return uvloop.run(serve_engine())


if __name__ == "__main__":
    main(sys.argv[1:])
