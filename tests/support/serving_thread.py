"""A server on a loop of its own, beside a test that runs a whole command in the main thread."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

Served = TypeVar("Served")


@contextmanager
def in_thread(server: AbstractAsyncContextManager[Served]) -> Iterator[Served]:
    """Enter `server` on another thread's loop; leave it when the block ends."""
    started, served = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with server as one:
            served.append(one)
            started.set()
            await stop.wait()

    def work() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield served[0]
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join()
