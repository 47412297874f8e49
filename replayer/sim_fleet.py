"""Several simulated engines in one process: what `engine-sim` runs and what tests use.

async with SimFleet(2, speed=20.0) as fleet:
    client.post(fleet.engines[0].url + "/v1/completions", ...)
    await fleet.engines[0].restart()
"""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from replayer.sim_host import SimEngine
from replayer.sim_options import SimOptions
from replayer.sim_reqlog import RequestLog
from replayer.sim_store import SharedStore


class SimFleet:
    """`count` engines on consecutive ports, or on ports of the kernel's choice (port 0).

    Keyword arguments are the fields of SimOptions. With `request_log` every finished request's
    record also goes to that file; `records` holds the last ones in any case.
    """

    def __init__(
        self,
        count: int,
        *,
        port: int = 0,
        bootstrap_port: int = 0,
        request_log: Path | None = None,
        **options: Any,
    ) -> None:
        self.options = SimOptions(**options)
        self.engines: list[SimEngine] = []
        self.records: list[dict[str, Any]] = []
        self._count = count
        self._ports = (port, bootstrap_port)
        self._log = RequestLog(request_log) if request_log else None
        self._tasks = asyncio.TaskGroup()
        self._store = SharedStore() if self.options.kv_connector == "implicit" else None

    async def __aenter__(self) -> Self:
        """Start all engines, or none."""
        await self._tasks.__aenter__()
        if self._log:
            self._tasks.create_task(self._log.run())
        port, bootstrap_port = self._ports
        for index in range(self._count):
            engine = SimEngine(
                self.options,
                self._tasks,
                port=port and port + index,
                bootstrap_port=bootstrap_port and bootstrap_port + index,
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
        """Stop all engines and write the log out."""
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
