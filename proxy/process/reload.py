"""Reload of the options at run time: all of them, or none and a log line with the reason.

SIGHUP or a change of the `--config` file starts a reload. A changed file is read once two checks in
a row found the same content, so a file that is still being written is not read. One that stays cut
is read, so a reload opens nothing that was closed (`access_changes`).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from proxy.config.in_force import router_config
from proxy.config.options import Settings
from proxy.config.sources import ConfigError, options
from proxy.fleet.membership import OPTIONS, Answer, Verdict
from proxy.net import tls
from proxy.process import access_changes
from proxy.state.access import bearer
from proxy.state.proxy_state import ProxyState, instance_tls

RELOADABLE = frozenset(name for name, _, option in options(Settings) if option.reloadable)
FILE_BYTES = 4 << 20
ERROR_CHARS = 500
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Prepared:
    settings: Settings
    for_clients: ssl.SSLContext | None
    for_instances: ssl.SSLContext | None


class Reloader:
    """Reloads the options of one process.

    `source` reads the options again (it reads files, so it runs in a thread) and raises
    ConfigError. `exchange` gives the listeners another TLS context.
    """

    def __init__(
        self,
        state: ProxyState,
        source: Callable[[], Settings],
        exchange: Callable[[ssl.SSLContext], Awaitable[None]],
    ) -> None:
        self._state = state
        self._source = source
        self._exchange = exchange
        self._asked = asyncio.Event()
        self.last: dict[str, object] | None = None
        """Result and time of the last reload, and its error; None before the first."""
        self.refused: str | None = None
        """The error of the last reload, if it was refused."""
        path = state.options.settings.config
        self._file = None if path is None else _WatchedFile(path)
        if self._file is not None:
            self._file.has_changed()

    def ask(self) -> None:
        """Request a reload; several requests before it begins are one reload."""
        self._asked.set()

    async def catch_up(self) -> None:
        """Reload what has changed since this process read its options: a start takes a while."""
        if await asyncio.to_thread(self._differs):
            await self.reload("changed during the start")

    async def refuse_opening(self) -> None:
        """Raise ConfigError if a process that is started now would open what is closed here.

        Of other mistakes it reads, that process says itself, and it may be of another version.
        """
        try:
            new = await asyncio.to_thread(self._source)
        except (ConfigError, OSError):
            return
        access_changes.refuse_opening(self._state.options.settings, new)

    async def watch(self, interval_s: float) -> None:
        """Reload on request and when the file has changed, until cancelled."""
        while True:
            if await self._is_asked_within(interval_s):
                self._asked.clear()
                await self.reload("SIGHUP")
            elif self._file is not None and await asyncio.to_thread(self._file.has_changed):
                await self.reload("changed file")

    def _differs(self) -> bool:
        """Whether the options are others by now than those that this process began with."""
        try:
            return bool(_changed(self._state.options.settings, self._source()))
        except (ConfigError, OSError):
            return True  # the reload says why

    async def _is_asked_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        except TimeoutError:
            return False
        return True

    async def reload(self, why: str) -> str:
        """Apply the present options or keep the old ones; returns applied, unchanged, refused."""
        state = self._state
        try:
            ready = await asyncio.to_thread(self._prepare)
            answers = self._checked(ready.settings)
        except (ConfigError, OSError) as error:
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

    def _prepare(self) -> _Prepared:
        if self._file is not None:
            self._file.refuse_if_empty()
        settings = self._source()
        return _Prepared(settings, tls.for_clients(settings), instance_tls(settings))

    def _checked(self, new: Settings) -> list[Answer]:
        """What becomes of the instances; raises ConfigError if an option cannot change."""
        old = self._state.options.settings
        fixed = sorted(_changed(old, new) - RELOADABLE)
        if (old.tls_cert is None) != (new.tls_cert is None):
            fixed.append("tls_cert (from or to none)")
        if fixed:
            raise ConfigError(
                f"{', '.join(fixed)} cannot change at run time: restart (hot: SIGUSR2)"
            )
        access_changes.refuse_opening(old, new)
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
        if access := access_changes.changes(state.options.settings, new):
            _log.warning("config reloaded (%s), access changes: %s", why, "; ".join(access))
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


def _names(answers: list[Answer], verdict: Verdict) -> list[str]:
    return [answer.name for answer in answers if answer.verdict is verdict]


def _changed(old: Settings, new: Settings) -> set[str]:
    return {n for n in Settings.model_fields if getattr(old, n) != getattr(new, n)}


class _WatchedFile:
    """A file that is checked for changes, in a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stat: tuple[int, int, int] | None = None
        self._used: bytes | None = None
        self._pending: bytes | None = None

    def has_changed(self) -> bool:
        """Whether two checks in a row found the same content, other than the last one reported.

        The first check reports nothing. An unreadable file counts as content, so it is reported
        once.
        """
        at = self._signature()
        if at == self._stat and self._pending is None and self._used is not None:
            return False
        self._stat = at
        seen = self._digest()
        if self._used is None or seen == self._used:
            self._used, self._pending = seen, None
            return False
        if seen != self._pending:
            self._pending = seen
            return False
        self._used, self._pending = seen, None
        return True

    def refuse_if_empty(self) -> None:
        """Raise ConfigError for an empty file: it is a mistake, not a request for all defaults."""
        try:
            with self._path.open("rb") as file:
                is_empty = not file.read(FILE_BYTES).strip()
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
            with self._path.open("rb") as file:
                return sha256(file.read(FILE_BYTES)).digest()
        except OSError:
            return b"unreadable"
