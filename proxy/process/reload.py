"""Reload of the options at run time: all of them, or none and a log line with the reason.

SIGHUP or a change of the `--config` file starts a reload. A changed file is read once two checks in
a row found the same content, so a file that is still being written is not read. One that stays cut
is read, so a reload opens nothing that was closed (`access_changes`).

Files are read off the loop, for READ_S at most, in threads that no exit waits for: a file system
may hang.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from proxy.config.in_force import OptionsInForce, router_config
from proxy.config.options import Settings
from proxy.config.regular_files import read_regular
from proxy.config.sources import ConfigError, options
from proxy.core.routing.router import Router
from proxy.fleet.instances import Instances
from proxy.fleet.membership import OPTIONS, Answer, Membership, Verdict
from proxy.net import tls
from proxy.net.timeouts import Clock, MayHang
from proxy.process import access_changes
from proxy.protocol.errors import DEFECTS
from proxy.state.access import bearer
from proxy.telemetry.metrics import Metrics

READ_S = 10.0
"""How long reading all files of the options may take."""
RELOADABLE = frozenset(name for name, _, option in options(Settings) if option.reloadable)
ERROR_CHARS = 500
T = TypeVar("T")
_log = logging.getLogger(__name__)


class NotReadError(ConfigError):
    """Reading the files of the options takes too long, or an earlier time has not ended."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """New options that may be taken; `access`: what they change about access, in words."""

    settings: Settings
    access: list[str]
    for_clients: ssl.SSLContext | None
    for_instances: ssl.SSLContext | None


class Reloadable(Protocol):
    """The owners that a reload changes: those of the whole proxy's state."""

    clock: Clock
    options: OptionsInForce
    metrics: Metrics
    instances: Instances
    members: Membership
    router: Router

    def use(self, settings: Settings) -> None:
        """Apply reloaded options."""


class Reloader:
    """Reloads the options of one process.

    `source` reads the options again (it reads files, so it runs in a thread) and raises
    ConfigError. `exchange` gives the listeners another TLS context.
    """

    def __init__(
        self,
        state: Reloadable,
        source: Callable[[], Settings],
        exchange: Callable[[ssl.SSLContext], Awaitable[None]],
    ) -> None:
        self._state = state
        self._source = source
        self._exchange = exchange
        self._asked, self._reloading = asyncio.Event(), asyncio.Lock()
        self._fence = access_changes.Fence()
        self.last: dict[str, object] | None = None
        """Result and time of the last reload, and its error; None before the first."""
        self.refused: str | None = None
        """The error of the last reload, if it was refused."""
        self._reads, self._reading = MayHang[Any]("reload"), asyncio.Lock()
        self._hangs = False
        path = state.options.settings.config
        self._file = None if path is None else _WatchedFile(path)
        if self._file is not None:
            self._file.has_changed(self._file.look())

    def ask(self) -> None:
        """Request a reload; several requests before it begins are one reload."""
        self._asked.set()

    async def catch_up(self) -> None:
        """Reload what has changed since this process read its options: a start takes a while."""
        if await self._differs():
            await self.reload("changed during the start")

    def take_over(self, fence: Mapping[str, Any]) -> None:
        """Go on with a predecessor's fence; raises ConfigError if these options open anything."""
        self._fence.take_over(fence, self._state.options.settings)

    async def refuse_opening(self) -> dict[str, Any]:
        """Raise ConfigError if a process that is started now would open what is closed here.

        Returns the fence for that process, which holds what it reads itself against it. Of other
        mistakes it reads, that process says itself, and it may be of another version.
        """
        async with self._reloading:
            old = self._state.options.settings

            def checked() -> dict[str, Any]:
                new = None
                with suppress(ConfigError):
                    new = self._source()
                if new is not None:
                    self._fence.refuse_opening(old, new)
                return self._fence.handed_on(old)

            return await self._aside(checked)

    async def watch(self, interval_s: float) -> None:
        """Reload on request and when the file has changed, until cancelled."""
        while True:
            if await self._is_asked_within(interval_s):
                self._asked.clear()
                await self.reload("SIGHUP")
            elif self._file is not None and await self._has_changed(self._file):
                await self.reload("changed file")

    async def _has_changed(self, file: _WatchedFile) -> bool:
        """Whether the file is another one, or can no longer be looked at, or can be again."""
        hung = self._hangs
        try:
            seen = await self._aside(file.look)
        except NotReadError:
            self._hangs = True
            return not hung  # the reload says why
        self._hangs = False
        return file.has_changed(seen) or hung

    async def _differs(self) -> bool:
        """Whether the options are others by now than those that this process began with."""
        try:
            now = await self._aside(self._source)
        except ConfigError:
            return True  # the reload says why
        return bool(_changed(self._state.options.settings, now))

    async def _aside(self, read: Callable[[], T]) -> T:
        """What reading files returns; raises ConfigError, NotReadError where it hangs."""

        def tried() -> T | ConfigError:
            try:
                return read()
            except ConfigError as error:
                return error

        async with self._reading:
            try:
                found: T | ConfigError = await self._reads.run(tried, READ_S)
            except (OSError, *DEFECTS) as error:
                raise NotReadError(f"its files cannot be read: {error}") from error
        if isinstance(found, ConfigError):
            raise copy(found)  # this frame keeps it: see UpstreamFailure.again
        return found

    async def _is_asked_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            return False
        return True

    async def reload(self, why: str) -> str:
        """Apply the present options or keep the old ones; returns applied, unchanged, refused."""
        async with self._reloading:  # what is compared with the old ones replaces those
            return await self._reload(why)

    async def _reload(self, why: str) -> str:
        state = self._state
        old = state.options.settings
        try:
            ready = await self._aside(lambda: self._prepare(old))
            answers = self._judged(ready.settings)
        except ConfigError as error:
            self.refused = f"config not reloaded ({why}), the old one stays: {error}"
            _log.error("%s", self.refused)
            result = "refused"
        else:
            self.refused = None
            result = await self._apply(ready, answers, why)
        state.metrics.reloads.labels(result).inc()
        self.last = {"result": result, "t": state.clock.wall_now()}
        if self.refused is not None:
            self.last["error"] = self.refused[:ERROR_CHARS]
        return result

    def _prepare(self, old: Settings) -> _Prepared:
        """Read and check the options; raises ConfigError. Runs in a thread: keys may be many."""
        if self._file is not None:
            self._file.refuse_if_empty()
        new = self._source()
        _refuse_fixed(old, new)
        self._fence.refuse_opening(old, new)
        access = access_changes.changes(old, new)
        return _Prepared(new, access, tls.for_clients(new), tls.own_for_instances(new))

    def _judged(self, new: Settings) -> list[Answer]:
        """What becomes of the instances; raises ConfigError if one cannot change."""
        answers = self._state.members.judge(OPTIONS, new.instances)
        if refused := _names(answers, Verdict.REFUSED):
            raise ConfigError(
                f"instances: {refused[0]} exists with another name, address or thermal part, "
                "and may have requests; remove it first, then add it"
            )
        return answers

    async def _apply(self, ready: _Prepared, answers: list[Answer], why: str) -> str:
        state, new = self._state, ready.settings
        changed = sorted(_changed(state.options.settings, new))
        if ready.access:
            _log.warning("config reloaded (%s), access changes: %s", why, "; ".join(ready.access))
        if changed:
            self._switch(new)
        state.instances.connect_options.change(ready.for_instances, bearer(new.instance_api_key))
        if ready.for_clients is not None:
            try:
                await self._exchange(ready.for_clients)
            except OSError as error:
                self.refused = f"config reloaded ({why}), but for the listeners' TLS: {error}"
                _log.error("%s", self.refused)
                return "refused"
        if not changed and ready.for_clients is None and ready.for_instances is None:
            _log.info("config read again (%s): nothing has changed", why)
            return "unchanged"
        _log.info(
            "config reloaded (%s): %s; instances added: %s, removed: %s",
            why,
            ", ".join(changed) or "certificates",
            ", ".join(_names(answers, Verdict.NEW)) or "none",
            ", ".join(_names(answers, Verdict.DRAIN)) or "none",
        )
        return "applied"

    def _switch(self, new: Settings) -> None:
        """Apply all changes without an await, so that no request sees only some of them."""
        state = self._state
        state.use(new)
        state.members.want(OPTIONS, new.instances)
        state.router.reconfigure(router_config(new))


def _refuse_fixed(old: Settings, new: Settings) -> None:
    """Raise ConfigError if an option that cannot change at run time has changed."""
    fixed = sorted(_changed(old, new) - RELOADABLE)
    if (old.tls_cert is None) != (new.tls_cert is None):
        fixed.append("tls_cert (from or to none)")
    if fixed:
        raise ConfigError(f"{', '.join(fixed)} cannot change at run time: restart (hot: SIGUSR2)")


def _names(answers: list[Answer], verdict: Verdict) -> list[str]:
    return [answer.name for answer in answers if answer.verdict is verdict]


def _changed(old: Settings, new: Settings) -> set[str]:
    return {n for n in Settings.model_fields if getattr(old, n) != getattr(new, n)}


class _Seen(NamedTuple):
    """A file as it was found; no digest where its signature is that of the last time."""

    at: tuple[int, int, int]
    digest: bytes | None


class _WatchedFile:
    """A file that is checked for changes: looked at in a thread, judged on the loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stat: tuple[int, int, int] | None = None
        self._used: bytes | None = None
        self._pending: bytes | None = None

    def look(self) -> _Seen:
        """Read what `has_changed` needs."""
        at = self._signature()
        is_same = at == self._stat and self._pending is None and self._used is not None
        return _Seen(at, None if is_same else self._digest())

    def has_changed(self, seen: _Seen) -> bool:
        """Whether two checks in a row found the same content, other than the last one reported.

        The first check reports nothing. An unreadable file counts as content, so it is reported
        once.
        """
        self._stat, digest = seen
        if digest is None:
            return False
        if self._used is None or digest == self._used:
            self._used, self._pending = digest, None
            return False
        if digest != self._pending:
            self._pending = digest
            return False
        self._used, self._pending = digest, None
        return True

    def refuse_if_empty(self) -> None:
        """Raise ConfigError for an empty file: it is a mistake, not a request for all defaults."""
        try:
            is_empty = not read_regular(self._path).strip()
        except OSError:
            return  # reading the options will report the error
        if is_empty:
            raise ConfigError(f"file {self._path} is empty")

    def _signature(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return 0, 0, 0
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _digest(self) -> bytes:
        try:
            return sha256(read_regular(self._path)).digest()
        except OSError:
            return b"unreadable"
