"""One planner as a process: its parts put together, its listener, its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar

import aiohttp
from aiohttp import web

from planner.config.deployments import Deployment
from planner.config.options import PlannerOptions
from planner.config.plugins import PluginSpec
from planner.config.profiles import read_profile
from planner.control import MOST_BODY, application
from planner.core.budget import Share, SharedBudget
from planner.core.types import COMPONENT
from planner.plugin_api.external import Caller
from planner.run import Clocks, Learned, Planner, capabilities_of, components_of
from planner.scalers.base import Scaler, ScalerError
from planner.scalers.registry import SCALERS
from planner.scalers.state_file import StateError
from planner.sources.engines import Engines
from planner.sources.live import Live
from planner.sources.prometheus import Prometheus
from planner.sources.proxy import Proxies
from planner.sources.trace import files, windows
from proxy.config.secrets import SecretStr
from proxy.config.sources import ConfigError
from proxy.net.server.connection import Rules, Runner
from proxy.net.server.listener import ConnectionLimit, GuardedSite, client_cap
from proxy.net.server.refusals import RefusalLog
from proxy.net.tls import for_servers
from replayer.arguments import InputError
from replayer.trace.rows import TraceError

CLOSE_S = 2.0
"""Time that open requests to the listener have when it ends."""
HEAD_S = 10.0
"""Time for the head of a request to the listener."""
MOST_CLIENTS = 128
"""Connections of the listener; one more takes the place of the one that is silent for longest."""
VALIDATE_S = 30.0
_log = logging.getLogger("planner")


class StartError(Exception):
    """The planner cannot begin; the text is one line."""


_whose: ContextVar[str] = ContextVar("_whose", default="")
"""The deployment that the current task works for, where there are several."""


def with_deployment(record: logging.LogRecord) -> bool:
    """Have a line of the log begin with the deployment that it is about: a filter."""
    if name := _whose.get():
        record.msg = f"{name}: {record.msg}"
    return True


@contextmanager
def _of(one: Deployment) -> Iterator[None]:
    """Work for a deployment: it is named in the log, and in what keeps it from beginning."""
    token = _whose.set(one.name)
    try:
        yield
    except (ConfigError, InputError, TraceError, StartError, StateError) as error:
        if not one.name:
            raise
        raise StartError(f"deployment {one.name}: {error}") from error
    finally:
        _whose.reset(token)


@asynccontextmanager
async def made(options: PlannerOptions) -> AsyncIterator[tuple[Planner, Scaler, Proxies]]:
    """The parts of a planner, without its state; closed at the end.

    Raises ConfigError and StartError.
    """
    components = components_of(options)
    token = options.proxy_token
    async with (
        _session("proxy", options) as to_proxies,
        _session("instance", options) as to_engines,
        _session("prometheus", options) as to_prometheus,
    ):
        prometheus = _prometheus(to_prometheus, options)
        proxies = Proxies(to_proxies, options.proxies, _secret(token), components, prometheus)
        live = Live(
            proxies,
            Engines(to_engines),
            {one: capabilities_of(options) for one in components},
            options.throughput_adjustment_interval_seconds,
            options.scaling_max_wait_seconds,
        )
        scaler = _scaler(options)
        clocks = Clocks(time.monotonic, time.time)  # noqa: TID251 - here it is injected
        planner = Planner(options, live, proxies, scaler, clocks, learned(options))
        planner.externals.begin(options.plugins, connect_of(options))
        yield planner, scaler, proxies


def connect_of(options: PlannerOptions) -> Callable[[PluginSpec], Caller] | None:
    """What calls plugins of other processes, where there may be some. Raises StartError."""
    if not options.plugin and not options.plugin_registration:
        return None
    # The rest of the planner does without it, and mostly runs without its library.
    try:
        from planner.plugin_api.channel import Channel
    except ImportError as error:
        command = "pip install -c constraints.txt '.[planner-grpc]'"
        raise StartError(f"plugins: {error.name} is not installed; run {command}") from error
    return Channel


def _session(kind: str, options: PlannerOptions) -> aiohttp.ClientSession:
    """Connections to servers of a kind, verified by its options. Raises ConfigError."""
    files = [getattr(options, f"{kind}_{part}", None) for part in ("ca", "cert", "key")]
    trust = for_servers(kind, *files) if any(files) else True
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust))


def _scaler(options: PlannerOptions) -> Scaler:
    try:
        return SCALERS[options.scaler](options)
    except ValueError as error:
        raise StartError(f"scaler {options.scaler}: {error}") from error


def _secret(token: SecretStr | None) -> str | None:
    return None if token is None else token.get_secret_value()


def _prometheus(session: aiohttp.ClientSession, options: PlannerOptions) -> Prometheus | None:
    if options.throughput_metrics_source != "prometheus" or options.prometheus is None:
        return None
    return Prometheus(session, options.prometheus, _secret(options.prometheus_token))


def learned(options: PlannerOptions) -> Learned:
    """What the options' profile and traces say. Raises InputError, TraceError."""
    folder, traces = options.profile_results_dir, options.load_predictor_warmup_trace
    interval_s = options.throughput_adjustment_interval_seconds
    return Learned(
        read_profile(folder).priors(options.max_num_batched_tokens) if folder else (),
        list(windows(files(traces), interval_s)) if traces else (),
    )


async def validate_all(deployments: Sequence[Deployment]) -> list[str]:
    """What keeps planners from beginning, a line each. Raises ConfigError, StartError."""
    wrong: list[str] = []
    for one in deployments:
        with _of(one):
            found = await validate(one.options)
        wrong += [f"{one.name}: {line}" if one.name else line for line in found]
    return wrong


async def validate(options: PlannerOptions) -> list[str]:
    """What keeps a planner from beginning, a line each. Raises ConfigError, StartError."""
    wrong = []
    async with made(options) as (planner, scaler, proxies):
        wrong += await planner.externals.silent()
        await planner.externals.aclose()
        if await proxies.look(0.0) is None:
            wrong += proxies.failures()
        elif not proxies.members(COMPONENT):
            wrong.append(f"match {options.match}: no instance of the proxies has such a name")
        try:
            await _validated(scaler, options)
        except StartError as error:
            wrong.append(str(error))
        await scaler.aclose()
    return wrong


async def _validated(scaler: Scaler, options: PlannerOptions) -> None:
    """Check that a scaler can carry decisions out. Raises StartError."""
    try:
        async with asyncio.timeout(VALIDATE_S):
            await scaler.validate(components_of(options))
    except ScalerError as error:
        raise StartError(str(error)) from error
    except TimeoutError:
        text = f"scaler {scaler.name}: no answer within {VALIDATE_S:g} s"
        raise StartError(text) from None


async def serve(options: PlannerOptions) -> None:
    """Plan one deployment. Raises ConfigError, StartError, StateError."""
    await serve_all([Deployment("", options)])


async def serve_all(deployments: Sequence[Deployment]) -> None:
    """Run until SIGINT or SIGTERM; several share their GPUs.

    Raises ConfigError, InputError, TraceError, StartError, StateError.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    most = deployments[0].options.max_gpu_budget
    budget = SharedBudget(most) if len(deployments) > 1 and most >= 0 else None
    async with AsyncExitStack() as stack:
        planners: list[tuple[Deployment, Planner, Scaler]] = []
        for one in deployments:
            with _of(one):
                planner, scaler, _ = await stack.enter_async_context(made(one.options))
            if budget is not None:
                planner.join(Share(budget, one.name, one.weight))
            planners.append((one, planner, scaler))
        for one, planner, _ in planners:
            with _of(one):
                planner.begin()
                stack.push_async_callback(planner.end)
        for one, planner, scaler in planners:
            with _of(one):
                if not one.options.advisory:
                    await _validated(scaler, one.options)
                app = application(planner, scaler, one.options.control_token)
                await stack.enter_async_context(_listening(one.options, app))
        async with asyncio.TaskGroup() as tasks:
            for one, planner, _ in planners:
                with _of(one):
                    tasks.create_task(planner.run(stop))


@asynccontextmanager
async def _listening(options: PlannerOptions, app: web.Application) -> AsyncIterator[None]:
    host, port = options.control_address
    rules = Rules(HEAD_S, MOST_BODY, RefusalLog(lambda _: None))
    runner = Runner(app, rules, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    limit = ConnectionLimit(min(MOST_CLIENTS, client_cap(None)), lambda: None)
    try:
        site = GuardedSite(runner, host, port, limit, backlog=MOST_CLIENTS)
        try:
            await site.start()
        except OSError as error:
            raise StartError(f"control {host}:{port}: {error.strerror}") from error
        mode = "advisory: nothing is carried out" if options.advisory else options.scaler
        _log.info("planner listens on http://%s:%d; %s", *runner.addresses[0][:2], mode)
        yield
    finally:
        await runner.cleanup()
