"""The process that parses large bodies, one at a time, received from the proxy by a socket.

It ends when the proxy closes the socket, and not by the signals that stop a proxy, which may still
need it while it drains. Where memory runs out the kernel ends it rather than the proxy.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from proxy.process.memory import give_back
from proxy.protocol.examined import LENGTHS, examine_large, packed, unpacked_task
from proxy.protocol.prompt.facts import SEED_BYTES, seed_hashes

NICER = 19
"""It takes the CPU time that others leave: on one CPU, streams have events 2 to 3 ms sooner at p99
than with 5. On a full CPU it still has a fiftieth.
"""
CALM_S = 2.0
"""Without a body for so long, it returns its free memory. A body of 12 MB leaves some 40 MB, of
which the next one would need each page again.
"""


def main() -> None:
    """Serve the socket whose descriptor is the only argument; the seed of hashes comes first."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(NICER)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    with socket.socket(fileno=int(sys.argv[1])) as proxy, suppress(EOFError, OSError):
        seed_hashes(int.from_bytes(_exactly(proxy, SEED_BYTES), "big"))
        while True:
            _serve_one(proxy)
            if not select.select([proxy], [], [], CALM_S)[0]:
                give_back()


def _serve_one(proxy: socket.socket) -> None:
    """Examine the next body; nothing of it stays."""
    head = bytes(_received(proxy))
    found = examine_large(unpacked_task(head, bytes(_received(proxy))))
    result = packed(found)
    proxy.sendall(len(result).to_bytes(LENGTHS, "big") + result)


def _received(proxy: socket.socket) -> bytearray:
    """One message with its length in front; raises EOFError where the proxy has closed."""
    return _exactly(proxy, int.from_bytes(_exactly(proxy, LENGTHS), "big"))


def _exactly(proxy: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if (count := proxy.recv_into(view)) == 0:
            raise EOFError
        view = view[count:]
    return data


if __name__ == "__main__":
    main()
