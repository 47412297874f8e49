"""Simulated engines as processes: two ports each, started, stopped, killed and restarted.

`start` binds both ports and gives the engine a new id. `stop` acts like SIGTERM: running requests
answer with finish_reason "abort". `kill` acts like SIGKILL: connections are cut. `restart` kills
and starts on the same ports with an empty cache and another id. `SimFleet` is several engines in
one process, for `engine-sim` and for tests.

    async with SimFleet(2, speed=20.0) as fleet:
        client.post(fleet.engines[0].url + "/v1/completions", ...)
        await fleet.engines[0].restart()
"""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from errno import EADDRINUSE
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web

from replayer.engine.gpus import WarmGpus
from replayer.engine.heat import Plant, make_plant
from replayer.engine.kvcache import SharedStore
from replayer.engine.types import (
    Event,
    Finished,
    FirstToken,
    PullWanted,
    RemoteKv,
    SimRequest,
    Unpinned,
)
from replayer.simulator.api import Api, EngineProcess
from replayer.simulator.bootstrap import PullResult, Receiver, bootstrap_app
from replayer.simulator.driver import EngineDriver
from replayer.simulator.faults import Faults
from replayer.simulator.kv_events import Publisher
from replayer.simulator.metrics import EngineMetrics
from replayer.simulator.options import SimOptions
from replayer.simulator.request_log import EngineRequestLog, record

log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 5.0
"""Keep-alive time of uvicorn, which vLLM uses; most clients keep idle connections for longer."""
USUAL_BOOTSTRAP_PORT = 8998
"""The first engine's, as vLLM has it by default."""
Record = Callable[[dict[str, Any]], None]


class _Incarnation:
    """The parts of an engine that live from one start to the next stop or kill."""

    def __init__(self, owner: "SimEngine", tasks: asyncio.TaskGroup, record_: Record) -> None:
        options, store = owner.options, owner.store
        self.engine_id = str(uuid.uuid4())
        self.driver = EngineDriver(options, self._on_event, store)
        self.metrics = EngineMetrics(self.driver.engine, options.model, self.driver.unix_s(0.0))
        self.name = ""
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._receiver = Receiver(self._session, gives_up=options.kv_connector == "nixl")
        self._tasks = tasks
        self._own: set[asyncio.Task[None]] = set()
        self._record = record_
        publishes = owner.kv_events_port is not None
        process = EngineProcess(
            self.engine_id,
            self._release_remote,
            owner.crash,
            owner.side_address,
            owner.kv_event_sources if publishes else None,
            self._dcgm if owner.plant is not None else None,
        )
        self.gpus: WarmGpus | None = None
        if owner.plant is not None:
            engine = self.driver.engine
            self.gpus = WarmGpus(engine, owner.plant, options.kv_bytes, options.host)
        self._faults = owner.faults
        self.publisher: Publisher | None = None
        if publishes:
            self.publisher = Publisher(tasks, options.block_size)
            self.driver.engine.pool.journal = []
        self.driver.on_step = self._on_step
        self.api = Api(options, self.driver, self.metrics, process, owner.faults)
        self.spawn(self.driver.run())

    def spawn(self, work: Any) -> None:
        """Run a coroutine as a task that `end` cancels."""
        task = self._tasks.create_task(work)
        self._own.add(task)
        task.add_done_callback(self._own.discard)

    def _on_step(self) -> None:
        """Warm the GPUs; publish what the last step has changed in the cache."""
        if self.gpus is not None:
            self.gpus.warmer_celsius = self._faults.heat_celsius
            self.gpus.observe(self.driver.now_s())
        if self.publisher is None:
            return
        changes = self.driver.engine.pool.journal
        if changes:
            self.driver.engine.pool.journal = []
            self.publisher.publish(changes, self.driver.unix_s(self.driver.now_s()))

    def _dcgm(self) -> str:
        """The metrics of its GPUs, now."""
        assert self.gpus is not None
        self.gpus.warmer_celsius = self._faults.heat_celsius
        return self.gpus.exposition(self.driver.now_s())

    async def end(self) -> None:
        """Stop the driver and all tasks; log the prefill legs that are still pinned."""
        self.driver.stop()
        if self.publisher is not None:
            self.publisher.close()
        for request in self.driver.engine.sender.pinned:
            self._log(request)
        for task in list(self._own):
            task.cancel()
        await self._session.close()

    def _on_event(self, event: Event) -> None:
        match event:
            case FirstToken():
                self.metrics.first_token(event.request)
            case Finished():
                self.metrics.finished(event.request)
                job = event.request.job
                if job.send_as is None or event.request.finish_reason != "length":
                    self._log(event.request)
            case Unpinned():
                self._log(event.request)
            case PullWanted():
                self.spawn(self._fetch(event))
            case _:
                pass

    def _log(self, request: SimRequest) -> None:
        self._record(record(self.name, self.driver, request))

    async def _fetch(self, wanted: PullWanted) -> None:
        result = await self._receiver.fetch(wanted.remote, wanted.tokens)
        # A lost sender never answers; the engine model then gives up after its own timeout.
        if result is not PullResult.LOST:
            ok = result is PullResult.DONE
            if not ok:
                log.warning("%s: no KV for %s", self.name, wanted.request.job.request_id)
            self.driver.pull_done(wanted.request, ok=ok)

    def _release_remote(self, remote: RemoteKv) -> None:
        self.spawn(self._pull_nothing(remote))

    async def _pull_nothing(self, remote: RemoteKv) -> None:
        """Make a sender unpin its KV by an empty pull, which counts as served."""
        await self._receiver.fetch(remote, 0)


class SimEngine:
    """A simulated engine with its API port and its bootstrap port (0: the kernel chooses).

    `yields`: it takes any bootstrap port where its own is not free.
    `kv_events_port`: it publishes its KV events there, and replays them at the next one, or at one
    that the kernel chooses; None: it publishes none.
    """

    def __init__(  # noqa: PLR0913 - its ports, and what all engines share
        self,
        options: SimOptions,
        tasks: asyncio.TaskGroup,
        *,
        port: int = 0,
        bootstrap_port: int = 0,
        yields: bool = False,
        kv_events_port: int | None = None,
        record: Record = lambda _entry: None,
        store: SharedStore | None = None,
    ) -> None:
        self.options = options
        self.store = store
        self.faults = Faults()
        self.plant: Plant | None = None
        """Its GPUs, which stay as warm as they are while the engine restarts; with --thermal."""
        if options.thermal:
            self.plant = make_plant(options.plant_name, options.heat())
        self.port = port
        self.bootstrap_port = bootstrap_port
        self._yields = yields
        self.kv_events_port = kv_events_port
        self.replay_port = kv_events_port + 1 if kv_events_port else 0
        self._tasks = tasks
        self._record = record
        self._runners: list[web.AppRunner] = []
        self._life: _Incarnation | None = None

    @property
    def url(self) -> str:
        """Base URL of the API."""
        return f"http://{self.options.host}:{self.port}"

    @property
    def bootstrap_url(self) -> str:
        """Base URL of the bootstrap server."""
        return f"http://{self.options.host}:{self.bootstrap_port}"

    @property
    def engine_id(self) -> str:
        """Id of the running incarnation."""
        return self._alive().engine_id

    @property
    def driver(self) -> EngineDriver:
        """The running incarnation's driver; `driver.engine` is the model."""
        return self._alive().driver

    @property
    def running(self) -> bool:
        """Whether the engine runs: True between start and stop or kill."""
        return self._life is not None

    def stats(self) -> dict[str, float]:
        """Return load and counters of the running incarnation, as numbers (tokens, requests)."""
        engine = self.driver.engine
        done, sender = engine.counters, engine.sender
        return {
            "running": len(engine.running),
            "waiting": len(engine.waiting),
            "fetching": len(engine.fetching),
            "pinned": len(sender.pinned),
            "busy_sender_slots": sender.busy_slots,
            "kv_usage": engine.pool.usage_ratio,
            "prompt_computed_tokens": done.prompt_computed,
            "prompt_local_hit_tokens": done.prompt_local_hits,
            "prompt_external_tokens": done.prompt_external,
            "generated_tokens": done.generated,
            "preemptions": done.preemptions,
            "bytes_sent": sender.bytes_sent,
            "expired": sender.expired,
            "stale_reads": sender.stale,
            "failed_receives": done.failed_receives,
            "aborted": done.finished["abort"],
            "finished": done.finished["length"] + done.finished["stop"],
            "rejected": self._alive().metrics.rejected,
        }

    async def start(self) -> None:
        """Bind both ports and serve; OSError when a port is taken."""
        life = _Incarnation(self, self._tasks, self._record)
        self._life = life
        bootstrap = bootstrap_app(
            life.engine_id, self.side_address, life.driver.serve_pull, self.faults
        )
        try:
            self.port = await self._listen(life.api.app(), self.port, "--port")
            self.bootstrap_port = await self._listen_to_peers(bootstrap)
            if life.publisher is not None:
                await self._publish(life.publisher)
        except OSError:
            await self.kill()
            raise
        life.name = f"{self.options.host}:{self.port}"

    async def stop(self) -> None:
        """Shut down in order: running requests end with their tokens so far and "abort"."""
        life, self._life = self._life, None
        if life is not None:
            await self._refuse_connections()
            await life.end()
            await self._close()

    async def kill(self) -> None:
        """End at once: cut every connection without an answer."""
        life, self._life = self._life, None
        if life is None:
            return
        await self._refuse_connections()
        for runner in self._runners:
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
        await life.end()
        await self._close()

    def side_address(self) -> tuple[str, int]:
        """Host and port at which other engines pull KV."""
        return self.options.host, self.bootstrap_port

    def kv_event_sources(self) -> dict[str, Any]:
        """Addresses of its KV events, in vLLM's form."""
        host = self.options.host
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://{host}:{self.kv_events_port}",
                "replay_endpoint": f"tcp://{host}:{self.replay_port}",
                "topic": "",
            }
        }

    @property
    def publisher(self) -> Publisher:
        """The running incarnation's publisher of KV events."""
        found = self._alive().publisher
        if found is None:
            raise RuntimeError("the engine publishes no KV events")
        return found

    def crash(self) -> None:
        """Kill the engine from one of its own handlers."""
        self._tasks.create_task(self.kill())

    async def restart(self) -> None:
        """Kill and start again: same ports, new engine id, empty cache."""
        await self.kill()
        await self.start()

    async def _listen_to_peers(self, app: web.Application) -> int:
        """Bind the bootstrap port, or any where the usual one is taken, and keep that."""
        try:
            return await self._listen(app, self.bootstrap_port, "--bootstrap-port")
        except OSError as error:
            if not self._yields or error.errno != EADDRINUSE:
                raise
            return await self._listen(app, 0, "--bootstrap-port")
        finally:
            self._yields = False

    async def _publish(self, publisher: Publisher) -> None:
        host, port = self.options.host, self.kv_events_port or 0
        try:
            self.kv_events_port, self.replay_port = await publisher.listen(
                host, port, self.replay_port
            )
        except OSError as error:
            raise _taken("--kv-events-port", host, port, error) from error

    async def _listen(self, app: web.Application, port: int, option: str) -> int:
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_S,
            shutdown_timeout=1.0,
        )
        self._runners.append(runner)
        await runner.setup()
        host = self.options.host
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise _taken(option, host, port, error) from error
        return int(runner.addresses[0][1])

    async def _refuse_connections(self) -> None:
        for runner in self._runners:
            for site in list(runner.sites):
                await site.stop()

    async def _close(self) -> None:
        runners, self._runners = self._runners, []
        for runner in runners:
            await runner.cleanup()

    def _alive(self) -> _Incarnation:
        if self._life is None:
            raise RuntimeError("the engine is not running")
        return self._life


def _taken(option: str, host: str, port: int, error: OSError) -> OSError:
    """Make the error for a port that cannot be had; it names the option to change."""
    number = error.errno or 0  # negative for names that do not resolve
    why = os.strerror(number) if number > 0 else error.strerror or str(error)
    return OSError(number, f"{option} {port}: cannot listen on {host}:{port}: {why}")


class SimFleet:
    """`count` engines on consecutive ports, or on ports that the kernel chooses (port 0).

    `bootstrap_port` None: the usual ones, or any where those are taken.
    Further keyword arguments are fields of SimOptions. `records` holds the log records of the last
    10,000 to 20,000 requests; with `request_log` all of them also go to that file.
    """

    def __init__(
        self,
        count: int,
        *,
        port: int = 0,
        bootstrap_port: int | None = 0,
        kv_events_port: int | None = None,
        request_log: Path | None = None,
        **options: Any,
    ) -> None:
        self.options = SimOptions(**options)
        self.engines: list[SimEngine] = []
        self.records: list[dict[str, Any]] = []
        self._count = count
        self._ports = (port, bootstrap_port)
        self._kv_events_port = kv_events_port
        self._log = EngineRequestLog(request_log) if request_log else None
        self._tasks = asyncio.TaskGroup()
        self._store = SharedStore() if self.options.kv_connector == "implicit" else None

    async def __aenter__(self) -> Self:
        """Start all engines, or none."""
        await self._tasks.__aenter__()
        if self._log:
            self._tasks.create_task(self._log.run())
        port, bootstrap_port = self._ports
        yields = bootstrap_port is None
        if bootstrap_port is None:
            bootstrap_port = USUAL_BOOTSTRAP_PORT
        events = self._kv_events_port
        for index in range(self._count):
            engine = SimEngine(
                self.options,
                self._tasks,
                port=port and port + index,
                bootstrap_port=bootstrap_port and bootstrap_port + index,
                yields=yields,
                kv_events_port=events and events + 2 * index,
                record=self._record,
                store=self._store,
            )
            try:
                await engine.start()
            except OSError as error:
                await self.__aexit__(None, None, None)
                raise error
            self.engines.append(engine)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all engines and write the rest of the log."""
        for engine in self.engines:
            await engine.stop()
        if self._log:
            self._log.stop()
        await self._tasks.__aexit__(None, None, None)

    def _record(self, entry: dict[str, Any]) -> None:
        self.records.append(entry)
        if len(self.records) > 20_000:
            del self.records[:10_000]
        if self._log:
            self._log.add(entry)
