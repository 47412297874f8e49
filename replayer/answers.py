"""What others answer over HTTP, read up to a bound."""

import aiohttp

MOST_BYTES = 8 << 20
"""Of a proxy's document; a fleet of 1,000 instances has 3 MB of `/instances`."""
ENGINE_BYTES = 1 << 20
"""Of an engine's document."""
MOST_VALUE = 1e18
"""A larger figure than any counter has; one that is no number is left out as well."""


async def body_of(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return a body; of a larger one its beginning, which is longer than `most_bytes`.

    Whoever closes the answer then ends its connection.
    """
    found = bytearray()
    while len(found) <= most_bytes and (more := await answer.content.readany()):
        found += more
    return bytes(found)
