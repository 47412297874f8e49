"""One instance as the self-benchmark sees it: what it serves, what runs on it, timed requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import orjson

from planner.profiling.grid import OUTPUT_TOKENS
from proxy.net.peer_documents import Sample, sample_of, wanted_lines
from replayer.answers import MOST_BYTES, MOST_VALUE, body_of
from replayer.arguments import InputError
from replayer.replay.client import (
    Call,
    Client,
    ClientOptions,
    ReplayOutcome,
    TimedExchange,
    explain,
)
from replayer.replay.prompts import BodyForm, PromptWriter
from replayer.trace.loaders import TraceRequest

TIMEOUT_S = 300.0
"""Of a request, from its sending to the end of its answer."""
ASK_TIMEOUT_S = 15.0
"""Of a GET."""
IDLE_TIMEOUT_S = 30.0
"""For the end of what the benchmark itself has started."""
LOOK_S = 0.02
"""How often it is looked whether something has come true."""
MOST_LENGTH = 1 << 24
"""Of a model, in tokens: the longest prompt is nearly as long."""
BLOCK_TOKENS = 512
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
GENERATED, LAYOUT = "vllm:generation_tokens_total", "vllm:cache_config_info"
SERIES = tuple(name.encode() for name in (RUNNING, WAITING, GENERATED, LAYOUT))
"""A hundredth of an engine's metrics; parsing all of them takes longer than many a step."""


class BenchmarkError(Exception):
    """The benchmark cannot go on; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the instance is. `timeout_s`: of one request; `model` None: the first that it names."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = TIMEOUT_S

    @property
    def headers(self) -> dict[str, str]:
        """What goes with each request."""
        own = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", "Accept-Encoding": "identity"} | own


@dataclass(frozen=True, slots=True)
class Model:
    """What the instance serves."""

    name: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """What an engine's metrics say, summed over its ranks.

    `generated`: tokens since its start. `kv_tokens`: 0 where it does not tell.
    """

    running: int
    waiting: int
    generated: int
    kv_tokens: int

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return not (self.running or self.waiting)


@dataclass(frozen=True, slots=True)
class Beside:
    """A stream that ran beside others, and the engine before it began and after its end."""

    measured: TimedExchange
    before: EngineState
    after: EngineState


class Instance:
    """Asks one instance and sends it prompts that no cache knows from before this run."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        """`seed` makes the words of all prompts."""
        self._session, self._target, self._seed = session, target, seed
        options = ClientOptions(f"{target.url}/v1/completions", target.timeout_s)
        self._client = Client(session, options, clock)
        self._writer: PromptWriter | None = None

    async def serves(self) -> Model:
        """Ask what it serves; raises InputError."""
        text = await self._get("/v1/models")
        wanted = self._target.model
        try:
            listed = {str(one["id"]): one["max_model_len"] for one in orjson.loads(text)["data"]}
            name = next(iter(listed)) if wanted is None else wanted
            model = Model(name, _length(listed[name]))
        except KeyError as error:
            raise InputError(f"{self._told('/v1/models')} has no {error}") from None
        except (ValueError, TypeError, StopIteration, RecursionError):
            raise InputError(f"{self._told('/v1/models')} names no model with a length") from None
        form = BodyForm(model.name, "completions", prompt="ids", seed=self._seed)
        self._writer = PromptWriter(form, [_request(0, BLOCK_TOKENS, 1)])
        return model

    async def state(self) -> EngineState:
        """Read its metrics; raises InputError."""
        lines = wanted_lines(await self._get("/metrics") + b"\n", SERIES)
        sums = dict.fromkeys((RUNNING, WAITING, GENERATED), 0.0)
        seen, kv_tokens = set(), 0
        try:
            for sample in (_sample(line) for line in lines if line is not None):
                seen.add(sample.name)
                if sample.name in sums:
                    sums[sample.name] += sample.value
                if sample.name == LAYOUT:
                    kv_tokens += _kv_tokens(sample.labels)
            running, waiting, generated = map(int, sums.values())
        except ValueError:
            raise InputError(f"{self._told('/metrics')} is no text of metrics") from None
        if missing := sums.keys() - seen:
            raise InputError(f"{self._told('/metrics')} has no {', '.join(sorted(missing))}")
        return EngineState(running, waiting, generated, kv_tokens)

    async def idle(self) -> EngineState:
        """Wait until the engine has no request any more; raises BenchmarkError."""
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                while True:
                    if (state := await self.state()).is_idle:
                        return state
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            at = f"{self._target.url}: not idle within {IDLE_TIMEOUT_S:g} s"
            raise BenchmarkError(f"{at}: somebody else sends it requests") from None

    async def answer(self, number: int, prompt_tokens: int, output_tokens: int) -> TimedExchange:
        """Send the prompt of a number and wait for the whole answer; raises BenchmarkError."""
        exchange = self._client.open_exchange()
        await self._send(exchange, number, prompt_tokens, output_tokens)
        return _whole(exchange, prompt_tokens)

    async def beside(self, context: int, batch: int, room: int) -> Beside:
        """Time one stream beside `batch` - 1 others, which are broken off once it has ended.

        The others begin first, so that it shares its steps with no prompt. `room`: the most tokens
        that they may generate.
        """
        others = [self._client.open_exchange() for _ in range(1, batch)]
        found: Beside | Exception
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._send(one, number, context, room))
                for number, one in enumerate(others, 1)
            ]
            try:
                await _begun(others)
                before = await self.state()
                measured = await self.answer(0, context, OUTPUT_TOKENS)
                _all_run(others)
                found = Beside(measured, before, await self.state())
            except (BenchmarkError, InputError) as error:
                found = error  # raised within the group it would come out as one of several
            for task in tasks:
                task.cancel()
        if isinstance(found, Exception):
            raise found
        return found

    async def _send(
        self, exchange: TimedExchange, number: int, prompt_tokens: int, output_tokens: int
    ) -> None:
        assert self._writer is not None, "asked what it serves"
        request = _request(number, prompt_tokens, output_tokens)
        await self._client.run(Call(self._writer.body(request), self._target.headers), exchange)

    async def _get(self, path: str) -> bytes:
        url, headers = self._target.url + path, self._target.headers
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                self._session.get(url, headers=headers, allow_redirects=False) as answer,
            ):
                body = await body_of(answer, MOST_BYTES)
            if answer.status == HTTPStatus.OK and len(body) <= MOST_BYTES:
                return body
            reason = f"is {answer.status}, of {len(body)} bytes"
        except TimeoutError:
            reason = f"does not come within {ASK_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            reason = f"fails: {explain(error)}"
        raise InputError(f"{self._told(path)} {reason}")

    def _told(self, path: str) -> str:
        return f"--instance {self._target.url}: the answer to GET {path}"


def _request(number: int, prompt_tokens: int, output_tokens: int) -> TraceRequest:
    """Make a prompt of whole blocks of its own; it is a prefix of any longer one of its number."""
    blocks = -(-prompt_tokens // BLOCK_TOKENS)
    return TraceRequest(
        request_id=str(number),
        session_id=None,
        turn=0,
        arrival_s=0.0,
        input_tokens=prompt_tokens,
        output_tokens=output_tokens,
        runs=((number << 30, blocks),),
        block_tokens=BLOCK_TOKENS,
        line=1,
    )


def _length(told: object) -> int:
    """Read a model's length; raises ValueError."""
    if type(told) is not int or not 0 < told <= MOST_LENGTH:
        raise ValueError("no length")
    return told


def _sample(line: bytes) -> Sample:
    """Read a line of metrics; raises ValueError."""
    sample = sample_of(line)
    if sample is None or not 0 <= sample.value < MOST_VALUE:
        raise ValueError("no sample")
    return sample


def _kv_tokens(labels: Mapping[str, str]) -> int:
    try:
        tokens = float(labels["num_gpu_blocks"]) * float(labels["block_size"])
    except (KeyError, ValueError):
        return 0
    return int(tokens) if 0 <= tokens < MOST_VALUE else 0


def _whole(exchange: TimedExchange, prompt_tokens: int) -> TimedExchange:
    """Refuse an answer that is not a whole one to this very prompt."""
    told = exchange.stream
    if exchange.outcome is not ReplayOutcome.OK:
        raise BenchmarkError(f"a prompt of {prompt_tokens} tokens: {exchange.error}")
    if told.prompt_tokens != prompt_tokens or not told.completion_tokens:
        counts = f"{told.prompt_tokens} and {told.completion_tokens} tokens"
        raise BenchmarkError(f"a prompt of {prompt_tokens} tokens: its usage says {counts}")
    return exchange


async def _begun(exchanges: Sequence[TimedExchange]) -> None:
    """Wait for a first token of each; each has its own deadline."""
    while any(one.first_byte_s is None for one in exchanges):
        _all_run(exchanges)
        await asyncio.sleep(LOOK_S)


def _all_run(exchanges: Iterable[TimedExchange]) -> None:
    """Refuse streams that have ended by themselves."""
    for one in exchanges:
        if one.outcome is ReplayOutcome.OK:
            raise BenchmarkError("a stream ended before the measured one did: it had no more room")
        if one.outcome is ReplayOutcome.TIMEOUT:
            hint = "(--timeout): is --max-num-seqs larger than the engine's?"
            raise BenchmarkError(f"a stream beside others: {one.error} {hint}")
        if one.outcome is not ReplayOutcome.INTERRUPTED:
            raise BenchmarkError(f"a stream beside others: {one.error}")
