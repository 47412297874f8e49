"""Bus: what every way of telling the other replicas does."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

READ_AT_ONCE: Final = 16
"""Batches of one exchange."""
MOST_BYTES: Final = 1 << 20
"""Bytes of a batch."""
KEPT_MS: Final = 60_000
"""How long a batch stays for those who read later."""


class BusError(Exception):
    """An exchange that failed; its text is one line for the log, without a secret."""


class Heard(NamedTuple):
    """What one exchange has brought. `is_all`: there was no more to read."""

    batches: list[bytes]
    is_all: bool


class Bus(Protocol):
    """An ordered log of batches, and this reader's position in it.

    It begins with the oldest batch that is kept. A reader gets its own batches too.
    """

    async def exchange(self, batch: bytes | None) -> Heard:
        """Append a batch, if there is one, and read what is new, oldest first.

        Raises BusError. Whether the batch was appended is not known then.
        """

    def start_again(self) -> None:
        """Read from the last own batch on: the position is void, as the log is another one."""

    async def close(self) -> None:
        """Close the connection; the next exchange opens another one."""
