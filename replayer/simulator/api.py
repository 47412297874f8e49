"""vLLM's HTTP API for one simulated engine: routes, streaming, errors, cancellation.

As with vLLM, a stream gets status 200 and its headers at once, and its first bytes with the first
token. A stream of /v1/responses reports its creation at once. A later error is an event in the
stream. When a client leaves, its requests are aborted. The handlers hold no state; requests are in
the engine model.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from replayer.engine.tokens import detokenize
from replayer.engine.types import Job, RemoteKv, SimRequest
from replayer.simulator.driver import EngineDriver, LiveJob
from replayer.simulator.faults import Faults
from replayer.simulator.messages import MessagesAnswer, MessagesError
from replayer.simulator.messages import as_chat as chat_of_messages
from replayer.simulator.metrics import EngineMetrics
from replayer.simulator.openai.agent import next_step
from replayer.simulator.openai.agent_answers import ChatStep, MessagesStep, ResponsesStep
from replayer.simulator.openai.answers import Answer
from replayer.simulator.openai.embeddings import parse_embedding
from replayer.simulator.openai.errors import ApiError, json_response, like_vllm, model_card
from replayer.simulator.openai.kv_params import handing_of, nixl_answer
from replayer.simulator.openai.requests import (
    Ask,
    RequestLimits,
    check_model,
    parse_ask,
    parse_body,
    prompt_of,
    scripted,
)
from replayer.simulator.openai.responses import ResponsesAnswer, ResponseStore
from replayer.simulator.options import SimOptions

log = logging.getLogger(__name__)
VERSION = "0.33.0"
_MAX_BODY_BYTES = 256 * 2**20
_MUCH = b',"prompt_token_ids":[%b0]' % (b"0," * 2**20)
"""Members that make an answer longer than anybody should read."""
_BUSY = "The engine is currently busy and cannot accept new requests. Please try again later."
Release = Callable[[RemoteKv], None]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """The parts of the engine's process that the handlers use.

    `release` makes a sender unpin KV that will not be fetched. `crash` kills the engine. `address`
    returns the host and port for pulls of its KV. `kv_event_sources` returns the addresses of its
    KV events, or None.
    """

    engine_id: str
    release: Release
    crash: Callable[[], None]
    address: Callable[[], tuple[str, int]]
    kv_event_sources: Callable[[], dict[str, Any]] | None = None
    dcgm: Callable[[], str] | None = None


class Api:
    """The handlers of one engine."""

    def __init__(
        self,
        options: SimOptions,
        driver: EngineDriver,
        metrics: EngineMetrics,
        process: EngineProcess,
        faults: Faults,
    ) -> None:
        self._options = options
        self._driver = driver
        self._metrics = metrics
        self._process = process
        self._faults = faults
        self._dcgm_text = ""
        self._responses = ResponseStore()
        self._limits = RequestLimits(
            model=options.model,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            natural_length=options.natural_length,
            eos_with_limit=options.eos_with_limit,
            connector=options.kv_connector,
        )
        # A message must have a limit, so that it says nothing of the length that is wanted.
        self._ends_early = replace(self._limits, eos_with_limit=True)

    def app(self) -> web.Application:
        """Make the aiohttp application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[like_vllm])
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/v1/responses", self.responses)
        app.router.add_get("/v1/responses/{id}", self.response)
        app.router.add_post("/v1/responses/{id}/cancel", self.cancel_response)
        app.router.add_post("/v1/messages", self.messages)
        app.router.add_post("/v1/messages/count_tokens", self.count_tokens)
        app.router.add_post("/v1/embeddings", self.embeddings)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ping", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", self.metrics)
        if self._process.kv_event_sources is not None:
            app.router.add_get("/kv_event_sources", self.kv_event_sources)
        if self._process.dcgm is not None:
            app.router.add_get("/dcgm/metrics", self.dcgm)
        app.router.add_post("/sim/faults", self.faults)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = parse_body(await request.read())
        return await self._generate(request, body, chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = parse_body(await request.read())
        answer_of = Answer if self._options.tool_calls is None else ChatStep
        return await self._generate(request, body, chat=True, answer_of=answer_of)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        body = parse_body(await request.read())
        chat = self._responses.as_chat(body)

        def answer_of(ask: Ask, request_id: str, created_s: int) -> Answer:
            keep = partial(self._responses.keep, messages=chat["messages"])
            limit = chat["max_tokens"] or self._limits.max_model_len - ask.prompt_tokens
            told = body | {"max_output_tokens": limit}
            kind = ResponsesAnswer if ask.step is None else ResponsesStep
            return kind(ask, request_id, created_s, told, keep)

        return await self._generate(request, chat, chat=True, answer_of=answer_of)

    async def response(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{id}."""
        return json_response(self._responses.get(request.match_info["id"]))

    async def cancel_response(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel."""
        return json_response(self._responses.cancel(request.match_info["id"]))

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        chat = chat_of_messages(parse_body(await request.read()))
        answer_of = MessagesAnswer if self._options.tool_calls is None else MessagesStep
        try:
            return await self._generate(
                request, chat, chat=True, answer_of=answer_of, limits=self._ends_early
            )
        except ApiError as error:
            raise error if error.is_early else MessagesError(error) from error

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        chat = chat_of_messages(parse_body(await request.read()), counts_only=True)
        try:
            check_model(chat, self._limits.model)
            tokens = len(prompt_of(chat))
        except ApiError as error:
            raise error if error.is_early else MessagesError(error) from error
        counts = {"input_tokens": tokens}
        return json_response(counts | {"context_management": {"original_input_tokens": tokens}})

    async def embeddings(self, request: web.Request) -> web.Response:
        """POST /v1/embeddings; unlike a real engine this one serves them beside text."""
        embedding = parse_embedding(parse_body(await request.read()), self._limits)
        self._check_queue()
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        created_s = int(self._driver.unix_s(self._driver.now_s()))
        jobs = embedding.jobs(request_id)
        lives = [self._driver.submit(job, streams=False) for job in jobs]
        try:
            await self._ended(lives)
            return json_response(embedding.answer(request_id, created_s))
        finally:
            for live in lives:
                self._driver.abort(live)

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize, for a prompt or messages."""
        body = parse_body(await request.read())
        check_model(body, self._limits.model)
        ids = list(prompt_of(body))
        return json_response(
            {
                "count": len(ids),
                "max_model_len": self._limits.max_model_len,
                "tokens": ids,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize; ids of words outside the vocabulary come back as `<id>`."""
        body = parse_body(await request.read())
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(t, int) and t >= 0 for t in tokens):
            raise ApiError(400, "tokens: Input should be a list of token ids", "tokens")
        return json_response({"prompt": detokenize(tokens)})

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models."""
        created = int(self._driver.unix_s(0.0))
        card = model_card(self._limits.model, created, self._limits.max_model_len)
        return json_response({"object": "list", "data": [card]})

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health and /ping: an empty 200, whatever the load."""
        return web.Response()

    async def version(self, _request: web.Request) -> web.Response:
        """GET /version: the vLLM release that is modelled."""
        return json_response({"version": VERSION})

    async def metrics(self, _request: web.Request) -> web.Response:
        """GET /metrics."""
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.render(), headers=headers)

    async def dcgm(self, _request: web.Request) -> web.Response:
        """GET /dcgm/metrics: its GPUs, as dcgm-exporter tells them; with the fault `sensor`."""
        fault = self._faults.sensor
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "gone":
            return web.Response(status=503)
        if self._process.dcgm is not None and not (fault == "frozen" and self._dcgm_text):
            self._dcgm_text = self._process.dcgm()
        return web.Response(text="" if fault == "dropout" else self._dcgm_text)

    async def kv_event_sources(self, _request: web.Request) -> web.Response:
        """GET /kv_event_sources: where the KV events of each data-parallel rank are."""
        sources = self._process.kv_event_sources
        return json_response(sources() if sources is not None else {})

    async def faults(self, request: web.Request) -> web.Response:
        """POST /sim/faults: set fault switches, see `faults`."""
        try:
            self._faults.change(**parse_body(await request.read()))
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return json_response(self._faults.state())

    async def _generate(
        self,
        request: web.Request,
        body: dict[str, Any],
        *,
        chat: bool,
        answer_of: Callable[[Ask, str, int], Answer] = Answer,
        limits: RequestLimits | None = None,
    ) -> web.StreamResponse:
        try:
            ask = parse_ask(body, limits or self._limits, chat=chat)
            self._check_transfer(ask)
            self._check_queue()
        except ApiError as error:
            # vLLM >= 0.22 releases the KV of a decode leg that it rejects once it is parsed.
            if not error.is_early:
                self._release_kv(body)
            raise
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        if chat and self._options.tool_calls is not None:
            ask = scripted(ask, next_step(body, self._options.tool_calls, request_id))
        answer = answer_of(ask, request_id, int(self._driver.unix_s(self._driver.now_s())))
        lives = [self._driver.submit(job, streams=ask.stream) for job in _jobs(ask, request_id)]
        try:
            if ask.stream:
                return await self._stream(request, request_id, answer, lives, ask)
            whole = await self._whole(request_id, answer, lives)
            if ask.handing.send_as is not None:
                return await self._with_prefill_fault(whole)
            return whole
        finally:
            for live in lives:
                self._driver.abort(live)

    def _release_kv(self, body: dict[str, Any]) -> None:
        with suppress(ApiError):
            remote = handing_of(body, self._limits.connector).fetch
            if remote is not None and remote.engine_id != self._process.engine_id:
                self._process.release(remote)

    def _check_transfer(self, ask: Ask) -> None:
        fetch = ask.handing.fetch
        if ask.handing.is_fatal:
            self._process.crash()
            raise ApiError(500, "EngineCore encountered an issue. See stack trace.")
        if ask.handing.is_incomplete:
            log.warning("kv_transfer_params lacks a key: prefilling locally")
        if fetch is not None and fetch.engine_id == self._process.engine_id:
            message = "kv_transfer_params: remote_engine_id is this engine itself"
            raise ApiError(400, message, "kv_transfer_params")

    def _check_queue(self) -> None:
        limit = self._options.max_num_queued_reqs
        engine = self._driver.engine
        if limit is not None and len(engine.waiting) + len(engine.fetching) >= limit:
            self._metrics.rejected += 1
            raise ApiError(503, _BUSY)

    async def _ended(self, lives: Sequence[LiveJob]) -> list[SimRequest]:
        """Wait for the end of all requests; ApiError where the engine failed at one."""
        for live in lives:
            while live.request.finish_reason is None:
                await live.changed()
        requests = [live.request for live in lives]
        if any(request.finish_reason == "error" for request in requests):
            raise ApiError(500, "Internal server error")
        return requests

    async def _whole(self, request_id: str, answer: Answer, lives: list[LiveJob]) -> web.Response:
        requests = await self._ended(lives)
        return web.Response(
            body=answer.whole(requests, self._kv_params(requests[0])),
            content_type="application/json",
            headers={"X-Request-Id": request_id},
        )

    async def _with_prefill_fault(self, answer: web.Response) -> web.Response:
        """The answer to a prefill leg, or what the fault makes of it; its KV stays pinned."""
        if self._faults.prefill == "hang":
            await asyncio.get_running_loop().create_future()
        if self._faults.prefill == "error":
            raise ApiError(500, "Internal server error")
        if self._faults.prefill == "garbage":
            answer.body = b"{"
        if self._faults.prefill == "huge":
            assert isinstance(answer.body, bytes)
            answer.body = b"%b%b}" % (answer.body[:-1], _MUCH)
        return answer

    async def _apply_stream_fault(self, request: web.Request) -> bool:
        """Stall or cut a stream as the fault says; True if it must end early but normally."""
        transport, how = request.transport, self._faults.stream
        if how == "stall":
            await asyncio.get_running_loop().create_future()
        if transport is not None and how == "reset":
            transport.abort()
        if transport is not None and how == "close":
            transport.close()
        return how == "no_done"

    def _kv_params(self, request: SimRequest) -> dict[str, Any] | None:
        """Return the answer's kv_transfer_params: with NIXL, where a pinned leg's blocks are."""
        is_kept = request in self._driver.engine.sender.pinned
        if self._limits.connector != "nixl" or not is_kept:
            return None
        process, block = self._process, self._limits.block_size
        return nixl_answer(process.engine_id, process.address(), request, block)

    async def _stream(
        self, request: web.Request, request_id: str, answer: Answer, lives: list[LiveJob], ask: Ask
    ) -> web.StreamResponse:
        """A stream, or as much of it as the fault lets pass."""
        faults, transport = self._faults, request.transport
        if not faults.cuts or transport is None:
            return await self._streamed(request, request_id, answer, lives, ask)
        faults.cuts -= 1
        cut: Any = CutTransport(transport, faults.cut_bytes)
        request.protocol.transport = cut
        try:
            response = await self._streamed(request, request_id, answer, lives, ask)
            with suppress(ConnectionResetError):
                await response.write_eof()
        finally:
            if request.protocol.transport is cut:
                request.protocol.transport = transport  # for the connection's next request
        return response

    async def _streamed(
        self, request: web.Request, request_id: str, answer: Answer, lives: list[LiveJob], ask: Ask
    ) -> web.StreamResponse:
        response = await _begun(request, request_id, answer)
        sent = [0] * len(lives)
        opening = answer.opening()
        pending = list(range(len(lives)))
        with suppress(ConnectionResetError):  # the client has left
            while pending:
                await lives[pending[0]].changed()
                parts = [opening]
                opening = b""
                for index in list(pending):
                    live = lives[index]
                    finished = live.request.finish_reason
                    if finished == "error":
                        await response.write(answer.failure())
                        return response
                    if live.request.output_tokens > sent[index] or finished is not None:
                        parts.append(answer.delta(index, sent[index], live.request))
                        sent[index] = live.request.output_tokens
                    if finished is not None:
                        pending.remove(index)
                # Many tokens may come in one write: the fault also prevents a complete answer.
                beyond = sum(sent) - self._faults.stream_tokens
                is_faulty = self._faults.stream != "ok" and beyond >= (0 if pending else 1)
                if not pending and not is_faulty:
                    parts.append(answer.closing([live.request for live in lives]))
                await response.write(b"".join(parts))
                if is_faulty and await self._apply_stream_fault(request):
                    return response
        return response


class CutTransport:
    """A connection that breaks after so many bytes of what is written to it."""

    def __init__(self, transport: asyncio.Transport, left_bytes: int) -> None:
        self._transport = transport
        self._left_bytes = left_bytes

    def write(self, data: bytes) -> None:
        """Write the part of it that still fits, and close after it."""
        if self._left_bytes < 0:
            return
        self._left_bytes -= len(data)
        if self._left_bytes > 0:
            self._transport.write(data)
            return
        self._transport.write(data[: len(data) + self._left_bytes])
        self._left_bytes = -1
        self._transport.close()

    def writelines(self, pieces: Sequence[bytes]) -> None:
        """Write them joined."""
        self.write(b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def _begun(request: web.Request, request_id: str, answer: Answer) -> web.StreamResponse:
    """A stream with its headers and what it says at once."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "X-Request-Id": request_id,
            "Vary": "Origin",
        }
    )
    await response.prepare(request)
    if greeting := answer.greeting():
        await response.write(greeting)
    return response


def _jobs(ask: Ask, request_id: str) -> list[Job]:
    return [
        Job(
            request_id=request_id,
            prompt_tokens=choice.prompt.tokens,
            block_hashes=choice.prompt.block_hashes,
            output_tokens=choice.output_tokens,
            finish_reason="stop" if choice.stops else "length",
            output_hashes=choice.output.hashes,
            token_ids=choice.output.token_ids,
            send_as=ask.handing.send_as,
            fetch=ask.handing.fetch,
        )
        for choice in ask.choices
    ]
