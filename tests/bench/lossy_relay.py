"""A proxy with a fault, for the bench's own tests: of each piece it reads it loses an event.

`lossy_relay PORT URL,..`. What it sends is well-formed HTTP, so only counting finds it out.
"""

from __future__ import annotations

import asyncio
import re
import sys
from urllib.parse import urlsplit

EVENT = re.compile(rb"[0-9a-f]+\r\ndata: \{[^\n]*\n\n\r\n")
PIECE_BYTES = 1 << 16


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, loses: bool) -> None:
    """Pass bytes on until the end."""
    while piece := await reader.read(PIECE_BYTES):
        writer.write(EVENT.sub(b"", piece, count=1) if loses else piece)
        await writer.drain()
    writer.close()


async def serve(port: int, target: str) -> None:
    """One upstream connection per client connection."""
    url = urlsplit(target)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_connection(url.hostname, url.port)
        async with asyncio.TaskGroup() as group:
            group.create_task(pump(reader, to_engine, loses=False))
            group.create_task(pump(from_engine, writer, loses=True))

    server = await asyncio.start_server(relay, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2].split(",")[0]))
