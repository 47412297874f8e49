"""The proxy between raw clients and engines behind fault proxies; invariants when it is left.

    async with rig([stalls(), GOOD], ttft_timeout=0.3) as r:
        got = await r.ask()

Instance i has the name `i0`, `i1`, ..., and `r.links[i]` is the fault proxy before it. Beside
them an instance `calm` serves another model, to a flow of requests that must never notice anything
(I9).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import generate_latest

from replayer.simulator.host import SimEngine, SimFleet
from tests.chaos import figures
from tests.chaos import invariants as inv
from tests.chaos.client import Connection, Got, connect, exchange, request
from tests.chaos.faultproxy import FaultProxy
from tests.chaos.invariants import LagProbe, LogCatcher, Residue, holds
from tests.support.harness import WAIT_S, RawEngine, Script, ServedProxy, chat, is_set_within, until
from tests.support.turns import slowness

CANARIES = {
    "Authorization": "Bearer sk-canary-key-91f0",
    "Cookie": "sid=canary-cookie-52ab",
    "X-Api-Key": "canary-api-key-03de",
    "Proxy-Authorization": "Basic canary-proxy-auth-77aa",
    "X-Custom-Secret": "canary-header-18cc",
}
PROMPT_SECRET = "canary-prompt-e5b2"
SECRETS = [value.split()[-1].split("=")[-1] for value in CANARIES.values()] + [PROMPT_SECRET]
TODO = functools.partial(pytest.mark.xfail, strict=True)
"""A row whose feature is still to come; the reason says which."""
SLOW_PROBES: dict[str, Any] = {"health_interval": 60.0}
"""Probes take no part: what traffic sees decides."""
_FLOW_PAUSE_S = 0.01
MAX_RETRIES = 2
MODEL, CALM_MODEL = "sim-8b", "calm-8b"
ENGINE_SECRET = "canary-engine-error-7c1d"
"""Stands in error texts of engines: its client may read it, no log."""
_ids = itertools.count()


@dataclass
class Sent:
    """A request that went through `Rig.ask`."""

    request_id: str
    got: Got | None = None


@dataclass
class Flow:
    """Requests to an instance that nothing is wrong with."""

    good: int = 0
    bad: list[str] = field(default_factory=list)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Rig:
    """One proxy and its surroundings. `engines` are those of the caller, not the calm one."""

    proxy: ServedProxy
    engines: Sequence[Any]
    links: list[FaultProxy]
    boots: list[FaultProxy]
    """Before the simulated engines' bootstrap servers; pulls of KV pass here too."""
    calm: RawEngine
    log: LogCatcher
    lag: LagProbe
    sims: SimFleet | None = None
    sent: list[Sent] = field(default_factory=list)
    answers: list[Got] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    flow: Flow = field(default_factory=Flow)
    may_log: tuple[str, ...] = ()
    """Words of lines at ERROR that the row expects."""
    may_keep_work: bool = False
    """Simulated engines may still have work, which ends by itself."""

    @property
    def url(self) -> str:
        return self.proxy.server.url

    @property
    def state(self) -> Any:
        return self.proxy.server.state

    @property
    def router(self) -> Any:
        return self.proxy.router

    async def ask(
        self,
        text: str = "hello",
        *,
        headers: dict[str, str] | None = None,
        path: str = "/v1/chat/completions",
        body: Any = None,
        **fields: Any,
    ) -> Got:
        """A request with secrets in it, and its answer."""
        sent = Sent(f"chaos-{next(_ids)}")
        self.sent.append(sent)
        if body is None:
            body = chat(f"{text} {PROMPT_SECRET}", **fields)
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        ours = CANARIES | {"X-Request-Id": sent.request_id} | (headers or {})
        sent.got = await exchange(self.url, request(raw, ours, path))
        self.answers.append(sent.got)
        return sent.got

    async def raw(self, data: bytes) -> Got:
        """Bytes as they are, and the answer to them."""
        got = await exchange(self.url, data, self.lag.forgive)
        self.answers.append(got)
        return got

    async def connection(self, **options: Any) -> Connection:
        made = await connect(self.url, **options)
        self.connections.append(made)
        return made

    async def records(self, count: int) -> list[dict[str, Any]]:
        """Log lines of the caller's requests, once there are this many."""
        found: list[dict[str, Any]] = []

        def enough() -> bool:
            found[:] = [r for r in self._lines() if r["model"] != CALM_MODEL]
            return len(found) >= count

        await until(enough, f"{count} log lines")
        return found

    async def record(self) -> dict[str, Any]:
        """The only log line."""
        (found,) = await self.records(1)
        return found

    def _lines(self) -> list[dict[str, Any]]:
        path = self.proxy.settings.request_log
        assert path is not None
        lines = path.read_bytes().split(b"\n")[:-1]  # the last one may be half written
        return [orjson.loads(line) for line in lines]

    def metric(self, name: str, **labels: str) -> float:
        return self.proxy.metric(name, **labels)

    def is_up(self, name: str) -> bool:
        return bool(self.router.known.fleet.is_up(name))

    @property
    def exposition(self) -> str:
        self.state.collector.now_s = self.state.clock.now_s()
        return generate_latest(self.state.metrics.registry).decode()

    @property
    def posts(self) -> int:
        """Requests that reached the caller's instances, every attempt and leg."""
        return sum(len(link.posts) for link in self.links)

    @property
    def attempts(self) -> float:
        """Of those, without the proxy's own trials and replays for stale connections."""
        posts = [a for link in self.links for a in link.posts if a.request_id.startswith("chaos-")]
        return len(posts) - self.metric("upstream_replays_total")

    async def kill(self, i: int) -> None:
        """A simulated engine's process ends: its connections are cut, nobody listens."""
        await self.engines[i].kill()
        for link in self._ports(i):
            await link.accept("refuse")

    async def start(self, i: int) -> None:
        """It comes back, with a new engine id and nothing in its cache."""
        await self.engines[i].start()
        for link in self._ports(i):
            await link.accept("serve")

    def _ports(self, i: int) -> list[FaultProxy]:
        return [self.links[i], *self.boots[i : i + 1]]

    async def quiet(self) -> None:
        """Wait until nothing is in flight, in the proxy and behind it."""
        await until(lambda: self.state.in_flight.count == 0, "no request in flight")
        await until(lambda: self.proxy.connections() == 0, "no upstream connection in use")

    # What must hold, each looked at once when the rig is left.

    async def check(self) -> None:
        """I1 to I10, but for what only shows when everything is closed."""
        await self._counters()
        await self._connections()
        await self._outcomes()
        self._endings()
        self._logs()
        await self._secrets()
        self._replays()
        counting = "a turn of the loop computed"
        lag_s = self.lag.longest_s
        is_short = lag_s < inv.LAG_S or lag_s < inv.LAG_S * slowness()
        holds("I8", is_short, f"{counting} {lag_s:.3f} s")
        if self.flow.good or self.flow.bad:
            holds("I9", not self.flow.bad, f"the healthy flow failed: {self.flow.bad[:3]}")

    async def _counters(self) -> None:
        with contextlib.suppress(AssertionError):
            await until(
                lambda: not self.state.in_flight.count and not inv.not_zero(self.exposition)
            )
        holds("I1", self.state.in_flight.count == 0, "requests are in flight")
        holds("I1", not len(self.state.instances.pending), "bytes of answers are counted")
        left = inv.not_zero(self.exposition)
        holds("I1", not left, f"counters are not at zero: {left}")
        holds(
            "I1",
            self.router.known.ledger.live == 0 == self.router.known.ledger.drift(),
            "leases are left",
        )

    async def _connections(self) -> None:
        with contextlib.suppress(AssertionError):
            await until(lambda: self._in_use() == 0)
        holds("I3", self._in_use() == 0, f"{self._in_use()} upstream requests outlive their client")

    def _in_use(self) -> int:
        scripted = sum(e.busy for e in self.engines if isinstance(e, RawEngine))
        return self.proxy.connections() + scripted + (0 if self.may_keep_work else self.sim_work())

    def sim_work(self) -> int:
        """What the simulated engines run, wait for, fetch and keep pinned."""
        if self.sims is None:
            return 0
        models = [e.driver.engine for e in self.sims.engines if e.running]
        return sum(
            len(m.running) + len(m.waiting) + len(m.fetching) + len(m.sender.pinned) for m in models
        )

    async def _outcomes(self) -> None:
        with contextlib.suppress(AssertionError):
            await until(lambda: inv.logged(self._lines()) == inv.outcomes(self.exposition))
        lines, counted = self._lines(), inv.outcomes(self.exposition)
        told = inv.logged(lines)
        holds("I2", told == counted, f"log says {told}, metrics say {counted}")
        ids = [line["request_id"] for line in lines]
        for sent in self.sent:
            if sent.got is not None:
                holds("I2", ids.count(sent.request_id) == 1, f"{sent.request_id} not logged once")

    def _endings(self) -> None:
        for got in self.answers:
            tail = got.body[-200:]
            holds("I4", inv.is_honest(got), f"a clean end that the engine did not make: {tail!r}")
            holds("I4", inv.says_when(got), f"a 503 without Retry-After: {tail!r}")

    def _logs(self) -> None:
        known = (word for line in self.log.errors for word in self.may_log if word in line)
        errors = self.log.errors if next(known, None) is None else []
        holds("I5", not errors, f"errors in the log: {errors[:2]}")
        bad = inv.bad_lines(self.log.lines)
        holds("I5", not bad, f"in the log: {bad[:2]}")

    async def _secrets(self) -> None:
        outputs = ["\n".join(self.log.lines), self.exposition, repr(self._lines())]
        for path in ("/health", "/instances", "/decisions", "/busy_threshold"):
            async with self.proxy.http.get(self.proxy.server.admin_url + path) as response:
                outputs.append(await response.text())
        leaked = inv.hits([*SECRETS, ENGINE_SECRET], *outputs)
        holds("I7", not leaked, f"secrets in the outputs: {leaked}")
        said = [repr(got.headers) + repr(got.body) for got in self.answers if got.status >= 400]
        leaked = inv.hits(SECRETS, *said)
        holds("I7", not leaked, f"secrets in error answers: {leaked}")

    def _replays(self) -> None:
        retried = {line["request_id"]: line["retries"] for line in self._lines()}
        worst = max(retried.values(), default=0)
        holds("I10", worst <= MAX_RETRIES, f"{worst} retries of one request")
        for sent in self.sent:
            first_s = sent.got.first_s if sent.got else None
            if first_s is None:
                continue
            asked = [
                [a for a in link.posts if _is_of(a.request_id, sent) and a.at_s > first_s]
                for link in self.links
            ]
            late = [posts for posts in asked if posts]
            most = self.proxy.settings.migration_limit
            is_so = len(late) <= most and all(len(posts) <= MOVE_ASKS for posts in late)
            holds("I10", is_so, f"asked again after the first byte: {late}")


MOVE_ASKS = 3
"""Requests to one instance for one move: for a second, to compute, and to go on with the stream."""


def _boot(engine: SimEngine) -> FaultProxy:
    """A fault proxy before a bootstrap server, which then names it as its worker's address too."""
    gate = FaultProxy(engine.bootstrap_url)

    def rename(data: bytes) -> bytes:
        there, here = (b"tcp://127.0.0.1:%d" % p for p in (engine.bootstrap_port, gate.port))
        assert len(there) == len(here), "the answer's length is already said"
        return data.replace(there, here)

    gate.down.change = rename
    return gate


def _is_of(request_id: str, sent: Sent) -> bool:
    """Whether a leg that answers was for this request; a prefill leg (`-p`) is no replay."""
    if request_id.endswith("-p"):
        return False
    return request_id == sent.request_id or request_id.startswith(sent.request_id + "-")


async def _run_flow(proxy: ServedProxy, flow: Flow) -> None:
    """Requests to the calm instance until told to end; each must be served whole."""
    loop = asyncio.get_running_loop()
    while not await is_set_within(flow.is_over, _FLOW_PAUSE_S):
        began_s = loop.time()
        try:
            answer = await proxy.post(chat("calm") | {"model": CALM_MODEL})
        except OSError as error:
            flow.bad.append(repr(error))
        else:
            if answer.status == 200 and answer.text == "fine":
                flow.good += 1
                figures.flow_s.append(loop.time() - began_s)
            else:
                flow.bad.append(f"{answer.status} {answer.body[:200]!r}")


@asynccontextmanager
async def _beside(rig: Rig, *, flow: bool) -> AsyncIterator[None]:
    """The lag probe and, where asked for, the healthy flow, while the block runs."""
    probe = asyncio.create_task(rig.lag.run())
    flowing = asyncio.create_task(_run_flow(rig.proxy, rig.flow)) if flow else None
    try:
        yield
        if flow:
            await until(lambda: rig.flow.good or rig.flow.bad, "the flow")
    finally:
        rig.flow.is_over.set()
        if flowing is not None:
            await asyncio.wait({flowing}, timeout=WAIT_S)
            flowing.cancel()
        probe.cancel()
        await asyncio.gather(probe, *([flowing] if flowing else []), return_exceptions=True)


Engine = RawEngine | Script
RigFactory = Callable[..., Any]


class Floor:
    """Where rigs are built: a folder for their logs, and how many were left in order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = itertools.count()
        self.checked = 0
        self.failed = False

    @asynccontextmanager
    async def __call__(
        self,
        engines: Sequence[Engine] = (),
        *,
        sims: int = 0,
        sim: dict[str, Any] | None = None,
        flow: bool = True,
        boots: bool = False,
        **options: Any,
    ) -> AsyncIterator[Rig]:
        """A rig with scripted engines, or with `sims` simulated ones; checks when it is left.

        `boots`: the instances have a bootstrap server, behind the same fault proxy if scripted.
        Where `sim` has `thermal`, the sensors of their GPUs are read through it too.
        """
        before, failure = Residue(), None
        async with AsyncExitStack() as stack:
            rig = await self._build(stack, engines, sims, sim or {}, boots=boots, **options)
            try:
                async with _beside(rig, flow=flow):
                    yield rig
                await rig.check()
            except Exception as error:  # noqa: BLE001 - raised below, without groups round it
                failure = error
            for connection in rig.connections:
                connection.close()
        if failure is not None:
            self.failed = True
            raise failure
        is_back = await before.is_back()
        holds("I6", is_back, f"something is left behind: {before}")
        self.checked += 1

    async def _build(
        self,
        stack: AsyncExitStack,
        engines: Sequence[Engine],
        sims: int,
        sim: dict[str, Any],
        *,
        boots: bool,
        **options: Any,
    ) -> Rig:
        enter = stack.enter_async_context
        catcher = stack.enter_context(LogCatcher())
        fleet = None
        if sims:
            fleet = await enter(SimFleet(sims, **({"speed": 50.0, "tick": 0.0} | sim)))
            there: list[Any] = list(fleet.engines)
            where = [engine.url for engine in fleet.engines]
        else:
            made = [e if isinstance(e, RawEngine) else RawEngine(e) for e in engines]
            there = [await enter(engine) for engine in made]
            where = [engine.address for engine in made]
        links = [await enter(FaultProxy(at)) for at in where]
        gates = [await enter(_boot(engine)) for engine in there if boots and sims]
        calm = await enter(RawEngine(models=(CALM_MODEL,)))
        instances = [f"calm={calm.address}"]
        for i, link in enumerate(links):
            gate = (gates or links)[i].address
            more = f";bootstrap={gate}" if boots else ""
            if sim.get("thermal"):
                more += f";gpus=0;dcgm={link.address}/dcgm/metrics"
            instances.append(f"i{i}={link.address}{more}")
        defaults: dict[str, Any] = {"kv_connector": "mooncake" if boots else "none"}
        folder = self._folder / str(next(self._number))
        folder.mkdir()
        proxy = ServedProxy(folder / "requests.jsonl", instances, **(defaults | options))
        await enter(proxy)
        await proxy.up()
        return Rig(proxy, there, links, gates, calm, catcher, LagProbe(), fleet)
