"""One run: sends each request on schedule, and keeps its result.

The schedule and all measured times use one monotonic clock with one origin.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGTERM
from typing import Annotated, Protocol

import aiohttp
import msgspec
import xxhash

from replayer.answers import MOST_BYTES, body_of
from replayer.replay.client import (
    ERROR_CHARS,
    Call,
    Client,
    ClientOptions,
    ReplayOutcome,
    TimedExchange,
    explain,
    open_session,
)
from replayer.replay.engine_counters import CounterReader, EngineCounters
from replayer.replay.options import ReplayOptions
from replayer.replay.prompts import BodyForm, PromptWriter
from replayer.replay.schedule import Due, Pace, PaceRules
from replayer.trace.loaders import TraceRequest

# A request's body is made this long before it is due, so that its making delays no request.
LEAD_S = 0.02
UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")
HEADER_CHARS = 96
SHOWN_MODELS = 5
MODEL_CHARS = 256
MODELS_TIMEOUT_S = 15.0  # longer than the connect timeout
UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class TargetError(Exception):
    """The target cannot be replayed against; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one request; `exchange` None: it was skipped."""

    request: TraceRequest
    sent_as: str | None
    intended_s: float | None
    exchange: TimedExchange | None


class _Model(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(max_length=MODEL_CHARS)]


class _Models(msgspec.Struct):
    """What is read of a list of models."""

    data: list[_Model]


class RunObserver(Protocol):
    """Observer of a run's requests."""

    def begun(self, run: "Run") -> None:
        """Called once, before the first request; what it raises ends the run."""

    def due(self, request: TraceRequest) -> None:
        """Called shortly before a request is sent."""

    def sent(self) -> None:
        """Called when a request is sent."""

    def ended(self, result: Result) -> str | None:
        """Called when a request has ended or was skipped; a reason that it returns ends the run."""


class _Stop(Exception):  # noqa: N818 - it is no error
    """The run is to end now."""


def header_safe(name: str) -> str:
    """Make an id of a trace valid in a header: ASCII, bounded; distinct ids stay distinct."""
    safe = UNSAFE.sub("_", name)[:HEADER_CHARS]
    return safe if safe == name else f"{safe}-{xxhash.xxh32_hexdigest(name.encode())}"


@dataclass(slots=True)
class Run:
    """A run and its results so far, which remain after an interruption."""

    options: ReplayOptions
    requests: Sequence[TraceRequest]
    run_id: str
    watcher: RunObserver
    seed: int = 0
    results: list[Result] = field(default_factory=list)
    origin_s: float = field(default_factory=time.monotonic)
    cpu_s: float = 0.0
    model: str | None = None
    served: tuple[str, ...] = ()
    stopped: str | None = None
    engine_counters: EngineCounters = field(default_factory=EngineCounters)

    def clock(self) -> float:
        """Return the seconds since the origin of the run."""
        return time.monotonic() - self.origin_s

    async def execute(self) -> None:
        """Send all requests; raises TargetError, only before the first request."""
        async with open_session() as session:
            self.model, self.served = await model_of(session, self.options)
            form = BodyForm(
                model=self.model,
                endpoint=self.options.endpoint,
                chat=self.options.chat,
                prompt=self.options.prompt,
                seed=self.seed,
                salt=f"[run {self.run_id}]\n" if self.options.seed is None else "",
            )
            path = "chat/completions" if form.endpoint == "chat" else "completions"
            client = Client(
                session,
                ClientOptions(
                    url=f"{self.options.target}/v1/{path}",
                    timeout_s=self.options.request_timeout_s,
                    retries=self.options.retry_503,
                    seed=self.seed,
                ),
                self.clock,
            )
            reader = CounterReader(
                session, self.options.target, authorization(self.options), self.options.engines
            )
            self.engine_counters = reader.counters
            await reader.read_before()
            driver = ReplayDriver(self, client, PromptWriter(form, self.requests))
            self.watcher.begun(self)
            cpu_s = time.process_time()
            self.origin_s = time.monotonic()
            try:
                await driver.drive(Pace(self.requests, pace_rules(self.options)))
            finally:
                self.cpu_s = time.process_time() - cpu_s
            await reader.read_after()


def pace_rules(options: ReplayOptions) -> PaceRules:
    """Return the schedule's part of the options."""
    return PaceRules(
        slots=options.concurrency if options.mode == "sessions" else None,
        speedup=options.speedup,
        think_cap_s=options.think_cap_s,
        ramp_s=options.ramp_s,
    )


class ReplayDriver:
    """Sends the requests of a schedule when they are due."""

    def __init__(self, run: Run, client: Client, writer: PromptWriter) -> None:
        """Results go to `run`."""
        self._run = run
        self._client = client
        self._writer = writer
        self._wake = asyncio.Event()

    async def drive(self, pace: Pace) -> None:
        """Send every request of the schedule and wait until all have ended, or are stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                while not pace.finished:
                    for due in pace.take_due(self._run.clock() + LEAD_S):
                        group.create_task(self._one(due, pace))
                    self._wake.clear()
                    await self._wait(pace.next_due_s())
        except* _Stop:
            pass

    async def _wait(self, due_s: float | None) -> None:
        """Wait until the next request is due, or one has ended and may make another due."""
        delay_s = None if due_s is None else due_s - LEAD_S - self._run.clock()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._wake.wait()

    async def _one(self, due: Due, pace: Pace) -> None:
        request = due.request
        sent_as = f"{header_safe(request.request_id)}.{self._run.run_id}"
        call = Call(self._writer.body(request), self._headers(request, sent_as))
        self._run.watcher.due(request)
        await asyncio.sleep(due.intended_s - self._run.clock())
        exchange = self._client.open_exchange()
        self._run.watcher.sent()
        try:
            await self._client.run(call, exchange)
        finally:
            self._note(Result(request, sent_as, due.intended_s, exchange))
        if self._run.stopped:
            raise _Stop
        ok = exchange.outcome is ReplayOutcome.OK
        for skipped in pace.finish(request.request_id, exchange.end_s, ok=ok):
            self._note(Result(skipped, None, None, None))
        self._wake.set()

    def _note(self, result: Result) -> None:
        self._run.results.append(result)
        run = self._run
        reason = run.watcher.ended(result)
        if result.exchange is not None and not run.options.save_text:
            result.exchange.forget_text()  # a run keeps all its results
        if reason is not None and run.stopped is None:
            run.stopped = reason + _other_models(run.model, run.served)

    def _headers(self, request: TraceRequest, sent_as: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "X-Request-ID": sent_as}
        if request.session_id is not None:
            headers["X-Session-ID"] = header_safe(request.session_id)
        return headers | authorization(self._run.options)


def _other_models(model: str | None, served: Sequence[str]) -> str:
    """Say what a target serves that does not name the model; empty if that is unknown."""
    if not served or model in served:
        return ""
    more = ", ..." if len(served) > SHOWN_MODELS else ""
    return f"; the target serves {', '.join(served[:SHOWN_MODELS])}{more}, not {model}"


def authorization(options: ReplayOptions) -> dict[str, str]:
    """Return the header that carries the API key, if there is one."""
    return {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}


async def model_of(
    session: aiohttp.ClientSession, options: ReplayOptions
) -> tuple[str, tuple[str, ...]]:
    """Return the model to ask for, and those that the target names; raises TargetError.

    It is the one given, or the target's first.

    The target is asked in both cases, so that an unreachable one ends the run before it begins.
    """
    answer = b""
    try:
        async with asyncio.timeout(MODELS_TIMEOUT_S):
            answer, seen = await _models(session, options)
    except UNREACHED as error:
        raise TargetError(f"--target {options.target}: {explain(error)}") from None
    except TimeoutError:
        seen = "no answer in time"
    except (aiohttp.ClientError, OSError) as error:
        seen = explain(error)
    except ValueError as error:  # a name that no resolver takes
        seen = str(error)[:ERROR_CHARS]
    names = _names(answer)
    if not options.model and not names:
        raise TargetError(
            f"--target {options.target}: GET /v1/models names no model ({seen}); give --model"
        )
    return options.model or names[0], names


async def _models(session: aiohttp.ClientSession, options: ReplayOptions) -> tuple[bytes, str]:
    url, headers = f"{options.target}/v1/models", authorization(options)
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        body = await body_of(response, MOST_BYTES)
    if len(body) > MOST_BYTES:
        return b"", f"over {MOST_BYTES} bytes"
    return body, f"status {response.status}"


def _names(answer: bytes) -> tuple[str, ...]:
    """Read the ids of a list of models; empty if it is none."""
    try:
        return tuple(one.id for one in msgspec.json.decode(answer, type=_Models).data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ()


def run_blocking(run: Run, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> bool:
    """Execute a run on a loop of its own; returns False when it was interrupted."""
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_until_terminated(run))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return False
    return True


async def _until_terminated(run: Run) -> None:
    """Make SIGTERM end a run as Ctrl-C does, with its results."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(SIGTERM, task.cancel)
    await run.execute()
